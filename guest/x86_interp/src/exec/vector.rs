//! Floating point and SIMD: checks, memory operands, and the hand-over to the vector unit.
use crate::{
    op::{Handler, Op},
    system::System,
};
use iced_x86::Instruction;

pub(super) fn select<S: System>(_insn: &Instruction) -> Option<Handler<S>> {
    None
}

pub(super) fn prepare<S: System>(_sys: &mut S, _op: &mut Op<S>) {}
