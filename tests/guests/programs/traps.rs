//! A program that executes every software interrupt and what is like it, with every prefix, at page ends, single-stepped and
//! under ptrace, and prints which signals come of it, with all that a handler can see. The host's output is what a guest's must be.
//!
//! Each line is a case: its bytes, where they lie, and a group for each signal.

use std::{arch::global_asm, fmt::Write, ptr::null_mut};

unsafe extern "C" {
    fn mmap(at: *mut u8, len: usize, rights: i32, flags: i32, file: i32, offset: i64) -> *mut u8;
    fn mprotect(at: *mut u8, len: usize, rights: i32) -> i32;
    fn sigaction(signal: i32, action: *const Action, old: *mut Action) -> i32;
    fn sigaltstack(stack: *const Stack, old: *mut Stack) -> i32;
    fn fork() -> i32;
    fn waitpid(process: i32, status: *mut i32, options: i32) -> i32;
    fn ptrace(request: i64, process: i32, address: u64, data: u64) -> i64;
    fn kill(process: i32, signal: i32) -> i32;
    fn getpid() -> i32;
    fn _exit(code: i32) -> !;
    /// Jumps to code (RDI) with a stack (RSI) and a selector (RDX); returns when the handler has it do so.
    fn enter(code: u64, stack: u64, selector: u64);
    static resume: u8;
}

global_asm!(
    ".globl enter",
    "enter:",
    "push rbx",
    "push rbp",
    "push r12",
    "push r13",
    "push r14",
    "push r15",
    "mov [rip + resume_stack], rsp",
    "mov rsp, rsi",
    "sub rsp, 16",
    "mov [rsp], rdi",
    "mov [rsp + 8], rdx",
    "mov eax, 0x7fff",
    "mov ebx, 2000",
    "retfq",
    ".globl resume",
    "resume:",
    "mov rsp, [rip + resume_stack]",
    "cld",
    "pop r15",
    "pop r14",
    "pop r13",
    "pop r12",
    "pop rbp",
    "pop rbx",
    "ret",
    ".bss",
    "resume_stack: .quad 0",
    ".text",
);

/// Two pages of code, and one that nobody may execute.
const CODE: u64 = 0x1000_0000;
/// Data that have not been touched when the code comes to them, and code.
const FRESH: u64 = 0x1400_0000;
/// Where flags are popped from.
const STACK: u64 = 0x1800_8000;
const PAGE: u64 = 4096;
const TF: u64 = 1 << 8;
const OF: u64 = 1 << 11;
const FLAGS: u64 = 0x202;
const TRAP: i32 = 5;
const WIDE: u64 = 0x33;
const NARROW: u64 = 0x23;
/// Signals watched in one case.
const MAX: usize = 6;
/// Passes through code that loops.
const LOOPS: u64 = 2000;

#[repr(C)]
struct Action {
    handler: usize,
    flags: u64,
    restorer: usize,
    mask: [u64; 16],
}

#[repr(C)]
struct Stack {
    at: *mut u8,
    flags: i32,
    len: usize,
}

/// What a handler, or a tracer, sees of a signal.
#[derive(Clone, Copy)]
struct Seen {
    signal: i32,
    code: i32,
    address: u64,
    rip: u64,
    error: u64,
    trap: u64,
    flags: u64,
    selector: u64,
    rax: u64,
}

static mut SEEN: ([Option<Seen>; MAX], usize) = ([None; MAX], 0);

/// Registers in the machine context of a signal frame.
const RAX: usize = 13;
const RIP: usize = 16;
const RFLAGS: usize = 17;
const SELECTORS: usize = 18;
const ERROR: usize = 19;
const TRAP_NUMBER: usize = 20;

extern "C" fn on_signal(signal: i32, info: *const i32, context: *mut u64) {
    // SAFETY: the host's signal frame; one thread.
    unsafe {
        let regs = context.add(5);
        let at = |n: usize| *regs.add(n);
        let seen = Seen {
            signal,
            code: *info.add(2),
            address: *info.add(4).cast(),
            rip: at(RIP),
            error: at(ERROR),
            trap: at(TRAP_NUMBER),
            flags: at(RFLAGS),
            selector: at(SELECTORS) & 0xffff,
            rax: at(RAX),
        };
        let (list, count) = &mut *(&raw mut SEEN);
        list[*count] = Some(seen);
        *count += 1;
        if signal != TRAP || *count == MAX {
            *regs.add(RIP) = &raw const resume as u64;
            *regs.add(RFLAGS) = FLAGS;
            *regs.add(SELECTORS) = at(SELECTORS) & !0xffff | WIDE;
        }
    }
}

