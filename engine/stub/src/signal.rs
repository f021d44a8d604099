//! Where guest code comes back: every signal lands in [`on_signal`] or [`on_signal_keys`].
//!
//! The handler does not return to guest code: it puts the interrupted state into the frame, leaves the
//! signal stack and goes on afresh. Only what interrupted the wedge itself is resumed.

use crate::{
    assist, cpuid, die, fault, frame,
    gates::in_gate,
    here,
    host::{self, load_vectors, save_segments},
    narrow::{self, Call},
    patched,
    run::{self, restart},
    shared, turns,
};
use core::arch::naked_asm;
use frame::{
    ALT_STACK, ALT_STACK_LEN, CACHE, CACHE_LEN, KICK, Reason, USER_CACHE, VcpuPage, WINDOW,
    area_of, go, mode,
};
use x86::{flags::TF, vector};

/// What marks a signal frame as written by the host: our "restorer".
pub const RESTORER: u64 = 1;
/// Bytes of one of the code cache's routines; the first enters translated code, the second and third
/// leave it.
const ROUTINE: u64 = 512;
const SIGILL: u64 = 4;
const SIGTRAP: u64 = 5;
pub const SIGSEGV: u64 = 11;
const SIGSYS: u64 = 31;
/// The host's code for a SIGSYS of a filter's.
const SYS_SECCOMP: u64 = 1;
pub const GENERAL_PROTECTION: u64 = vector::GP as u64;
const PAGE_FAULT: u64 = vector::PF as u64;
/// The host's selector of 64-bit user code.
const USER_CS: u64 = 0x33;

