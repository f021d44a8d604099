//! INT n, INT3, INTO, INT1 and BOUND.

use crate::{
    cpu::Cpu,
    exec::Choice,
    op::{Op, sign_extend},
    system::System,
};
use iced_x86::{Code, Instruction, Mnemonic};
use x86::{Fault, flags, vector};

/// INT n; in virtual-8086 mode it needs IOPL 3 (INT3 and INTO do not).
fn int_n<S: System>(cpu: &mut Cpu<S>, sys: &mut S, op: &Op<S>) -> Result<(), Fault> {
    cpu.check_virtual_iopl()?;
    cpu.software_interrupt(sys, op.imm as u8, true)
}

fn int3<S: System>(cpu: &mut Cpu<S>, sys: &mut S, _: &Op<S>) -> Result<(), Fault> {
    cpu.software_interrupt(sys, vector::BP, true)
}

/// INT1 is a #DB trap that no gate's DPL stops.
fn int1<S: System>(cpu: &mut Cpu<S>, sys: &mut S, _: &Op<S>) -> Result<(), Fault> {
    cpu.software_interrupt(sys, vector::DB, false)
}

fn into<S: System>(cpu: &mut Cpu<S>, sys: &mut S, _: &Op<S>) -> Result<(), Fault> {
    if cpu.vcpu.rflags & flags::OF == 0 {
        return Ok(());
    }
    cpu.software_interrupt(sys, vector::OF, true)
}

/// BOUND: #BR unless the signed index lies between the two bounds in memory.
fn bound<S: System, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let linear = cpu.linear(op, 2 * SIZE as u64, false)?;
    let signed = |value| sign_extend::<SIZE>(value) as i64;
    let index = signed(cpu.reg::<SIZE>(op.dst));
    // The upper bound is not even read if the lower is missed.
    if index < signed(cpu.load::<SIZE>(sys, linear)?) {
        return Err(Fault::new(vector::BR));
    }
    let high = cpu.load::<SIZE>(sys, linear.wrapping_add(SIZE as u64))?;
    if index > signed(high) { Err(Fault::new(vector::BR)) } else { Ok(()) }
}

pub(super) fn select<S: System>(insn: &Instruction) -> Option<Choice<S>> {
    Some(match insn.mnemonic() {
        Mnemonic::Int => (int_n, true),
        Mnemonic::Int3 => (int3, true),
        Mnemonic::Int1 => (int1, true),
        Mnemonic::Into => (into, true),
        Mnemonic::Bound if insn.code() == Code::Bound_r16_m1616 => (bound::<S, 2>, false),
        Mnemonic::Bound => (bound::<S, 4>, false),
        _ => return None,
    })
}
