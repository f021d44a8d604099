//! 32-bit user code: what the host has to know before it runs, and how its system calls come.
//!
//! It runs in the host's own 32-bit code segment, in the same process as 64-bit code does, and can become
//! that: a far jump is all it takes. What differs is the way there (IRET), that data segments count, and
//! system calls: by INT 0x80, which the filter has come as a signal as it does SYSCALL, and by SYSENTER.
//!
//! **Thread-local segments.** A program can load their selectors at any time, so the host's entries are the
//! guest's whenever user code runs that could: they are compared before, and set by the one call there is
//! for it.
//!
//! **SYSENTER** forgets RIP and RSP, on any CPU, and Linux takes both from elsewhere: the host puts EBP in RSP's
//! place, and the word EBP points to in EBP's. All that the guest's kernel can know is thus in the signal's
//! frame. If the host cannot read that word it does not say so, but goes on at its own vDSO, in 32-bit mode,
//! with an error number in RAX, and the call's number is lost. Therefore SYSENTER is interpreted where user code is
//! to go on at it: its stack may not be mapped. And the vDSO's address is a small number to 32-bit code
//! (`host_linux/src/body.rs`), so that nothing is executed there.

use crate::{
    assist, claims,
    context::{Context, Next},
    cpuid, fault, here,
    host::user_word,
    patched, sites,
};
use core::arch::naked_asm;
use wedge_abi::{AREA, AREA_ALIAS, AREAS, FIRST_AREA, Reason, STAND_IN, VcpuPage, area, area_of};
use x86::{
    flags::{IF, IOPL, NT, RF, TF, VM},
    narrow::USER_CS_32,
    reg::{RAX, RBP, RSP},
    vector,
};

/// What Linux's system calls of 32-bit programs interrupt by.
const SYSTEM_CALL: u64 = 0x80;
const AUDIT_ARCH_I386: u64 = 0x4000_0003;
const SIGILL: u64 = 4;
const SIGSEGV: u64 = 11;
const SIGSYS: u64 = 31;
/// `sysenter`, and `mov ebp, esp` before it.
const SYSENTER: u64 = 0x340f;
const MOV_SYSENTER: u64 = 0x340f_e589;
/// RAX where the host could not read the word that SYSENTER's EBP points to: EFAULT.
const NO_STACK: u64 = -14_i64 as u64;
/// `int 0x80`
const INT_80: u16 = 0x80cd;
/// In an error code: of the IDT.
const IDT: u64 = 2;
/// The vDSO's bytes at the most.
const VDSO_LEN: u64 = 0x2000;
/// The number of no call.
const NO_NUMBER: u64 = 0xffff_ffff;
/// Selectors of thread-local segments have this bit, others of [`crate::strict`]'s list do not.
const OF_AREA: u64 = 0x40;

/// How a program has made a system call.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum NarrowCall {
    /// In none of these ways.
    None,
    /// By INT 0x80; RIP is behind it.
    Interrupt,
    /// By SYSENTER.
    Enter,
}

/// The host has what user code can load into its segment registers. False: the instruction at RIP is to be
/// interpreted.
pub fn prepare(cx: &mut Context<'_>) -> bool {
    if !matters(cx) {
        return true;
    }
    if cx.shared.setup.narrow == 0 {
        return false;
    }
    let known = (0..AREAS).all(|at| has(cx, at));
    let loaded = [cx.vcpu.regs.ds, cx.vcpu.regs.es, cx.vcpu.regs.fs, cx.vcpu.regs.gs];
    let usable = |selector: &u64| {
        area_of(*selector)
            .is_none_or(|at| cx.vcpu.system.areas.get(at).is_some_and(|area| *area != 0))
    };
    known
        && loaded.iter().all(usable)
        && (cx.vcpu.run.compatibility == 0
            || cx.vcpu.run.user_rip >> 32 == 0 && !is_at_sysenter(cx))
}

/// User code is 32-bit code or has, or had, to do with thread-local segments.
fn matters(cx: &Context<'_>) -> bool {
    let loaded = cx.vcpu.regs.ds | cx.vcpu.regs.es | cx.vcpu.regs.fs | cx.vcpu.regs.gs;
    cx.vcpu.run.compatibility != 0
        || loaded & OF_AREA != 0
        || cx.shared.narrow.areas.iter().any(|area| *area != 0)
}

