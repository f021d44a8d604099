//! Probe 1: a process with nothing but its window. Starts the blob of `blob/wedge.rs`, looks at its
//! maps from outside, and reads what its guest and its handlers noted.

use crate::host::{self, PAGE, RW, must};
use crate::measure::{Price, price_ticks, tsc};
use crate::report::{fact, law, row};
use std::sync::atomic::Ordering;

#[allow(dead_code)]
mod layout {
    include!("../../blob/layout.rs");
}
use layout::{
    ALT_STACK, ALT_STACK_LEN, BLOB, SHARED, STACK, STACK_LEN, Shared, WINDOW, WINDOW_END,
};

static IMAGE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/wedge.bin"));
const RAM: usize = 64 << 20;
const REPEATS: usize = 9;
const CALLS: u64 = 20_000;
const FAULTS: u64 = 2_000;

// The guest program. r13 is where to go on after an exit that was not asked for.
crate::code!(
    wedge_guest,
    "rdtsc",
    "shl rdx, 32",
    "lea rdi, [rax + rdx]",
    "mov eax, 1002",
    "syscall",
    "rdtsc",
    "shl rdx, 32",
    "lea rbp, [rax + rdx]",
    "mov ebx, 20000",
    "2: mov eax, 39",
    "syscall",
    "dec ebx",
    "jnz 2b",
    "rdtsc",
    "shl rdx, 32",
    "lea rdi, [rax + rdx]",
    "sub rdi, rbp",
    "mov eax, 1000",
    "syscall",
    "rdtsc",
    "shl rdx, 32",
    "lea rbp, [rax + rdx]",
    "mov esi, 0x10000000",
    "mov ebx, 2000",
    "2: mov [rsi], rsi",
    "add rsi, 4096",
    "dec ebx",
    "jnz 2b",
    "rdtsc",
    "shl rdx, 32",
    "lea rdi, [rax + rdx]",
    "sub rdi, rbp",
    "mov eax, 1001",
    "syscall",
    "mov eax, 2000",
    "syscall",
    // A second wedge by fork; the child notes when its guest runs, and ends.
    "movabs r12, 0x018000100000",
    "rdtsc",
    "shl rdx, 32",
    "lea rbp, [rax + rdx]",
    "mov eax, 3000",
    "syscall",
    "test rax, rax",
    "jnz 4f",
    "rdtsc",
    "shl rdx, 32",
    "lea rdi, [rax + rdx]",
    "sub rdi, rbp",
    "mov eax, 1003",
    "syscall",
    "mov eax, 231",
    "xor edi, edi",
    "syscall",
    "4: pause",
    "cmp qword ptr [r12 + 56 + 3 * 8], 0",
    "je 4b",
    // A host call by jumping into the wedge's text, without the secret.
    "lea r13, [rip + 3f]",
    "movabs r12, 0x018000100000",
    "xor r9d, r9d",
    "mov eax, 39",
    "jmp [r12 + 56 + 15 * 8]",
    "3: lea r13, [rip + 3f]",
    "mov eax, 11",
    "mov edi, 0x400000",
    "mov esi, 4096",
    "jmp [r12 + 56 + 15 * 8]",
    // A forged signal: the handler's address with a frame of the guest's own making.
    "3: lea r13, [rip + 3f]",
    "lea rdx, [rsp - 1024]",
    "mov rsi, rdx",
    "push 0",
    "jmp [r12 + 56 + 14 * 8]",
    // The closing WRPKRU with another eax: must not reach user code.
    "3: lea r13, [rip + 3f]",
    "xor eax, eax",
    "xor ecx, ecx",
    "xor edx, edx",
    "jmp [r12 + 56 + 13 * 8]",
    // The XRSTOR with an image that opens every key, and a made-up frame to be resumed.
    "3: mov r14d, 0x10300000",
    "lea rax, [rip + 4f]",
    "mov [r14 + 152], rax",
    "mov [r14 + 168], rax",
    "mov qword ptr [r14 + 176], 0x202",
    "mov [r14 + 160], rsp",
    "lea rdi, [r14 + 0x1000]",
    "mov qword ptr [rdi], 0",
    "mov qword ptr [rdi + 512], 0x200",
    "mov eax, 0x200",
    "xor edx, edx",
    "jmp [r12 + 56 + 12 * 8]",
    "4: xor ecx, ecx",
    "rdpkru",
    "mov edi, eax",
    "mov eax, 1005",
    "syscall",
    "3: lea r13, [rip + 3f]",
    "mov eax, 20",
    "int 0x80",
    "3: lea r13, [rip + 3f]",
    "mov eax, 20",
    "lea ebp, [rsp - 64]",
    "mov dword ptr [rbp], 0",
    "sysenter",
    "3: lea r13, [rip + 3f]",
    "mov rax, 0xffffffffff600000",
    "call rax",
    "3: lea r13, [rip + 3f]",
    "mov eax, 56",
    "syscall",
    "3: lea r13, [rip + 3f]",
    "movabs rax, [0x7ffffffde000]",
    "3: mov eax, 231",
    "xor edi, edi",
    "syscall",
    "hlt"
);

