//! Plain moves between vector registers, memory and general registers.
//!
//! They make up most vector instructions of real code, and need neither MXCSR nor arithmetic.
//! `dst` and `src` of the [`Op`] are vector register numbers here (or a general register, for MOVD
//! and MOVQ). What a VEX-encoded instruction does not write it zeroes.

use super::{
    access::{Vector, Wide},
    permit,
};
use crate::{
    cpu::Cpu,
    op::{Handler, Op, RegRef},
    system::System,
};
use iced_x86::{EncodingKind, Instruction, Mnemonic, OpKind};
use x86::Fault;

const ZERO: Vector = [0; 16];

#[inline(always)]
fn permit<S: System, const VEX: bool>(cpu: &Cpu<S>) -> Result<(), Fault> {
    if VEX { permit::avx(cpu) } else { permit::sse(cpu) }
}

#[inline(always)]
fn write<S: System, const N: usize, const VEX: bool>(cpu: &mut Cpu<S>, op: &Op<S>, value: Wide) {
    cpu.set_low(op.dst.index, value[0]);
    if VEX {
        cpu.set_high(op.dst.index, value[1]);
    }
}

/// From memory: `N` bytes, zero-extended.
fn load<S: System, const N: usize, const VEX: bool, const ALIGNED: bool>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    permit::<S, VEX>(cpu)?;
    let value = cpu.load_vector::<N, ALIGNED>(sys, op)?;
    write::<S, N, VEX>(cpu, op, value);
    Ok(())
}

/// To memory: `N` bytes.
fn store<S: System, const N: usize, const VEX: bool, const ALIGNED: bool>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    permit::<S, VEX>(cpu)?;
    let high = if N == 32 { cpu.high(op.src.index) } else { ZERO };
    let value = [cpu.low(op.src.index), high];
    cpu.store_vector::<N, ALIGNED>(sys, op, value)
}

/// Between registers: `N` bytes, zero-extended.
fn copy<S: System, const N: usize, const VEX: bool>(
    cpu: &mut Cpu<S>,
    _: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    permit::<S, VEX>(cpu)?;
    let mut low = cpu.low(op.src.index);
    low[N.min(16)..].fill(0);
    let high = if N == 32 { cpu.high(op.src.index) } else { ZERO };
    write::<S, N, VEX>(cpu, op, [low, high]);
    Ok(())
}

/// MOVSS and MOVSD between registers: the rest of the destination stays.
fn merge<S: System, const N: usize>(cpu: &mut Cpu<S>, _: &mut S, op: &Op<S>) -> Result<(), Fault> {
    permit::<S, false>(cpu)?;
    let (mut value, new) = (cpu.low(op.dst.index), cpu.low(op.src.index));
    value[..N].copy_from_slice(&new[..N]);
    cpu.set_low(op.dst.index, value);
    Ok(())
}

/// MOVLPS, MOVHPS and the like from memory: one half of the destination.
fn load_half<S: System, const HIGH: bool>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    permit::<S, false>(cpu)?;
    let [half, _] = cpu.load_vector::<8, false>(sys, op)?;
    let at = if HIGH { 8 } else { 0 };
    let mut value = cpu.low(op.dst.index);
    value[at..at + 8].copy_from_slice(&half[..8]);
    cpu.set_low(op.dst.index, value);
    Ok(())
}

/// MOVHPS and the like to memory.
fn store_high<S: System, const VEX: bool>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    permit::<S, VEX>(cpu)?;
    let mut value = cpu.low(op.src.index);
    value.copy_within(8.., 0);
    cpu.store_vector::<8, false>(sys, op, [value, ZERO])
}

/// MOVD and MOVQ from a general register.
fn from_general<S: System, const N: usize, const VEX: bool>(
    cpu: &mut Cpu<S>,
    _: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    permit::<S, VEX>(cpu)?;
    let value = cpu.reg::<N>(op.src);
    write::<S, N, VEX>(cpu, op, [u128::from(value).to_le_bytes(), ZERO]);
    Ok(())
}

/// MOVD and MOVQ to a general register.
fn to_general<S: System, const N: usize, const VEX: bool>(
    cpu: &mut Cpu<S>,
    _: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    permit::<S, VEX>(cpu)?;
    let value = u128::from_le_bytes(cpu.low(op.src.index)) as u64;
    cpu.set_reg::<N>(op.dst, value);
    Ok(())
}

/// VZEROUPPER: the high halves of all registers the mode has.
fn zero_upper<S: System>(cpu: &mut Cpu<S>, _: &mut S, op: &Op<S>) -> Result<(), Fault> {
    permit::<S, true>(cpu)?;
    let count = if op.long { 16 } else { 8 };
    cpu.vcpu.fpu.ymm_high[..count].fill([0; 16]);
    Ok(())
}

/// VZEROALL.
fn zero_all<S: System>(cpu: &mut Cpu<S>, sys: &mut S, op: &Op<S>) -> Result<(), Fault> {
    zero_upper(cpu, sys, op)?;
    let count = if op.long { 16 } else { 8 };
    cpu.vcpu.fpu.xmm[..count].fill([0; 16]);
    Ok(())
}

/// Chooses a handler and sets its register numbers; `None` if the instruction is no plain move.
pub(super) fn prepare<S: System>(op: &mut Op<S>) -> Option<Handler<S>> {
    let handler = choose(&op.insn)?;
    op.dst = register(&op.insn, 0);
    op.src = register(&op.insn, 1);
    Some(handler)
}

