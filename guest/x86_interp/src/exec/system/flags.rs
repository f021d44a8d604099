//! PUSHF, POPF, CLI, STI, STAC, CLAC (SDM vol. 2).

use crate::{cpu::Cpu, exec::Choice, op::Op, system::System};
use iced_x86::{Instruction, Mnemonic};
use x86::{Fault, control::cr0, flags};

/// The flags any program may change through POPF and IRET.
const UNPRIVILEGED: u64 = flags::STATUS | flags::TF | flags::DF | flags::NT | flags::AC | flags::ID;

impl<S: System> Cpu<S> {
    /// The current I/O privilege level.
    pub(crate) fn iopl(&self) -> u8 {
        (self.vcpu.rflags >> 12 & 3) as u8
    }

    /// CLI, STI and the interrupt flag of POPF and IRET are allowed.
    pub(crate) fn may_change_if(&self) -> bool {
        self.vcpu.cr0 & cr0::PE == 0 || self.vcpu.cpl() <= self.iopl()
    }

    /// In virtual-8086 mode the instructions on the interrupt flag need IOPL 3.
    pub(crate) fn check_virtual_iopl(&self) -> Result<(), Fault> {
        let virtual_8086 = self.vcpu.rflags & flags::VM != 0;
        if virtual_8086 && self.iopl() < 3 { Err(Fault::gp(0)) } else { Ok(()) }
    }

    /// Merges a popped flags image of `size` bytes by the privileges of the current level;
    /// `resume` is the extra flag IRET may set.
    pub(crate) fn merge_flags(&mut self, image: u64, size: usize, resume: u64) {
        let mut mask = UNPRIVILEGED | resume;
        if self.may_change_if() {
            mask |= flags::IF;
        }
        if self.vcpu.cpl() == 0 {
            mask |= flags::IOPL;
        }
        if size == 2 {
            mask &= 0xffff;
        }
        self.vcpu.rflags = self.vcpu.rflags & !mask | image & mask | flags::FIXED;
    }
}

fn pushf<S: System, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    _: &Op<S>,
) -> Result<(), Fault> {
    cpu.check_virtual_iopl()?;
    cpu.push::<SIZE>(sys, cpu.vcpu.rflags & !(flags::VM | flags::RF))
}

fn popf<S: System, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    _: &Op<S>,
) -> Result<(), Fault> {
    cpu.check_virtual_iopl()?;
    let image = cpu.peek::<SIZE>(sys, 0)?;
    cpu.drop_stack(SIZE as u64);
    cpu.merge_flags(image, SIZE, 0);
    cpu.update_view();
    Ok(())
}

fn cli<S: System>(cpu: &mut Cpu<S>, _: &mut S, _: &Op<S>) -> Result<(), Fault> {
    if !cpu.may_change_if() {
        return Err(Fault::gp(0));
    }
    cpu.vcpu.rflags &= !flags::IF;
    Ok(())
}

/// STI holds interrupts off for one more instruction if they were off.
fn sti<S: System>(cpu: &mut Cpu<S>, _: &mut S, _: &Op<S>) -> Result<(), Fault> {
    if !cpu.may_change_if() {
        return Err(Fault::gp(0));
    }
    if cpu.vcpu.rflags & flags::IF == 0 {
        cpu.vcpu.interrupt_shadow = true;
    }
    cpu.vcpu.rflags |= flags::IF;
    Ok(())
}

fn set_ac<S: System, const SET: bool>(cpu: &mut Cpu<S>, _: &mut S, _: &Op<S>) -> Result<(), Fault> {
    if cpu.vcpu.cpl() != 0 {
        return Err(Fault::ud());
    }
    cpu.vcpu.rflags &= !flags::AC;
    if SET {
        cpu.vcpu.rflags |= flags::AC;
    }
    cpu.update_view();
    Ok(())
}

pub(super) fn select<S: System>(insn: &Instruction) -> Option<Choice<S>> {
    Some(match insn.mnemonic() {
        Mnemonic::Pushf => (pushf::<S, 2>, false),
        Mnemonic::Pushfd => (pushf::<S, 4>, false),
        Mnemonic::Pushfq => (pushf::<S, 8>, false),
        Mnemonic::Popf => (popf::<S, 2>, true),
        Mnemonic::Popfd => (popf::<S, 4>, true),
        Mnemonic::Popfq => (popf::<S, 8>, true),
        Mnemonic::Cli => (cli, false),
        Mnemonic::Sti => (sti, true),
        Mnemonic::Stac => (set_ac::<S, true>, false),
        Mnemonic::Clac => (set_ac::<S, false>, false),
        _ => return None,
    })
}
