//! A program of the guest that tries to get out of what a program may do: into the guest's kernel, into
//! the wedge that runs it, to the host. Each attempt is a process of its own, and must end as it would
//! on a CPU that knows nothing of ring3.
//!
//! Its arguments say what is closed to it: `kernel` (the guest kernel's memory), `wedge` (the wedge's own
//! pages), `stack` (RSP has no say in whether a signal of the host's finds room), `signals` (what a process of user
//! code tells its wedge); and `unaligned`, that the host's CPU does not check alignment. Attempts on what is not closed,
//! or not checked, are skipped, and said to be.

use std::{
    arch::asm,
    ptr, slice,
    sync::{
        OnceLock,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use wedge_abi::{BIAS, BLOB, CACHE, VCPU_PAGE, HAND_OVER, JOURNAL, MAX_SITES, RAM, REGIONS, SHARED, SITES, STACK, TABLES};

#[path = "isolation/accesses.rs"]
mod accesses;
#[path = "isolation/keys.rs"]
mod keys;
#[path = "isolation/leftovers.rs"]
mod leftovers;
#[path = "isolation/signals.rs"]
mod signals;

unsafe extern "C" {
    fn fork() -> i32;
    fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
    fn _exit(code: i32) -> !;
    fn mmap(at: *mut u8, len: usize, protection: i32, flags: i32, descriptor: i32, offset: i64) -> *mut u8;
    fn ualarm(microseconds: u32, again: u32) -> u32;
    fn sigaction(signal: i32, action: usize, old: usize) -> i32;
}

const ILL: i32 = 4;
const TRAP: i32 = 5;
const BUS: i32 = 7;
const FPE: i32 = 8;
const SEGV: i32 = 11;
const ALRM: i32 = 14;
const SYS: i32 = 31;
const GETPID: u64 = 39;
const UNAME: u64 = 63;
const MMAP: u64 = 9;
const MPROTECT: u64 = 10;
const MUNMAP: u64 = 11;
const FUTEX: u64 = 202;
/// Bytes of the blob's text looked at.
const TEXT: usize = 0x4000;
/// Turns of an empty loop, some ten milliseconds of them.
const GROWN: u32 = 20_000_000;
/// Processes that may try to copy it.
const TRIES: u32 = 20;
/// Microseconds that an attempt may take, and one that may well go on for ever.
const LONG: u32 = 3_000_000;
const SHORT: u32 = 300_000;
/// An address where nothing is mapped.
const NOWHERE: u64 = 0x0300_0000_0000;
/// Where the kernel's direct map and text lie on Debian's kernels without KASLR.
const KERNEL: [u64; 3] = [0xffff_8880_0000_1000, 0xffff_8880_0100_0000, 0xffff_ffff_8100_0000];

/// What the wedge shares with others, and nobody writes.
const SEALED: [(&str, usize); 5] =
    [("blob", BLOB), ("code", CACHE), ("tables", TABLES), ("regions", REGIONS), ("sites", SITES)];

/// How an attempt must end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// By a signal.
    Signal(i32),
    /// By any signal.
    Killed,
    /// By itself, and not as hoped.
    Unsatisfied,
    /// It goes on: whatever was asked for was done by the guest's kernel, as usual.
    Fine,
    /// As [`End::Fine`], or by a signal.
    Unharmed,
    /// In any way: a program may do this, and what comes of it is its own affair.
    Any,
}
use End::{Any, Fine, Killed, Signal, Unharmed, Unsatisfied};

/// What must be closed, or checked by the CPU, for an attempt to be tried.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Needs {
    Nothing,
    Kernel,
    Wedge,
    Alignment,
    /// Signals find room wherever RSP points.
    Stack,
    /// What user code's process and the wedge tell each other is not believed.
    Signals,
}

struct Outcome {
    closed: Vec<Needs>,
    /// Microseconds that an attempt may take.
    patience: u32,
    failed: u32,
}