/// The machine context of a signal frame.
#[repr(C)]
pub struct Context {
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

/// The handler where keys are in use: opens them first.
#[unsafe(naked)]
pub extern "C" fn on_signal_keys() {
    naked_asm!("mov r14, rdi", "xor eax, eax", "xor ecx, ecx", "xor edx, edx", "wrpkru", "jmp {common}",
        common = sym common)
}

/// The handler where there are no keys.
#[unsafe(naked)]
pub extern "C" fn on_signal() {
    naked_asm!("mov r14, rdi", "jmp {common}", common = sym common)
}

/// The signal frame is at RSP and nowhere else; it is believed only if it lies on the signal stack,
/// which user code cannot write, and the host has just written it: its restorer slot is armed, and
/// consumed.
#[unsafe(naked)]
extern "C" fn common() {
    naked_asm!(
        "lea rax, [rip + alt_stack]",
        "xor rax, rsp",
        "shr rax, 15",
        "jne 9f",
        "cmp qword ptr [rsp], {restorer}",
        "jne 9f",
        "mov qword ptr [rsp], 0",
        "mov rbx, rsp",
        "push 0x202",
        "popfq",
        "mov rdi, r14",
        "lea rsi, [rbx + 8]",    // ucontext
        "lea rdx, [rbx + 312]",  // siginfo, behind the ucontext's 304 bytes
        "and rsp, -16",
        "call {body}",
        // Only what interrupted the wedge itself is resumed; the host takes everything from its frame.
        "lea rsp, [rbx + 8]",
        "lea r9, [rip + shared_page]",
        "mov r9, [r9]",
        "mov eax, {sigreturn}",
        "syscall",
        "9: ud2",
        restorer = const RESTORER, body = sym sort, sigreturn = const host::SIGRETURN)
}

const _: () = assert!(ALT_STACK.is_multiple_of(ALT_STACK_LEN) && ALT_STACK_LEN == 1 << 15);

/// What was interrupted? Returns to have the wedge go on.
extern "C" fn sort(signal: u64, context: &mut Context, info: &[u64; 4]) {
    let f = frame();
    let pc = context.rip;
    let wedge_text = pc >= here(WINDOW) as u64 && pc < shared().setup.blob_end;
    let enters = routine(pc, CACHE) == 0;
    // Part of the state is in the frame already, and the registers are no longer the guest's.
    let leaves = [CACHE, USER_CACHE].iter().any(|cache| matches!(routine(pc, *cache), 1 | 2));
    match (f.run.mode, signal == KICK as u64) {
        (_, true) if wedge_text && in_gate(pc) => give_up_gate(context),
        (_, true) if wedge_text => f.run.kicked = 1,
        (mode::KERNEL, true) if enters => give_up_gate(context),
        (mode::KERNEL, true) if leaves => f.run.kicked = 1,
        (mode::USER, _) => user(f, signal, context, info),
        (mode::KERNEL, _) if in_cache(pc) => kernel(f, signal, context, info),
        (_, false) => own(f, signal, context),
        _ => die(),
    }
}

/// Which routine of the code cache that begins there a PC lies in; those of user code lie in a cache of their
/// own.
fn routine(pc: u64, cache: usize) -> u64 {
    pc.wrapping_sub(here(cache) as u64) / ROUTINE
}

fn in_cache(pc: u64) -> bool {
    pc.wrapping_sub(here(CACHE) as u64) < CACHE_LEN as u64
}

/// A fault of the wedge's own: in a careful access, or the end of single-stepping guest code. Any
/// other is told to the monitor, which gives up.
fn own(f: &mut VcpuPage, signal: u64, context: &mut Context) {
    let careful = [
        assist::load_careful as *const () as u64,
        fault::store_careful as *const () as u64,
        host::careful_xrstor(),
    ];
    if signal == SIGTRAP && context.flags & TF != 0 {
        context.flags &= !TF;
    } else if careful.contains(&context.rip) {
        context.rip = assist::load_failed as *const () as u64;
    } else {
        (f.exit.signal, f.exit.pc, f.exit.address, f.exit.trap) =
            (signal, context.rip, context.cr2, context.trap);
        restart(broken);
    }
}

extern "C" fn broken() -> ! {
    turns::exit(Reason::Lost)
}

/// The guest's registers are still in the frame, but for its vectors: the host has put them into the
/// signal frame and cleared those in the CPU.
fn give_up_gate(context: &Context) -> ! {
    load_vectors(context.vectors);
    restart(kicked_in_gate)
}

extern "C" fn kicked_in_gate() -> ! {
    turns::exit(Reason::Kicked)
}

impl Context {
    /// Of the registers of another process, as the host has said them, and an XSAVE area in order.
    pub fn of(
        [r8, r9, r10, r11, r12, r13, r14, r15, rest @ ..]: [u64; 23],
        vectors: *mut u8,
    ) -> Self {
        let [rdi, rsi, rbp, rbx, rdx, rax, rcx, rsp, rip, flags, selectors, error, trap, mask, cr2] =
            rest;
        let r8_to_r15 = [r8, r9, r10, r11, r12, r13, r14, r15];
        Self {
            head: [0; 5],
            r8_to_r15,
            rdi,
            rsi,
            rbp,
            rbx,
            rdx,
            rax,
            rcx,
            rsp,
            rip,
            flags,
            selectors,
            error,
            trap,
            mask,
            cr2,
            vectors,
        }
    }
}

fn user(f: &mut VcpuPage, signal: u64, context: &Context, info: &[u64; 4]) -> ! {
    save_segments(f);
    came_back(f, signal, context, info)
}

/// User code has come back by a signal; the frame has its segments.
pub fn came_back(f: &mut VcpuPage, signal: u64, context: &Context, info: &[u64; 4]) -> ! {
    save(f, signal, context, info);
    f.exit.info = 0;
    let site = patched::site_of(context.rip);
    f.regs.rip = site.unwrap_or(context.rip);
    if site.is_some() && signal == SIGTRAP {
        f.exit.signal = KICK as u64; // a step to the stub is none of the program's
    }
    f.regs.rflags = context.flags;
    take_code_segment(f, context.selectors);
    let s = shared();
    let call = narrow::call(f, s, info[3] >> 32, info[3] & 0xffff_ffff);
    // AUDIT_ARCH_X86_64, SYS_SECCOMP, and not the vsyscall page.
    let system_call =
        signal == SIGSYS && info[3] >> 32 == 0xc000_003e && f.exit.address == f.regs.rip;
    if system_call {
        restore_number(f, info[3] as i32);
    }
    let page_fault = signal == SIGSEGV && f.exit.trap == PAGE_FAULT;
    let protection = signal == SIGSEGV && f.exit.trap == GENERAL_PROTECTION;
    match f.run.fast != 0 && (f.run.compatibility == 0 || s.setup.narrow != 0) {
        _ if area_of(f.regs.ss).is_some() => restart(user_exit),
        _ if signal == SIGILL && f.run.compatibility == 0 => restart(user_illegal),
        true if system_call => restart(system_call_entry),
        true if call == Call::Interrupt => restart(user_interrupt),
        true if call == Call::Enter => restart(user_enter_system),
        true if page_fault => restart(user_fault),
        true if protection => restart(user_protection),
        _ => restart(user_exit),
    }
}

/// CS, and SS if user code has made it a thread-local segment: with that it is not entered from here.
fn take_code_segment(f: &mut VcpuPage, selectors: u64) {
    let (cs, ss) = (selectors & 0xffff, selectors >> 48);
    if cs != USER_CS || f.run.compatibility != 0 {
        f.regs.cs = cs;
    }
    f.run.compatibility = (cs != USER_CS).into();
    if area_of(ss).is_some() {
        f.regs.ss = ss;
    }
}

/// The host takes some numbers of system calls for its own results, on the way to a signal, and
/// changes RAX.
fn restore_number(f: &mut VcpuPage, number: i32) {
    if f.regs.gpr[0] as i32 != number {
        f.regs.gpr[0] = number as i64 as u64;
    }
}

extern "C" fn user_exit() -> ! {
    turns::exit(Reason::UserSignal)
}

extern "C" fn user_fault() -> ! {
    fault::user(frame())
}

extern "C" fn user_protection() -> ! {
    let f = frame();
    if !cpuid::answer(f) {
        turns::exit(Reason::UserSignal);
    }
    f.counters.cpuids += 1;
    f.run.go = go::USER;
    run::run()
}

/// Where there would be a SYSCALL but for a patch, the frame becomes that of its trap.
extern "C" fn user_illegal() -> ! {
    let f = frame();
    let Some(back) = patched::call_at(f.regs.rip) else { turns::exit(Reason::UserSignal) };
    (f.exit.signal, f.regs.rip, f.exit.address) = (SIGSYS, back, back);
    if f.run.fast != 0 {
        assist::system_call(f)
    }
    turns::exit(Reason::UserSignal)
}

extern "C" fn system_call_entry() -> ! {
    let f = frame();
    if patched::is_hot(f.regs.rip) {
        turns::exit(Reason::HotSite);
    }
    assist::system_call(f)
}

extern "C" fn user_interrupt() -> ! {
    let f = frame();
    if f.exit.code == SYS_SECCOMP && narrow::is_hot(f, shared()) {
        turns::exit(Reason::HotSite);
    }
    narrow::interrupt(f);
    turns::exit(Reason::UserSignal)
}

extern "C" fn user_enter_system() -> ! {
    narrow::enter_system(frame());
    turns::exit(Reason::UserSignal)
}

fn kernel(f: &mut VcpuPage, signal: u64, context: &Context, info: &[u64; 4]) -> ! {
    save(f, signal, context, info);
    f.exit.pc = context.rip;
    f.block.host_flags = context.flags & !TF;
    let page_fault = signal == SIGSEGV && f.exit.trap == PAGE_FAULT;
    restart(if page_fault { kernel_fault } else { kernel_exit })
}

extern "C" fn kernel_fault() -> ! {
    fault::kernel(frame())
}

extern "C" fn kernel_exit() -> ! {
    turns::exit(Reason::KernelSignal)
}

/// The interrupted registers. Vectors go back into the CPU at once: the wedge uses none.
fn save(f: &mut VcpuPage, signal: u64, c: &Context, info: &[u64; 4]) {
    let [r8, r9, r10, r11, r12, r13, r14, r15] = c.r8_to_r15;
    f.regs.gpr = [
        c.rax, c.rcx, c.rdx, c.rbx, c.rsp, c.rbp, c.rsi, c.rdi, r8, r9, r10, r11, r12, r13, r14,
        r15,
    ];
    f.exit.signal = signal;
    f.exit.code = info[1] & 0xffff_ffff;
    f.exit.address = info[2];
    f.exit.trap = c.trap;
    f.exit.error = c.error;
    load_vectors(c.vectors);
    f.run.mode = mode::WEDGE;
}
