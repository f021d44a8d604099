//! Privileged and system instructions.
use super::Choice;
use crate::system::System;
use iced_x86::Instruction;

pub(super) fn select<S: System>(_insn: &Instruction, _bits: u32) -> Option<Choice<S>> {
    None
}
