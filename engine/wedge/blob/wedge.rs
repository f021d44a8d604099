//! The wedge: alone in its process with the guest's user pages, it runs guest user code directly and
//! hands every exit to the monitor.
//!
//! No libc, no heap, no thread-local storage, no writable statics, no panics. Guest code comes back
//! by signals only. Host calls are possible only from this text and only with a secret, which lies in
//! pages that guest code cannot read (protection key 1).
#![no_std]
#![no_main]

use core::arch::{asm, naked_asm};
use core::sync::atomic::Ordering;

include!("layout.rs");

const SYS_MMAP: u64 = 9;
const SYS_MPROTECT: u64 = 10;
const SYS_MUNMAP: u64 = 11;
const SYS_SIGACTION: u64 = 13;
const SYS_SIGRETURN: u64 = 15;
const SYS_SIGALTSTACK: u64 = 131;
const SYS_PRCTL: u64 = 157;
const SYS_ARCH_PRCTL: u64 = 158;
const SYS_FUTEX: u64 = 202;
const SYS_EXIT_GROUP: u64 = 231;
const SYS_SECCOMP: u64 = 317;
/// PKRU while guest code runs: every key but 0 is closed; what the kernel gives a handler, too.
const PKRU_GUEST: u32 = 0x5555_5554;
/// What marks a frame as written by the kernel: our "restorer".
const RESTORER: u64 = 1;

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    die()
}

fn die() -> ! {
    // SAFETY: raises #UD in the wedge itself, which ends this process.
    unsafe { asm!("ud2", options(noreturn)) }
}

fn shared() -> &'static mut Shared {
    // SAFETY: the monitor mapped it before jumping here; one thread uses it on this side.
    unsafe { &mut *(SHARED as *mut Shared) }
}

/// The host call for everything but mmap. The sixth argument is always the secret.
#[inline(never)]
extern "C" fn call(nr: u64, a: u64, b: u64, c: u64, d: u64, e: u64) -> i64 {
    let result;
    // SAFETY: callers pass what the call asks for.
    unsafe {
        asm!("syscall", inlateout("rax") nr => result, in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d,
            in("r8") e, in("r9") shared().secret, lateout("rcx") _, lateout("r11") _);
    }
    result
}

/// Maps guest RAM. The secret rides in the halves of `fd` and `prot` the host ignores.
#[inline(never)]
extern "C" fn map(at: u64, len: u64, prot: u64, flags: u64, fd: u64, offset: u64) -> i64 {
    let result;
    let fd = fd & 0xffff_ffff | shared().secret & !0xffff_ffff;
    let prot = prot & 0xffff_ffff | shared().secret << 32;
    // SAFETY: maps guest pages at guest addresses only.
    unsafe {
        asm!("syscall", inlateout("rax") SYS_MMAP => result, in("rdi") at, in("rsi") len, in("rdx") prot,
            in("r10") flags, in("r8") fd, in("r9") offset, lateout("rcx") _, lateout("r11") _);
    }
    result
}

/// First instruction of the image: change to the window's stack, forget the old one.
#[unsafe(naked)]
#[unsafe(no_mangle)]
#[unsafe(link_section = ".text.start")]
extern "C" fn wedge_start() -> ! {
    naked_asm!("movabs rsp, {stack}", "xor ebp, ebp", "call {main}", "ud2",
        stack = const STACK + STACK_LEN, main = sym main)
}

extern "C" fn main() -> ! {
    alone();
    signals();
    filter();
    shared().in_guest = 1;
    // The first "guest code": its trap makes the frame that the monitor then fills.
    // SAFETY: the handler never returns here.
    unsafe { asm!("int3", "ud2", options(noreturn)) }
}

/// Unmaps everything but the window, and clears what a thread of a C library leaves behind.
fn alone() {
    call(SYS_ARCH_PRCTL, 0x1002, 0, 0, 0, 0); // ARCH_SET_FS
    call(SYS_ARCH_PRCTL, 0x1012, 0, 0, 0, 0); // ARCH_SET_CPUID: CPUID faults from now on
    call(273, 0, 24, 0, 0, 0); // set_robust_list
    call(218, 0, 0, 0, 0, 0); // set_tid_address
    let below = call(SYS_MUNMAP, 0, WINDOW as u64, 0, 0, 0);
    let above = call(SYS_MUNMAP, WINDOW_END as u64, (TOP - WINDOW_END) as u64, 0, 0, 0);
    if below != 0 || above != 0 {
        die();
    }
}

#[repr(C)]
struct Action {
    handler: u64,
    flags: u64,
    restorer: u64,
    mask: u64,
}

