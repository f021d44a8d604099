//! What a 32-bit kernel does besides computing, without the monitor.

use crate::{
    Context,
    assist::{IN_HOST, ORDINARY_KERNEL, descriptor, go_on_at, kernel_word, open_to_interrupt},
    blocks::find,
    invlpg,
};
use x86::{
    flags::{AC, IF, RF},
    narrow::{KERNEL_START, wide},
    reg::RSP,
};

/// 32-bit code of the kernel's, without the accessed bit.
const FLAT_CODE: u64 = 0x00cf_9a00_0000_ffff;
/// Bytes of what IRETD pops without a change of privilege: EIP, CS and EFLAGS (SDM vol. 2, IRET).
const FRAME: u64 = 12;

/// IRETD from the kernel to the kernel: Linux serializes so. False if it is the monitor's to do.
pub fn iret(cx: &mut Context<'_>) -> bool {
    let esp = cx.vcpu.regs.gpr[RSP];
    let Some([rip, cs, flags]) = frame(cx, esp) else { return false };
    let flags = flags & !RF;
    let flat = cs == cx.vcpu.regs.cs && descriptor(cx.vcpu, cs) == Some(FLAT_CODE);
    let ordinary = flags & !ORDINARY_KERNEL == 0 && !open_to_interrupt(cx.vcpu, flags);
    let known = find(rip, flags & AC != 0);
    if cs & 3 != 0 || !flat || !ordinary || rip < KERNEL_START || known == 0 {
        return false;
    }
    if flags & AC != 0 {
        invlpg::finish_deferred(cx);
    }
    cx.vcpu.regs.gpr[RSP] = (esp + FRAME) & u64::from(u32::MAX);
    cx.vcpu.regs.interrupt_flag = flags & IF;
    cx.vcpu.regs.ac = flags & AC;
    cx.vcpu.block.host_flags = flags & IN_HOST;
    cx.vcpu.counters.kernel_returns += 1;
    go_on_at(cx.vcpu, rip, known);
    true
}

/// EIP, CS and EFLAGS from the stack, if that is mapped and they do not reach around the end of memory.
fn frame(cx: &mut Context<'_>, esp: u64) -> Option<[u64; 3]> {
    if !(KERNEL_START..=(1 << 32) - 2 * FRAME).contains(&esp) {
        return None;
    }
    let first = kernel_word(cx.vcpu, wide(esp))?;
    let second = kernel_word(cx.vcpu, wide(esp + 4))?;
    Some([first & u64::from(u32::MAX), first >> 32 & 0xffff, second >> 32])
}