impl Outcome {
    fn attempt(&mut self, name: &str, needs: Needs, expected: End, attempt: impl FnOnce() -> bool) {
        if !self.closed.contains(&needs) {
            println!("{name}: skipped: the host has no means");
            return;
        }
        let ended = ended(self.patience, attempt);
        let right = match expected {
            Any => true,
            Killed => matches!(ended, Signal(_)),
            Unharmed => ended != Unsatisfied,
            expected => ended == expected,
        };
        self.failed += u32::from(!right);
        println!("{name}: {}: {ended:?}", if right { "ok" } else { "FAILED" });
    }
}

/// Runs an attempt in a process of its own.
fn ended(patience: u32, attempt: impl FnOnce() -> bool) -> End {
    let mut status = 0;
    // SAFETY: one thread; the child only makes its attempt and ends.
    unsafe {
        match fork() {
            0 => {
                ualarm(patience, 0);
                _exit(if attempt() { 0 } else { 1 })
            }
            child => waitpid(child, &mut status, 0),
        };
    }
    match (status & 0x7f, status >> 8 & 0xff) {
        (0, 0) => Fine,
        (0, _) => Unsatisfied,
        (signal, _) => Signal(signal),
    }
}

fn load(at: u64) -> bool {
    // SAFETY: the attempt; whatever it does, it does to this process.
    unsafe { core::ptr::read_volatile(at as *const u64) };
    true
}

fn store(at: u64) -> bool {
    // SAFETY: as `load`.
    unsafe { core::ptr::write_volatile(at as *mut u8, 0) };
    true
}

fn jump(at: u64) -> bool {
    // SAFETY: as `load`.
    unsafe { asm!("call {}", in(reg) at, clobber_abi("C")) };
    true
}

/// Goes on until the engine takes this process for one that has not just begun.
fn grow() {
    (0..GROWN).for_each(|n| { std::hint::black_box(n); });
}

/// The blob's text, if a process that runs directly finds it; else nothing. What a program finds there is no promise:
/// an instruction that is interpreted sees what the guest's page tables say, a page that is not there. So it is copied
/// in processes that may fail, and kept.
fn blob_text() -> &'static [u8] {
    static TEXT_FOUND: OnceLock<&[u8]> = OnceLock::new();
    TEXT_FOUND.get_or_init(|| {
        // SAFETY: memory of our own, which children share.
        let copy = unsafe { mmap(ptr::null_mut(), TEXT, 3, 0x21, -1, 0) };
        assert_ne!(copy as isize, -1, "no memory");
        // SAFETY: the attempt; the blob is longer than what is copied.
        let copied = || ended(LONG, || unsafe { grow(); ptr::copy_nonoverlapping(BLOB as *const u8, copy, TEXT); true }) == Fine;
        let found = (0..TRIES).any(|_| copied());
        // SAFETY: nobody writes it any more.
        unsafe { slice::from_raw_parts(copy, if found { TEXT } else { 0 }) }
    })
}

/// Where the wedge's SYSCALLs are; none where there is no wedge.
fn wedge_calls() -> Vec<u64> {
    let calls = blob_text().windows(2).enumerate().filter(|(_, pair)| **pair == [0x0f, 0x05]);
    calls.map(|(at, _)| (BLOB + at) as u64).collect()
}

/// SYSCALL at `at`, with these registers. What follows one of the wedge's ends in a few pops and a
/// return, all of which find the way back.
fn call_from(at: u64, number: u64, a: [u64; 6]) -> u64 {
    let result;
    // SAFETY: as `load`; R15 keeps the stack.
    unsafe {
        asm!(
            "push rbx", "push rbp", "push r15",
            "mov r15, rsp",
            "lea rcx, [rip + 2f]",
            ".rept 12", "push rcx", ".endr",
            "jmp r11",
            "2: mov rsp, r15",
            "pop r15", "pop rbp", "pop rbx",
            inlateout("rax") number => result, inlateout("r11") at => _,
            in("rdi") a[0], in("rsi") a[1], in("rdx") a[2], in("r10") a[3], in("r8") a[4], in("r9") a[5],
            lateout("rcx") _, lateout("r12") _, lateout("r13") _, lateout("r14") _,
        );
    }
    result
}

