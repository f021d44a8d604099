//! The gate with which a block of user code begins: may its pages be executed in the address space that runs?
//!
//! Translations outlive what page tables say, and processes share them. So there is a word for each page of code, at which the gate
//! looks. Jumps within a page go past the gate.
//!
//! A block for a place has a head before its gate. Computed jumps have looked for an address, by what some other process has found
//! there, so the head asks whether the block's place is at that address now.

use super::{
    Emitter,
    landing::{TARGET, WORD},
};
use crate::{
    Version,
    asm::{plus, spill},
    recover::Fixes,
};
use iced_x86::{Code, Instruction, MemoryOperand, Register};
use wedge_abi::{BlockExit, HEAD_LEN, distance, is_place, text_of};

impl Emitter<'_> {
    /// Emits the gate of a block, if pages of code have words.
    pub fn gate(&mut self, version: Version) {
        let Some(table) = self.layout.verified else { return };
        if let Some(origins) = self.layout.origins {
            self.head(origins);
        }
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

    /// Emits the head of the block: its place, and a check whether a computed jump leads to that place.
    fn head(&mut self, origins: u64) {
        let here = self.request.guest;
        self.asm.raw(&here.to_le_bytes());
        self.asm.load_hva(WORD, origin_at(origins, here));
        self.asm.reg1(Code::Not_rm64, WORD);
        let beyond = 1 - distance(here);
        self.asm
            .lea(WORD, MemoryOperand::with_base_index_scale_displ_size(TARGET, WORD, 1, beyond, 8));
        self.let_in();
        self.asm.op(Code::Nopd);
        debug_assert_eq!(self.asm.len() as u64, HEAD_LEN);
    }

    /// The GVA that is known to the translator as `guest`, into a register, without flags.
    ///
    /// # Panics
    /// If `guest` is a place out of reach. Operands are asked about before ([`Emitter::is_out_of_reach`]), and code lies within reach.
    pub(super) fn load_guest_address(&mut self, to: Register, guest: u64) {
        match self.layout.origins.filter(|_| is_place(guest)) {
            Some(origins) => {
                self.asm.load_hva(to, origin_at(origins, guest));
                self.asm.lea(to, plus(to, distance(guest)));
            }
            None => self.asm.mov_imm(to, guest),
        }
    }

    /// Translated code cannot compute the address of the instruction's operand. It is farther than a displacement reaches, or relative
    /// to EIP, where a place has no room.
    pub(super) fn is_out_of_reach(&self, insn: &Instruction) -> bool {
        let relative = insn.is_ip_rel_memory_operand() && self.layout.origins.is_some();
        relative
            && (insn.memory_base() == Register::EIP || !is_reached(insn.ip_rel_memory_address()))
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

/// HVA of the word that holds the origin (GVA) of the text that a place is in.
fn origin_at(origins: u64, place: u64) -> u64 {
    origins + text_of(place) as u64 * 8
}

/// A place is near enough to its origin for a displacement.
fn is_reached(place: u64) -> bool {
    i32::try_from(distance(place)).is_ok()
}
