//! A translated block: code, how to recover state in it, and where it leads.

use crate::recover::Mark;

/// A direct jump out of a block, by its 32-bit displacement, that can be pointed at another block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// Offset of the displacement in the block's code.
    pub displacement: u32,
    /// GVA it leads to.
    pub target: u64,
    /// RFLAGS.AC at the target, as far as this block knows.
    pub ac: bool,
    /// It is no branch: who gets as far as the jump takes it.
    pub always: bool,
}

/// A jump out of a block to the routine that looks up where it leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JumpLookup {
    /// Offset of the displacement in the block's code.
    pub displacement: u32,
    /// HVA of the routine.
    pub routine: u64,
}

/// Which pages a block of user code is of, among all that there are: not the same page of RAM for each program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Version {
    /// Index of the page its first instruction begins in.
    pub index: u32,
    /// Index of the page behind, where its last instruction ends, if not in the first.
    pub second: Option<u32>,
    /// What a word of [`crate::Layout::verified`] holds if the page may be executed.
    pub generation: u32,
}

/// A translated block.
#[derive(Clone, Debug)]
pub struct Block {
    /// GVA of the first guest instruction.
    pub guest: u64,
    /// Bytes of guest code it was made from.
    pub guest_len: u32,
    /// How many bytes of guest code the translator has looked at: the block's own, and perhaps some behind them.
    pub read: u32,
    /// The virtual RFLAGS.AC it was translated for.
    pub ac: bool,
    /// HVA of the code.
    pub host: u64,
    /// The code.
    pub code: Vec<u8>,
    /// What its links point at while they are unlinked: [`crate::stubs::MISSED_LEN`] bytes each, the last link's first. They lie right before
    /// [`crate::Request::stubs`].
    pub stubs: Vec<u8>,
    /// How to recover state, ascending by host offset.
    pub marks: Vec<Mark>,
    /// Jumps that can be linked.
    pub links: Vec<Link>,
    /// Jumps to computed targets.
    pub lookups: Vec<JumpLookup>,
    /// Offset of the code behind the block's gate (`emit/gate.rs`) or landing (`emit/landing.rs`); zero if the block has neither.
    pub body: u32,
    /// GVA behind the call at its end, and RFLAGS.AC there as far as this block knows.
    pub returns: Option<(u64, bool)>,
}
