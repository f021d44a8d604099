//! A guest's memory that looks like a Linux kernel's, more or less, to who looks for its symbols, types, tasks and stacks in it.

use inspect::linux::{LinuxKernel, VmaLayout};
use ram::Ram;
use vmm::RunningKernel;

use fuzzer::Target;

pub(crate) const TARGET: Target = Target { name: "linux", seeds, run };

/// Where the kernel's image is mapped (GVA): at its own place in memory here.
const IMAGE: u64 = 0xffff_ffff_8000_0000;
/// Where its parts are (GPA).
const TABLES: [u64; 3] = [0x1000, 0x2000, 0x3000];
const NOTE: usize = 0x4000;
const NAMES: usize = 0x5000;
const TOKENS: usize = 0x6000;
const INDEX: usize = 0x6400;
const OFFSETS: usize = 0x6800;
const NUMBERS: usize = 0x6f00;
const TYPES: usize = 0x7000;
const DATA: usize = 0x8000;
const CODE: usize = 0x9000;
const END: usize = 0xa000;
/// Symbols in its code, 64 bytes from each to the next.
const FUNCTIONS: [&str; 18] = [
    "begin_new_exec",
    "do_exit",
    "wake_up_new_task",
    "__switch_to",
    "get_signal",
    "do_group_exit",
    "common_interrupt",
    "sysvec_apic_timer_interrupt",
    "exc_page_fault",
    "__x64_sys_openat",
    "__x64_sys_read",
    "__x86_return_thunk",
    "entry_SYSCALL_64_after_hwframe",
    "f",
    "_etext",
    "__syscall_meta__openat",
    "__syscall_meta__read",
    "entry_SYSCALL_64",
];
const STRUCTURES: [(&str, &[&str]); 11] = [
    ("task_struct", &["pid", "tgid", "comm", "tasks", "mm", "fs"]),
    ("mm_struct", &["pgd", "mm_mt"]),
    ("maple_tree", &["ma_root"]),
    ("vm_area_struct", &["vm_start", "vm_end", "vm_pgoff", "vm_flags", "vm_file"]),
    ("file", &["f_path"]),
    ("fs_struct", &["root"]),
    ("path", &["mnt", "dentry"]),
    ("dentry", &["d_parent", "d_name"]),
    ("qstr", &["name"]),
    ("mount", &["mnt", "mnt_parent", "mnt_mountpoint"]),
    ("orc_entry", &["end"]),
];

fn put(image: &mut [u8], at: usize, bytes: &[u8]) {
    image[at..at + bytes.len()].copy_from_slice(bytes);
}

fn gva(at: usize) -> u64 {
    IMAGE + at as u64
}

/// All symbols and where they are.
fn symbols() -> Vec<(&'static str, u64)> {
    let functions = FUNCTIONS.iter().enumerate().map(|(n, name)| (*name, gva(CODE + 64 * n)));
    let data = [
        ("_stext", gva(CODE)),
        ("init_task", gva(DATA)),
        ("__start_BTF", gva(TYPES)),
        ("__stop_BTF", gva(TYPES) + types().len() as u64),
        ("__start_orc_unwind_ip", gva(DATA + 0x400)),
        ("__stop_orc_unwind_ip", gva(DATA + 0x440)),
        ("__start_orc_unwind", gva(DATA + 0x440)),
        ("current_task", 0x20),
    ];
    data.into_iter().chain(functions).collect()
}

/// BTF: structures whose members are numbers, and a function.
fn types() -> Vec<u8> {
    let (mut strings, mut words) = (vec![0_u8], Vec::new());
    let mut name = |text: &str| {
        let at = strings.len() as u32;
        strings.extend(text.bytes().chain([0]));
        at
    };
    words.extend([name("long"), 1 << 24, 8, 64]); // 1: a number
    words.extend([name("char"), 1 << 24, 1, 1 << 24 | 8]); // 2: a letter
    words.extend([0, 2 << 24, 2]); // 3: text
    for (structure, members) in STRUCTURES {
        words.extend([name(structure), 4 << 24 | members.len() as u32, 8 * members.len() as u32]);
        for (n, member) in members.iter().enumerate() {
            words.extend([name(member), 1, 64 * n as u32]);
        }
    }
    let prototype = 4 + STRUCTURES.len() as u32;
    words.extend([0, 13 << 24 | 2, 1, name("number"), 1, name("text"), 3]);
    words.extend([name("f"), 12 << 24, prototype]);
    let len = 4 * words.len() as u32;
    let head = [0xeb9f | 1 << 16, 24, 0, len, len, strings.len() as u32];
    let words: Vec<u8> = head.iter().chain(&words).flat_map(|word| word.to_le_bytes()).collect();
    [words, strings].concat()
}

fn note() -> Vec<u8> {
    let places = [
        ("kallsyms_names", NAMES),
        ("kallsyms_num_syms", NUMBERS),
        ("kallsyms_token_table", TOKENS),
        ("kallsyms_token_index", INDEX),
        ("kallsyms_offsets", OFFSETS),
        ("kallsyms_relative_base", NUMBERS + 8),
        ("init_top_pgt", TABLES[0] as usize),
        ("_stext", CODE),
    ];
    let lines = places.map(|(name, at)| format!("SYMBOL({name})={:x}\n", gva(at)));
    let text = format!("OSRELEASE=6.12.0\n{}NUMBER(phys_base)=0\n", lines.concat());
    let head = [11, text.len() as u32, 0].map(u32::to_le_bytes).concat();
    [&head[..], b"VMCOREINFO\0\0", text.as_bytes()].concat()
}