/// A register operand as a number, vector or general.
pub(super) fn register(insn: &Instruction, operand: u32) -> RegRef {
    let register = insn.op_register(operand);
    if register.is_vector_register() {
        RegRef { index: register.number() as u8, shift: 0 }
    } else {
        RegRef::of(register)
    }
}

fn choose<S: System>(insn: &Instruction) -> Option<Handler<S>> {
    use Mnemonic as M;
    let no_mmx = (0..insn.op_count()).all(|i| !insn.op_register(i).is_mm());
    if !no_mmx {
        return None;
    }
    let wide = insn.op0_register().is_ymm() || insn.op1_register().is_ymm();
    match insn.mnemonic() {
        M::Movaps | M::Movapd | M::Movdqa => whole::<S, 16, false, true>(insn),
        M::Movups | M::Movupd | M::Movdqu | M::Lddqu => whole::<S, 16, false, false>(insn),
        M::Movntps | M::Movntpd | M::Movntdq | M::Movntdqa => whole::<S, 16, false, true>(insn),
        M::Vmovaps
        | M::Vmovapd
        | M::Vmovdqa
        | M::Vmovntps
        | M::Vmovntpd
        | M::Vmovntdq
        | M::Vmovntdqa
            if wide =>
        {
            whole::<S, 32, true, true>(insn)
        }
        M::Vmovaps
        | M::Vmovapd
        | M::Vmovdqa
        | M::Vmovntps
        | M::Vmovntpd
        | M::Vmovntdq
        | M::Vmovntdqa => whole::<S, 16, true, true>(insn),
        M::Vmovups | M::Vmovupd | M::Vmovdqu | M::Vlddqu if wide => {
            whole::<S, 32, true, false>(insn)
        }
        M::Vmovups | M::Vmovupd | M::Vmovdqu | M::Vlddqu => whole::<S, 16, true, false>(insn),
        M::Movd | M::Movq if insn.encoding() == EncodingKind::Legacy => word::<S, false>(insn),
        M::Vmovd | M::Vmovq => word::<S, true>(insn),
        M::Vzeroupper => Some(zero_upper),
        M::Vzeroall => Some(zero_all),
        _ => part(insn),
    }
}

/// Moves of whole registers.
fn whole<S: System, const N: usize, const VEX: bool, const ALIGNED: bool>(
    insn: &Instruction,
) -> Option<Handler<S>> {
    Some(match (insn.op0_kind(), insn.op1_kind()) {
        (OpKind::Register, OpKind::Register) => copy::<S, N, VEX>,
        (OpKind::Register, OpKind::Memory) => load::<S, N, VEX, ALIGNED>,
        (OpKind::Memory, OpKind::Register) => store::<S, N, VEX, ALIGNED>,
        _ => return None,
    })
}

/// MOVD and MOVQ.
fn word<S: System, const VEX: bool>(insn: &Instruction) -> Option<Handler<S>> {
    let four = matches!(insn.mnemonic(), Mnemonic::Movd | Mnemonic::Vmovd);
    let general = |i| insn.op_register(i).is_gpr();
    Some(match (insn.op0_kind(), insn.op1_kind()) {
        (OpKind::Register, OpKind::Register) if general(0) => match four {
            true => to_general::<S, 4, VEX>,
            false => to_general::<S, 8, VEX>,
        },
        (OpKind::Register, OpKind::Register) if general(1) => match four {
            true => from_general::<S, 4, VEX>,
            false => from_general::<S, 8, VEX>,
        },
        (OpKind::Register, OpKind::Register) => copy::<S, 8, VEX>,
        (OpKind::Register, OpKind::Memory) if four => load::<S, 4, VEX, false>,
        (OpKind::Register, OpKind::Memory) => load::<S, 8, VEX, false>,
        (OpKind::Memory, OpKind::Register) if four => store::<S, 4, VEX, false>,
        (OpKind::Memory, OpKind::Register) => store::<S, 8, VEX, false>,
        _ => return None,
    })
}

/// Moves of a part of a register.
fn part<S: System>(insn: &Instruction) -> Option<Handler<S>> {
    use Mnemonic as M;
    let loads = insn.op_count() == 2 && insn.op1_kind() == OpKind::Memory;
    let stores = insn.op0_kind() == OpKind::Memory;
    Some(match insn.mnemonic() {
        M::Movss if loads => load::<S, 4, false, false>,
        M::Movss if stores => store::<S, 4, false, false>,
        M::Movss => merge::<S, 4>,
        M::Movsd if loads => load::<S, 8, false, false>,
        M::Movsd if stores => store::<S, 8, false, false>,
        M::Movsd => merge::<S, 8>,
        M::Vmovss if loads => load::<S, 4, true, false>,
        M::Vmovss if stores => store::<S, 4, true, false>,
        M::Vmovsd if loads => load::<S, 8, true, false>,
        M::Vmovsd if stores => store::<S, 8, true, false>,
        M::Movlps | M::Movlpd if loads => load_half::<S, false>,
        M::Movhps | M::Movhpd if loads => load_half::<S, true>,
        M::Movlps | M::Movlpd if stores => store::<S, 8, false, false>,
        M::Movhps | M::Movhpd if stores => store_high::<S, false>,
        M::Vmovlps | M::Vmovlpd if stores => store::<S, 8, true, false>,
        M::Vmovhps | M::Vmovhpd if stores => store_high::<S, true>,
        _ => return None,
    })
}
