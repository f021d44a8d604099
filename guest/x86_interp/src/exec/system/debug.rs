//! MOV to and from debug registers (SDM 17.2).

use crate::{
    cpu::Cpu,
    debug::{dr6, dr7},
    exec::Choice,
    op::Op,
    system::System,
};
use iced_x86::{Instruction, Mnemonic, Register};
use x86::{Fault, control::cr4};

/// The register's index, with DR4 and DR5 as other names of DR6 and DR7.
fn index<S: System>(cpu: &mut Cpu<S>, register: Register) -> Result<usize, Fault> {
    let number = register.number();
    let alias = matches!(number, 4 | 5);
    if number > 7 || alias && cpu.vcpu.cr4 & cr4::DE != 0 {
        return Err(Fault::ud());
    }
    cpu.require_cpl0()?;
    if cpu.vcpu.dr[7] & dr7::GD != 0 {
        return Err(Fault::debug(dr6::BD));
    }
    Ok(if alias { number + 2 } else { number })
}

fn read<S: System>(cpu: &mut Cpu<S>, _: &mut S, op: &Op<S>) -> Result<(), Fault> {
    let value = cpu.vcpu.dr[index(cpu, op.insn.op1_register())?];
    if op.long {
        cpu.set_reg::<8>(op.dst, value);
    } else {
        cpu.set_reg::<4>(op.dst, value);
    }
    Ok(())
}

fn write<S: System>(cpu: &mut Cpu<S>, _: &mut S, op: &Op<S>) -> Result<(), Fault> {
    let register = index(cpu, op.insn.op0_register())?;
    let value = if op.long { cpu.reg::<8>(op.src) } else { cpu.reg::<4>(op.src) };
    if register >= 6 && value >> 32 != 0 {
        return Err(Fault::gp(0));
    }
    cpu.vcpu.dr[register] = match register {
        6 => value & (dr6::HITS | dr6::BD | dr6::BS | dr6::BT) | dr6::ONES,
        7 => value & dr7::WRITABLE | dr7::ONE,
        _ => value,
    };
    cpu.update_watch();
    Ok(())
}

pub(super) fn select<S: System>(insn: &Instruction) -> Option<Choice<S>> {
    Some(match insn.mnemonic() {
        Mnemonic::Mov if insn.op0_register().is_dr() => (write, true),
        Mnemonic::Mov if insn.op1_register().is_dr() => (read, false),
        _ => return None,
    })
}
