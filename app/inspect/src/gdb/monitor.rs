//! Commands of ours: `monitor help` in GDB.

use std::fmt::Write;

use ram::Ram;
use x86::paging::{ADDRESS, NX, P, PS, RW, Roots, US};

use super::{registers::listing, target::DebugTarget};
use crate::{
    linux::{LinuxKernel, Task},
    vmcoreinfo::VmCoreInfo,
};

const HELP: &str = "\
kaslr            how far the kernel lies from where it was linked to
regs [VCPU]      registers, the system's included
lapic [VCPU]     registers of the local APIC
mappings [VCPU]  what the page tables map: first and last address, rights, physical address
xp ADDRESS [N]   N bytes (64) of physical memory
phys on|off      addresses of x, print and so on are physical ones
vmcoreinfo       what the kernel says of itself
processes        processes of a Linux guest: number, name, structure
catch oops       from now on an oops or a panic of a Linux guest stops it
catch exception N    exception N, or de, ud, gp, pf ..., does, where its handler begins
catch            what is caught; `catch none`: nothing any more
only PID|all     breakpoints in user code count in this process only, or in all
";
/// Ranges of memory that `mappings` shows at the most.
const MOST: usize = 2000;
/// Page tables that are looked at for that: a guest can have far more.
const MOST_TABLES: usize = 100_000;
/// Bytes that `xp` shows at the most.
const MOST_BYTES: u64 = 4096;

/// What a command prints.
pub fn answer(machine: &mut DebugTarget, command: &str) -> String {
    let words: Vec<&str> = command.split_whitespace().collect();
    let vcpu = words.get(1).map_or(Some(0), |word| word.parse().ok());
    let known = |vcpu: Option<usize>| vcpu.filter(|vcpu| *vcpu < machine.inspector().vcpus());
    match (words.first().copied(), known(vcpu)) {
        (None | Some("help"), _) => HELP.to_owned(),
        (Some("kaslr"), _) => kaslr(machine.inspector().ram()),
        (Some("processes"), _) => processes(machine.inspector().ram()),
        (Some("vmcoreinfo"), _) => vmcoreinfo(machine.inspector().ram(), VmCoreInfo::text),
        (Some("xp"), _) => physical(machine.inspector().ram(), &words[1..]),
        (Some("catch"), _) => machine.catch(&words[1..]),
        (Some("only"), _) => {
            machine.process_filter.run_command(machine.inspector().ram(), words.get(1).copied())
        }
        (Some("phys"), _) => switch(machine, words.get(1).copied()),
        (Some("regs" | "lapic" | "mappings"), None) => "there is no such vCPU\n".to_owned(),
        (Some("regs"), Some(vcpu)) => {
            machine.state(vcpu).map_or_else(ended, |state| listing(&state))
        }
        (Some("lapic"), Some(vcpu)) => lapic(machine, vcpu),
        (Some("mappings"), Some(vcpu)) => machine
            .state(vcpu)
            .map_or_else(ended, |state| mappings(machine.inspector().ram(), Roots::from(&state))),
        (Some(other), _) => format!("there is no `{other}`; there are\n{HELP}"),
    }
}

fn ended() -> String {
    "the vCPU has ended\n".to_owned()
}

fn vmcoreinfo<'a>(ram: &Ram, text: impl Fn(&VmCoreInfo) -> &str + 'a) -> String {
    const NONE: &str = "there is no VMCOREINFO in memory: no Linux kernel, or not booted so far\n";
    VmCoreInfo::find(ram).map_or_else(|| NONE.to_owned(), |info| text(&info).to_owned())
}

fn kaslr(ram: &Ram) -> String {
    let Some(info) = VmCoreInfo::find(ram) else { return vmcoreinfo(ram, VmCoreInfo::text) };
    let Some(offset) = info.hex("KERNELOFFSET") else {
        return "VMCOREINFO has no KERNELOFFSET\n".to_owned();
    };
    let release = info.release();
    format!(
        "{release} lies {offset:#x} above its link address\nadd-symbol-file vmlinux -o {offset:#x}\n"
    )
}

fn processes(ram: &Ram) -> String {
    let kernel = match LinuxKernel::find(ram) {
        Ok(kernel) => kernel,
        Err(unknown) => return format!("{unknown}\n"),
    };
    let mut text = format!("{:>8}  {:<16}  task_struct\n", "PID", "NAME");
    for Task { address, pid, comm, .. } in kernel.processes(ram) {
        let _ = writeln!(text, "{pid:>8}  {comm:<16}  {address:#x}"); // a String takes all
    }
    text
}

fn switch(machine: &mut DebugTarget, word: Option<&str>) -> String {
    match word {
        Some("on") => machine.physical = true,
        Some("off") => machine.physical = false,
        _ => return "phys on, or phys off\n".to_owned(),
    }
    String::new()
}

fn number(word: &str) -> Option<u64> {
    match word.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => word.parse().ok(),
    }
}