/// Where the code lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// In the middle of a page.
    Inside,
    /// What is behind the instruction must not be executed.
    End,
    /// Its last byte is in the next page.
    Across,
}

#[derive(Clone)]
struct Case {
    name: String,
    bytes: Vec<u8>,
    selector: u64,
    flags: u64,
    place: Place,
    loops: bool,
    shows_rax: bool,
}

fn map(at: u64, len: u64, rights: i32) {
    const FIXED: i32 = 0x32; // private, anonymous, there
    // SAFETY: nothing else is at the addresses of this program.
    let got = unsafe { mmap(at as *mut u8, len as usize, rights, FIXED, -1, 0) };
    assert_eq!(got as u64, at, "mmap");
}

/// Lays the case's code out; its first address.
fn place(case: &Case) -> u64 {
    map(CODE, 2 * PAGE, 3);
    map(CODE + 2 * PAGE, PAGE, 0);
    map(FRESH, 2 * PAGE, 7);
    map(STACK - PAGE * 8, PAGE * 16, 3);
    let end = CODE + 2 * PAGE;
    let before = 1 + case.bytes.len() as u64;
    let at = match case.place {
        Place::Inside => CODE + 0x800,
        Place::End => end - before,
        Place::Across => CODE + PAGE - before + 1,
    };
    let code = [&[0x9d], &case.bytes[..], &[0x90, 0x90, 0x90, 0x0f, 0x0b]].concat();
    let len = code.len().min((end - at) as usize);
    // SAFETY: all of it has just been mapped.
    unsafe {
        std::ptr::copy_nonoverlapping(code.as_ptr(), at as *mut u8, len);
        assert_eq!(mprotect(CODE as *mut u8, 2 * PAGE as usize, 5), 0);
        let width = if case.selector == WIDE { 8 } else { 4 };
        for n in 0..if case.loops { LOOPS } else { 1 } {
            let flags = if case.loops && n + 1 < LOOPS { FLAGS } else { case.flags };
            ((STACK + n * width) as *mut u32).write(flags as u32);
        }
    }
    at
}

fn show(line: &mut String, seen: &Seen, traced: bool, shows_rax: bool) {
    let near = |address: u64| match address.wrapping_sub(CODE) {
        at if at < 3 * PAGE => format!("code+{at:x}"),
        _ => format!("{address:x}"),
    };
    let Seen { signal, code, error, trap, flags, selector, .. } = seen;
    let _ = write!(
        line,
        " | {signal} code {code:x} addr {} rip {}",
        near(seen.address),
        near(seen.rip)
    );
    if !traced {
        let _ = write!(line, " err {error:x} trap {trap}");
    }
    let _ = write!(line, " flags {flags:x} cs {selector:x}");
    if shows_rax {
        let _ = write!(line, " rax {:x}", seen.rax);
    }
}

fn handled(case: &Case) {
    let at = place(case);
    // SAFETY: one thread; the code ends in a signal.
    let seen = unsafe {
        SEEN = ([None; MAX], 0);
        enter(at, STACK, case.selector);
        (*(&raw const SEEN)).0
    };
    let mut line = format!("{} {:?}:", case.name, case.place);
    seen.iter().flatten().for_each(|seen| show(&mut line, seen, false, case.shows_rax));
    println!("{line}");
}

const TRACE_ME: i64 = 0;
const GET_REGS: i64 = 12;
const SET_REGS: i64 = 13;
const CONT: i64 = 7;
const STEP: i64 = 9;
const GET_INFO: i64 = 0x4202;
const STOP: i32 = 19;

/// Places in the tracer's view of the registers.
const R_AX: usize = 10;
const R_ORIG_AX: usize = 15;
const R_IP: usize = 16;
const R_CS: usize = 17;
const R_FLAGS: usize = 18;
const R_SP: usize = 19;

