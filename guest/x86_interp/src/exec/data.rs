//! Data movement: MOV and its relatives, LEA, CMOV, SETcc, conversions, byte swaps.

use super::{condition, condition_code, is_gpr, is_memory, nop, operand_size};
use crate::{
    cpu::Cpu,
    op::{
        Destination, Dst, Handler, Imm, Mem, Op, RegRef, Source, Src, address_mask, by_size,
        sign_extend,
    },
    system::System,
};
use iced_x86::{Instruction, Mnemonic, OpKind};
use std::sync::atomic::{Ordering, fence};
use x86::{Fault, reg};

fn mov<S: System, D: Destination, R: Source, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let value = R::get::<S, SIZE>(cpu, sys, op)?;
    D::put::<S, SIZE>(cpu, sys, op, value)
}

/// MOVZX, MOVSX, MOVSXD: from `FROM` bytes to the `SIZE` of the register.
fn extend<S: System, R: Source, const FROM: usize, const SIGNED: bool, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let value = R::get::<S, FROM>(cpu, sys, op)?;
    let value = if SIGNED { sign_extend::<FROM>(value) } else { value };
    cpu.set_reg::<SIZE>(op.dst, value);
    Ok(())
}

fn lea<S: System, const SIZE: usize>(cpu: &mut Cpu<S>, _: &mut S, op: &Op<S>) -> Result<(), Fault> {
    let offset = cpu.effective(op);
    cpu.set_reg::<SIZE>(op.dst, offset);
    Ok(())
}

/// CMOVcc: the source is read whatever the condition, and a 32-bit destination is always written.
fn cmov<S: System, R: Source, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let value = R::get::<S, SIZE>(cpu, sys, op)?;
    let holds = condition(cpu.vcpu.rflags, condition_code(&op.insn));
    let value = if holds { value } else { cpu.reg::<SIZE>(op.dst) };
    cpu.set_reg::<SIZE>(op.dst, value);
    Ok(())
}

fn setcc<S: System, D: Destination>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let holds = condition(cpu.vcpu.rflags, condition_code(&op.insn));
    D::put::<S, 1>(cpu, sys, op, holds.into())
}

fn bswap<S: System, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    _: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let value = cpu.reg::<SIZE>(op.dst);
    // BSWAP of a 16-bit register is undefined; the CPUs we know clear it.
    let swapped = if SIZE == 2 { 0 } else { swap::<SIZE>(value) };
    cpu.set_reg::<SIZE>(op.dst, swapped);
    Ok(())
}

fn swap<const SIZE: usize>(value: u64) -> u64 {
    value.swap_bytes() >> (64 - SIZE * 8)
}

fn movbe<S: System, D: Destination, R: Source, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let value = R::get::<S, SIZE>(cpu, sys, op)?;
    D::put::<S, SIZE>(cpu, sys, op, swap::<SIZE>(value))
}

const RAX: RegRef = RegRef { index: reg::RAX as u8, shift: 0 };
const RDX: RegRef = RegRef { index: reg::RDX as u8, shift: 0 };

/// CBW, CWDE, CDQE: `SIZE` is that of the result.
fn widen<S: System, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    _: &mut S,
    _: &Op<S>,
) -> Result<(), Fault> {
    let value = cpu.vcpu.gpr[reg::RAX];
    let value = match SIZE {
        2 => sign_extend::<1>(value),
        4 => sign_extend::<2>(value),
        _ => sign_extend::<4>(value),
    };
    cpu.set_reg::<SIZE>(RAX, value);
    Ok(())
}

/// CWD, CDQ, CQO.
fn spread<S: System, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    _: &mut S,
    _: &Op<S>,
) -> Result<(), Fault> {
    let negative = sign_extend::<SIZE>(cpu.vcpu.gpr[reg::RAX]) as i64 >> 63;
    cpu.set_reg::<SIZE>(RDX, negative as u64);
    Ok(())
}

fn xlat<S: System>(cpu: &mut Cpu<S>, sys: &mut S, op: &Op<S>) -> Result<(), Fault> {
    let mask = address_mask(crate::op::address_size(&op.insn, cpu.vcpu.code_bits()));
    let offset = cpu.vcpu.gpr[reg::RBX].wrapping_add(cpu.vcpu.gpr[reg::RAX] & 0xff) & mask;
    let linear = cpu.segmented(op.address.seg as usize, offset, 1, false)?;
    let value = cpu.load::<1>(sys, linear)?;
    cpu.set_reg::<1>(RAX, value);
    Ok(())
}

fn pause<S: System>(_: &mut Cpu<S>, sys: &mut S, _: &Op<S>) -> Result<(), Fault> {
    sys.pause();
    Ok(())
}