/// The host's entry is the guest's.
fn has(cx: &mut Context<'_>, at: usize) -> bool {
    let [wanted, now] = [&cx.vcpu.system.areas, &cx.shared.narrow.areas].map(|all| all.get(at));
    let (Some(&wanted), Some(&now)) = (wanted, now) else { return false };
    if wanted == now {
        return true;
    }
    let Some(told) = area(at, wanted) else { return false };
    for (word, at) in told.iter().zip(0..) {
        // SAFETY: a page that is mapped for this.
        unsafe { *(here(AREA_ALIAS) as *mut u32).add(at) = *word };
    }
    let done = tell(cx);
    if done && let Some(now) = cx.shared.narrow.areas.get_mut(at) {
        *now = wanted;
    }
    done
}

/// Has the host set the segment that the page at [`AREA`] describes. The host reads that page by this process's rights. So where the page
/// is closed to user code, it is opened for the call: no user code runs meanwhile. False if the host refuses.
fn tell(cx: &mut Context<'_>) -> bool {
    let closed = cx.shared.mapped.sites_closed != 0;
    if closed && !sites::show_areas(cx, true) {
        return false;
    }
    let done = set_area(AREA as u64, cx.shared.setup.secret) == 0;
    (!closed || sites::show_areas(cx, false)) && done
}

/// INT 0x80 of `set_thread_area`, whose argument lies at `at`.
#[unsafe(naked)]
extern "C" fn set_area(at: u64, secret: u64) -> i64 {
    naked_asm!("push rbx", "mov ebx, edi", "mov rdi, rsi", "shr rdi, 32", "mov eax, {number}",
        "int 0x80", "movsxd rax, eax", "pop rbx", "ret", number = const crate::filter::SET_THREAD_AREA)
}

fn is_at_sysenter(cx: &Context<'_>) -> bool {
    let code = user_word(cx.vcpu.run.user_rip).unwrap_or(0);
    code & 0xffff == SYSENTER || code & 0xffff_ffff == MOV_SYSENTER
}

/// The guest's thread-local segments, if user code that comes next could have to do with them. False if they
/// cannot be read.
pub fn read_areas(cx: &mut Context<'_>) -> bool {
    if cx.shared.setup.narrow == 0 || !matters(cx) {
        return true;
    }
    for at in 0..AREAS {
        let entry = (FIRST_AREA as u64 + at as u64) * 8;
        let inside = entry + 7 <= cx.vcpu.system.gdt_limit;
        let Some(found) = (if inside {
            assist::kernel_word(cx.vcpu, cx.vcpu.system.gdt.wrapping_add(entry))
        } else {
            Some(0)
        }) else {
            return false;
        };
        if let Some(known) = cx.vcpu.system.areas.get_mut(at) {
            *known = if area(at, found).is_some() { found } else { 0 };
        }
    }
    true
}

/// 32-bit user code may be entered.
pub fn may_enter(cx: &Context<'_>, cs: u64, rip: u64) -> bool {
    let plain = |selector: u64| matches!(selector, 0..=3 | 0x2b);
    cx.shared.setup.narrow != 0
        && cs & 0xffff == USER_CS_32 as u64
        && rip >> 32 == 0
        && plain(cx.vcpu.regs.ds)
        && plain(cx.vcpu.regs.es)
}

/// What user code has come back by, whose state is in the vCPU page but for what its system call has lost.
pub fn call(cx: &mut Context<'_>, arch: u64, number: u64) -> NarrowCall {
    let narrow = cx.vcpu.run.compatibility != 0;
    if cx.vcpu.exit.signal == SIGSYS && arch == AUDIT_ARCH_I386 {
        restore_number(cx.vcpu, number);
        if narrow && cx.vcpu.exit.address >> 32 != 0 {
            cx.shared.narrow.entered = cx.vcpu.exit.address & 0xffff_ffff;
            return entered(cx.vcpu);
        }
        return if cx.vcpu.exit.address == cx.vcpu.regs.rip {
            NarrowCall::Interrupt
        } else {
            NarrowCall::None
        };
    }
    if is_stand_in(cx) {
        cx.vcpu.regs.rip += 2;
        // For the monitor.
        (cx.vcpu.exit.signal, cx.vcpu.exit.address) = (SIGSYS, cx.vcpu.regs.rip);
        return NarrowCall::Interrupt;
    }
    if narrow && cx.vcpu.exit.signal == SIGSEGV && is_at_vdso(cx) {
        cx.vcpu.regs.gpr[RAX] = NO_NUMBER;
        return entered(cx.vcpu);
    }
    if narrow && is_refused_enter(cx) {
        (cx.vcpu.exit.signal, cx.vcpu.exit.address) = (SIGSYS, u64::MAX);
        return NarrowCall::Enter;
    }
    NarrowCall::None
}