/// The kernel as it lies in memory from its first byte on.
pub(crate) fn image() -> Vec<u8> {
    let mut image = vec![0; END];
    let [top, middle, low] = TABLES;
    put(&mut image, top as usize + 511 * 8, &(middle | 3).to_le_bytes());
    put(&mut image, middle as usize + 510 * 8, &(low | 3).to_le_bytes());
    put(&mut image, low as usize, &0x83_u64.to_le_bytes());
    put(&mut image, NOTE, &note());
    let (mut names, mut offsets) = (Vec::new(), Vec::new());
    for (name, address) in symbols() {
        names.extend([name.len() as u8 + 1, b'T']);
        names.extend(name.bytes());
        // Those of the kernel's are counted from its beginning, downwards; the others are as they are.
        let offset = if address < IMAGE { address as i32 } else { -1 - (address - IMAGE) as i32 };
        offsets.extend(offset.to_le_bytes());
    }
    put(&mut image, NAMES, &names);
    put(&mut image, OFFSETS, &offsets);
    put(&mut image, NUMBERS, &(symbols().len() as u64).to_le_bytes());
    put(&mut image, NUMBERS + 8, &IMAGE.to_le_bytes());
    for letter in 0..=255_u8 {
        put(&mut image, TOKENS + 2 * usize::from(letter), &[letter, 0]);
        put(&mut image, INDEX + 2 * usize::from(letter), &(2 * u16::from(letter)).to_le_bytes());
    }
    put(&mut image, TYPES, &types());
    put(&mut image, DATA, &[1_u64, 1].map(u64::to_le_bytes).concat());
    put(&mut image, DATA + 16, b"init\0");
    put(&mut image, DATA + 24, &gva(DATA + 24).to_le_bytes());
    (0..FUNCTIONS.len()).for_each(|n| put(&mut image, CODE + 64 * n, &[0x55, 0xc3]));
    image
}

fn seeds() -> Vec<Vec<u8>> {
    vec![image()]
}

fn run(bytes: &[u8]) {
    let ram = Ram::new(2 << 20).expect("memory");
    ram.write_gpa(0, bytes).expect("an input is shorter");
    let Ok(kernel) = LinuxKernel::find(&ram) else { return };
    for name in ["f", "_stext", "absent"] {
        kernel.types.parameters(name);
        let Some(at) = kernel.symbols.find(name) else { continue };
        kernel.symbols.before(at);
        kernel.symbols.around(at);
    }
    let running = RunningKernel { roots: kernel.roots(), image: TABLES[1] | 3, entry: gva(CODE) };
    let running = LinuxKernel::running(&ram, running);
    let _ = running.and_then(|kernel| kernel.flush_counts());
    for task in kernel.processes(&ram).iter().take(100) {
        kernel.tables_of(&ram, task);
        let Ok(layout) = VmaLayout::of(&kernel) else { continue };
        layout.find(&kernel, &ram, task.address, 0x40_0000);
    }
    kernel.current_by(&ram, gva(DATA));
    kernel.text(&ram, gva(NOTE));
}

#[cfg(test)]
mod tests {
    use super::*;
    use x86_interp::GuestRam;

    /// Inputs that are no kernel at all attack nothing.
    #[test]
    fn the_image_is_a_kernel() {
        let ram = Ram::new(2 << 20).expect("memory");
        ram.write_gpa(0, &image()).expect("there is room");
        let kernel = LinuxKernel::find(&ram).unwrap_or_else(|unknown| panic!("{unknown}"));
        assert_eq!(kernel.symbols.find("do_exit"), Some(gva(CODE + 64)));
        assert_eq!(kernel.processes(&ram).len(), 1);
        assert_eq!(kernel.types.parameters("f").len(), 2);
        VmaLayout::of(&kernel).unwrap_or_else(|unknown| panic!("{unknown}"));
    }

    /// A program can describe a kernel of its own in memory of its own.
    #[test]
    fn what_could_have_been_written_describes_no_kernel_that_runs() {
        let ram = Ram::new(2 << 20).expect("memory");
        ram.write_gpa(0, &image()).expect("there is room");
        let kernel = LinuxKernel::find(&ram).unwrap_or_else(|unknown| panic!("{unknown}"));
        let entry = kernel.symbols.find("entry_SYSCALL_64").expect("it is one of them");
        let [_, middle, low] = TABLES;
        let runs_by = |image, entry| {
            let running = RunningKernel { roots: kernel.roots(), image, entry };
            LinuxKernel::running(&ram, running).is_ok()
        };
        let running = |entry| runs_by(middle | 3, entry);
        assert!(!running(entry), "the kernel can write it");
        ram.store64(low, 0x81);
        assert!(running(entry));
        assert!(!running(entry + 64), "another kernel's entry");
        assert!(!running(entry.wrapping_sub(1 << 30)), "far from the kernel that runs");
        ram.store64(low, 0x85);
        ram.store64(middle + 510 * 8, low | 7);
        assert!(!runs_by(middle | 7, entry), "programs can read it");
        assert!(!runs_by(0, entry), "it is not mapped");
    }
}