/// The same as seen by a tracer that has it go on by `request`.
fn traced(case: &Case, request: i64) {
    let at = place(case);
    let mut line = format!(
        "{} {:?} {}:",
        case.name,
        case.place,
        if request == STEP { "stepped" } else { "traced" }
    );
    // SAFETY: plain system calls on a child of ours.
    unsafe {
        let child = fork();
        if child == 0 {
            ptrace(TRACE_ME, 0, 0, 0);
            kill(getpid(), STOP);
            _exit(1);
        }
        let mut status = 0;
        waitpid(child, &mut status, 0);
        let mut regs = [0u64; 27];
        ptrace(GET_REGS, child, 0, regs.as_mut_ptr() as u64);
        (regs[R_IP], regs[R_SP], regs[R_CS], regs[R_FLAGS]) = (at, STACK, case.selector, FLAGS);
        (regs[R_AX], regs[R_ORIG_AX]) = (0x7fff, u64::MAX);
        ptrace(SET_REGS, child, 0, regs.as_ptr() as u64);
        for _ in 0..MAX {
            ptrace(request, child, 0, 0);
            waitpid(child, &mut status, 0);
            if status & 0xff != 0x7f {
                let _ = write!(line, " | ended {status:x}");
                break;
            }
            let mut info = [0i32; 32];
            ptrace(GET_INFO, child, 0, info.as_mut_ptr() as u64);
            ptrace(GET_REGS, child, 0, regs.as_mut_ptr() as u64);
            let seen = Seen {
                signal: status >> 8,
                code: info[2],
                address: info.as_ptr().add(4).cast::<u64>().read(),
                rip: regs[R_IP],
                error: 0,
                trap: 0,
                flags: regs[R_FLAGS],
                selector: regs[R_CS],
                rax: regs[R_AX],
            };
            show(&mut line, &seen, true, case.shows_rax);
            if seen.signal != TRAP {
                break;
            }
        }
        kill(child, 9);
        waitpid(child, &mut status, 0);
    }
    println!("{line}");
}

/// What is executed, by name; with RAX shown if it is a system call.
const INSTRUCTIONS: [(&str, &[u8], bool); 24] = [
    ("int3", &[0xcc], false),
    ("int 3", &[0xcd, 3], false),
    ("int 4", &[0xcd, 4], false),
    ("int1", &[0xf1], false),
    ("into", &[0xce], false),
    ("int 80", &[0xcd, 0x80], true),
    ("int 0", &[0xcd, 0], false),
    ("int 1", &[0xcd, 1], false),
    ("int 2", &[0xcd, 2], false),
    ("int 5", &[0xcd, 5], false),
    ("int 8", &[0xcd, 8], false),
    ("int d", &[0xcd, 0xd], false),
    ("int e", &[0xcd, 0xe], false),
    ("int 20", &[0xcd, 0x20], false),
    ("int 2e", &[0xcd, 0x2e], false),
    ("int cc", &[0xcd, 0xcc], false),
    ("int f1", &[0xcd, 0xf1], false),
    ("int ff", &[0xcd, 0xff], false),
    ("ud2", &[0x0f, 0x0b], false),
    ("ud1", &[0x0f, 0xb9, 0xc0], false),
    ("ud0", &[0x0f, 0xff, 0xc0], false),
    ("hlt", &[0xf4], false),
    ("cli", &[0xfa], false),
    ("in", &[0xec], false),
];
const PREFIXES: [&[u8]; 14] = [
    &[],
    &[0x66],
    &[0xf2],
    &[0xf3],
    &[0x2e],
    &[0x3e],
    &[0x64],
    &[0x65],
    &[0x67],
    &[0x48],
    &[0x4f],
    &[0xf0],
    &[0x66, 0xf3, 0x65],
    &[0xcc],
];

/// Those that trap: all prefixes, all places.
const TRAPS: usize = 6;

fn software_interrupts(selector: u64) -> Vec<Case> {
    let mut all = Vec::new();
    let mode = if selector == WIDE { "64" } else { "32" };
    for (n, (name, insn, shows_rax)) in INSTRUCTIONS.into_iter().enumerate() {
        for prefix in PREFIXES.into_iter().take(if n < TRAPS { PREFIXES.len() } else { 3 }) {
            // REX and 32-bit code: other instructions. What INT1 leaves in RIP is not the same on all hosts, and its cases are compared with INT3's.
            let skipped = selector == NARROW && matches!(prefix, [0x48 | 0x4f])
                || name == "int1" && prefix == [0xcc];
            if skipped {
                continue;
            }
            for flags in [FLAGS, FLAGS | OF, FLAGS | TF, FLAGS | TF | OF] {
                let bytes = [prefix, insn].concat();
                let places: &[Place] = match bytes.len() {
                    1 => &[Place::Inside, Place::End],
                    _ => &[Place::Inside, Place::End, Place::Across],
                };
                for place in places {
                    let name = format!("{mode} {name} {prefix:02x?} flags {flags:x}");
                    let bytes = bytes.clone();
                    all.push(Case {
                        name,
                        bytes,
                        selector,
                        flags,
                        place: *place,
                        loops: false,
                        shows_rax,
                    });
                }
            }
        }
    }
    if selector == WIDE {
        all.extend(one_byte_opcodes());
    }
    all
}