/// SYSENTER, where the host's CPU has none under a 64-bit kernel (AMD's): nothing is lost.
fn is_refused_enter(cx: &Context<'_>) -> bool {
    cx.vcpu.exit.signal == SIGILL
        && cx.vcpu.exit.trap == u64::from(vector::UD)
        && cpuid::has(cx, SYSENTER as u16)
}

/// What stands for INT 0x80 has faulted.
fn is_stand_in(cx: &Context<'_>) -> bool {
    cx.vcpu.exit.signal == SIGSEGV
        && cx.vcpu.exit.trap == u64::from(vector::GP)
        && cx.vcpu.exit.error == u64::from(STAND_IN) << 3 | IDT
        && cx.vcpu.regs.rip >> 47 == 0
        && cpuid::has(cx, INT_80)
}

/// INT 0x80 has come by trap, and its site is worth patching now; RIP is behind it.
pub fn is_hot(cx: &mut Context<'_>) -> bool {
    let rip = cx.vcpu.regs.rip;
    patched::is_warm(cx.shared, rip)
        && user_word(rip.wrapping_sub(2)).unwrap_or(0) & 0xffff == u64::from(INT_80)
}

/// SYSENTER has come: EBP is in RSP's place.
fn entered(vcpu: &mut VcpuPage) -> NarrowCall {
    vcpu.regs.gpr[RBP] = vcpu.regs.gpr[RSP] & 0xffff_ffff;
    // For the monitor, which tells by it.
    (vcpu.exit.signal, vcpu.exit.address) = (SIGSYS, u64::MAX);
    vcpu.regs.rip = 0;
    NarrowCall::Enter
}

/// The host has not been able to read the word that SYSENTER's EBP points to.
fn is_at_vdso(cx: &Context<'_>) -> bool {
    let rip = cx.vcpu.regs.rip;
    let there = if cx.shared.narrow.entered == 0 {
        rip != 0 && rip < VDSO_LEN
    } else {
        rip == cx.shared.narrow.entered
    };
    cx.vcpu.exit.trap == u64::from(vector::PF)
        && cx.vcpu.exit.address == rip
        && cx.vcpu.regs.gpr[RAX] == NO_STACK
        && there
}

/// The host takes some numbers of system calls for its own results, and changes RAX.
fn restore_number(vcpu: &mut VcpuPage, number: u64) {
    if (vcpu.regs.gpr[RAX] ^ number) & 0xffff_ffff != 0 {
        vcpu.regs.gpr[RAX] = number & 0xffff_ffff;
    }
}

/// INT 0x80 by user code, whose state is in the vCPU page with RIP behind the instruction.
pub fn interrupt(cx: &mut Context<'_>) -> Next {
    claims::note_unknown(cx.vcpu);
    let Some(next) = fault::interrupt(cx, SYSTEM_CALL) else {
        return Next::Exit(Reason::UserSignal);
    };
    cx.vcpu.counters.system_calls += 1;
    next
}

/// SYSENTER by user code, whose state is in the vCPU page but for RIP and RSP.
pub fn enter_system(cx: &mut Context<'_>) -> Next {
    let vcpu = &mut *cx.vcpu;
    let flags = vcpu.regs.rflags & !(IF | VM | RF);
    let cs = vcpu.system.sysenter_cs & 0xfffc;
    if flags & (TF | NT | IOPL) != 0 || cs == 0 {
        return Next::Exit(Reason::UserSignal);
    }
    claims::note_unknown(vcpu);
    (vcpu.regs.cs, vcpu.regs.ss) = (cs, cs + 8);
    (vcpu.regs.gpr[RSP], vcpu.regs.rip) = (vcpu.system.sysenter_esp, vcpu.system.sysenter_eip);
    vcpu.counters.system_calls += 1;
    assist::enter_kernel(cx, flags)
}