fn signals() {
    let stack = [ALT_STACK as u64, 0, ALT_STACK_LEN as u64];
    call(SYS_SIGALTSTACK, stack.as_ptr() as u64, 0, 0, 0, 0);
    let keys = shared().keys != 0;
    let handler = if keys { on_signal_keys as *const () } else { on_signal as *const () };
    // SA_SIGINFO | SA_ONSTACK | SA_NODEFER | SA_RESTORER
    let flags = 4 | 0x0800_0000 | 0x4000_0000 | 0x0400_0000;
    // A kick waits while a handler runs: it is delivered when guest code goes on.
    let action = Action { handler: handler as u64, flags, restorer: RESTORER, mask: 1 << (KICK - 1) };
    for signal in [4, 5, 7, 8, KICK as u64, 11, 31] {
        call(SYS_SIGACTION, signal, &raw const action as u64, 0, 8, 0);
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Bpf {
    code: u16,
    yes: u8,
    no: u8,
    k: u32,
}

const LOAD: u16 = 0x20;
const EQUAL: u16 = 0x15;
const ABOVE: u16 = 0x35;
const RETURN: u16 = 6;
const ALL_SET: u16 = 0x45;
const ALLOW: u32 = 0x7fff_0000;
const TRAP: u32 = 0x0003_0000;

/// Calls only from the blob, only these few, only with the secret; anything else is a SIGSYS.
fn filter() {
    let s = shared();
    let (high, low) = ((s.secret >> 32) as u32, s.secret as u32);
    let op = |code, yes, no, k| Bpf { code, yes, no, k };
    let program = [
        op(LOAD, 0, 0, 4), // arch
        op(EQUAL, 0, 22, 0xc000_003e),
        op(LOAD, 0, 0, 12), // instruction pointer, high
        op(EQUAL, 0, 20, (WINDOW >> 32) as u32),
        op(LOAD, 0, 0, 8), // low; the window starts at zero
        op(ABOVE, 18, 0, s.blob_end as u32),
        op(LOAD, 0, 0, 0), // number
        op(EQUAL, 9, 0, SYS_MMAP as u32),
        op(EQUAL, 4, 0, SYS_MPROTECT as u32),
        op(EQUAL, 3, 0, SYS_MUNMAP as u32),
        op(EQUAL, 2, 0, SYS_FUTEX as u32),
        op(EQUAL, 1, 0, SYS_SIGRETURN as u32),
        op(EQUAL, 0, 11, SYS_EXIT_GROUP as u32),
        op(LOAD, 0, 0, 60), // sixth argument, high
        op(EQUAL, 0, 9, high),
        op(LOAD, 0, 0, 56),
        op(EQUAL, 6, 7, low),
        op(LOAD, 0, 0, 52), // mmap: descriptor, high half
        op(EQUAL, 0, 5, high),
        op(LOAD, 0, 0, 36), // protection, high half
        op(EQUAL, 0, 3, low),
        op(LOAD, 0, 0, 40), // flags must say MAP_FIXED
        op(ALL_SET, 0, 1, 0x10),
        op(RETURN, 0, 0, ALLOW),
        op(RETURN, 0, 0, TRAP),
    ];
    let fprog = [program.len() as u64, program.as_ptr() as u64];
    call(SYS_PRCTL, 38, 1, 0, 0, 0); // PR_SET_NO_NEW_PRIVS
    if call(SYS_SECCOMP, 1, 0, fprog.as_ptr() as u64, 0, 0) != 0 {
        die();
    }
}

/// The machine context of a signal frame.
#[repr(C)]
struct Context {
    head: [u64; 5],
    r8_to_r15: [u64; 8],
    rdi: u64,
    rsi: u64,
    rbp: u64,
    rbx: u64,
    rdx: u64,
    rax: u64,
    rcx: u64,
    rsp: u64,
    rip: u64,
    flags: u64,
    selectors: u64,
    error: u64,
    trap: u64,
    mask: u64,
    cr2: u64,
    vectors: *mut u8,
}

/// Every signal lands here, first with the keys opened. The frame is at RSP and nowhere else; it is
/// believed only if the kernel has just written it: its restorer slot is armed, and consumed.
#[unsafe(naked)]
extern "C" fn on_signal_keys() {
    naked_asm!(
        "mov r14, rdi",
        "xor eax, eax",
        "xor ecx, ecx",
        "xor edx, edx",
        "wrpkru",
        "mov rdi, r14",
        "jmp {plain}",
        plain = sym on_signal)
}

#[unsafe(naked)]
extern "C" fn on_signal() {
    naked_asm!(
        "push 0x202",
        "popfq",
        "mov rbx, rsp",
        "cmp qword ptr [rbx], {restorer}",
        "jne 9f",
        "mov qword ptr [rbx], 0",
        "lea rsi, [rbx + 8]",    // ucontext
        "lea rdx, [rbx + 312]",  // siginfo, behind the ucontext's 304 bytes
        "and rsp, -16",
        "call {body}",
        // rt_sigreturn takes everything from the frame, PKRU included.
        "lea rsp, [rbx + 8]",
        "mov r9, rax",
        "mov eax, {sigreturn}",
        "syscall",
        "9: ud2",
        restorer = const RESTORER, body = sym exit_and_resume, sigreturn = const SYS_SIGRETURN)
}

/// Hands an exit to the monitor and fills the frame with what to go on with; gives the secret.
extern "C" fn exit_and_resume(signal: u64, context: &mut Context, info: &[u64; 4]) -> u64 {
    let s = shared();
    if s.in_guest == 0 {
        die(); // a fault of our own
    }
    s.in_guest = 0;
    s.signal = signal as u32;
    s.code = info[1] & 0xffff_ffff;
    s.address = info[2];
    s.trap = context.trap;
    s.error = context.error;
    save(s, context);
    hand_over(s);
    restore(s, context);
    s.in_guest = 1;
    s.secret
}

fn save(s: &mut Shared, c: &Context) {
    let r = &mut s.registers;
    let [r8, r9, r10, r11, r12, r13, r14, r15] = c.r8_to_r15;
    r.gpr = [
        c.rax, c.rcx, c.rdx, c.rbx, c.rsp, c.rbp, c.rsi, c.rdi, r8, r9, r10, r11, r12, r13, r14, r15,
    ];
    r.rip = c.rip;
    r.rflags = c.flags;
    // SAFETY: the kernel's frame holds at least the legacy area, header and AVX component.
    unsafe {
        copy(r.vectors.as_mut_ptr(), c.vectors, r.vectors.len());
        asm!("rdfsbase {}", out(reg) r.fs_base);
        asm!("rdgsbase {}", out(reg) r.gs_base);
    }
}

fn restore(s: &Shared, c: &mut Context) {
    let r = &s.registers;
    let [rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8, r9, r10, r11, r12, r13, r14, r15] = r.gpr;
    c.r8_to_r15 = [r8, r9, r10, r11, r12, r13, r14, r15];
    (c.rax, c.rcx, c.rdx, c.rbx) = (rax, rcx, rdx, rbx);
    (c.rsp, c.rbp, c.rsi, c.rdi) = (rsp, rbp, rsi, rdi);
    c.rip = r.rip;
    c.flags = r.rflags;
    c.mask = 0;
    let components = 7 | if s.pkru_offset != 0 { 1 << 9 } else { 0 };
    // SAFETY: as for saving; bytes 464 to 511 are the kernel's own marks and stay.
    unsafe {
        copy(c.vectors, r.vectors.as_ptr(), 464);
        *(c.vectors.add(512) as *mut u64) = components;
        copy(c.vectors.add(576), r.vectors.as_ptr().add(576), 256);
        if s.pkru_offset != 0 {
            *(c.vectors.add(s.pkru_offset as usize) as *mut u32) = PKRU_GUEST;
        }
        asm!("wrfsbase {}", in(reg) r.fs_base);
        asm!("wrgsbase {}", in(reg) r.gs_base);
    }
}

/// # Safety
/// Both ranges are valid and do not overlap.
unsafe fn copy(to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: the caller's promise; REP MOVSB needs no vector registers and no memcpy.
    unsafe {
        asm!("rep movsb", inout("rdi") to => _, inout("rsi") from => _, inout("rcx") len => _);
    }
}

/// Gives the monitor its turn, and obeys its orders when it is ours again.
fn hand_over(s: &mut Shared) {
    loop {
        s.turn.store(MONITOR, Ordering::SeqCst);
        call(SYS_FUTEX, &raw const s.turn as u64, 1, 1, 0, 0);
        while s.turn.load(Ordering::SeqCst) != WEDGE {
            call(SYS_FUTEX, &raw const s.turn as u64, 0, MONITOR as u64, 0, 0);
        }
        obey(s);
        if s.failed == 0 && s.resume != 0 {
            return;
        }
    }
}

fn obey(s: &mut Shared) {
    s.failed = 0;
    let count = (s.order_count as usize).min(MAX_ORDERS);
    for at in 0..count {
        let Some(order) = s.orders.get(at).copied() else { break };
        let result = apply(&order, s.ram);
        if result < 0 {
            s.failed = result;
            break;
        }
    }
    s.order_count = 0;
}

fn apply(order: &Order, ram: u64) -> i64 {
    let end = order.address.wrapping_add(order.len);
    let clear = end <= WINDOW as u64 || order.address >= (WINDOW + WINDOW_LEN) as u64;
    if !clear || end > TOP as u64 || end < order.address {
        die();
    }
    if order.protection == 0 {
        return call(SYS_MUNMAP, order.address, order.len, 0, 0, 0);
    }
    // MAP_SHARED | MAP_FIXED, and MAP_POPULATE for less than a large page.
    let flags = 0x11 | if order.len < 1 << 21 { 0x8000 } else { 0 };
    map(order.address, order.len, order.protection, flags, ram, order.offset)
}
