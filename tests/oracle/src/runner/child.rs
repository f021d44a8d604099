//! The native process: forked, locked up, and from then on only ever in three pieces of code: the
//! case it runs, the kernel's signal delivery, and the assembly below.
//!
//! The assembly is a signal handler that never returns by itself: it publishes where the kernel
//! put the frame, hands the turn to the runner, waits, and lets `rt_sigreturn` load the next
//! case from the frame the runner has edited meanwhile. It uses only the signal stack and
//! the control page, so nothing a case does to registers (FS, RSP, selectors, AC) matters to it.
//!
//! Why a case cannot escape: seccomp allows system calls from the handler's own text alone, and
//! any other becomes a SIGSYS, which ends the case like an exception does. Cases that loop are
//! ended by a timer of CPU time.

use std::arch::global_asm;
use std::io;

use super::shared::{CONTROL, CONTROL_OFFSET, LEN, SIGNAL_STACK, SIGNAL_STACK_LEN};
use super::shared::{TURN_CHILD, TURN_RUNNER};
use crate::layout::{WINDOWS, Window};

/// Interval of the timer that ends endless cases, in microseconds of CPU time. A case that is
/// hit twice in a row is endless; one that is hit once is run again.
const TIMER_US: i64 = 200_000;

/// What ends a case: an exception's signal, seccomp's, or the timer's.
const SIGNALS: [i32; 7] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGILL,
    libc::SIGFPE,
    libc::SIGTRAP,
    libc::SIGSYS,
    libc::SIGPROF,
];

global_asm!(
    ".pushsection .text.ring3_oracle, \"ax\", @progbits",
    ".balign 64",
    // The text seccomp lets make system calls starts here.
    "ring3_oracle_text:",
    // First entry: the first frame comes from this exception.
    "ring3_oracle_enter:",
    "ud2",
    // rdi = signal, rdx = ucontext
    "ring3_oracle_handler:",
    "movabs r8, {control}",
    "mov [r8 + 4], edi",
    "mov [r8 + 8], rdx",
    "rdfsbase rax",
    "mov [r8 + 16], rax",
    "rdgsbase rax",
    "mov [r8 + 24], rax",
    // Frames do not hold these.
    "mov [r8 + 40], ds",
    "mov [r8 + 42], es",
    "mov [r8 + 44], fs",
    "mov [r8 + 46], gs",
    // Hand over the turn and wake the runner.
    "mov dword ptr [r8], {runner}",
    "mov rdi, r8",
    "mov esi, {wake}",
    "mov edx, 1",
    "mov eax, {futex}",
    "syscall",
    // Wait until the turn comes back.
    "2:",
    "cmp dword ptr [r8], {child}",
    "je 3f",
    "mov rdi, r8",
    "mov esi, {wait}",
    "mov edx, {runner}",
    "xor r10d, r10d",
    "mov eax, {futex}",
    "syscall",
    "jmp 2b",
    "3:",
    // Selectors first: they load a base of their own.
    "mov ds, [r8 + 40]",
    "mov es, [r8 + 42]",
    "mov fs, [r8 + 44]",
    "mov gs, [r8 + 46]",
    "mov rax, [r8 + 16]",
    "wrfsbase rax",
    "mov rax, [r8 + 24]",
    "wrgsbase rax",
    // rt_sigreturn finds the frame by RSP, and keeps the flags it does not load.
    "mov rsp, [r8 + 8]",
    "push qword ptr [r8 + 32]",
    "popfq",
    "mov eax, {sigreturn}",
    "syscall",
    "ud2",
    "ring3_oracle_text_end:",
    ".popsection",
    control = const CONTROL,
    runner = const TURN_RUNNER,
    child = const TURN_CHILD,
    futex = const libc::SYS_futex,
    wake = const libc::FUTEX_WAKE,
    wait = const libc::FUTEX_WAIT,
    sigreturn = const libc::SYS_rt_sigreturn,
);

unsafe extern "C" {
    fn ring3_oracle_text();
    fn ring3_oracle_enter() -> !;
    fn ring3_oracle_handler();
    fn ring3_oracle_text_end();
}

/// Forks the native process over the shared memory `fd`. It makes its first frame and hands the
/// turn to the runner, or exits.
pub fn spawn(fd: i32) -> io::Result<libc::pid_t> {
    let filter = filter();
    // SAFETY: the child calls only functions that are safe after a fork of a threaded process
    // (system call wrappers, no allocation), and leaves Rust for good in `live`.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => live(fd, &filter),
        pid => Ok(pid),
    }
}

