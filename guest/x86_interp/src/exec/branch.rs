//! Near jumps, calls and returns. Far transfers are in `system`.

use super::{condition, condition_code, is_gpr, is_memory};
use crate::{
    cpu::Cpu,
    op::{Dst, Handler, Mem, Op, Source, address_mask},
    system::System,
};
use iced_x86::{Code, FlowControl, Instruction, Mnemonic, OpKind};
use x86::{Fault, reg};

/// The branch target, cut to the operand size in legacy code.
#[inline(always)]
fn target<S: System>(cpu: &Cpu<S>, op: &Op<S>) -> u64 {
    let rip = cpu.vcpu.rip.wrapping_add(op.imm);
    if op.long {
        return rip;
    }
    match op.insn.op0_kind() {
        OpKind::NearBranch16 => rip & 0xffff,
        _ => rip & 0xffff_ffff,
    }
}

#[inline(always)]
fn take<S: System>(cpu: &mut Cpu<S>, op: &Op<S>) -> Result<(), Fault> {
    let rip = target(cpu, op);
    cpu.check_target(rip)?;
    cpu.jump(rip);
    Ok(())
}

fn jcc<S: System, const CODE: u8>(cpu: &mut Cpu<S>, _: &mut S, op: &Op<S>) -> Result<(), Fault> {
    if condition(cpu.vcpu.rflags, CODE) { take(cpu, op) } else { Ok(()) }
}

fn jmp<S: System>(cpu: &mut Cpu<S>, _: &mut S, op: &Op<S>) -> Result<(), Fault> {
    take(cpu, op)
}

fn call<S: System, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let rip = target(cpu, op);
    cpu.check_target(rip)?;
    cpu.push::<SIZE>(sys, cpu.vcpu.rip)?;
    cpu.jump(rip);
    Ok(())
}

fn jmp_indirect<S: System, R: Source, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let rip = R::get::<S, SIZE>(cpu, sys, op)?;
    cpu.check_target(rip)?;
    cpu.jump(rip);
    Ok(())
}

fn call_indirect<S: System, R: Source, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let rip = R::get::<S, SIZE>(cpu, sys, op)?;
    // The return address is stored first and stays below RSP if the target is none: so do CPUs.
    let rsp = cpu.vcpu.gpr[reg::RSP];
    cpu.push::<SIZE>(sys, cpu.vcpu.rip)?;
    cpu.check_target(rip).inspect_err(|_| cpu.vcpu.gpr[reg::RSP] = rsp)?;
    cpu.jump(rip);
    Ok(())
}

/// RET, with the bytes of arguments to drop in the immediate (zero without one).
fn ret<S: System, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let rip = cpu.peek::<SIZE>(sys, 0)?;
    cpu.check_target(rip)?;
    cpu.drop_stack(SIZE as u64 + op.imm);
    cpu.jump(rip);
    Ok(())
}

/// LOOP, LOOPE, LOOPNE: RCX of the address size counts down; flags stay.
fn loop_<S: System>(cpu: &mut Cpu<S>, _: &mut S, op: &Op<S>) -> Result<(), Fault> {
    let mask = counter_mask(op);
    let count = cpu.vcpu.gpr[reg::RCX].wrapping_sub(1) & mask;
    let zero = cpu.vcpu.rflags & x86::flags::ZF != 0;
    let condition = match op.insn.mnemonic() {
        Mnemonic::Loope => zero,
        Mnemonic::Loopne => !zero,
        _ => true,
    };
    if count != 0 && condition {
        take(cpu, op)?;
    }
    set_counter(cpu, mask, count);
    Ok(())
}

fn jrcxz<S: System>(cpu: &mut Cpu<S>, _: &mut S, op: &Op<S>) -> Result<(), Fault> {
    if cpu.vcpu.gpr[reg::RCX] & counter_mask(op) == 0 { take(cpu, op) } else { Ok(()) }
}

