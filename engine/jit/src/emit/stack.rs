//! PUSH, POP, LEAVE.

use super::Emitter;
use crate::{
    asm::{biased, plus, spill},
    recover::Fixes,
    translate::Flow,
};
use iced_x86::{Code, Instruction, Register};

impl Emitter<'_> {
    pub(super) fn push(&mut self, insn: &Instruction) -> Flow {
        let top = biased(Register::RSP, -8);
        match insn.code() {
            Code::Push_r64 => self.asm.store_mem(top, insn.op0_register()),
            Code::Push_rm64 => {
                let mut fixes = Fixes::default();
                self.put_aside(&mut fixes, 0, Register::RAX);
                if !self.load_operand(insn, Register::RAX) {
                    self.asm.load(Register::RAX, spill(0));
                    return self.call_out(insn);
                }
                self.asm.store_mem(top, Register::RAX);
                self.asm.load(Register::RAX, spill(0));
            }
            _ => self.asm.store_mem_imm(top, insn.immediate(0) as i32),
        }
        self.lower_stack();
        Flow::On
    }

    pub(super) fn pop(&mut self, insn: &Instruction) -> Flow {
        let into = insn.op0_register();
        self.asm.load_mem(into, biased(Register::RSP, 0));
        if into != Register::RSP {
            self.raise_stack(8);
        }
        Flow::On
    }

    pub(super) fn leave(&mut self) -> Flow {
        let mut fixes = Fixes::default();
        self.put_aside(&mut fixes, 0, Register::RAX);
        self.asm.load_mem(Register::RAX, biased(Register::RBP, 0));
        self.asm.lea(Register::RSP, plus(Register::RBP, 8));
        self.asm.mov(Register::RBP, Register::RAX);
        self.asm.load(Register::RAX, spill(0));
        Flow::On
    }

    /// RSP -= 8, without flags.
    pub(super) fn lower_stack(&mut self) {
        self.asm.lea(Register::RSP, plus(Register::RSP, -8));
    }

    /// RSP += `bytes`, without flags.
    pub(super) fn raise_stack(&mut self, bytes: i64) {
        self.asm.lea(Register::RSP, plus(Register::RSP, bytes));
    }
}
