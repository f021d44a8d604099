//! Instruction handlers, one file per family, and the choice among them.

mod alu;
mod atomic;
mod bits;
mod branch;
mod data;
mod decimal;
mod flag_ops;
mod muldiv;
mod shift;
mod stack;
mod string;
mod system;
mod vector;

use crate::{
    cpu::Cpu,
    op::{Handler, Op},
    system::System,
};
use iced_x86::{Code, Instruction, OpKind};
use x86::{Fault, flags};

/// A handler, and whether a block must end after the instruction because it may change what the
/// following bytes mean (mode, mappings, interrupts).
pub(crate) type Choice<S> = (Handler<S>, bool);

/// Chooses the handler of an instruction. What nobody knows is #UD.
pub(crate) fn select<S: System>(insn: &Instruction) -> Choice<S> {
    if insn.code() == Code::INVALID {
        return (ud, true);
    }
    let plain = alu::select(insn)
        .or_else(|| data::select(insn))
        .or_else(|| branch::select(insn))
        .or_else(|| stack::select(insn))
        .or_else(|| shift::select(insn))
        .or_else(|| muldiv::select(insn))
        .or_else(|| bits::select(insn))
        .or_else(|| atomic::select(insn))
        .or_else(|| string::select(insn))
        .or_else(|| flag_ops::select(insn))
        .or_else(|| decimal::select(insn));
    if let Some(handler) = plain {
        return (handler, false);
    }
    system::select(insn)
        .or_else(|| vector::select(insn).map(|handler| (handler, false)))
        .unwrap_or((ud, true))
}

/// Last touch on a decoded instruction, once its handler is known.
pub(crate) fn prepare<S: System>(sys: &mut S, op: &mut Op<S>) {
    vector::prepare(sys, op);
}

/// #UD.
pub(crate) fn ud<S: System>(_: &mut Cpu<S>, _: &mut S, _: &Op<S>) -> Result<(), Fault> {
    Err(Fault::ud())
}

/// #GP(0).
pub(crate) fn gp<S: System>(_: &mut Cpu<S>, _: &mut S, _: &Op<S>) -> Result<(), Fault> {
    Err(Fault::gp(0))
}

/// Does nothing.
fn nop<S: System>(_: &mut Cpu<S>, _: &mut S, _: &Op<S>) -> Result<(), Fault> {
    Ok(())
}

/// Size in bytes of an operand.
fn operand_size(insn: &Instruction, index: u32) -> usize {
    match insn.op_kind(index) {
        OpKind::Register => insn.op_register(index).size(),
        _ => insn.memory_size().size(),
    }
}

/// An operand is a general register.
fn is_gpr(insn: &Instruction, index: u32) -> bool {
    insn.op_kind(index) == OpKind::Register && insn.op_register(index).is_gpr()
}

fn is_memory(insn: &Instruction, index: u32) -> bool {
    insn.op_kind(index) == OpKind::Memory
}

/// Replaces the status flags.
#[inline(always)]
fn set_status(rflags: &mut u64, status: u64) {
    *rflags = (*rflags & !flags::STATUS) | status;
}

/// Evaluates one of the sixteen conditions, by its encoding.
#[inline(always)]
fn condition(rflags: u64, code: u8) -> bool {
    let has = |mask: u64| rflags & mask != 0;
    let less = has(flags::SF) != has(flags::OF);
    let holds = match code >> 1 {
        0 => has(flags::OF),
        1 => has(flags::CF),
        2 => has(flags::ZF),
        3 => has(flags::CF | flags::ZF),
        4 => has(flags::SF),
        5 => has(flags::PF),
        6 => less,
        _ => less || has(flags::ZF),
    };
    holds != (code & 1 != 0)
}

/// The encoding of an instruction's condition.
fn condition_code(insn: &Instruction) -> u8 {
    insn.condition_code() as u8 - 1
}
