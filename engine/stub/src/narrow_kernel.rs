//! IRETD of 32-bit kernels, and what they map for a moment, without the monitor.

use crate::{
    Context,
    assist::{
        ORDINARY_KERNEL, descriptor, kernel_word, open_to_interrupt, run_block, set_kernel_flags,
    },
    bias,
    blocks::find,
    context::Next,
    fault, hints, lookup,
    mmu::{Access, PAGE},
    narrow_crossing, narrow_strings,
};
use wedge_abi::{FLEETING, LOOKUP_WRITE, Reason, go, walks};
use x86::{
    flags::{AC, RF},
    narrow::{KERNEL_START, wide},
    reg::RSP,
};

/// Descriptor of a kernel's flat 32-bit code, without the accessed bit.
const FLAT_CODE: u64 = 0x00cf_9a00_0000_ffff;
/// Bytes of what IRETD pops without a change of privilege: EIP, CS and EFLAGS (SDM vol. 2, IRET).
const FRAME: u64 = 12;

/// Carries out an IRETD. Linux serializes the CPU by one that returns to the kernel itself. `None` leaves the instruction to the
/// monitor.
pub fn iret(cx: &mut Context<'_>) -> Option<Next> {
    let esp = cx.vcpu.regs.gpr[RSP];
    let [rip, cs, flags] = frame(cx, esp)?;
    let flags = flags & !RF;
    if cs & 3 == 3 {
        return narrow_crossing::iret(cx, esp);
    }
    let flat = cs == cx.vcpu.regs.cs && descriptor(cx.vcpu, cs) == Some(FLAT_CODE);
    let ordinary = flags & !ORDINARY_KERNEL == 0 && !open_to_interrupt(cx.vcpu, flags);
    let known = find(rip, flags & AC != 0);
    if cs & 3 != 0 || !flat || !ordinary || rip < KERNEL_START || known == 0 {
        return None;
    }
    cx.vcpu.regs.gpr[RSP] = (esp + FRAME) & u64::from(u32::MAX);
    cx.vcpu.regs.rip = rip;
    set_kernel_flags(cx.vcpu, flags);
    cx.vcpu.counters.kernel_returns += 1;
    Some(run_block(cx, known))
}

/// EIP, CS and EFLAGS from the stack. `None` if the stack is not mapped, or ends at the end of memory.
fn frame(cx: &mut Context<'_>, esp: u64) -> Option<[u64; 3]> {
    if !(KERNEL_START..=(1 << 32) - 2 * FRAME).contains(&esp) {
        return None;
    }
    let first = kernel_word(cx.vcpu, wide(esp))?;
    let second = kernel_word(cx.vcpu, wide(esp + 4))?;
    Some([first & u64::from(u32::MAX), first >> 32 & 0xffff, second >> 32])
}

/// Of so many faults in pages that are mapped only for a moment the monitor is told one.
const TOLD: u64 = 8;

/// Translated code of a 32-bit kernel's has faulted at a GVA, in a page that the kernel had dropped by INVLPG: most such pages are mapped for
/// a moment, accessed, and dropped again. `None` if the page is to be mapped as any other.
pub fn of_fleeting_page(cx: &mut Context<'_>, gva: u64) -> Option<Next> {
    let hva = (gva & !(PAGE - 1)).wrapping_add(bias());
    let is_fleeting = cx.vcpu.run.seeks_fleeting != 0
        && cx.vcpu.regs.cpl == 0
        && gva >= wide(KERNEL_START.max(cx.vcpu.run.plain_from))
        && hints::is_dropped(&cx.shared.mapped, hva);
    if !is_fleeting {
        return None;
    }
    if narrow_strings::redirect(cx, gva) {
        return Some(fault::goes_on(cx));
    }
    cx.vcpu.paging.fleeting += 1;
    let tells = cx.vcpu.paging.fleeting.is_multiple_of(TOLD) && cx.vcpu.run.go != go::STEP;
    tells.then(|| {
        cx.vcpu.exit.info = FLEETING;
        Next::Exit(Reason::KernelSignal)
    })
}

/// A look-up of a 32-bit kernel's has no entry: it gets one. `None` leaves the instruction to the monitor.
pub fn look_up(cx: &mut Context<'_>) -> Option<Next> {
    let (gva, bytes) = (cx.vcpu.exit.operand, cx.vcpu.exit.info & (LOOKUP_WRITE - 1));
    let access = Access { write: cx.vcpu.exit.info & LOOKUP_WRITE != 0, fetch: false, user: false };
    let may = cx.vcpu.run.walks == walks::PAE
        && cx.vcpu.regs.cpl == 0
        && (KERNEL_START..1 << 32).contains(&gva)
        && (gva & (PAGE - 1)) + bytes <= PAGE;
    if !may || !lookup::fill_narrow_kernel(cx, gva, access) {
        return None;
    }
    cx.vcpu.run.go = go::BLOCK;
    Some(Next::Run)
}
