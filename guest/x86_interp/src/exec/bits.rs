//! Bit tests, scans and counts; CRC32.

use super::{alu::locked, is_memory, operand_size, set_status};
use crate::{
    cpu::Cpu,
    op::{Handler, Mem, Op, Source, Src, by_size, mask, sign_extend},
    system::System,
};
use iced_x86::{Instruction, Mnemonic, OpKind};
use x86::{Fault, flags};

/// BT, BTS, BTR, BTC.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Change {
    None,
    Set,
    Reset,
    Complement,
}

fn change_of(insn: &Instruction) -> Change {
    match insn.mnemonic() {
        Mnemonic::Bts => Change::Set,
        Mnemonic::Btr => Change::Reset,
        Mnemonic::Btc => Change::Complement,
        _ => Change::None,
    }
}

fn changed(value: u64, bit: u64, change: Change) -> u64 {
    match change {
        Change::None => value,
        Change::Set => value | bit,
        Change::Reset => value & !bit,
        Change::Complement => value ^ bit,
    }
}

fn set_carry(rflags: &mut u64, carry: bool) {
    *rflags = *rflags & !flags::CF | u64::from(carry);
}

fn offset_of<S: System, const SIZE: usize>(cpu: &Cpu<S>, op: &Op<S>) -> u64 {
    if op.insn.op1_kind() == OpKind::Register { cpu.reg::<SIZE>(op.src) } else { op.imm }
}

fn bit_register<S: System, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    _: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let bit = 1 << (offset_of::<S, SIZE>(cpu, op) & (SIZE as u64 * 8 - 1));
    let value = cpu.reg::<SIZE>(op.dst);
    set_carry(&mut cpu.vcpu.rflags, value & bit != 0);
    let change = change_of(&op.insn);
    if change != Change::None {
        cpu.set_reg::<SIZE>(op.dst, changed(value, bit, change));
    }
    Ok(())
}

/// A register bit offset is signed and reaches beyond the operand: the address moves along.
fn bit_memory<S: System, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let offset = offset_of::<S, SIZE>(cpu, op);
    let bit = 1 << (offset & (SIZE as u64 * 8 - 1));
    let moved;
    let op = if op.insn.op1_kind() == OpKind::Register {
        let units = (sign_extend::<SIZE>(offset) as i64) >> (SIZE * 8).trailing_zeros();
        moved = op.displaced((units as u64).wrapping_mul(SIZE as u64));
        &moved
    } else {
        op
    };
    let change = change_of(&op.insn);
    if change == Change::None {
        let value = Mem::get::<S, SIZE>(cpu, sys, op)?;
        set_carry(&mut cpu.vcpu.rflags, value & bit != 0);
        return Ok(());
    }
    locked::<S, SIZE>(cpu, sys, op, |f, value| {
        set_carry(f, value & bit != 0);
        changed(value, bit, change)
    })
}

/// BSF and BSR: with a zero source the destination keeps its value.
fn scan<S: System, R: Source, const FORWARD: bool, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let value = R::get::<S, SIZE>(cpu, sys, op)?;
    let rflags = &mut cpu.vcpu.rflags;
    *rflags = *rflags & !flags::ZF | u64::from(value == 0) << 6;
    if value != 0 {
        let index = if FORWARD { value.trailing_zeros() } else { 63 - value.leading_zeros() };
        cpu.set_reg::<SIZE>(op.dst, index.into());
    }
    Ok(())
}

/// TZCNT and LZCNT.
fn count_zeros<S: System, R: Source, const TRAILING: bool, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let value = R::get::<S, SIZE>(cpu, sys, op)?;
    let bits = SIZE as u32 * 8;
    let count = if TRAILING {
        value.trailing_zeros().min(bits)
    } else {
        value.leading_zeros() - (64 - bits)
    };
    let status = u64::from(count == bits) | u64::from(count == 0) << 6;
    let rflags = &mut cpu.vcpu.rflags;
    *rflags = *rflags & !(flags::CF | flags::ZF) | status;
    cpu.set_reg::<SIZE>(op.dst, count.into());
    Ok(())
}

fn popcnt<S: System, R: Source, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let value = R::get::<S, SIZE>(cpu, sys, op)?;
    set_status(&mut cpu.vcpu.rflags, u64::from(value == 0) << 6);
    cpu.set_reg::<SIZE>(op.dst, value.count_ones().into());
    Ok(())
}

/// CRC32 with the Castagnoli polynomial over `FROM` bytes.
fn crc32<S: System, R: Source, const FROM: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let data = R::get::<S, FROM>(cpu, sys, op)?;
    let mut crc = cpu.reg::<4>(op.dst);
    crc ^= data & 0xffff_ffff;
    crc = crc_bits(crc, 8 * FROM.min(4));
    if FROM == 8 {
        crc = crc_bits(crc ^ data >> 32, 32);
    }
    cpu.set_reg::<4>(op.dst, crc);
    Ok(())
}

/// Advances a reflected CRC by `bits` zero bits.
fn crc_bits(mut crc: u64, bits: usize) -> u64 {
    for _ in 0..bits {
        crc = crc >> 1 ^ if crc & 1 != 0 { 0x82f6_3b78 } else { 0 };
    }
    crc & mask::<4>()
}

pub(super) fn select<S: System>(insn: &Instruction) -> Option<Handler<S>> {
    let size = operand_size(insn, 0);
    let memory = is_memory(insn, 1);
    Some(match insn.mnemonic() {
        Mnemonic::Bt | Mnemonic::Bts | Mnemonic::Btr | Mnemonic::Btc if is_memory(insn, 0) => {
            by_size!(size, bit_memory, S)
        }
        Mnemonic::Bt | Mnemonic::Bts | Mnemonic::Btr | Mnemonic::Btc => {
            by_size!(size, bit_register, S)
        }
        Mnemonic::Bsf if memory => choose_scan::<S, Mem, true>(size),
        Mnemonic::Bsf => choose_scan::<S, Src, true>(size),
        Mnemonic::Bsr if memory => choose_scan::<S, Mem, false>(size),
        Mnemonic::Bsr => choose_scan::<S, Src, false>(size),
        Mnemonic::Tzcnt if memory => choose_count::<S, Mem, true>(size),
        Mnemonic::Tzcnt => choose_count::<S, Src, true>(size),
        Mnemonic::Lzcnt if memory => choose_count::<S, Mem, false>(size),
        Mnemonic::Lzcnt => choose_count::<S, Src, false>(size),
        Mnemonic::Popcnt if memory => by_size!(size, popcnt, S, Mem),
        Mnemonic::Popcnt => by_size!(size, popcnt, S, Src),
        Mnemonic::Crc32 if memory => by_size!(operand_size(insn, 1), crc32, S, Mem),
        Mnemonic::Crc32 => by_size!(operand_size(insn, 1), crc32, S, Src),
        _ => return None,
    })
}

fn choose_scan<S: System, R: Source, const FORWARD: bool>(size: usize) -> Handler<S> {
    match size {
        2 => scan::<S, R, FORWARD, 2>,
        4 => scan::<S, R, FORWARD, 4>,
        _ => scan::<S, R, FORWARD, 8>,
    }
}

fn choose_count<S: System, R: Source, const TRAILING: bool>(size: usize) -> Handler<S> {
    match size {
        2 => count_zeros::<S, R, TRAILING, 2>,
        4 => count_zeros::<S, R, TRAILING, 4>,
        _ => count_zeros::<S, R, TRAILING, 8>,
    }
}