fn set_counter<S: System>(cpu: &mut Cpu<S>, mask: u64, count: u64) {
    let rcx = &mut cpu.vcpu.gpr[reg::RCX];
    *rcx = if mask == 0xffff { *rcx & !0xffff | count } else { count };
}

fn counter_mask<S: System>(op: &Op<S>) -> u64 {
    use Code::*;
    address_mask(match op.insn.code() {
        Jcxz_rel8_16 | Jcxz_rel8_32 | Loop_rel8_16_CX | Loop_rel8_32_CX | Loope_rel8_16_CX
        | Loope_rel8_32_CX | Loopne_rel8_16_CX | Loopne_rel8_32_CX => 16,
        Jecxz_rel8_16 | Jecxz_rel8_32 | Jecxz_rel8_64 | Loop_rel8_16_ECX | Loop_rel8_32_ECX
        | Loop_rel8_64_ECX | Loope_rel8_16_ECX | Loope_rel8_32_ECX | Loope_rel8_64_ECX
        | Loopne_rel8_16_ECX | Loopne_rel8_32_ECX | Loopne_rel8_64_ECX => 32,
        _ => 64,
    })
}

macro_rules! jcc_table {
    ($($code:literal)*) => { [$(jcc::<S, $code>),*] };
}

/// Bytes of an instruction's return address or stack slot.
fn stack_size(insn: &Instruction) -> usize {
    match insn.code() {
        Code::Call_rel16 | Code::Call_rm16 | Code::Retnw | Code::Retnw_imm16 | Code::Jmp_rm16 => 2,
        Code::Call_rel32_32
        | Code::Call_rm32
        | Code::Retnd
        | Code::Retnd_imm16
        | Code::Jmp_rm32 => 4,
        _ => 8,
    }
}

macro_rules! by_stack {
    ($insn:expr, $f:ident, $($t:ty),*) => {
        match stack_size($insn) {
            2 => $f::<$($t,)* 2>,
            4 => $f::<$($t,)* 4>,
            _ => $f::<$($t,)* 8>,
        }
    };
}

pub(super) fn select<S: System>(insn: &Instruction) -> Option<Handler<S>> {
    let near = matches!(
        insn.op0_kind(),
        OpKind::NearBranch16 | OpKind::NearBranch32 | OpKind::NearBranch64
    );
    Some(match insn.mnemonic() {
        Mnemonic::Loop | Mnemonic::Loope | Mnemonic::Loopne => loop_,
        Mnemonic::Jcxz | Mnemonic::Jecxz | Mnemonic::Jrcxz => jrcxz,
        Mnemonic::Jmp if near => jmp,
        Mnemonic::Call if near => by_stack!(insn, call, S),
        Mnemonic::Ret => by_stack!(insn, ret, S),
        Mnemonic::Jmp if insn.is_jmp_near_indirect() => choose_jmp(insn)?,
        Mnemonic::Call if insn.is_call_near_indirect() => choose_call(insn)?,
        _ if insn.flow_control() == FlowControl::ConditionalBranch
            && insn.is_jcc_short_or_near() =>
        {
            jcc_table!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)[condition_code(insn) as usize]
        }
        _ => return None,
    })
}

fn choose_jmp<S: System>(insn: &Instruction) -> Option<Handler<S>> {
    if is_memory(insn, 0) {
        Some(by_stack!(insn, jmp_indirect, S, Mem))
    } else {
        is_gpr(insn, 0).then(|| by_stack!(insn, jmp_indirect, S, Dst) as Handler<S>)
    }
}

fn choose_call<S: System>(insn: &Instruction) -> Option<Handler<S>> {
    if is_memory(insn, 0) {
        Some(by_stack!(insn, call_indirect, S, Mem))
    } else {
        is_gpr(insn, 0).then(|| by_stack!(insn, call_indirect, S, Dst) as Handler<S>)
    }
}
