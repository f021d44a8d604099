//! SYSCALL, SYSRET, SYSENTER, SYSEXIT, SWAPGS: as an Intel CPU does them (SDM 5.8.7, 5.8.8).
//!
//! Their segments are not read from the GDT: selectors come from MSRs and everything else is
//! fixed and flat.

use crate::{
    cpu::Cpu,
    debug::{TrapRule, dr6},
    exec::Choice,
    op::Op,
    system::System,
};
use iced_x86::{Instruction, Mnemonic};
use x86::{
    Fault, Segment,
    control::{cr0, efer},
    flags, paging, reg, seg,
    segment::attr,
};

/// RFLAGS bits SYSRET takes from R11.
const SYSRET_FLAGS: u64 = 0x003c_7fd7;

/// A flat code or data segment at privilege level `dpl`.
fn flat(selector: u16, dpl: u8, rights: u16) -> Segment {
    let fixed = attr::P | attr::S | attr::G | attr::RW | attr::ACCESSED;
    let attr = fixed | rights | u16::from(dpl) << attr::DPL_SHIFT;
    Segment { selector: selector & !3 | u16::from(dpl), attr, limit: u32::MAX, base: 0 }
}

impl<S: System> Cpu<S> {
    /// CS and SS become the flat segments of a SYSCALL or SYSRET.
    pub fn set_flat(&mut self, cs: u16, ss: u16, dpl: u8, long: bool) {
        let size = if long { attr::L } else { attr::DB };
        self.vcpu.seg[seg::CS] = flat(cs, dpl, attr::CODE | size);
        self.vcpu.seg[seg::SS] = flat(ss, dpl, attr::DB);
        self.update_view();
    }
}

fn syscall<S: System>(cpu: &mut Cpu<S>, _: &mut S, _: &Op<S>) -> Result<(), Fault> {
    if cpu.vcpu.efer & efer::SCE == 0 || !cpu.vcpu.is_64bit() {
        return Err(Fault::ud());
    }
    let v = &mut cpu.vcpu;
    v.gpr[reg::RCX] = v.rip;
    v.gpr[reg::R11] = v.rflags & !flags::RF;
    v.rflags = v.rflags & !(v.sfmask | flags::RF) | flags::FIXED;
    let (target, selector) = (v.lstar, (v.star >> 32) as u16);
    // Single step looks at TF as the kernel sees it: masked, no trap.
    if v.rflags & flags::TF == 0 {
        cpu.trap_rule = TrapRule::NoStep;
    }
    cpu.set_flat(selector, selector.wrapping_add(8), 0, true);
    cpu.jump(target);
    Ok(())
}

fn sysret<S: System, const LONG: bool>(
    cpu: &mut Cpu<S>,
    _: &mut S,
    _: &Op<S>,
) -> Result<(), Fault> {
    if cpu.vcpu.efer & efer::SCE == 0 || !cpu.vcpu.is_64bit() {
        return Err(Fault::ud());
    }
    cpu.require_cpl0()?;
    let rcx = cpu.vcpu.gpr[reg::RCX];
    if LONG && !paging::canonical(rcx) {
        return Err(Fault::gp(0));
    }
    let v = &mut cpu.vcpu;
    v.rflags = v.gpr[reg::R11] & SYSRET_FLAGS | flags::FIXED;
    let selector = (v.star >> 48) as u16;
    // Unlike IRET, a TF that comes back traps at once.
    cpu.trap_rule = TrapRule::NoStep;
    if cpu.vcpu.rflags & flags::TF != 0 {
        cpu.traps |= dr6::BS;
    }
    let cs = selector.wrapping_add(if LONG { 16 } else { 0 });
    cpu.set_flat(cs, selector.wrapping_add(8), 3, LONG);
    cpu.jump(if LONG { rcx } else { rcx & 0xffff_ffff });
    Ok(())
}

/// #GP(0) outside protected mode or before the kernel has set IA32_SYSENTER_CS.
fn sysenter_selector<S: System>(cpu: &Cpu<S>) -> Result<u16, Fault> {
    let selector = cpu.vcpu.sysenter_cs as u16;
    if cpu.vcpu.cr0 & cr0::PE == 0 || selector & !3 == 0 {
        return Err(Fault::gp(0));
    }
    Ok(selector & !3)
}

fn sysenter<S: System>(cpu: &mut Cpu<S>, _: &mut S, _: &Op<S>) -> Result<(), Fault> {
    cpu.enter_system()
}

impl<S: System> Cpu<S> {
    /// Does what SYSENTER does, which asks neither where it is nor what the stack is.
    ///
    /// # Errors
    /// The exception it raises.
    pub fn enter_system(&mut self) -> Result<(), Fault> {
        let selector = sysenter_selector(self)?;
        let long = self.vcpu.long_mode();
        let v = &mut self.vcpu;
        v.rflags &= !(flags::VM | flags::IF | flags::RF);
        let mask = if long { u64::MAX } else { 0xffff_ffff };
        v.gpr[reg::RSP] = v.sysenter_esp & mask;
        let target = v.sysenter_eip & mask;
        self.set_flat(selector, selector.wrapping_add(8), 0, long);
        self.jump(target);
        Ok(())
    }
}

fn sysexit<S: System, const LONG: bool>(
    cpu: &mut Cpu<S>,
    _: &mut S,
    _: &Op<S>,
) -> Result<(), Fault> {
    let selector = sysenter_selector(cpu)?;
    cpu.require_cpl0()?;
    let (rsp, rip) = (cpu.vcpu.gpr[reg::RCX], cpu.vcpu.gpr[reg::RDX]);
    if LONG && !(paging::canonical(rsp) && paging::canonical(rip)) {
        return Err(Fault::gp(0));
    }
    let mask = if LONG { u64::MAX } else { 0xffff_ffff };
    let cs = selector.wrapping_add(if LONG { 32 } else { 16 });
    cpu.vcpu.gpr[reg::RSP] = rsp & mask;
    cpu.set_flat(cs, cs.wrapping_add(8), 3, LONG);
    cpu.jump(rip & mask);
    Ok(())
}

fn swapgs<S: System>(cpu: &mut Cpu<S>, _: &mut S, _: &Op<S>) -> Result<(), Fault> {
    cpu.require_cpl0()?;
    let v = &mut cpu.vcpu;
    std::mem::swap(&mut v.seg[seg::GS].base, &mut v.kernel_gs_base);
    Ok(())
}

pub(super) fn select<S: System>(insn: &Instruction) -> Option<Choice<S>> {
    Some(match insn.mnemonic() {
        Mnemonic::Syscall => (syscall, true),
        Mnemonic::Sysret => (sysret::<S, false>, true),
        Mnemonic::Sysretq => (sysret::<S, true>, true),
        Mnemonic::Sysenter => (sysenter, true),
        Mnemonic::Sysexit => (sysexit::<S, false>, true),
        Mnemonic::Sysexitq => (sysexit::<S, true>, true),
        Mnemonic::Swapgs => (swapgs, false),
        _ => return None,
    })
}
