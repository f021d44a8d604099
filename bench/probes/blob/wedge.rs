//! A wedge in miniature: a process with no libc, no heap, no TLS and no writable statics, alone with
//! its window. It catches a guest's system calls and faults by signals it never returns from, and
//! may call the host only from its own text and only with a secret in a register.
#![no_std]
#![no_main]

use core::arch::{asm, naked_asm};
use core::sync::atomic::Ordering;

include!("layout.rs");

const SYS_MMAP: u64 = 9;
const SYS_MUNMAP: u64 = 11;
const SYS_SIGACTION: u64 = 13;
const SYS_SIGRETURN: u64 = 15;
const SYS_SIGALTSTACK: u64 = 131;
const SYS_CLONE: u64 = 56;
const SYS_PRCTL: u64 = 157;
const SYS_FUTEX: u64 = 202;
const SYS_EXIT_GROUP: u64 = 231;
const SYS_SECCOMP: u64 = 317;

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    die()
}

fn die() -> ! {
    // SAFETY: raises #UD, whose default is the end of this process.
    unsafe { asm!("ud2", options(noreturn)) }
}

/// The page shared with the starter.
fn shared() -> &'static mut Shared {
    // SAFETY: the starter mapped it before jumping here; one thread uses it on this side.
    unsafe { &mut *(SHARED as *mut Shared) }
}

/// The only host-call instruction. The sixth argument is always the secret.
#[inline(never)]
extern "C" fn call(nr: u64, a: u64, b: u64, c: u64, d: u64, e: u64) -> i64 {
    let result;
    // SAFETY: callers pass what the call asks for.
    unsafe {
        asm!("syscall", inlateout("rax") nr => result, in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d,
            in("r8") e, in("r9") shared().cookie, lateout("rcx") _, lateout("r11") _);
    }
    result
}

/// mmap needs all six arguments: the secret rides in the halves of `fd` and `prot` the host ignores.
#[inline(never)]
extern "C" fn map(at: u64, len: u64, prot: u64, flags: u64, fd: u64, offset: u64) -> i64 {
    let result;
    let fd = fd & 0xffff_ffff | shared().cookie & !0xffff_ffff;
    let prot = prot & 0xffff_ffff | shared().cookie << 32;
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
    enter_guest()
}