const NAMES: &[&str] = &[
    "jump to the wedge's syscall instruction, getpid",
    "jump to the wedge's syscall instruction, munmap",
    "jump to the wedge's handler with a made-up frame",
    "jump to the closing WRPKRU with eax = 0",
    "int 0x80",
    "sysenter",
    "vsyscall page",
    "clone",
    "where the host's stack was",
];

/// Starts the wedge and prints what came of it.
pub fn run() {
    fact("blob bytes", IMAGE.len());
    image_laws();
    let alone = one_wedge(1, true);
    results(alone);
    let times = |fill: u64| -> Vec<[u64; 16]> {
        (0..REPEATS).map(|_| one_wedge(fill, false).results).collect()
    };
    for fill in [1, 16, 64] {
        let runs = times(fill);
        let pages = |run: &[u64; 16]| run[1];
        row(
            format!("guest touches a fresh page, {fill} mapped per fault: per page"),
            of(&runs, FAULTS, pages),
        );
        if fill == 1 {
            row("guest call, answered in Rust", of(&runs, CALLS, |run| run[0]));
            row("fork of the starter to the guest's first instruction", of(&runs, 1, |run| run[2]));
            row(
                "fork of a wedge with 2000 guest mappings to the child's guest",
                of(&runs, 1, |run| run[3]),
            );
        }
    }
}

/// The price of one figure over several runs.
fn of(runs: &[[u64; 16]], ops: u64, pick: impl Fn(&[u64; 16]) -> u64) -> Price {
    let mut ticks = runs.iter().map(pick);
    price_ticks(runs.len(), ops, || ticks.next().unwrap_or(0))
}

/// One wedge that maps `fill` pages around each fault; what it noted, `results[2]` being the time
/// from here to its guest's first instruction.
fn one_wedge(fill: u64, print: bool) -> &'static Shared {
    let ram = ram_with_guest();
    host::map(SHARED, PAGE, RW, libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1, 0);
    // SAFETY: the page was mapped just above; an all-zero Shared is valid.
    let shared = unsafe { &mut *(SHARED as *mut Shared) };
    order(shared, ram);
    shared.fill = fill;
    let image = image_memfd();
    crate::guest::forget_rseq();
    let born = tsc();
    // SAFETY: the child jumps into the blob and never comes back.
    let child = must("fork", unsafe { libc::fork() }.into()) as i32;
    if child == 0 {
        become_wedge(image);
    }
    look(child, shared, print);
    let mut status = 0;
    // SAFETY: collects the child, and closes what only this run used.
    unsafe {
        libc::waitpid(child, &raw mut status, 0);
        libc::close(ram);
        libc::close(image);
    }
    let faults = FAULTS.div_ceil(fill) + 1;
    assert_eq!(
        (status, shared.calls, shared.faults),
        (0, CALLS, faults),
        "the guest ran as it should"
    );
    shared.results[2] = shared.results[2].wrapping_sub(born);
    shared
}

/// What must and must not be in the image, at any alignment: guest code can jump anywhere.
fn image_laws() {
    let end = IMAGE.windows(8).position(|w| w == b"end-text").unwrap_or(0);
    let (text, _) = IMAGE.split_at(end);
    let mut decoder = iced_x86::Decoder::with_ip(64, text, BLOB as u64, 0);
    let vector = decoder.iter().find(uses_vectors).map(|i| i.ip());
    law("no instruction of the blob names a vector register", !text.is_empty() && vector.is_none());
    let count = |wanted: fn(&[u8]) -> bool| IMAGE.windows(3).filter(|w| wanted(w)).count();
    law("two host-call instructions (calls and mmap)", count(|w| w[..2] == [0x0f, 0x05]) == 2);
    law("two WRPKRU (in and out)", count(|w| w == [0x0f, 0x01, 0xef]) == 2);
    let xrstor = |w: &[u8]| w[..2] == [0x0f, 0xae] && w[2] >> 3 & 7 == 5 && w[2] < 0xc0;
    law("one XRSTOR", IMAGE.windows(3).filter(|w| xrstor(w)).count() == 1);
}