/// The function that looks what a call of the wedge's has done, where the call does not come back: most crash in the wedge's code, by
/// what registers hold.
static LOOK: AtomicUsize = AtomicUsize::new(0);

/// Has a signal that would end this process call `look` first, which says whether the attempt has achieved nothing.
fn after_all(look: fn() -> bool) {
    #[repr(C)]
    struct Action(extern "C" fn(i32), [u64; 16], i32, usize);
    const ON_STACK: i32 = 0x0800_0000;
    LOOK.store(look as usize, Relaxed);
    for signal in [ILL, TRAP, BUS, FPE, SEGV, ALRM, SYS] {
        // SAFETY: as the C library has it. While the handler runs another such signal is the end.
        unsafe { sigaction(signal, &Action(looks, [u64::MAX; 16], ON_STACK, 0) as *const Action as usize, 0) };
    }
}

extern "C" fn looks(_: i32) {
    // SAFETY: stored by `after_all`.
    let look: fn() -> bool = unsafe { core::mem::transmute(LOOK.load(Relaxed)) };
    // SAFETY: ends this process.
    unsafe { _exit(if look() { 0 } else { 1 }) }
}

/// As UNAME fills it.
type Name = [u8; 390];
static mut NAME: Name = [0; 390];

/// What the kernel says it is, asked at one of the program's own SYSCALLs.
fn system_name() -> Name {
    let mut name = [0; 390];
    let own: u64;
    // SAFETY: takes an address.
    unsafe { asm!("lea {}, [rip + 3f]", "jmp 4f", "3: syscall", "ret", "4:", out(reg) own) };
    call_from(own, UNAME, [name.as_mut_ptr() as u64, 0, 0, 0, 0, 0]);
    name
}

/// Where an attempt would write, had its calls been carried out.
static AIM: AtomicUsize = AtomicUsize::new(0);

fn hit() -> bool {
    store(AIM.load(Relaxed) as u64);
    false
}

/// A SYSCALL instruction of the wedge's, to which attempts jump.
#[derive(Clone, Copy)]
struct Call {
    /// GVA of the instruction.
    at: u64,
    /// Programs cannot read the secret that the wedge's calls carry.
    closed: bool,
}

impl Call {
    /// The secret that this process's calls carry, where a program can read it.
    fn secret(self) -> u64 {
        // SAFETY: mapped, where it is not closed.
        if self.closed { 0x0123_4567_89ab_cdef } else { unsafe { ptr::read_volatile(SHARED as *const u64) } }
    }

    /// A host call would show the host's kernel. One that is refused leaves the name as it was.
    fn asks_the_guest(self) -> bool {
        fn is_the_guests() -> bool {
            // SAFETY: one thread.
            let name = unsafe { (&raw const NAME).read() };
            name == [0; 390] || name == system_name()
        }
        after_all(is_the_guests);
        call_from(self.at, UNAME, [&raw mut NAME as u64, 0, 0, 0, 0, self.secret()]);
        is_the_guests()
    }

    /// The host's descriptors, mapped with the secret where a mapping says so. (The first is guest RAM.)
    fn maps_nothing(self) -> bool {
        after_all(|| !load(NOWHERE));
        (1..512).all(|fd| {
            let secret = self.secret();
            let (protection, high) = (1 | secret << 32, secret & !0xffff_ffff);
            call_from(self.at, MMAP, [NOWHERE, 4096, protection, 0x11, fd | high, 0]) != NOWHERE
        })
    }

    /// Makes a call after which memory at its first argument might be writable, and writes there. The write must end the attempt.
    fn aims_by(self, number: u64, arguments: [u64; 6]) -> bool {
        AIM.store(arguments[0] as usize, Relaxed);
        after_all(hit);
        call_from(self.at, number, arguments);
        hit()
    }

