//! Processes of the guest whose slots were given to others, and how many slots there may be for that.
//!
//! Nobody tells which processes of a guest are alive. One that comes back after its slot was given away is: there
//! are too few slots then, and filling one again costs milliseconds. So there may be one more each time.

use crate::slots::MAX_SLOTS;
use std::collections::VecDeque;

/// Slots that there may be from the start.
pub(crate) const FEW_SLOTS: usize = 12;
/// Processes that are remembered: who comes back later would not have kept a slot, however many there were.
const REMEMBERED: usize = MAX_SLOTS;

/// Who has lost a slot.
#[derive(Debug)]
pub(crate) struct Evicted {
    /// GPAs of their top page tables, the oldest first.
    roots: VecDeque<u64>,
    most: usize,
    ceiling: usize,
}

impl Default for Evicted {
    fn default() -> Self {
        Self { roots: VecDeque::new(), most: FEW_SLOTS, ceiling: MAX_SLOTS }
    }
}

impl Evicted {
    /// The slot of the process with this top page table is another's now.
    pub(crate) fn note(&mut self, root: u64) {
        if self.roots.len() == REMEMBERED {
            self.roots.pop_front();
        }
        self.roots.push_back(root);
    }

    /// The process with this top page table has no slot. If it had one there may be one more.
    pub(crate) fn come_back(&mut self, root: u64) {
        if let Some(at) = self.roots.iter().position(|known| *known == root) {
            self.roots.remove(at);
            self.most = (self.most + 1).min(self.ceiling);
        }
    }

    /// So many slots there may be.
    pub(crate) fn most(&self) -> usize {
        self.most
    }

    /// There will never be more slots than there may be now.
    pub(crate) fn is_at_ceiling(&self) -> bool {
        self.most == self.ceiling
    }

    /// The host gives no process beyond so many slots.
    pub(crate) fn stay_at(&mut self, slots: usize) {
        (self.most, self.ceiling) = (slots, slots);
    }
}