/// The child's whole life. The exit status tells the step that failed.
fn live(fd: i32, filter: &[libc::sock_filter]) -> ! {
    // SAFETY: system calls on memory and signals of this process only, which is ours; the
    // mappings replace nothing. What follows `ring3_oracle_enter` is argued at the module top.
    unsafe {
        let steps: [unsafe fn(i32, &[libc::sock_filter]) -> bool; 4] =
            [map_windows, catch_signals, start_timer, lock_up];
        for (number, step) in steps.iter().enumerate() {
            if !step(fd, filter) {
                libc::_exit(number as i32 + 1);
            }
        }
        ring3_oracle_enter()
    }
}

unsafe fn map(fd: i32, base: u64, len: u64, offset: u64, protection: i32) -> bool {
    let flags = libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE | libc::MAP_POPULATE;
    let (at, len) = (base as *mut libc::c_void, len as usize);
    // SAFETY: NOREPLACE: nothing that exists is touched.
    unsafe { libc::mmap(at, len, protection, flags, fd, offset as libc::off_t) == at }
}

unsafe fn map_windows(fd: i32, _: &[libc::sock_filter]) -> bool {
    let protection = |window: &Window| {
        let write = if window.writable { libc::PROT_WRITE } else { 0 };
        let execute = if window.executable { libc::PROT_EXEC } else { 0 };
        libc::PROT_READ | write | execute
    };
    // SAFETY: see `map`.
    let window = |w: &Window| unsafe { map(fd, w.base, w.len, w.offset, protection(w)) };
    let rest = LEN - CONTROL_OFFSET;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: see `map`.
    WINDOWS.iter().all(window) && unsafe { map(fd, CONTROL, rest, CONTROL_OFFSET, access) }
}

unsafe fn catch_signals(_: i32, _: &[libc::sock_filter]) -> bool {
    // SAFETY: the structures are plain data, all-zero is a valid start; the handler obeys the
    // signal ABI.
    unsafe {
        let stack = libc::stack_t {
            ss_sp: SIGNAL_STACK as *mut libc::c_void,
            ss_flags: 0,
            ss_size: SIGNAL_STACK_LEN as usize,
        };
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = ring3_oracle_handler as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigfillset(&mut action.sa_mask);
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut none);
        libc::sigaltstack(&stack, std::ptr::null_mut()) == 0
            && libc::sigprocmask(libc::SIG_SETMASK, &none, std::ptr::null_mut()) == 0
            && SIGNALS.iter().all(|&s| libc::sigaction(s, &action, std::ptr::null_mut()) == 0)
    }
}

unsafe fn start_timer(_: i32, _: &[libc::sock_filter]) -> bool {
    let interval = libc::timeval { tv_sec: 0, tv_usec: TIMER_US };
    let timer = libc::itimerval { it_interval: interval, it_value: interval };
    // SAFETY: a timer of this process.
    unsafe { libc::setitimer(libc::ITIMER_PROF, &timer, std::ptr::null_mut()) == 0 }
}

/// Dies with the runner's thread, and takes the right to make system calls from anywhere else.
unsafe fn lock_up(_: i32, filter: &[libc::sock_filter]) -> bool {
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
    // SAFETY: `program` describes `filter`, which the kernel copies.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) == 0
            && libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program) == 0
    }
}

/// Allows system calls of the 64-bit table from the handler's text, traps all others.
fn filter() -> [libc::sock_filter; 10] {
    const ARCH_X86_64: u32 = 0xc000_003e;
    let start = ring3_oracle_text as *const () as u64;
    let end = ring3_oracle_text_end as *const () as u64;
    assert_eq!(start >> 32, end >> 32, "the handler's text straddles 4 GiB");
    let statement = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let jump = |kind: u32, k: u32, jt: u8, jf: u8| {
        let code = (libc::BPF_JMP | kind | libc::BPF_K) as u16;
        libc::sock_filter { code, jt, jf, k }
    };
    let load = |offset| statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset);
    [
        load(4), // arch
        jump(libc::BPF_JEQ, ARCH_X86_64, 0, 6),
        load(12), // upper half of the instruction pointer
        jump(libc::BPF_JEQ, (start >> 32) as u32, 0, 4),
        load(8), // lower half
        jump(libc::BPF_JGE, start as u32, 0, 2),
        jump(libc::BPF_JGT, end as u32, 1, 0),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_TRAP),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_TRAP),
    ]
}