    fn maps(self, at: u64, flags: u64, offset: u64) -> bool {
        let secret = self.secret();
        self.aims_by(MMAP, [at, 4096, 3 | secret << 32, flags, secret & !0xffff_ffff, offset])
    }

    /// What a program would need to map more: to write what its process is told.
    fn opens_nothing(self) -> bool {
        self.makes_writable(JOURNAL)
    }

    /// The same: to do without what its process is told.
    fn unmaps_nothing(self) -> bool {
        self.aims_by(MUNMAP, [JOURNAL as u64, 4096, 0, 0, 0, self.secret()])
    }

    /// The same: to put something else in its place.
    fn replaces_nothing(self) -> bool {
        self.maps(JOURNAL as u64, 0x8011, 0)
    }

    /// What is sealed stays so, even for one who may change what the process has mapped.
    fn makes_writable(self, sealed: usize) -> bool {
        self.aims_by(MPROTECT, [sealed as u64, 4096, 3, 0, 0, self.secret()])
    }

    /// Guest RAM, where the program would have it.
    fn maps_no_memory(self) -> bool {
        self.maps(NOWHERE, 0x11, 0x10_0000)
    }

    /// Calls that are the wedge's with its other processes.
    fn hands_over(self) -> bool {
        call_from(self.at, FUTEX, [VCPU_PAGE as u64, 1, 1 << 30, 0, 0, self.secret()]);
        call_from(self.at, HAND_OVER, [0; 6]);
        true
    }
}

/// SYSCALL inside another instruction.
fn hidden_call() -> bool {
    let (hidden, plain): (u64, u64);
    // SAFETY: getpid.
    unsafe {
        asm!("lea rdx, [rip + 2f]", "add rdx, 2", "jmp rdx",
            "2: .byte 0x48, 0xb9, 0x0f, 0x05, 0xeb, 0x04, 0, 0, 0, 0", // movabs rcx, imm64; in it: syscall; jmp +4
            inlateout("rax") GETPID => hidden, out("rdx") _, lateout("rcx") _, lateout("r11") _);
        asm!("syscall", inlateout("rax") GETPID => plain, lateout("rcx") _, lateout("r11") _);
    }
    hidden == plain
}

/// The 32-bit getpid.
fn interrupt_80() -> bool {
    let (old, plain): (u64, u64);
    // SAFETY: getpid.
    unsafe {
        asm!("int 0x80", inlateout("rax") 20u64 => old, lateout("r8") _, lateout("r9") _, lateout("r10") _, lateout("r11") _);
        asm!("syscall", inlateout("rax") GETPID => plain, lateout("rcx") _, lateout("r11") _);
    }
    old == plain
}

/// An attempt that is a few instructions.
macro_rules! code {
    ($($line:literal),*) => {
        || {
            // SAFETY: as `load`.
            unsafe { asm!($($line,)* out("rax") _, out("rcx") _, out("rdx") _, out("r11") _) };
            true
        }
    };
}

fn memory(o: &mut Outcome) {
    for kernel in KERNEL {
        let window = kernel.wrapping_add(BIAS);
        o.attempt(&format!("load kernel {kernel:#x}"), Needs::Nothing, Signal(SEGV), || load(kernel));
        o.attempt(&format!("load window {window:#x}"), Needs::Kernel, Signal(SEGV), || load(window));
        o.attempt(&format!("store window {window:#x}"), Needs::Kernel, Signal(SEGV), || store(window));
        o.attempt(&format!("jump window {window:#x}"), Needs::Nothing, Signal(SEGV), || jump(window));
    }
    let ram = RAM as u64 + 0x10_0000;
    o.attempt("load guest RAM", Needs::Kernel, Signal(SEGV), || load(ram));
    o.attempt("store guest RAM", Needs::Kernel, Signal(SEGV), || store(ram));
    o.attempt("jump guest RAM", Needs::Nothing, Signal(SEGV), || jump(ram));
    for (name, at) in [("shared", SHARED), ("vCPU page", VCPU_PAGE), ("stack", STACK)] {
        o.attempt(&format!("load {name} page"), Needs::Wedge, Signal(SEGV), || load(at as u64));
        o.attempt(&format!("store {name} page"), Needs::Wedge, Signal(SEGV), || store(at as u64));
        o.attempt(&format!("jump {name} page"), Needs::Nothing, Signal(SEGV), || jump(at as u64));
    }
    for (name, at) in SEALED {
        o.attempt(&format!("store {name}"), Needs::Nothing, Signal(SEGV), || store(at as u64));
    }
}