fn uses_vectors(instruction: &iced_x86::Instruction) -> bool {
    (0..instruction.op_count()).map(|n| instruction.op_register(n)).any(|register| {
        register.is_vector_register() || register.is_mm() || register.is_k() || register.is_st()
    })
}

fn ram_with_guest() -> i32 {
    let fd = host::memfd(RAM);
    // Every page exists before the guest asks for it, as in a guest that has run for a while.
    let populate = libc::MAP_SHARED | libc::MAP_POPULATE;
    host::map(0x0300_0000_0000, RAM, RW, populate, fd, 0);
    host::unmap(0x0300_0000_0000, RAM);
    let code = wedge_guest();
    // SAFETY: writes the slice at the second page.
    unsafe { libc::pwrite(fd, code.as_ptr().cast(), code.len(), PAGE as i64) };
    fd
}

fn image_memfd() -> i32 {
    let fd = host::memfd(IMAGE.len().next_multiple_of(PAGE));
    // SAFETY: writes the slice at the start.
    unsafe { libc::pwrite(fd, IMAGE.as_ptr().cast(), IMAGE.len(), 0) };
    fd
}

/// The address of the last place in the blob that holds these bytes.
fn find(bytes: &[u8]) -> u64 {
    let at = IMAGE.windows(bytes.len()).rposition(|w| w == bytes).expect("the blob holds it");
    (BLOB + at) as u64
}

fn order(shared: &mut Shared, ram: i32) {
    shared.cookie = 0x1357_9bdf_2468_ace0;
    shared.ram = ram as u64;
    shared.blob_end = (BLOB + IMAGE.len()) as u64;
    shared.results[15] = find(&[0x0f, 0x05]);
    shared.results[14] = find(&[0x49, 0x89, 0xd6, 0x49, 0x89, 0xf7]); // the handler: mov r14, rdx; mov r15, rsi
    shared.results[13] = find(&[0x0f, 0x01, 0xef]); // the closing WRPKRU
    shared.results[12] = find(&[0x48, 0x0f, 0xae, 0x2f]); // xrstor64 [rdi]
}

fn become_wedge(image: i32) -> ! {
    let text = libc::PROT_READ | libc::PROT_EXEC;
    host::map(BLOB, IMAGE.len().next_multiple_of(PAGE), text, libc::MAP_SHARED, image, 0);
    host::map_anon(STACK, STACK_LEN, RW);
    host::map_anon(ALT_STACK, ALT_STACK_LEN, RW);
    // SAFETY: the blob's first byte is its entry; nothing of this program is used again.
    unsafe { std::arch::asm!("jmp {}", in(reg) BLOB, options(noreturn)) }
}

/// Waits for the wedge to hold still and reads its maps.
fn look(child: i32, shared: &Shared, print: bool) {
    for _ in 0..3000 {
        if shared.stage.load(Ordering::SeqCst) == 1 {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let maps = std::fs::read_to_string(format!("/proc/{child}/maps")).unwrap_or_default();
    let start = |line: &str| line.split('-').next().and_then(|s| usize::from_str_radix(s, 16).ok());
    let strange: Vec<&str> = maps
        .lines()
        .filter(|line| {
            let at = start(line).unwrap_or(0);
            !(WINDOW..WINDOW_END).contains(&at)
                && at >= 0x2000_0000
                && !line.ends_with("[vsyscall]")
        })
        .collect();
    if print {
        maps_found(&maps, &strange);
    }
    shared.stage.store(2, Ordering::SeqCst);
    // SAFETY: wakes the wedge's futex.
    unsafe { libc::syscall(libc::SYS_futex, &raw const shared.stage, libc::FUTEX_WAKE, 1) };
}

fn maps_found(maps: &str, strange: &[&str]) {
    let alone = strange.is_empty() && !maps.is_empty();
    law("nothing but window, guest and [vsyscall] is mapped", alone);
    strange.iter().for_each(|line| println!("    {line}"));
    let window = maps.lines().filter(|line| line.starts_with("18000"));
    window
        .for_each(|line| println!("    {}", line.split_whitespace().collect::<Vec<_>>().join(" ")));
}

fn results(shared: &Shared) {
    for (name, [what, rip, address, nr]) in NAMES.iter().zip(shared.exits) {
        let (signal, trap) = (what >> 32, what & 0xffff_ffff);
        let caught = format!(
            "signal {signal} trap {trap} rip {rip:#x} addr {address:#x} call {:#x}",
            nr as u32
        );
        fact(name, if signal == 0 { "NOT SEEN".into() } else { caught });
    }
    law(
        "a jump to the XRSTOR with PKRU in its image gains nothing",
        shared.results[5] == 0x5555_5554,
    );
    law("every odd exit was caught and survived", shared.odd == NAMES.len() as u64);
}