/// Those that 64-bit mode does not have: nothing behind them is looked at.
fn one_byte_opcodes() -> impl Iterator<Item = Case> {
    let opcodes: [u8; 15] =
        [0x06, 0x07, 0x0e, 0x16, 0x17, 0x1e, 0x1f, 0x27, 0x2f, 0x37, 0x3f, 0x60, 0x61, 0xce, 0xd6];
    opcodes.into_iter().flat_map(|opcode| {
        [vec![opcode], vec![0x66, 0x48, opcode]].into_iter().map(|bytes| Case {
            name: format!("64 opcode {bytes:02x?}"),
            bytes,
            selector: WIDE,
            flags: FLAGS,
            place: Place::End,
            loops: false,
            shows_rax: false,
        })
    })
}

/// Single steps over what is answered by more than the CPU.
fn steps() -> Vec<Case> {
    let fresh = (FRESH as u32).to_le_bytes();
    let load = [&[0x48, 0x8b, 0x0c, 0x25], &fresh[..]].concat();
    let store = [&[0x48, 0x89, 0x0c, 0x25], &fresh[..]].concat();
    let jump = [&[0xb9], &fresh[..], &[0xff, 0xe1]].concat();
    let number = [&[0xb8, 0xff, 0x0f, 0, 0, 0x0f, 0x05][..], &[0xff, 0xcb, 0x75, 0xf4]].concat();
    let compared = [
        &[0x0f, 0x05, 0x48, 0x3d, 1, 0xf0, 0xff, 0xff, 0xb8, 0xff, 0x7f, 0, 0][..],
        &[0xff, 0xcb, 0x75, 0xee],
    ]
    .concat();
    let list: [(&str, Vec<u8>, bool, bool); 12] = [
        ("nop", vec![0x90], false, false),
        ("cpuid", vec![0x31, 0xc0, 0x31, 0xc9, 0x0f, 0xa2], false, false),
        ("cpuid at once", vec![0x0f, 0xa2], false, false),
        ("rdtsc", vec![0x0f, 0x31], false, false),
        ("load", load, false, false),
        ("store", store, false, false),
        ("jump", jump, false, false),
        ("syscall", vec![0x0f, 0x05], true, false),
        ("syscall with a prefix", vec![0x48, 0x0f, 0x05], true, false),
        ("pushf and popf", vec![0x9c, 0x9d], false, false),
        ("a numbered call", number, true, true),
        ("a compared call", compared, true, true),
    ];
    let mut all = Vec::new();
    for (name, bytes, shows_rax, loops) in list {
        for flags in [FLAGS, FLAGS | TF] {
            let name = format!("64 {name} flags {flags:x}");
            let bytes = bytes.clone();
            all.push(Case {
                name,
                bytes,
                selector: WIDE,
                flags,
                place: Place::Inside,
                loops,
                shows_rax,
            });
        }
    }
    all
}

fn main() {
    // SAFETY: plain system calls.
    unsafe {
        let stack =
            Stack { at: null_mut::<u8>().wrapping_add(0x1c00_0000), flags: 0, len: 0x1_0000 };
        map(0x1c00_0000, 0x1_0000, 3);
        assert_eq!(sigaltstack(&stack, null_mut()), 0);
        // With information, on that stack, not blocked.
        let action = Action {
            handler: on_signal as *const () as usize,
            flags: 0x4800_0004,
            restorer: 0,
            mask: [0; 16],
        };
        for signal in [4, 5, 7, 8, 11] {
            act(signal, &action);
        }
    }
    for selector in [WIDE, NARROW] {
        let all = software_interrupts(selector);
        all.iter().for_each(handled);
        let some = all.iter().filter(|case| case.flags == FLAGS | OF && case.place != Place::End);
        for case in some {
            traced(case, CONT);
            traced(case, STEP);
        }
    }
    let all = steps();
    all.iter().for_each(handled);
    for case in all.iter().filter(|case| !case.loops && case.flags == FLAGS) {
        traced(case, CONT);
        traced(case, STEP);
    }
}

/// The C library's structure has the mask before the flags.
unsafe fn act(signal: i32, action: &Action) {
    #[repr(C)]
    struct Libc {
        handler: usize,
        mask: [u64; 16],
        flags: i32,
        restorer: usize,
    }
    let libc = Libc {
        handler: action.handler,
        mask: action.mask,
        flags: action.flags as i32,
        restorer: 0,
    };
    // SAFETY: as the C library wants it.
    assert_eq!(unsafe { sigaction(signal, (&raw const libc).cast(), null_mut()) }, 0);
}
