//! IRETD of 32-bit kernels, without the monitor.

use crate::{
    Context,
    assist::{
        ORDINARY_KERNEL, descriptor, kernel_word, open_to_interrupt, run_block, set_kernel_flags,
    },
    blocks::find,
    context::Next,
};
use x86::{
    flags::{AC, RF},
    narrow::{KERNEL_START, wide},
    reg::RSP,
};

/// Descriptor of a kernel's flat 32-bit code, without the accessed bit.
const FLAT_CODE: u64 = 0x00cf_9a00_0000_ffff;
/// Bytes of what IRETD pops without a change of privilege: EIP, CS and EFLAGS (SDM vol. 2, IRET).
const FRAME: u64 = 12;

/// Carries out an IRETD by which a kernel returns to itself. Linux serializes the CPU by one. `None` leaves the instruction to the
/// monitor.
pub fn iret(cx: &mut Context<'_>) -> Option<Next> {
    let esp = cx.vcpu.regs.gpr[RSP];
    let [rip, cs, flags] = frame(cx, esp)?;
    let flags = flags & !RF;
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
