//! The kernel's mappings that are not global.
//!
//! A kernel has its own memory in all spaces and marks it global, for flushes to leave it alone. Linux does
//! not for pages of its direct map that modules and BPF programs have had: their rights were taken away for a
//! while, and the mark does not come back with them. There are some dozen of them, and any may be a page
//! table or a stack that every fork touches; were everything of a space dropped for one of them, each flush
//! would cost what a new space does. So it is known which they are, a flush drops them alone, and where the
//! new page tables are at hand, only what these do not say any more: a TLB may have loaded the same again at
//! once.
//!
//! Why none is forgotten: a mapping is noted when it is ordered, by where it lies and how long it is, and its
//! note goes only with the mapping, and with whatever is mapped in its place. The model in `tests/shadow` has
//! such pages, small and large.

use std::collections::BTreeSet;

/// The mappings, by HVA and bytes; what they show is known where all mappings are.
#[derive(Default)]
pub(super) struct Locals(BTreeSet<(u64, u64)>);

impl Locals {
    /// One is made.
    pub(super) fn add(&mut self, hva: u64, len: u64) {
        self.0.insert((hva, len));
    }

    /// There is one just there.
    pub(super) fn has(&self, hva: u64, len: u64) -> bool {
        self.0.contains(&(hva, len))
    }

    /// First HVA and bytes of each, ascending.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, u64)> {
        self.0.iter().copied()
    }

    /// What is in a range of HVAs is gone.
    pub(super) fn forget(&mut self, start: u64, len: u64) {
        let inside = |(at, bytes): &(u64, u64)| at + bytes <= start + len;
        self.0.extract_if((start, 0)..(start + len, 0), inside).for_each(drop);
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}
