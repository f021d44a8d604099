//! CPUID by user code, from what the interpreter has answered before.
//!
//! Programs ask some sixty times while they start. CPUID faults where the host can have it fault, and
//! where it cannot, another instruction that faults stands in its place (`fast::scan`): what counts is
//! what the guest has there.

use crate::{
    Context,
    mmu::{self, Access, Walk},
    reach,
    search::PageBytes,
};
use wedge_abi::{Cpuid, RAM, walks};
use x86::{
    flags::TF,
    reg::{RAX, RBX, RCX, RDX},
};

/// CPUID's two bytes.
const CPUID: u16 = 0xa20f;
const PAGE: u64 = 4096;

/// User code, whose state is in the vCPU page, has had a general-protection fault. True if that was CPUID and
/// it has been done. If it is single-stepped, more than that is to be done.
pub fn answer(cx: &mut Context<'_>) -> bool {
    let asked = [cx.vcpu.regs.gpr[RAX] as u32, cx.vcpu.regs.gpr[RCX] as u32];
    let known = |answer: &&Cpuid| answer.asked == asked;
    let Some(answer) = cx
        .vcpu
        .told
        .cpuid
        .answers
        .iter()
        .take(cx.vcpu.told.cpuid.count as usize)
        .find(known)
        .copied()
    else {
        return false;
    };
    if cx.vcpu.regs.rflags & TF != 0 || cx.vcpu.regs.rip >> 47 != 0 || !has(cx, CPUID) {
        return false;
    }
    let [eax, ebx, ecx, edx] = answer.registers;
    (cx.vcpu.regs.gpr[RAX], cx.vcpu.regs.gpr[RBX], cx.vcpu.regs.gpr[RCX], cx.vcpu.regs.gpr[RDX]) =
        (eax.into(), ebx.into(), ecx.into(), edx.into());
    cx.vcpu.regs.rip += 2;
    true
}

/// The guest has this instruction of two bytes at RIP, where user code has faulted.
pub fn has(cx: &Context<'_>, instruction: u16) -> bool {
    let fetch = Access { write: false, fetch: true, user: true };
    let inside = cx.vcpu.regs.rip & (PAGE - 1);
    if cx.vcpu.run.walks == walks::NONE || inside == PAGE - 1 {
        return false;
    }
    let Walk::Found(leaf) = mmu::walk(cx, cx.vcpu.regs.rip, fetch) else { return false };
    // SAFETY: a page of RAM, which is mapped for good.
    let page = unsafe { PageBytes::at(reach(RAM) as u64 + leaf.offset) };
    page.two(inside) == instruction.to_le_bytes()
}
