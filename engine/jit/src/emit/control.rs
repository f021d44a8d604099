//! Control registers and translations: what the vCPU page knows, and what the wedge can do.

use super::Emitter;
use crate::{
    asm::{slot, spill},
    recover::Fixes,
    translate::Flow,
};
use iced_x86::{Instruction, Register};
use wedge_abi::BlockExit;

impl Emitter<'_> {
    pub(super) fn read_control(&mut self, insn: &Instruction) -> Flow {
        let page_fault = insn.op1_register() == Register::CR2;
        let slot = if page_fault { slot!(regs.cr2) } else { slot!(regs.cr3) };
        self.asm.load(insn.op0_register().full_register(), slot);
        Flow::On
    }

    pub(super) fn invalidate_page(&mut self, insn: &Instruction) -> Flow {
        self.with_address(insn, BlockExit::InvalidatePage)
    }

    pub(super) fn load_space(&mut self, insn: &Instruction) -> Flow {
        self.asm.store(slot!(exit.operand), insn.op1_register());
        self.exit_before(insn, BlockExit::LoadSpace)
    }

    pub(super) fn system_call(&mut self, insn: &Instruction) -> Flow {
        self.exit_before(insn, BlockExit::SystemCall)
    }

    /// Has the wedge do something with the address of the instruction's operand.
    pub(super) fn with_address(&mut self, insn: &Instruction, kind: BlockExit) -> Flow {
        let mut fixes = Fixes::default();
        self.put_aside(&mut fixes, 0, Register::RAX);
        self.effective_address(insn, Register::RAX);
        self.asm.store(slot!(exit.operand), Register::RAX);
        self.asm.load(Register::RAX, spill(0));
        self.exit_before(insn, kind)
    }

    /// Exits at an instruction that the wedge may do and go on behind.
    pub(super) fn exit_before(&mut self, insn: &Instruction, kind: BlockExit) -> Flow {
        self.asm.store_constant(slot!(exit.next), insn.next_ip());
        self.exit(kind, insn.code() as u32, insn.ip());
        Flow::Ends
    }
}
