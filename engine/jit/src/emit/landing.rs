//! The landing with which a block of the kernel's begins that computed jumps lead to: is it the block for the GVA that is jumped to?
//!
//! A jump that looked its target up before it jumped would need a table of keys and addresses. One that may come to another address's
//! landing needs no keys, so the table is half as long, and a slot of it can be given to another address by one store.

use super::Emitter;
use crate::{
    asm::{plus, spill},
    recover::Fixes,
};
use iced_x86::Register;

/// The GVA that is jumped to, and what the landing looks at, in the first two spill slots.
pub(super) const TARGET: Register = Register::RAX;
pub(super) const WORD: Register = Register::RCX;

impl Emitter<'_> {
    /// Emits the landing, if there are landings. Only addresses in the last 2 GiB have some: the kernel's text and its modules.
    /// Jumps within STAC..CLAC search, so blocks for RFLAGS.AC set have none.
    pub fn landing(&mut self) {
        let negated = i32::try_from(self.request.guest.wrapping_neg());
        let landings = self.layout.landings.filter(|_| !self.ac);
        let (Some(_), Ok(negated @ 1..)) = (landings, negated) else { return };
        self.asm.lea(WORD, plus(TARGET, negated.into()));
        self.let_in();
        self.body = self.asm.len() as u32;
    }

    /// Emits the end of a check: a computed jump is let in if [`WORD`] is zero, and gets the guest's registers back. The check is part of the
    /// jump, so its code belongs to no guest instruction of this block.
    pub(super) fn let_in(&mut self) {
        let meant = self.asm.jrcxz();
        self.asm.jmp(self.stubs.astray);
        self.asm.bind_short(meant);
        let mut fixes = Fixes::default();
        for (index, register) in [TARGET, WORD].into_iter().enumerate() {
            fixes.spilled[index] = Some(register.number() as u8);
        }
        self.mark(false, fixes);
        self.undoes();
        self.asm.load(WORD, spill(1));
        self.asm.load(TARGET, spill(0));
    }
}
