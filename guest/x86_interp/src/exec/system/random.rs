//! RDRAND and RDSEED.

use crate::{
    cpu::Cpu,
    exec::Choice,
    op::{Op, by_size},
    system::System,
};
use iced_x86::{Instruction, Mnemonic};
use x86::{Fault, flags};

/// CF tells whether there was a random word; the other status flags are cleared.
fn random<S: System, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let word = sys.random();
    cpu.set_reg::<SIZE>(op.dst, word.unwrap_or(0));
    let carry = if word.is_some() { flags::CF } else { 0 };
    cpu.vcpu.rflags = cpu.vcpu.rflags & !flags::STATUS | carry;
    Ok(())
}

pub(super) fn select<S: System>(insn: &Instruction) -> Option<Choice<S>> {
    match insn.mnemonic() {
        Mnemonic::Rdrand | Mnemonic::Rdseed => {
            Some((by_size!(insn.op0_register().size(), random, S), false))
        }
        _ => None,
    }
}
