//! Where guest code comes back: every signal lands in [`on_signal`] or [`on_signal_keys`].
//!
//! The handler does not return to guest code: it puts the interrupted state into the vCPU page, leaves the
//! signal stack and goes on afresh. Only what interrupted the wedge itself is resumed.

use crate::{
    assist,
    context::{self, Context, Next, Step, kicked, restart},
    cpuid, die, fault,
    gates::in_gate,
    here,
    host::{self, Secret, load_vectors, save_segments},
    narrow::{self, NarrowCall},
    patched,
};
use core::{arch::naked_asm, sync::atomic::Ordering};
use wedge_abi::{
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
pub struct SignalFrame {
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

/// What was interrupted? Returns to have the wedge go on. Until that is known, nothing here refers to the shared
/// pages: code that does may be what was interrupted.
extern "C" fn sort(signal: u64, context: &mut SignalFrame, info: &[u64; 4]) {
    let (vcpu, s) = (context::vcpu(), context::shared());
    // SAFETY: mapped, and nobody else writes these two now.
    let (mode, blob_end) = unsafe {
        ((&raw const (*vcpu).run.mode).read_volatile(), (&raw const (*s).setup.blob_end).read())
    };
    let pc = context.rip;
    let wedge_text = pc >= here(WINDOW) as u64 && pc < blob_end;
    let enters = routine(pc, CACHE) == 0;
    // Part of the state is in the vCPU page already, and the registers are no longer the guest's.
    let leaves = [CACHE, USER_CACHE].iter().any(|cache| matches!(routine(pc, *cache), 1 | 2));
    match (mode, signal == KICK as u64) {
        (_, true) if wedge_text && in_gate(pc) => give_up_gate(context),
        (_, true) if wedge_text => kicked().store(1, Ordering::Relaxed),
        (mode::KERNEL, true) if enters => give_up_gate(context),
        (mode::KERNEL, true) if leaves => kicked().store(1, Ordering::Relaxed),
        (mode::USER, _) => leave_guest(|cx| user(cx, signal, context, info)),
        (mode::KERNEL, _) if in_cache(pc) => leave_guest(|cx| kernel(cx, signal, context, info)),
        (_, false) => own(signal, context),
        _ => die(),
    }
}

/// What was interrupted does not go on: its state is saved, and then comes a step on the wedge's stack.
fn leave_guest(save: impl FnOnce(&mut Context<'_>) -> Step) -> ! {
    // SAFETY: guest code, or code of the wedge that is broken off, has run until now, and this side has the turn.
    let next = save(&mut unsafe { Context::enter() });
    restart(next)
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
fn own(signal: u64, context: &mut SignalFrame) {
    let careful = [
        assist::load_careful as *const () as u64,
        fault::store_careful as *const () as u64,
        fault::store_careful_half as *const () as u64,
        host::careful_xrstor(),
    ];
    if signal == SIGTRAP && context.flags & TF != 0 {
        context.flags &= !TF;
    } else if careful.contains(&context.rip) {
        context.rip = assist::load_failed as *const () as u64;
    } else {
        leave_guest(|cx| {
            (cx.vcpu.exit.signal, cx.vcpu.exit.pc) = (signal, context.rip);
            (cx.vcpu.exit.address, cx.vcpu.exit.trap) = (context.cr2, context.trap);
            |_| Next::Exit(Reason::Lost)
        })
    }
}

/// The guest's registers are still in the vCPU page, but for its vectors: the host has put them into the
/// signal frame and cleared those in the CPU.
fn give_up_gate(context: &SignalFrame) -> ! {
    leave_guest(|cx| {
        load_vectors(cx.secret(), context.vectors);
        |_| Next::Exit(Reason::Kicked)
    })
}

impl SignalFrame {
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

fn user(cx: &mut Context<'_>, signal: u64, context: &SignalFrame, info: &[u64; 4]) -> Step {
    save_segments(cx.vcpu);
    came_back(cx, signal, context, info)
}

/// User code has come back by a signal; the vCPU page has its segments. What comes next.
pub fn came_back(
    cx: &mut Context<'_>,
    signal: u64,
    context: &SignalFrame,
    info: &[u64; 4],
) -> Step {
    let secret = cx.secret();
    save(cx.vcpu, secret, signal, context, info);
    cx.vcpu.exit.info = 0;
    let site = patched::site_of(context.rip);
    cx.vcpu.regs.rip = site.unwrap_or(context.rip);
    if site.is_some() && signal == SIGTRAP {
        cx.vcpu.exit.signal = KICK as u64; // a step to the stub is none of the program's
    }
    cx.vcpu.regs.rflags = context.flags;
    take_code_segment(cx.vcpu, context.selectors);
    let call = narrow::call(cx, info[3] >> 32, info[3] & 0xffff_ffff);
    let vcpu = &mut *cx.vcpu;
    // AUDIT_ARCH_X86_64, SYS_SECCOMP, and not the vsyscall page.
    let system_call =
        signal == SIGSYS && info[3] >> 32 == 0xc000_003e && vcpu.exit.address == vcpu.regs.rip;
    if system_call {
        restore_number(vcpu, info[3] as i32);
    }
    let page_fault = signal == SIGSEGV && vcpu.exit.trap == PAGE_FAULT;
    let protection = signal == SIGSEGV && vcpu.exit.trap == GENERAL_PROTECTION;
    match vcpu.run.fast != 0 && (vcpu.run.compatibility == 0 || cx.shared.setup.narrow != 0) {
        _ if area_of(vcpu.regs.ss).is_some() => user_exit,
        _ if signal == SIGILL && vcpu.run.compatibility == 0 => user_illegal,
        true if system_call => system_call_entry,
        true if call == NarrowCall::Interrupt => user_interrupt,
        true if call == NarrowCall::Enter => narrow::enter_system,
        true if page_fault => fault::user,
        true if protection => user_protection,
        _ => user_exit,
    }
}

/// CS, and SS if user code has made it a thread-local segment: with that it is not entered from here.
fn take_code_segment(vcpu: &mut VcpuPage, selectors: u64) {
    let (cs, ss) = (selectors & 0xffff, selectors >> 48);
    if cs != USER_CS || vcpu.run.compatibility != 0 {
        vcpu.regs.cs = cs;
    }
    vcpu.run.compatibility = (cs != USER_CS).into();
    if area_of(ss).is_some() {
        vcpu.regs.ss = ss;
    }
}

/// The host takes some numbers of system calls for its own results, on the way to a signal, and
/// changes RAX.
fn restore_number(vcpu: &mut VcpuPage, number: i32) {
    if vcpu.regs.gpr[0] as i32 != number {
        vcpu.regs.gpr[0] = number as i64 as u64;
    }
}

fn user_exit(_: &mut Context<'_>) -> Next {
    Next::Exit(Reason::UserSignal)
}

fn user_protection(cx: &mut Context<'_>) -> Next {
    if !cpuid::answer(cx) {
        return Next::Exit(Reason::UserSignal);
    }
    cx.vcpu.counters.cpuids += 1;
    cx.vcpu.run.go = go::USER;
    Next::Run
}

/// Where there would be a SYSCALL but for a patch, the vCPU page becomes that of its trap.
fn user_illegal(cx: &mut Context<'_>) -> Next {
    let vcpu = &mut *cx.vcpu;
    let Some(back) = patched::call_at(vcpu.regs.rip) else { return Next::Exit(Reason::UserSignal) };
    (vcpu.exit.signal, vcpu.regs.rip, vcpu.exit.address) = (SIGSYS, back, back);
    if vcpu.run.fast != 0 { assist::system_call(cx) } else { Next::Exit(Reason::UserSignal) }
}

fn system_call_entry(cx: &mut Context<'_>) -> Next {
    if patched::is_hot(cx.shared, cx.vcpu.regs.rip) {
        return Next::Exit(Reason::HotSite);
    }
    assist::system_call(cx)
}

fn user_interrupt(cx: &mut Context<'_>) -> Next {
    if cx.vcpu.exit.code == SYS_SECCOMP && narrow::is_hot(cx) {
        return Next::Exit(Reason::HotSite);
    }
    narrow::interrupt(cx)
}

fn kernel(cx: &mut Context<'_>, signal: u64, context: &SignalFrame, info: &[u64; 4]) -> Step {
    let secret = cx.secret();
    save(cx.vcpu, secret, signal, context, info);
    (cx.vcpu.exit.pc, cx.vcpu.exit.info) = (context.rip, 0);
    cx.vcpu.block.host_flags = context.flags & !TF;
    let page_fault = signal == SIGSEGV && cx.vcpu.exit.trap == PAGE_FAULT;
    if page_fault { fault::kernel } else { |_| Next::Exit(Reason::KernelSignal) }
}

/// The interrupted registers. Vectors go back into the CPU at once: the wedge uses none.
fn save(vcpu: &mut VcpuPage, secret: Secret, signal: u64, c: &SignalFrame, info: &[u64; 4]) {
    let [r8, r9, r10, r11, r12, r13, r14, r15] = c.r8_to_r15;
    vcpu.regs.gpr = [
        c.rax, c.rcx, c.rdx, c.rbx, c.rsp, c.rbp, c.rsi, c.rdi, r8, r9, r10, r11, r12, r13, r14,
        r15,
    ];
    vcpu.exit.signal = signal;
    vcpu.exit.code = info[1] & 0xffff_ffff;
    vcpu.exit.address = info[2];
    vcpu.exit.trap = c.trap;
    vcpu.exit.error = c.error;
    load_vectors(secret, c.vectors);
    vcpu.run.mode = mode::WEDGE;
}
