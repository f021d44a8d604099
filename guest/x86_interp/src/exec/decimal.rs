//! Decimal adjustment and SALC: only exist outside 64-bit mode.

use super::{
    alu::{parity, zsp},
    set_status,
};
use crate::{
    cpu::Cpu,
    op::{Handler, Op, RegRef},
    system::System,
};
use iced_x86::{Instruction, Mnemonic};
use x86::{Fault, flags, reg, vector};

const AL: RegRef = RegRef { index: reg::RAX as u8, shift: 0 };
const AX: RegRef = AL;

fn has<S: System>(cpu: &Cpu<S>, flag: u64) -> bool {
    cpu.vcpu.rflags & flag != 0
}

/// DAA and DAS (SDM vol. 2).
fn adjust_packed<S: System, const ADD: bool>(
    cpu: &mut Cpu<S>,
    _: &mut S,
    _: &Op<S>,
) -> Result<(), Fault> {
    let old = cpu.reg::<1>(AL);
    let low = old & 0xf > 9 || has(cpu, flags::AF);
    let high = old > 0x99 || has(cpu, flags::CF);
    let change = if low { 6 } else { 0 } + if high { 0x60 } else { 0 };
    let new = if ADD { old.wrapping_add(change) } else { old.wrapping_sub(change) } & 0xff;
    let borrowed = !ADD && low && old < 6;
    let carry = u64::from(high || borrowed);
    set_status(&mut cpu.vcpu.rflags, zsp::<1>(new) | carry | u64::from(low) << 4);
    cpu.set_reg::<1>(AL, new);
    Ok(())
}

/// AAA and AAS.
fn adjust_unpacked<S: System, const ADD: bool>(
    cpu: &mut Cpu<S>,
    _: &mut S,
    _: &Op<S>,
) -> Result<(), Fault> {
    let old = cpu.reg::<2>(AX);
    let adjust = old & 0xf > 9 || has(cpu, flags::AF);
    let new = match (adjust, ADD) {
        (true, true) => old.wrapping_add(0x106),
        (true, false) => old.wrapping_sub(0x106),
        _ => old,
    } & 0xff0f;
    let status = if adjust { flags::AF | flags::CF } else { 0 };
    set_status(&mut cpu.vcpu.rflags, status | zsp::<1>(new & 0xff));
    cpu.set_reg::<2>(AX, new);
    Ok(())
}

fn aam<S: System>(cpu: &mut Cpu<S>, _: &mut S, op: &Op<S>) -> Result<(), Fault> {
    let (value, base) = (cpu.reg::<1>(AL), op.imm & 0xff);
    let high = value.checked_div(base).ok_or(Fault::new(vector::DE))?;
    let low = value % base;
    cpu.set_reg::<2>(AX, high << 8 | low);
    set_status(&mut cpu.vcpu.rflags, zsp::<1>(low));
    Ok(())
}

fn aad<S: System>(cpu: &mut Cpu<S>, _: &mut S, op: &Op<S>) -> Result<(), Fault> {
    let value = cpu.reg::<2>(AX);
    let low = (value & 0xff).wrapping_add((value >> 8).wrapping_mul(op.imm & 0xff)) & 0xff;
    cpu.set_reg::<2>(AX, low);
    set_status(&mut cpu.vcpu.rflags, zsp::<1>(low) | parity(low));
    Ok(())
}

fn salc<S: System>(cpu: &mut Cpu<S>, _: &mut S, _: &Op<S>) -> Result<(), Fault> {
    let value = if has(cpu, flags::CF) { 0xff } else { 0 };
    cpu.set_reg::<1>(AL, value);
    Ok(())
}

pub(super) fn select<S: System>(insn: &Instruction) -> Option<Handler<S>> {
    Some(match insn.mnemonic() {
        Mnemonic::Daa => adjust_packed::<S, true>,
        Mnemonic::Das => adjust_packed::<S, false>,
        Mnemonic::Aaa => adjust_unpacked::<S, true>,
        Mnemonic::Aas => adjust_unpacked::<S, false>,
        Mnemonic::Aam => aam,
        Mnemonic::Aad => aad,
        Mnemonic::Salc => salc,
        _ => return None,
    })
}
