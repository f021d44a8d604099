//! Between a 32-bit kernel and its programs, without the monitor: page faults, INT n and SYSENTER, and IRETD and SYSEXIT back.
//!
//! Programs are run translated. Whatever is not ordinary is left to the monitor with the state untouched.

use crate::{
    Context,
    assist::{self, IN_HOST, enter_narrow_program, kernel_word, open_to_interrupt},
    blocks::find,
    context::Next,
    fault::{CLEARED, kernel_flags, store_careful_half},
    narrow_segments::{Descriptor, KERNEL, PROGRAM, own_of_kernel, own_of_program},
};
use wedge_abi::{VcpuPage, go, narrow_bias, walks};
use x86::{
    flags::{FIXED, IF, RF, VM},
    narrow::{KERNEL_START, wide},
    reg::{RCX, RDX, RSP},
};

/// Bytes of a word on the stack.
const WORD: u64 = 4;
const LOW: u64 = u32::MAX as u64;
/// Flags that a program's translation keeps.
const ORDINARY: u64 = IN_HOST | IF | FIXED;
/// Places in a 32-bit TSS (SDM 8.2.1): the stack pointer and the stack segment for kernel code.
const ESP0: u64 = 4;
const SS0: u64 = 8;

/// Carries out an IRETD that pops EIP, CS, EFLAGS, ESP and SS (SDM vol. 2, IRET), and so returns to a program. `None` leaves the instruction
/// to the monitor.
pub fn iret(cx: &mut Context<'_>, [rip, cs, flags, rsp, ss]: [u64; 5]) -> Option<Next> {
    let ss = ss & 0xffff;
    let is_code = Descriptor::of(cx.vcpu, cs)?.is_flat_code(cs, PROGRAM);
    let is_stack = Descriptor::of(cx.vcpu, ss)?.is_flat_stack(ss, PROGRAM);
    if !is_code || !is_stack {
        return None;
    }
    go_to_program(cx, Entry { rip, rsp, cs, ss, flags: flags | FIXED })
}

/// Where code goes on at another privilege level.
#[derive(Clone, Copy)]
struct Entry {
    rip: u64,
    rsp: u64,
    cs: u64,
    ss: u64,
    flags: u64,
}

fn go_to_program(cx: &mut Context<'_>, to: Entry) -> Option<Next> {
    let ordinary = to.flags & !ORDINARY == 0 && to.flags & IF != 0;
    let may = cx.vcpu.run.fast != 0 && cx.vcpu.run.walks == walks::PAE;
    let may = may && ordinary && to.rip < KERNEL_START;
    if !may || open_to_interrupt(cx.vcpu, to.flags) {
        return None;
    }
    let own = own_of_program(cx.vcpu)?;
    cx.vcpu.regs.gpr[RSP] = to.rsp;
    (cx.vcpu.regs.cs, cx.vcpu.regs.ss) = (to.cs, to.ss);
    Some(enter_narrow_program(cx, to.rip, to.flags, own))
}

/// Carries out a program's INT n; n is the exit's operand.
pub fn software_interrupt(cx: &mut Context<'_>) -> Option<Next> {
    cx.vcpu.regs.rip = cx.vcpu.exit.next;
    interrupt(cx, cx.vcpu.exit.operand, None)
}

/// Enters the kernel's handler of a vector for a program, whose state is in the vCPU page: for an exception with an error code, or for an
/// INT n, whose gate has to be open to programs. `None` leaves that to the monitor.
pub fn interrupt(cx: &mut Context<'_>, vector: u64, code: Option<u64>) -> Option<Next> {
    let vcpu = &mut *cx.vcpu;
    let gate = Gate::of(vcpu, vector).filter(|gate| code.is_some() || gate.level == PROGRAM)?;
    let (rsp, ss) = stack_of_kernel(vcpu)?;
    let own = own_of_kernel(vcpu)?;
    let flags = vcpu.regs.rflags;
    let pushed = flags | if code.is_some() { RF } else { 0 };
    let words = [vcpu.regs.ss, vcpu.regs.gpr[RSP], pushed, vcpu.regs.cs, vcpu.regs.rip];
    let rsp = store(rsp, &words)?;
    let rsp = code.map_or(Some(rsp), |code| store(rsp, &[code]))?;
    let to = Entry { rip: gate.handler, rsp, cs: gate.selector, ss, flags: flags & !gate.clears };
    Some(go_to_kernel(cx, to, own))
}