fn physical(ram: &Ram, words: &[&str]) -> String {
    let Some(gpa) = words.first().and_then(|word| number(word)) else {
        return "xp ADDRESS [BYTES]\n".to_owned();
    };
    let len = words.get(1).and_then(|word| number(word)).unwrap_or(64).min(MOST_BYTES);
    let mut bytes = vec![0; len as usize];
    if ram.read_gpa(gpa, &mut bytes).is_err() {
        return format!("{gpa:#x} and {len} bytes on is not all RAM\n");
    }
    let line = |(n, line): (usize, &[u8])| {
        let digits: String = line.iter().map(|byte| format!(" {byte:02x}")).collect();
        format!("{:#014x}{digits}\n", gpa + 16 * n as u64)
    };
    bytes.chunks(16).enumerate().map(line).collect()
}

fn lapic(machine: &DebugTarget, vcpu: usize) -> String {
    const REGISTERS: [(&str, u64); 16] = [
        ("id", 0x20),
        ("version", 0x30),
        ("tpr", 0x80),
        ("ppr", 0xa0),
        ("ldr", 0xd0),
        ("dfr", 0xe0),
        ("svr", 0xf0),
        ("esr", 0x280),
        ("icr low", 0x300),
        ("icr high", 0x310),
        ("lvt timer", 0x320),
        ("lvt lint0", 0x350),
        ("lvt lint1", 0x360),
        ("lvt error", 0x370),
        ("timer initial", 0x380),
        ("timer current", 0x390),
    ];
    let read = |offset| machine.inspector().apic_register(vcpu, offset);
    if read(REGISTERS[0].1).is_none() {
        return "the local APIC is switched off, or in x2APIC mode\n".to_owned();
    }
    let mut text = String::new();
    for (name, offset) in REGISTERS {
        let value = read(offset).map_or_else(|| "?".to_owned(), |value| format!("{value:08x}"));
        let _ = writeln!(text, "{name:<14} {value}"); // a String takes all
    }
    for (name, first) in [("in service", 0x100), ("requested", 0x200)] {
        let vectors = (0..256).filter(|vector| {
            read(first + vector / 32 * 16).is_some_and(|bits| bits >> (vector % 32) & 1 == 1)
        });
        let vectors: String = vectors.map(|vector| format!(" {vector:#x}")).collect();
        let _ = writeln!(text, "{name:<14}{vectors}");
    }
    text
}

/// Adjacent pages with the same rights.
struct Range {
    gva: u64,
    end: u64,
    gpa: u64,
    rights: u64,
}

fn mappings(ram: &Ram, roots: Roots) -> String {
    if roots.efer & x86::control::efer::LMA == 0 {
        return "the vCPU is not in long mode\n".to_owned();
    }
    let mut walk = Mappings { ram, ranges: Vec::new(), tables: 0 };
    walk.collect(roots.cr3 & ADDRESS, 39, 0, RW | US);
    let Mappings { ranges, tables, .. } = walk;
    let mut text = String::new();
    for Range { gva, end, gpa, rights } in ranges.iter().take(MOST) {
        let letter = |bit: u64, letter| if rights & bit != 0 { letter } else { '-' };
        let (write, user) = (letter(RW, 'w'), letter(US, 'u'));
        let execute = if rights & NX != 0 { '-' } else { 'x' };
        let last = end.wrapping_sub(1);
        let _ = writeln!(text, "{gva:016x}-{last:016x} {user}r{write}{execute} {gpa:012x}");
    }
    if ranges.len() > MOST || tables > MOST_TABLES {
        text.push_str("... and more\n");
    }
    text
}

/// A walk of all page tables.
struct Mappings<'a> {
    ram: &'a Ram,
    ranges: Vec<Range>,
    tables: usize,
}

impl Mappings<'_> {
    fn collect(&mut self, table: u64, shift: u32, base: u64, above: u64) {
        let mut bytes = [0; 4096];
        self.tables += 1;
        let enough = self.ranges.len() > MOST || self.tables > MOST_TABLES;
        if enough || self.ram.read_gpa(table, &mut bytes).is_err() {
            return;
        }
        for (slot, bytes) in (0..).zip(bytes.as_chunks::<8>().0) {
            let entry = u64::from_le_bytes(*bytes);
            if entry & P == 0 {
                continue;
            }
            let gva = base | slot << shift;
            let gva = ((gva << 16) as i64 >> 16) as u64;
            let rights = above & entry & (RW | US) | (above | entry) & NX;
            if shift == 12 || entry & PS != 0 && shift < 39 {
                let len = 1 << shift;
                let gpa = entry & ADDRESS & !(len - 1);
                self.note(Range { gva, end: gva.wrapping_add(len), gpa, rights });
            } else {
                self.collect(entry & ADDRESS, shift - 9, gva, rights);
            }
        }
    }

    fn note(&mut self, new: Range) {
        match self.ranges.last_mut() {
            Some(last)
                if last.end == new.gva
                    && last.rights == new.rights
                    && last.gpa + last.end.wrapping_sub(last.gva) == new.gpa =>
            {
                last.end = new.end;
            }
            _ => self.ranges.push(new),
        }
    }
}
