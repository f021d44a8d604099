//! Attempts to have the host's signals fail or go astray, by which programs come back to the engine: a process whose signal
//! cannot be delivered is killed, and the machine with it.
//!
//! On a CPU it is nobody's affair where RSP points as long as nothing is pushed, so a fault that the kernel settles (or a
//! system call) goes on with any RSP, and what is fatal is the signal that the guest's kernel has for it.

use wedge_abi::{ALT_STACK, ALT_STACK_LEN, BLOB, VCPU_PAGE, HAND_OVER, JOURNAL, SITES, STACK, STACK_LEN, USER_PAGE, UserPage};
use crate::{
    End,
    End::{Any, Fine, Killed, Signal},
    FPE, ILL, LONG, Needs, Outcome, SEGV, SHORT, TRAP, asm, blob_text, jump, mmap, wedge_calls,
};
use core::{mem::offset_of, ptr};

/// Pages of fresh memory that an attempt touches.
const FRESH: usize = 64;
/// An instruction that comes back to the engine by a signal, and what the guest's kernel makes of it.
type Fault = (&'static str, End, fn(u64) -> bool);

/// With RSP at the argument; it is the program's own again behind the instructions.
macro_rules! with_stack {
    ($($line:literal),*) => {
        |stack| {
            let fresh = fresh();
            // SAFETY: the attempt; whatever it does, it does to this process. R15 keeps the stack.
            unsafe {
                asm!("push rbx", "push rbp", "push r15", "mov r15, rsp", "mov rsp, r14", $($line,)*
                    "mov rsp, r15", "pop r15", "pop rbp", "pop rbx",
                    in("r14") stack, inout("rdi") fresh => _, inout("rcx") FRESH => _, out("rax") _, out("rdx") _,
                    out("rsi") _, out("r8") _, out("r9") _, out("r10") _, out("r11") _);
            }
            true
        }
    };
}

const FAULTS: [Fault; 9] = [
    ("page faults", Fine, with_stack!("2: mov byte ptr [rdi], 1", "add rdi, 4096", "dec rcx", "jnz 2b")),
    ("system calls", Fine, with_stack!("mov ebx, 200", "2: mov eax, 39", "syscall", "dec ebx", "jnz 2b")),
    // Long enough for interrupts to come.
    ("computing", Fine, with_stack!("mov ecx, 15000000", "2: dec ecx", "jnz 2b")),
    ("cpuid", Fine, with_stack!("xor eax, eax", "xor ecx, ecx", "cpuid")),
    ("an invalid instruction", Signal(ILL), with_stack!("ud2")),
    ("a breakpoint", Signal(TRAP), with_stack!("int3")),
    ("int 0x21", Signal(SEGV), with_stack!("int 0x21")),
    ("a division by zero", Signal(FPE), with_stack!("xor ecx, ecx", "mov eax, 1", "cdq", "idiv ecx")),
    ("a privileged instruction", Signal(SEGV), with_stack!("cli")),
];

fn fresh() -> usize {
    // SAFETY: the kernel chooses where: private, anonymous.
    unsafe { mmap(ptr::null_mut(), FRESH * 4096, 3, 0x22, -1, 0) as usize }
}

/// Where the host's stack for signals begins and ends, and the other pages of the engine's.
fn stacks() -> Vec<(String, u64)> {
    let (alt, end) = (ALT_STACK as u64, (ALT_STACK + ALT_STACK_LEN) as u64);
    let low = [0, 1, 8, 16, 128, 256, 1024, 4096].map(|above| ("the signal stack's start", alt, above as i64));
    let high = [-4096, -1024, -8, 0, 8].map(|above| ("the signal stack's end", end, above));
    let (user, page) = (USER_PAGE as u64, 4096);
    let others = [
        ("the user page", user, 0), ("the user page", user, 512), ("the user page", user, page),
        ("the journal", JOURNAL as u64, 8), ("the table of calls", SITES as u64, page),
        ("the wedge's stack", STACK as u64, STACK_LEN as i64), ("the vCPU page", VCPU_PAGE as u64, 64),
        ("nothing", 0, 0), ("no canonical address", 1 << 62, 0), ("the kernel", 0xffff_8880_0100_0000, 0),
    ];
    let all = low.into_iter().chain(high).chain(others);
    all.map(|(name, at, above)| (format!("{name} {above:+}"), at.wrapping_add_signed(above))).collect()
}

/// Flags set, an odd area loaded, and then a fault: whatever the state, the fault comes back.
fn states(o: &mut Outcome) {
    let state: [(&str, End, fn(u64) -> bool); 7] = [
        ("direction flag", Signal(ILL), with_stack!("std", "ud2")),
        ("nested task", Signal(ILL), with_stack!(
            "mov rsp, r15", "pushfq", "or dword ptr [rsp], 0x4000", "popfq", "mov rsp, r14", "ud2")),
        ("alignment check", Signal(ILL), with_stack!(
            "mov rsp, r15", "pushfq", "or dword ptr [rsp], 0x40000", "popfq", "mov rsp, r14", "ud2")),
        ("trap flag", Signal(TRAP), with_stack!(
            "mov rsp, r15", "pushfq", "or dword ptr [rsp], 0x100", "popfq", "mov rsp, r14", "nop")),
        ("stack segment loaded", Signal(ILL), with_stack!("mov eax, 0x2b", "mov ss, eax", "ud2")),
        ("far jump to 32-bit code", Signal(ILL), with_stack!(
            "mov rsp, r15", "sub rsp, 16", "mov dword ptr [rsp + 4], 0x23", "mov dword ptr [rsp], 0x1000",
            "mov rax, rsp", "mov rsp, r14", "jmp 2f", "2: ud2")),
        ("exceptions of SIMD unmasked", Signal(FPE), with_stack!(
            "mov rsp, r15", "push 0", "ldmxcsr [rsp]", "mov rsp, r14", "pxor xmm0, xmm0", "divss xmm0, xmm0")),
    ];
    for (name, expected, attempt) in state {
        o.attempt(&format!("{name} at the signal stack's start"), Needs::Stack, expected, move || attempt(ALT_STACK as u64 + 8));
    }
    o.attempt("areas that cannot be loaded", Needs::Stack, Signal(SEGV), || {
        with_area(|area| (area[512], area[24]) = (7, 0xff), ALT_STACK as u64 + 8)
    });
    o.attempt("header with reserved bits", Needs::Stack, Signal(SEGV), || {
        with_area(|area| area[512 + 16] = 1, ALT_STACK as u64 + 8)
    });
}

#[repr(C, align(64))]
struct Area([u8; 4096]);

/// XRSTOR of such an area, with RSP there.
fn with_area(change: fn(&mut [u8; 4096]), stack: u64) -> bool {
    let mut area = Area([0; 4096]);
    area.0[27] = 0xff; // MXCSR's reserved bits
    change(&mut area.0);
    // SAFETY: the attempt.
    unsafe {
        asm!("mov r15, rsp", "mov rsp, rcx", "xrstor64 [rdi]", "mov rsp, r15", in("rdi") area.0.as_ptr(),
            in("rcx") stack, in("eax") 7, in("edx") 0, out("r15") _);
    }
    true
}

/// Pushes until there is no more room.
fn recursion() -> bool {
    // SAFETY: the attempt.
    unsafe { asm!("2: push rax", "jmp 2b", options(noreturn)) }
}

/// The hand-over itself, which user code can jump to, with what it likes in the page that it shares with the wedge.
fn hand_overs(o: &mut Outcome) {
    for at in wedge_calls().into_iter().filter(|at| is_hand_over(*at)) {
        for event in [0, 1, 2, 3, 4, 5, u64::MAX] {
            o.attempt(&format!("event {event}"), Needs::Signals, Any, move || tell(event, at));
        }
    }
}

/// `mov eax, HAND_OVER` comes before the call.
fn is_hand_over(at: u64) -> bool {
    let at = at as usize - BLOB;
    at >= 4 && blob_text()[at - 4..at] == (HAND_OVER as u32).to_le_bytes()
}

fn tell(event: u64, at: u64) -> bool {
    let word = |offset: usize| (USER_PAGE + offset) as *mut u64;
    // SAFETY: the attempt.
    unsafe {
        (0..4096 / 8).for_each(|n| ptr::write_volatile(word(n * 8), 0xffff_ffff_ffff_fff7));
        ptr::write_volatile(word(offset_of!(UserPage, event)), event);
        asm!("mov rsp, rcx", "jmp rdx", in("rax") HAND_OVER, in("rdx") at, in("rcx") ALT_STACK + 8, options(noreturn))
    }
}

/// The engine's own code, from any of its first bytes on, with RSP where a signal finds no room.
fn jumps(o: &mut Outcome) {
    for (n, at) in wedge_calls().into_iter().enumerate() {
        for back in [48, 16] {
            o.attempt(&format!("{back} before call {n}"), Needs::Signals, Any, move || jump(at - back));
        }
    }
}

pub fn attempts(o: &mut Outcome) {
    for (place, stack) in stacks() {
        for (name, expected, fault) in FAULTS {
            o.attempt(&format!("{name} with RSP at {place}"), Needs::Stack, expected, || fault(stack));
        }
    }
    states(o);
    o.attempt("recursion without end", Needs::Stack, Killed, recursion);
    o.patience = SHORT;
    hand_overs(o);
    jumps(o);
    o.patience = LONG;
}