/// The stack that the TSS has for kernel code: its pointer and its selector.
fn stack_of_kernel(vcpu: &mut VcpuPage) -> Option<(u64, u64)> {
    let tss = vcpu.system.tss;
    let rsp = kernel_word(vcpu, tss.wrapping_add(ESP0))? & LOW;
    let ss = kernel_word(vcpu, tss.wrapping_add(SS0))? & 0xffff;
    Descriptor::of(vcpu, ss)?.is_flat_stack(ss, KERNEL).then_some((rsp, ss))
}

/// Carries out a program's SYSENTER (SDM vol. 2, SYSENTER).
pub fn enter_system(cx: &mut Context<'_>) -> Option<Next> {
    let system = &cx.vcpu.system;
    let cs = system.sysenter_cs & 0xfffc;
    let (rip, rsp) = (system.sysenter_eip & LOW, system.sysenter_esp & LOW);
    if cs == 0 || rip < KERNEL_START {
        return None;
    }
    let own = own_of_kernel(cx.vcpu)?;
    let flags = cx.vcpu.regs.rflags & !(IF | VM | RF);
    let to = Entry { rip, rsp, cs, ss: cs + 8, flags };
    cx.vcpu.counters.system_calls += 1;
    Some(go_to_kernel(cx, to, own))
}

/// Carries out the kernel's SYSEXIT (SDM vol. 2, SYSEXIT). `None` leaves the instruction to the monitor.
pub fn exit_system(cx: &mut Context<'_>) -> Option<Next> {
    let vcpu = &mut *cx.vcpu;
    let cs = vcpu.system.sysenter_cs & 0xfffc;
    if cs == 0 || vcpu.regs.cpl != KERNEL {
        return None;
    }
    let flags = kernel_flags(vcpu);
    let [rip, rsp] = [RDX, RCX].map(|register| vcpu.regs.gpr[register] & LOW);
    let (cs, ss) = ((cs + 16) | PROGRAM, (cs + 24) | PROGRAM);
    go_to_program(cx, Entry { rip, rsp, cs, ss, flags: flags | FIXED })
}

/// The kernel's translated code goes on.
fn go_to_kernel(cx: &mut Context<'_>, to: Entry, own: u64) -> Next {
    let vcpu = &mut *cx.vcpu;
    let block = find(to.rip, false);
    (vcpu.regs.cs, vcpu.regs.ss, vcpu.regs.cpl) = (to.cs, to.ss, KERNEL);
    (vcpu.regs.gpr[RSP], vcpu.regs.rip) = (to.rsp, to.rip);
    assist::set_kernel_flags(vcpu, to.flags);
    (vcpu.run.user_translated, vcpu.run.compatibility) = (0, 0);
    (vcpu.block.bias, vcpu.block.percpu) = (narrow_bias(crate::bias()), own);
    (vcpu.run.go, vcpu.block.jump) = (go::BLOCK, block);
    if block == 0 { assist::miss_for_good(cx) } else { Next::Run }
}

/// Pushes words to the kernel's stack at a GVA; the new stack pointer. `None` if the stack cannot be written.
fn store(mut rsp: u64, words: &[u64]) -> Option<u64> {
    for word in words {
        rsp = rsp.wrapping_sub(WORD);
        let hva = wide(rsp).wrapping_add(crate::bias());
        let there = (KERNEL_START..1 << 32).contains(&rsp) && rsp.is_multiple_of(WORD);
        if !there || store_careful_half(hva, *word) == 0 {
            return None;
        }
    }
    Some(rsp)
}

/// An interrupt or trap gate of a 32-bit guest's (SDM 6.11), to flat kernel code.
struct Gate {
    handler: u64,
    selector: u64,
    /// The level from which INT n may go through the gate.
    level: u64,
    /// Flags that are cleared on the way.
    clears: u64,
}

impl Gate {
    /// The gate of a vector. `None` if it is no such gate, or is not mapped.
    fn of(vcpu: &mut VcpuPage, vector: u64) -> Option<Self> {
        if vector * 8 + 7 > vcpu.system.idt_limit {
            return None;
        }
        let gate = kernel_word(vcpu, vcpu.system.idt.wrapping_add(vector * 8))?;
        let (handler, selector) = (gate & 0xffff | gate >> 32 & 0xffff_0000, gate >> 16 & 0xffff);
        let is_flat = Descriptor::of(vcpu, selector)?.is_flat_code(selector, KERNEL);
        // Present, and a 32-bit interrupt gate or trap gate.
        let ordinary = is_flat && gate >> 40 & 0x9e == 0x8e && handler >= KERNEL_START;
        let is_trap = gate >> 40 & 1 != 0;
        let clears = if is_trap { CLEARED & !IF } else { CLEARED };
        ordinary.then_some(Self { handler, selector, level: gate >> 45 & 3, clears })
    }
}