fn host_calls(o: &mut Outcome) {
    let calls = wedge_calls();
    let closed = o.closed.contains(&Needs::Wedge);
    o.patience = SHORT;
    for (at, (name, sealed)) in calls.into_iter().zip(SEALED.into_iter().cycle()) {
        let from = Call { at, closed };
        let makes = || from.makes_writable(sealed);
        o.attempt(&format!("store {name}, made writable at {at:#x}"), Needs::Nothing, Killed, makes);
        o.attempt(&format!("uname at {at:#x}"), Needs::Nothing, Unharmed, || from.asks_the_guest());
        o.attempt(&format!("mmap at {at:#x}"), Needs::Nothing, Unharmed, || from.maps_nothing());
        o.attempt(&format!("guest RAM at {at:#x}"), Needs::Wedge, Killed, || from.maps_no_memory());
        o.attempt(&format!("journal at {at:#x}"), Needs::Wedge, Killed, || from.opens_nothing());
        o.attempt(&format!("no journal at {at:#x}"), Needs::Wedge, Killed, || from.unmaps_nothing());
        o.attempt(&format!("another journal at {at:#x}"), Needs::Wedge, Killed, || from.replaces_nothing());
        o.attempt(&format!("hand over at {at:#x}"), Needs::Wedge, Unharmed, || from.hands_over());
    }
    o.patience = LONG;
    o.attempt("hidden syscall", Needs::Nothing, Fine, hidden_call);
    o.attempt("int 0x80", Needs::Nothing, Fine, interrupt_80);
    o.attempt("sysenter", Needs::Nothing, Killed, code!("mov eax, 20", "sysenter"));
    o.attempt("vsyscall read", Needs::Nothing, Signal(SEGV), || load(0xffff_ffff_ff60_0000));
}

fn instructions(o: &mut Outcome) {
    let privileged: [(&str, fn() -> bool); 10] = [
        ("cli", code!("cli")),
        ("hlt", code!("hlt")),
        ("in", code!("in al, 0x60")),
        ("rdmsr", code!("mov ecx, 0xc0000080", "rdmsr")),
        ("wrmsr", code!("mov ecx, 0xc0000080", "xor eax, eax", "xor edx, edx", "wrmsr")),
        ("mov cr3", code!("mov rax, cr3")),
        ("mov dr7", code!("mov rax, dr7")),
        ("swapgs", code!("swapgs")),
        ("invlpg", code!("invlpg [rsp]")),
        ("xsetbv", code!("xor ecx, ecx", "mov eax, 7", "xor edx, edx", "xsetbv")),
    ];
    for (name, attempt) in privileged {
        o.attempt(name, Needs::Nothing, Signal(SEGV), attempt);
    }
    // The guest's CPU has no protection keys.
    o.attempt("wrpkru", Needs::Nothing, Signal(ILL), code!("xor eax, eax", "xor ecx, ecx", "xor edx, edx", "wrpkru"));
    o.attempt("xrstor of keys", Needs::Nothing, Signal(SEGV), code!(
        "sub rsp, 4096", "and rsp, -64", "mov rdi, rsp", "xor eax, eax", "mov ecx, 512", "rep stosq",
        "mov dword ptr [rsp + 512], 0x200", "mov eax, 0x200", "xor edx, edx", "xrstor64 [rsp]"));
    o.attempt("xrstor of keys past its mask", Needs::Nothing, Signal(SEGV), code!(
        "sub rsp, 4096", "and rsp, -64", "mov rdi, rsp", "xor eax, eax", "mov ecx, 512", "rep stosq",
        "mov dword ptr [rsp + 512], 0x200", "mov eax, 0x200", "xor edx, edx", "jmp 2f",
        "mov eax, 7", "xor edx, edx", "2: xrstor64 [rsp]"));
}