/// Unmaps everything but the window, and clears what a thread of a C library leaves behind.
fn alone() {
    const TOP: u64 = 0x7fff_ffff_f000;
    call(158, 0x1002, 0, 0, 0, 0); // arch_prctl(ARCH_SET_FS, 0)
    call(273, 0, 24, 0, 0, 0); // set_robust_list
    call(218, 0, 0, 0, 0, 0); // set_tid_address
    let below = call(SYS_MUNMAP, 0, WINDOW as u64, 0, 0, 0);
    let above = call(SYS_MUNMAP, WINDOW_END as u64, TOP - WINDOW_END as u64, 0, 0, 0);
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
    // SA_SIGINFO | SA_ONSTACK | SA_NODEFER | SA_RESTORER
    let flags = 4 | 0x0800_0000 | 0x4000_0000 | 0x0400_0000;
    let action = Action { handler: on_signal as *const () as u64, flags, restorer: 1, mask: 0 };
    for signal in [4, 5, 7, 8, 11, 31] {
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
    let (high, low) = ((s.cookie >> 32) as u32, s.cookie as u32);
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
        op(EQUAL, 4, 0, SYS_CLONE as u32),
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

fn enter_guest() -> ! {
    let code = map(GUEST_TEXT as u64, 4096, 5, 0x11, shared().ram, 4096);
    if code != GUEST_TEXT as i64 {
        die();
    }
    // SAFETY: from here on the guest runs; it comes back by signals only.
    unsafe {
        asm!("mov rsp, {stack}", "xor r13d, r13d", "jmp {text}", stack = in(reg) GUEST_STACK as u64,
            text = in(reg) GUEST_TEXT as u64, options(noreturn))
    }
}

/// The machine context of a signal frame, as far as it is needed.
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
}

/// Every signal lands here. Opens the keys; believes in the frame only if the kernel has just written
/// it (its restorer slot is armed, and consumed here); resumes without sigreturn.
#[unsafe(naked)]
extern "C" fn on_signal() {
    naked_asm!(
        "mov r14, rdx",
        "mov r15, rsi",
        "xor eax, eax",
        "xor ecx, ecx",
        "xor edx, edx",
        "wrpkru",
        "mov rbp, rsp",
        "cmp qword ptr [rbp], 1",
        "jne 9f",
        "mov qword ptr [rbp], 0",
        "and rsp, -16",
        "mov rsi, r14",
        "mov rdx, r15",
        "call {body}",
        "mov rdx, r14",
        "mov rdi, [rdx + 224]",
        "mov r14, rdx",
        "mov eax, [rdi + 512]",
        "and eax, 0xe5",
        "or eax, 2",
        "xor edx, edx",
        "xrstor64 [rdi]",
        "mov eax, 0x55555554",
        "xor ecx, ecx",
        "xor edx, edx",
        "wrpkru",
        "cmp eax, 0x55555554",
        "jne 9f",
        "mov rdx, r14",
        "mov r8, [rdx + 40]",
        "mov r9, [rdx + 48]",
        "mov r10, [rdx + 56]",
        "mov r12, [rdx + 72]",
        "mov r13, [rdx + 80]",
        "mov r14, [rdx + 88]",
        "mov r15, [rdx + 96]",
        "mov rdi, [rdx + 104]",
        "mov rsi, [rdx + 112]",
        "mov rbp, [rdx + 120]",
        "mov rbx, [rdx + 128]",
        "mov rax, [rdx + 144]",
        // IRETQ is the one way to load rcx, r11, rflags, rsp and rip together; a call's answer may
        // take the cheaper popfq and jmp rcx, for there rcx = rip and r11 = rflags.
        "mov rcx, [rdx + 152]",
        "cmp rcx, [rdx + 168]",
        "jne 8f",
        "mov r11, [rdx + 176]",
        "push r11",
        "popfq",
        "mov rsp, [rdx + 160]",
        "mov rdx, [rdx + 136]",
        "jmp rcx",
        "8: push 0x2b",
        "push [rdx + 160]",
        "push [rdx + 176]",
        "push 0x33",
        "push [rdx + 168]",
        "mov r11, [rdx + 64]",
        "mov rdx, [rdx + 136]",
        "iretq",
        "9: ud2",
        body = sym signal_body)
}

extern "C" fn signal_body(signal: u64, context: &mut Context, info: &[u64; 4]) {
    let text = BLOB as u64..shared().blob_end;
    match signal {
        31 if !text.contains(&context.rip) && info[3] as u32 as u64 == context.rax => {
            guest_call(context, info)
        }
        11 if context.trap == 14 && in_heap(context.cr2) => page_in(context),
        _ => odd(signal, context, info),
    }
}

fn in_heap(address: u64) -> bool {
    (GUEST_HEAP as u64..(GUEST_HEAP + GUEST_HEAP_LEN) as u64).contains(&address)
}

/// RAM at the page that faulted and its neighbours in an aligned run of `fill` pages.
fn page_in(context: &Context) {
    let len = shared().fill * 4096;
    let page = context.cr2 & !(len - 1);
    let offset = page - GUEST_HEAP as u64 + 0x10_0000;
    let flags = 0x11 | 0x8000; // MAP_SHARED | MAP_FIXED | MAP_POPULATE
    if map(page, len, 3, flags, shared().ram, offset) != page as i64 {
        die();
    }
    shared().faults += 1;
}

fn guest_call(context: &mut Context, info: &[u64; 4]) {
    let s = shared();
    match context.rax {
        39 => {
            s.calls += 1;
            context.rax = 7;
        }
        231 => drop(call(SYS_EXIT_GROUP, context.rdi, 0, 0, 0, 0)),
        CALL_WAIT => {
            s.stage.store(1, Ordering::SeqCst);
            while s.stage.load(Ordering::SeqCst) == 1 {
                call(SYS_FUTEX, &raw const s.stage as u64, 0, 1, 0, 0);
            }
        }
        // SIGCHLD: a fork. Filter, handlers, alternate stack and mappings are inherited.
        CALL_FORK => context.rax = call(SYS_CLONE, 17, 0, 0, 0, 0) as u64,
        nr if (CALL_STORE..CALL_STORE + 16).contains(&nr) => {
            if let Some(slot) = s.results.get_mut((nr - CALL_STORE) as usize) {
                *slot = context.rdi;
            }
        }
        _ => odd(31, context, info),
    }
}

/// Notes an exit nobody asked for and goes on where the guest's r13 says.
fn odd(signal: u64, context: &mut Context, info: &[u64; 4]) {
    let s = shared();
    if let Some(slot) = s.exits.get_mut(s.odd as usize) {
        *slot = [signal << 32 | context.trap, context.rip, info[2], info[3]];
    }
    s.odd += 1;
    let [.., r13, _, _] = context.r8_to_r15;
    if r13 == 0 || s.odd > 16 {
        call(SYS_EXIT_GROUP, 99, 0, 0, 0, 0);
    }
    context.rip = r13;
    context.selectors = 0x2b_0000_0000_0033;
    context.rsp = GUEST_STACK as u64;
}
