//! Taps: the wedge makes a record before the block's first instruction.

use super::Emitter;
use crate::{asm::slot, recover::Fixes};
use wedge_abi::BlockExit;

/// A jump to the exit at a tap.
pub(crate) struct Tapped {
    /// Displacement of the jump.
    displacement: usize,
    /// Offset of the first instruction, where it goes on.
    behind: usize,
}

impl Emitter<'_> {
    /// The block begins with a tap.
    pub fn tap(&mut self) {
        self.mark(true, Fixes::default());
        let displacement = self.asm.jmp(self.stubs.exit);
        self.tapped = Some(Tapped { displacement, behind: self.asm.len() });
    }

    pub(super) fn emit_tap(&mut self) {
        let Some(Tapped { displacement, behind }) = self.tapped.take() else { return };
        let last = std::mem::take(&mut self.guest);
        self.asm.bind(displacement);
        self.mark(true, Fixes::default());
        self.undoes();
        self.asm.store_constant(slot!(exit.operand), self.request.host + behind as u64);
        self.exit(BlockExit::Tap, 0, self.request.guest);
        self.guest = last;
        self.mark(false, Fixes::default());
    }
}
