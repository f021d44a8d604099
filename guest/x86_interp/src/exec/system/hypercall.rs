//! VMCALL and VMMCALL: calls of the guest's kernel to the machine, where it offers any.
//!
//! Both makers' instructions are taken, as KVM does: code may have been built for either.

use crate::{
    cpu::Cpu,
    exec::Choice,
    op::{Op, RegRef, mask},
    system::System,
};
use iced_x86::{Instruction, Mnemonic};
use x86::{Fault, reg};

const RAX: RegRef = RegRef { index: reg::RAX as u8, shift: 0 };

fn hypercall<S: System>(cpu: &mut Cpu<S>, sys: &mut S, _: &Op<S>) -> Result<(), Fault> {
    let (long, kernel) = (cpu.vcpu.is_64bit(), cpu.vcpu.cpl() == 0);
    let get = |register: usize| {
        let value = cpu.vcpu.gpr[register];
        if long { value } else { value & mask::<4>() }
    };
    let arguments = [reg::RBX, reg::RCX, reg::RDX, reg::RSI].map(get);
    let answer = sys.hypercall(kernel, get(reg::RAX), arguments).ok_or(Fault::ud())?;
    if long {
        cpu.set_reg::<8>(RAX, answer)
    } else {
        cpu.set_reg::<4>(RAX, answer)
    }
    Ok(())
}

pub(super) fn select<S: System>(insn: &Instruction) -> Option<Choice<S>> {
    matches!(insn.mnemonic(), Mnemonic::Vmcall | Mnemonic::Vmmcall).then_some((hypercall, true))
}