fn odd_states(o: &mut Outcome) {
    o.attempt("far return to kernel code", Needs::Nothing, Signal(SEGV), code!(
        "push 0x10", "lea rax, [rip + 2f]", "push rax", "retfq", "2: nop"));
    o.attempt("kernel data segment", Needs::Nothing, Signal(SEGV), code!("mov eax, 0x18", "mov ds, eax"));
    o.attempt("kernel stack segment", Needs::Nothing, Signal(SEGV), code!("mov eax, 0x18", "mov ss, eax"));
    o.attempt("user data segment", Needs::Nothing, Fine, code!("mov eax, 0x2b", "mov ds, eax", "mov es, eax"));
    o.attempt("trap flag", Needs::Nothing, Signal(TRAP), code!(
        "pushfq", "or dword ptr [rsp], 0x100", "popfq", "nop"));
    o.attempt("alignment check", Needs::Alignment, Signal(BUS), code!(
        "pushfq", "or dword ptr [rsp], 0x40000", "popfq", "mov eax, [rsp + 1]"));
    o.attempt("system call with nested task", Needs::Nothing, Fine, code!(
        "pushfq", "or dword ptr [rsp], 0x4000", "popfq", "mov eax, 39", "syscall"));
    o.attempt("stack beyond canonical", Needs::Nothing, Signal(BUS), code!("mov rsp, 0x4000000000000000", "push rax"));
    o.attempt("stack in the kernel", Needs::Nothing, Signal(SEGV), code!("mov rsp, 0xffff888001000000", "push rax"));
    o.attempt("jump beyond canonical", Needs::Nothing, Signal(SEGV), || jump(1 << 62));
    o.attempt("jump to the kernel", Needs::Nothing, Signal(SEGV), || jump(KERNEL[2]));
}

/// The stubs of patched system calls, as far as their table is open: each makes a call that its site would
/// have made.
fn stubs(o: &mut Outcome) {
    if wedge_calls().is_empty() {
        return;
    }
    for n in 0..MAX_SITES.min(64) {
        o.attempt(&format!("stub {n}"), Needs::Nothing, Any, || {
            // SAFETY: the attempt, as `load`.
            let stub = unsafe { core::ptr::read_volatile((SITES + n * 8) as *const u64) };
            stub == 0 || jump(stub)
        });
    }
}

fn main() {
    let mut closed = vec![Needs::Nothing, Needs::Alignment];
    for argument in std::env::args().skip(1) {
        match argument.as_str() {
            "kernel" => closed.push(Needs::Kernel),
            "wedge" => closed.push(Needs::Wedge),
            "stack" => closed.push(Needs::Stack),
            "signals" => closed.push(Needs::Signals),
            _ => closed.retain(|needs| *needs != Needs::Alignment),
        }
    }
    let mut outcome = Outcome { closed, patience: LONG, failed: 0 };
    memory(&mut outcome);
    accesses::attempts(&mut outcome);
    host_calls(&mut outcome);
    instructions(&mut outcome);
    keys::attempts(&mut outcome);
    odd_states(&mut outcome);
    signals::attempts(&mut outcome);
    stubs(&mut outcome);
    // Behind the stubs: there is to be none of a call that copies its caller.
    leftovers::attempts(&mut outcome);
    println!("isolation: {} failed", outcome.failed);
    std::process::exit((outcome.failed != 0).into());
}
