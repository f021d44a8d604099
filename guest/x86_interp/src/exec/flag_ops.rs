//! Instructions on the arithmetic flags.

use crate::{
    cpu::Cpu,
    op::{Handler, Op, RegRef},
    system::System,
};
use iced_x86::{Instruction, Mnemonic};
use x86::{Fault, flags, reg};

const AH: RegRef = RegRef { index: reg::RAX as u8, shift: 8 };
/// The flags LAHF and SAHF carry.
const LOW: u64 = flags::SF | flags::ZF | flags::AF | flags::PF | flags::CF;

fn change<S: System, const CLEAR: u64, const SET: u64, const FLIP: u64>(
    cpu: &mut Cpu<S>,
    _: &mut S,
    _: &Op<S>,
) -> Result<(), Fault> {
    cpu.vcpu.rflags = (cpu.vcpu.rflags & !CLEAR | SET) ^ FLIP;
    Ok(())
}

fn lahf<S: System>(cpu: &mut Cpu<S>, _: &mut S, _: &Op<S>) -> Result<(), Fault> {
    let low = cpu.vcpu.rflags & LOW | flags::FIXED;
    cpu.set_reg::<1>(AH, low);
    Ok(())
}

fn sahf<S: System>(cpu: &mut Cpu<S>, _: &mut S, _: &Op<S>) -> Result<(), Fault> {
    cpu.vcpu.rflags = cpu.vcpu.rflags & !LOW | cpu.reg::<1>(AH) & LOW;
    Ok(())
}

pub(super) fn select<S: System>(insn: &Instruction) -> Option<Handler<S>> {
    Some(match insn.mnemonic() {
        Mnemonic::Clc => change::<S, { flags::CF }, 0, 0>,
        Mnemonic::Stc => change::<S, 0, { flags::CF }, 0>,
        Mnemonic::Cmc => change::<S, 0, 0, { flags::CF }>,
        Mnemonic::Cld => change::<S, { flags::DF }, 0, 0>,
        Mnemonic::Std => change::<S, 0, { flags::DF }, 0>,
        Mnemonic::Lahf => lahf,
        Mnemonic::Sahf => sahf,
        _ => return None,
    })
}
