//! IRETD of 32-bit kernels, and what they map for a moment, without the monitor.

use crate::{
    Context,
    assist::{
        ORDINARY_KERNEL, descriptor, kernel_word, open_to_interrupt, run_block, set_kernel_flags,
    },
    bias,
    blocks::find,
    context::Next,
    fault, hints,
    mmu::PAGE,
    narrow_crossing, narrow_strings,
};
use wedge_abi::{FLEETING, Reason, go};
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
    if !(KERNEL_START..=(1 << 32) - 2 * FRAME).contains(&esp) {
        return None;
    }
    // Behind EFLAGS the stack may end.
    let ([rip, cs], [_, flags]) = (stack_pair(cx, esp)?, stack_pair(cx, esp + 4)?);
    let (cs, flags) = (cs & 0xffff, flags & !RF);
    if cs & 3 == 3 {
        let [rsp, ss] = stack_pair(cx, esp + FRAME)?;
        return narrow_crossing::iret(cx, [rip, cs, flags, rsp, ss]);
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

/// Two words of the kernel's stack, from a GVA up. `None` if they are not mapped, which the exit's detail says.
fn stack_pair(cx: &mut Context<'_>, esp: u64) -> Option<[u64; 2]> {
    let both = kernel_word(cx.vcpu, wide(esp))?;
    Some([both & u64::from(u32::MAX), both >> 32])
}

/// Of faults in pages that are mapped only for a moment the monitor is told of one in so many.
const TOLD: u64 = 8;

/// Handles a fault of translated code at a GVA, if the code is a 32-bit kernel's and the page is probably mapped only for a moment: the
/// kernel had dropped the page's translation by INVLPG. `None` means that the page is to be mapped as any other page is.
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
