//! The gate with which a block of user code begins: may its pages be executed in the address space that runs?
//!
//! Translations outlive what page tables say, and processes share them. So there is a word for each page of code, at which the gate
//! looks. Jumps within a page go past the gate.

use super::Emitter;
use crate::{
    Version,
    asm::{plus, spill},
    recover::Fixes,
};
use iced_x86::Register;
use wedge_abi::BlockExit;

/// Put aside while the gate looks at words.
const WORD: Register = Register::RCX;

impl Emitter<'_> {
    /// Emits the gate of a block, if pages of code have words.
    pub fn gate(&mut self, version: Version) {
        let Some(table) = self.layout.verified else { return };
        self.mark(true, Fixes::default());
        let mut fixes = Fixes::default();
        self.put_aside(&mut fixes, 0, WORD);
        self.undoes();
        for index in [Some(version.index), version.second].into_iter().flatten() {
            self.asm.load_hva(WORD, table + u64::from(index) * 8);
            self.asm.lea(WORD, plus(WORD, -i64::from(version.generation)));
            let open = self.asm.jrcxz();
            self.gates.push(self.asm.jmp(self.stubs.exit));
            self.asm.bind_short(open);
        }
        self.asm.load(WORD, spill(0));
        self.body = self.asm.len() as u32;
    }

    /// Leaves for the wedge, which looks at the page tables, with the state at the start of the block.
    pub(super) fn emit_gates(&mut self) {
        if self.gates.is_empty() {
            return;
        }
        let last = std::mem::take(&mut self.guest);
        for gate in std::mem::take(&mut self.gates) {
            self.asm.bind(gate);
        }
        let mut fixes = Fixes::default();
        fixes.spilled[0] = Some(WORD.number() as u8);
        self.mark(false, fixes);
        self.undoes();
        self.asm.load(WORD, spill(0));
        self.exit(BlockExit::Miss, 0, self.request.guest);
        self.guest = last;
        self.mark(false, Fixes::default());
    }
}
