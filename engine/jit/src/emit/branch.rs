//! Control transfers. Direct ones are linked; indirect ones and returns look their target up.

use super::Emitter;
use crate::{
    asm::{biased, slot, spill},
    recover::Fixes,
    rules::Level,
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
        self.keep_in_one_word(2);
        let displacement = self.asm.jcc(condition, self.layout.cache);
        self.link(displacement, insn.near_branch_target(), false);
        Flow::On
    }

    pub(super) fn call(&mut self, insn: &Instruction) -> Flow {
        match self.looks_all_up() {
            Some(table) => {
                self.returns = Some(insn.next_ip());
                self.push_return_looked_up(table, insn);
            }
            None => self.push_return(insn, Fixes::default()),
        }
        self.go_on(insn.near_branch_target());
        Flow::Ends
    }

    /// The guest return address: a constant of the top 2 GiB in most kernels, or any. `fixes` are those
    /// that hold here; the second spill slot is free.
    fn push_return(&mut self, insn: &Instruction, mut fixes: Fixes) {
        let (next, top) = (insn.next_ip(), biased(Register::RSP, -8));
        self.returns = Some(next);
        if let Ok(near) = i32::try_from(next as i64) {
            self.asm.store_mem_imm(top, near);
        } else {
            self.put_aside(&mut fixes, 1, Register::RCX);
            self.load_guest_address(Register::RCX, next);
            self.asm.store_mem(top, Register::RCX);
            self.asm.load(Register::RCX, spill(1));
        }
        self.lower_stack();
    }

    pub(super) fn call_indirect(&mut self, insn: &Instruction, _bytes: &[u8]) -> Flow {
        let Some(fixes) = self.load_into_rax(insn) else { return self.call_out(insn) };
        self.note_jump(insn);
        self.push_return(insn, fixes);
        self.look_up();
        Flow::Ends
    }

    pub(super) fn jump_indirect(&mut self, insn: &Instruction, _bytes: &[u8]) -> Flow {
        if self.load_into_rax(insn).is_none() {
            return self.call_out(insn);
        }
        self.note_jump(insn);
        self.look_up();
        Flow::Ends
    }

    /// A jump of a program's may lead to what is no address, and then faults itself: notes where it is,
    /// and RSP.
    fn note_jump(&mut self, insn: &Instruction) {
        if self.layout.level == Level::User {
            self.asm.store_constant(slot!(exit.next), insn.ip());
            self.asm.store(spill(3), Register::RSP);
        }
    }

    pub(super) fn ret(&mut self, insn: &Instruction) -> Flow {
        let arguments = if insn.op_count() == 1 { i64::from(insn.immediate16()) } else { 0 };
        self.load_word_at(Register::RSP);
        self.note_jump(insn);
        self.raise_stack(8 + arguments);
        self.look_up();
        Flow::Ends
    }
}
