//! Privileged and system instructions, one file per subject.
//!
//! What is not advertised in CPUID (MONITOR, TSX, SMM...) has no handler and so is #UD.

mod control;
mod cpuid;
mod debug;
mod far;
mod flags;
mod hypercall;
mod invalidate;
mod iret;
mod msr;
mod mtrr;
mod ports;
mod random;
mod returning;
mod segment;
mod software;
mod syscall;
mod table;
mod verify;

use super::{Choice, is_memory};
use crate::{
    cpu::Cpu,
    op::{Destination, Dst, Mem, Op, Source, Src},
    system::System,
};
use iced_x86::Instruction;
use x86::Fault;

pub(super) fn select<S: System>(insn: &Instruction) -> Option<Choice<S>> {
    far::select(insn)
        .or_else(|| returning::select(insn))
        .or_else(|| iret::select(insn))
        .or_else(|| software::select(insn))
        .or_else(|| syscall::select(insn))
        .or_else(|| segment::select(insn))
        .or_else(|| table::select(insn))
        .or_else(|| verify::select(insn))
        .or_else(|| control::select(insn))
        .or_else(|| debug::select(insn))
        .or_else(|| invalidate::select(insn))
        .or_else(|| msr::select(insn))
        .or_else(|| cpuid::select(insn))
        .or_else(|| flags::select(insn))
        .or_else(|| hypercall::select(insn))
        .or_else(|| ports::select(insn))
        .or_else(|| random::select(insn))
}

/// Reads a 16-bit operand (a selector or machine status word) that is the instruction's first.
fn first16<S: System>(cpu: &mut Cpu<S>, sys: &mut S, op: &Op<S>) -> Result<u16, Fault> {
    let value = if is_memory(&op.insn, 0) {
        Mem::get::<S, 2>(cpu, sys, op)?
    } else {
        Dst::get::<S, 2>(cpu, sys, op)?
    };
    Ok(value as u16)
}

/// Reads a 16-bit operand that is the instruction's second.
fn second16<S: System>(cpu: &mut Cpu<S>, sys: &mut S, op: &Op<S>) -> Result<u16, Fault> {
    let value = if is_memory(&op.insn, 1) {
        Mem::get::<S, 2>(cpu, sys, op)?
    } else {
        Src::get::<S, 2>(cpu, sys, op)?
    };
    Ok(value as u16)
}

/// Stores a 16-bit system value: 16 bits to memory, the operand size to a register.
fn put16<S: System>(cpu: &mut Cpu<S>, sys: &mut S, op: &Op<S>, value: u64) -> Result<(), Fault> {
    if is_memory(&op.insn, 0) {
        return Mem::put::<S, 2>(cpu, sys, op, value);
    }
    match op.insn.op0_register().size() {
        2 => cpu.set_reg::<2>(op.dst, value),
        4 => cpu.set_reg::<4>(op.dst, value),
        _ => cpu.set_reg::<8>(op.dst, value),
    }
    Ok(())
}