pub(super) fn select<S: System>(insn: &Instruction) -> Option<Handler<S>> {
    let size = operand_size(insn, 0);
    Some(match insn.mnemonic() {
        Mnemonic::Mov => choose_mov(insn)?,
        Mnemonic::Movnti => by_size!(size, mov, S, Mem, Src),
        Mnemonic::Movzx => choose_extend::<S, false>(insn),
        Mnemonic::Movsx | Mnemonic::Movsxd => choose_extend::<S, true>(insn),
        Mnemonic::Lea => by_size!(size, lea, S),
        Mnemonic::Bswap => by_size!(size, bswap, S),
        Mnemonic::Movbe if is_memory(insn, 0) => by_size!(size, movbe, S, Mem, Src),
        Mnemonic::Movbe => by_size!(size, movbe, S, Dst, Mem),
        Mnemonic::Cbw => widen::<S, 2>,
        Mnemonic::Cwde => widen::<S, 4>,
        Mnemonic::Cdqe => widen::<S, 8>,
        Mnemonic::Cwd => spread::<S, 2>,
        Mnemonic::Cdq => spread::<S, 4>,
        Mnemonic::Cqo => spread::<S, 8>,
        Mnemonic::Xlatb => xlat,
        Mnemonic::Pause => pause,
        Mnemonic::Nop
        | Mnemonic::Reservednop
        | Mnemonic::Endbr64
        | Mnemonic::Endbr32
        | Mnemonic::Rdsspd
        | Mnemonic::Rdsspq
        | Mnemonic::Prefetch
        | Mnemonic::Prefetchw
        | Mnemonic::Prefetchwt1
        | Mnemonic::Prefetchnta
        | Mnemonic::Prefetcht0
        | Mnemonic::Prefetcht1
        | Mnemonic::Prefetcht2
        | Mnemonic::Cldemote => nop,
        Mnemonic::Lfence | Mnemonic::Sfence | Mnemonic::Mfence => barrier,
        _ => return choose_conditional(insn),
    })
}

/// Other vCPUs see what was stored before it before anything after it is loaded.
fn barrier<S: System>(_: &mut Cpu<S>, _: &mut S, _: &Op<S>) -> Result<(), Fault> {
    fence(Ordering::SeqCst);
    Ok(())
}

fn choose_conditional<S: System>(insn: &Instruction) -> Option<Handler<S>> {
    let size = operand_size(insn, 0);
    let name = insn.mnemonic() as u32;
    if (Mnemonic::Seta as u32..=Mnemonic::Sets as u32).contains(&name) {
        return Some(if is_gpr(insn, 0) { setcc::<S, Dst> } else { setcc::<S, Mem> });
    }
    let is_cmov = (Mnemonic::Cmova as u32..=Mnemonic::Cmovs as u32).contains(&name);
    is_cmov.then(|| {
        if is_memory(insn, 1) { by_size!(size, cmov, S, Mem) } else { by_size!(size, cmov, S, Src) }
    })
}

fn choose_mov<S: System>(insn: &Instruction) -> Option<Handler<S>> {
    let size = operand_size(insn, 0);
    let immediate = !matches!(insn.op1_kind(), OpKind::Register | OpKind::Memory);
    Some(match (is_memory(insn, 0), is_memory(insn, 1), immediate) {
        (true, _, true) => by_size!(size, mov, S, Mem, Imm),
        (true, _, false) if is_gpr(insn, 1) => by_size!(size, mov, S, Mem, Src),
        (false, true, _) if is_gpr(insn, 0) => by_size!(size, mov, S, Dst, Mem),
        (false, false, true) => by_size!(size, mov, S, Dst, Imm),
        (false, false, false) if is_gpr(insn, 0) && is_gpr(insn, 1) => {
            by_size!(size, mov, S, Dst, Src)
        }
        _ => return None, // segment, control and debug registers
    })
}

fn choose_extend<S: System, const SIGNED: bool>(insn: &Instruction) -> Handler<S> {
    if is_memory(insn, 1) {
        choose_extend_from::<S, Mem, SIGNED>(insn)
    } else {
        choose_extend_from::<S, Src, SIGNED>(insn)
    }
}

fn choose_extend_from<S: System, R: Source, const SIGNED: bool>(insn: &Instruction) -> Handler<S> {
    match (operand_size(insn, 1), operand_size(insn, 0)) {
        (1, 2) => extend::<S, R, 1, SIGNED, 2>,
        (1, 4) => extend::<S, R, 1, SIGNED, 4>,
        (1, _) => extend::<S, R, 1, SIGNED, 8>,
        (2, 2) => extend::<S, R, 2, SIGNED, 2>,
        (2, 4) => extend::<S, R, 2, SIGNED, 4>,
        (2, _) => extend::<S, R, 2, SIGNED, 8>,
        (_, 2) => extend::<S, R, 4, SIGNED, 2>,
        (_, 4) => extend::<S, R, 4, SIGNED, 4>,
        (_, _) => extend::<S, R, 4, SIGNED, 8>,
    }
}
