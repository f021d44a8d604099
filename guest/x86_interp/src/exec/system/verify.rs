//! Asking about selectors without loading them: LAR, LSL, VERR, VERW, ARPL.

use super::{first16, put16, second16};
use crate::{
    cpu::Cpu,
    descriptor::{Descriptor, is_null},
    exec::Choice,
    op::Op,
    system::System,
};
use iced_x86::{Instruction, Mnemonic};
use x86::{Fault, flags, segment::kind, vector};

/// Access-rights bits LAR gives.
const LAR_BITS: u64 = 0x00ff_ff00;

impl<S: System> Cpu<S> {
    /// The descriptor of a selector, if there is one; only page faults are errors.
    fn look_up(&mut self, sys: &mut S, selector: u16) -> Result<Option<Descriptor>, Fault> {
        if is_null(selector) {
            return Ok(None);
        }
        match self.descriptor(sys, selector, vector::GP) {
            Ok(found) => Ok(Some(found)),
            Err(fault) if fault.vector == vector::GP => Ok(None),
            Err(fault) => Err(fault),
        }
    }

    /// The selector's segment may be named from the current level.
    fn visible(&self, found: &Descriptor) -> bool {
        let s = &found.segment;
        s.is_conforming() || self.vcpu.cpl().max(s.rpl()) <= s.dpl()
    }

    fn set_zero(&mut self, zero: bool) {
        self.vcpu.rflags = self.vcpu.rflags & !flags::ZF | if zero { flags::ZF } else { 0 };
    }
}

/// System descriptors LAR and LSL know, by mode.
fn known_system(number: u8, long: bool, with_limit: bool) -> bool {
    match number {
        kind::LDT | kind::TSS | kind::TSS_BUSY => true,
        kind::TSS16 | kind::TSS16_BUSY => !long,
        kind::CALL => !with_limit,
        kind::CALL16 | kind::TASK => !long && !with_limit,
        _ => false,
    }
}

fn lar_or_lsl<S: System, const LIMIT: bool>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    cpu.require_protected()?;
    let selector = second16(cpu, sys, op)?;
    let long = cpu.vcpu.long_mode();
    let found = cpu.look_up(sys, selector)?.filter(|found| {
        let s = &found.segment;
        (!s.is_system() || known_system(s.kind(), long, LIMIT)) && cpu.visible(found)
    });
    cpu.set_zero(found.is_some());
    let Some(found) = found else { return Ok(()) };
    let value = if LIMIT { found.segment.limit.into() } else { found.raw >> 32 & LAR_BITS };
    match op.insn.op0_register().size() {
        2 => cpu.set_reg::<2>(op.dst, value),
        4 => cpu.set_reg::<4>(op.dst, value),
        _ => cpu.set_reg::<8>(op.dst, value),
    }
    Ok(())
}

fn verify<S: System, const WRITE: bool>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    cpu.require_protected()?;
    let selector = first16(cpu, sys, op)?;
    let found = cpu.look_up(sys, selector)?;
    let good = found.is_some_and(|found| {
        let s = &found.segment;
        (if WRITE { s.is_writable() } else { s.is_readable() }) && cpu.visible(&found)
    });
    cpu.set_zero(good);
    Ok(())
}

/// ARPL: raises the RPL of the first selector to that of the second.
fn arpl<S: System>(cpu: &mut Cpu<S>, sys: &mut S, op: &Op<S>) -> Result<(), Fault> {
    cpu.require_protected()?;
    let selector = first16(cpu, sys, op)?;
    let level = cpu.reg::<2>(op.src) as u16 & 3;
    let raised = selector & 3 < level;
    if raised {
        put_low16(cpu, sys, op, selector & !3 | level)?;
    }
    cpu.set_zero(raised);
    Ok(())
}

/// Stores 16 bits; a register keeps its upper half.
fn put_low16<S: System>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
    value: u16,
) -> Result<(), Fault> {
    if crate::exec::is_memory(&op.insn, 0) {
        return put16(cpu, sys, op, value.into());
    }
    cpu.set_reg::<2>(op.dst, value.into());
    Ok(())
}

pub(super) fn select<S: System>(insn: &Instruction) -> Option<Choice<S>> {
    Some(match insn.mnemonic() {
        Mnemonic::Lar => (lar_or_lsl::<S, false>, false),
        Mnemonic::Lsl => (lar_or_lsl::<S, true>, false),
        Mnemonic::Verr => (verify::<S, false>, false),
        Mnemonic::Verw => (verify::<S, true>, false),
        Mnemonic::Arpl => (arpl, false),
        _ => return None,
    })
}
