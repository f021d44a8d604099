//! Control transfers. Direct ones are linked; indirect ones and returns look their target up.

use super::Emitter;
use crate::{
    asm::{biased, spill},
    recover::Fixes,
    translate::Flow,
};
use iced_x86::{Instruction, Register};

impl Emitter<'_> {
    pub(super) fn jump(&mut self, insn: &Instruction) -> Flow {
        self.go_on(insn.near_branch_target());
        Flow::Ends
    }

    /// Taken leaves the block, not taken goes on in it.
    pub(super) fn conditional(&mut self, insn: &Instruction) -> Flow {
        let condition = insn.condition_code() as u8 - 1;
        let displacement = self.asm.jcc(condition, self.layout.cache);
        self.link(displacement, insn.near_branch_target());
        Flow::On
    }

    pub(super) fn call(&mut self, insn: &Instruction) -> Flow {
        if !self.push_return(insn) {
            return self.call_out(insn);
        }
        self.go_on(insn.near_branch_target());
        Flow::Ends
    }

    /// The guest return address, which is a constant of the top 2 GiB.
    fn push_return(&mut self, insn: &Instruction) -> bool {
        let Ok(next) = i32::try_from(insn.next_ip() as i64) else { return false };
        self.asm.store_mem_imm(biased(Register::RSP, -8), next);
        self.lower_stack();
        true
    }

    pub(super) fn call_indirect(&mut self, insn: &Instruction, _bytes: &[u8]) -> Flow {
        if i32::try_from(insn.next_ip() as i64).is_err() || !self.load_target(insn) {
            return self.call_out(insn);
        }
        self.push_return(insn);
        self.look_up();
        Flow::Ends
    }

    pub(super) fn jump_indirect(&mut self, insn: &Instruction, _bytes: &[u8]) -> Flow {
        if !self.load_target(insn) {
            return self.call_out(insn);
        }
        self.look_up();
        Flow::Ends
    }

    /// The target into RAX, which is put aside. On failure nothing is changed.
    fn load_target(&mut self, insn: &Instruction) -> bool {
        let mut fixes = Fixes::default();
        self.put_aside(&mut fixes, 0, Register::RAX);
        if self.load_operand(insn, Register::RAX) {
            return true;
        }
        self.asm.load(Register::RAX, spill(0));
        false
    }

    pub(super) fn ret(&mut self, insn: &Instruction) -> Flow {
        let arguments = if insn.op_count() == 1 { i64::from(insn.immediate16()) } else { 0 };
        let mut fixes = Fixes::default();
        self.put_aside(&mut fixes, 0, Register::RAX);
        self.asm.load_mem(Register::RAX, biased(Register::RSP, 0));
        self.raise_stack(8 + arguments);
        self.look_up();
        Flow::Ends
    }
}
