//! PUSH, POP, LEAVE.

use super::{Emitter, lookup::SoughtAccess};
use crate::{
    asm::{biased, plus, spill, sum},
    recover::Fixes,
    translate::Flow,
};
use iced_x86::{Code, Instruction, MemoryOperand, Register};

/// A word that is pushed.
const WORD: SoughtAccess = SoughtAccess { bytes: 8, write: true };

impl Emitter<'_> {
    pub(super) fn push(&mut self, insn: &Instruction) -> Flow {
        match (insn.code(), self.looks_all_up()) {
            (Code::Push_rm64, _) => {
                if self.load_into_rax(insn).is_none() {
                    return self.call_out(insn);
                }
                self.asm.store_mem(biased(Register::RSP, -8), Register::RAX);
                self.asm.load(Register::RAX, spill(0));
            }
            (_, Some(table)) => {
                self.push_looked_up(table, insn, |e, top| e.store_pushed(insn, top));
            }
            (_, None) => self.store_pushed(insn, biased(Register::RSP, -8)),
        }
        self.lower_stack();
        Flow::On
    }

    /// Stores a register or a constant.
    fn store_pushed(&mut self, insn: &Instruction, top: MemoryOperand) {
        match insn.code() {
            Code::Push_r64 => self.asm.store_mem(top, insn.op0_register()),
            _ => self.asm.store_mem_imm(top, insn.immediate(0) as i32),
        }
    }

    pub(super) fn pop(&mut self, insn: &Instruction) -> Flow {
        let into = insn.op0_register();
        if let Some(table) = self.looks_all_up() {
            let pair = self.scratch_but(insn, &[Register::RCX]);
            let top = plus(Register::RSP, 0);
            let read = SoughtAccess { write: false, ..WORD };
            self.look_up_operand(table, read, pair, |e| e.asm.lea(pair[0], top));
            self.asm.load_mem(into, sum(pair[0], pair[1]));
            self.give_back(pair);
        } else {
            self.asm.load_mem(into, biased(Register::RSP, 0));
        }
        if into != Register::RSP {
            self.raise_stack(8);
        }
        Flow::On
    }

    pub(super) fn leave(&mut self) -> Flow {
        self.load_word_at(Register::RBP);
        self.asm.lea(Register::RSP, plus(Register::RBP, 8));
        self.asm.mov(Register::RBP, Register::RAX);
        self.asm.load(Register::RAX, spill(0));
        Flow::On
    }

    /// Loads the word at the address in a register, RSP or RBP, into RAX, which is put aside.
    pub(super) fn load_word_at(&mut self, at: Register) {
        if let Some(table) = self.looks_all_up() {
            let pair = [Register::RDX, Register::RSI];
            self.look_word_up(table, pair, |e| e.asm.lea(pair[0], plus(at, 0)));
            return;
        }
        let mut fixes = Fixes::default();
        self.put_aside(&mut fixes, 0, Register::RAX);
        self.asm.load_mem(Register::RAX, biased(at, 0));
    }

    /// Pushes the return address of a direct call by a look-up.
    pub(super) fn push_return_looked_up(&mut self, table: u64, insn: &Instruction) {
        let next = insn.next_ip();
        self.push_looked_up(table, insn, |e, top| {
            e.load_guest_address(Register::RCX, next);
            e.asm.store_mem(top, Register::RCX);
        });
        self.asm.load(Register::RCX, spill(0));
        self.lower_stack();
    }

    /// Has `store` emit a store to the word below the stack, which is looked up. RSP stays.
    fn push_looked_up(
        &mut self,
        table: u64,
        insn: &Instruction,
        store: impl FnOnce(&mut Self, MemoryOperand),
    ) {
        let pair = self.scratch_but(insn, &[Register::RCX]);
        self.look_up_operand(table, WORD, pair, |e| e.asm.lea(pair[0], plus(Register::RSP, -8)));
        store(self, sum(pair[0], pair[1]));
        self.give_back(pair);
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
