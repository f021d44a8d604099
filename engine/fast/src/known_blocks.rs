//! Blocks of a kernel's code that an earlier machine with the same kernel has run.
//!
//! A block that is not there costs a turn of the monitor, which takes longer than to translate it. A kernel starts in
//! the same way each time, so with the first block of a page that is asked for those are made that were run in this
//! page before. As it starts, a kernel writes to its own code, and what it runs in a page before that is not what it
//! runs behind it: a block is known with the number of times that the blocks of its page had been dropped.
//!
//! What is known may be wrong: then blocks are made that nobody runs.

use std::sync::{Mutex, PoisonError};

/// The kernel's text, its modules and its packet filters lie from here on (Linux, x86_64/mm.rst).
const START: u64 = 0xffff_ffff_0000_0000;
/// The most blocks that are noted: as many as three starts of a kernel of Debian's make.
const MOST: usize = 3 << 16;
const PAGE_BITS: u32 = 12;
/// The lowest bit of the page in an [`Entry`], and that of the number of drops.
const PAGE: u32 = 32;
const TIMES: u32 = 16;

/// A block, packed into a number. The fields from the highest bit on:
///
/// - 20 bits: the low bits of the number of the page that the block begins in (GVA);
/// - 16 bits: how often blocks of that page had been dropped when the block was made;
/// - 3 zeros;
/// - 12 bits: the block's offset in the page;
/// - 1 bit: the value of RFLAGS.AC that the block was made for.
type Entry = u64;

/// Blocks of kernel code that a machine knows, or that it notes for later machines.
#[derive(Debug, Default)]
pub struct KnownBlocks {
    /// The blocks that the machine knows, in ascending order.
    known: Vec<Entry>,
    /// The blocks that the machine has made, if it notes them.
    noted: Option<Mutex<Vec<Entry>>>,
}

impl KnownBlocks {
    /// For a machine that knows no blocks, and notes those that it makes.
    #[must_use]
    pub fn to_note() -> Self {
        Self { known: Vec::new(), noted: Some(Mutex::default()) }
    }

    /// For a machine that knows the blocks that another machine has noted.
    #[must_use]
    pub fn of(mut known: Vec<u64>) -> Self {
        known.sort_unstable();
        Self { known, noted: None }
    }

    /// The blocks that have been noted, in ascending order.
    #[must_use]
    pub fn noted(&self) -> Vec<u64> {
        let Some(noted) = &self.noted else { return Vec::new() };
        let mut noted = noted.lock().unwrap_or_else(PoisonError::into_inner).clone();
        noted.sort_unstable();
        noted.dedup();
        noted
    }

    /// The machine knows no blocks.
    pub(crate) fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// Notes a block that has been made at a GVA for a value of RFLAGS.AC, after blocks of its page were dropped so many `times`.
    pub(crate) fn note(&self, (gva, ac): (u64, bool), times: u16) {
        let Some(noted) = self.noted.as_ref().filter(|_| gva >= START) else { return };
        let mut noted = noted.lock().unwrap_or_else(PoisonError::into_inner);
        if noted.len() < MOST {
            noted.push(entry((gva, ac), times));
        }
    }

    /// The known blocks of the page at a GVA that were made after blocks of this page had been dropped so many `times`.
    pub(crate) fn of_page(&self, page: u64, times: u16) -> impl Iterator<Item = (u64, bool)> {
        let first = if page < START { Entry::MAX } else { entry((page, false), times) };
        let from = self.known.partition_point(|entry| *entry < first);
        let rest = self.known.iter().skip(from);
        let same = move |entry: &&Entry| **entry >> TIMES == first >> TIMES;
        rest.take_while(same).map(move |entry| (page | entry >> 1 & 0xfff, entry & 1 != 0))
    }
}

fn entry((gva, ac): (u64, bool), times: u16) -> Entry {
    let page = gva >> PAGE_BITS & 0xf_ffff;
    let offset = gva & ((1 << PAGE_BITS) - 1);
    page << PAGE | u64::from(times) << TIMES | offset << 1 | u64::from(ac)
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: u64 = 0xffff_ffff_8123_4000;

    #[test]
    fn a_page_has_its_blocks_of_the_same_times_in_order() {
        let noting = KnownBlocks::to_note();
        let made = [(A + 0xfff, true), (A + 0xfff, false), (A, false), (A + 0x1000, false)];
        for times in [0, 1, u16::MAX] {
            made.iter().skip(usize::from(times) % 3).for_each(|block| noting.note(*block, times));
        }
        noting.note(made[2], 0);
        noting.note((0xffff_8880_0000_0000, false), 0);
        let noted = noting.noted();
        assert_eq!(noted.len(), 4 + 3 + 4, "no block twice, and none of elsewhere");
        let known = KnownBlocks::of(noted);
        let of = |page, times| known.of_page(page, times).collect::<Vec<_>>();
        assert_eq!(of(A, 0), [made[2], made[1], made[0]]);
        assert_eq!(of(A, 1), [made[2], made[1]]);
        assert_eq!(of(A + 0x1000, u16::MAX), [made[3]]);
        assert!(of(A, 2).is_empty() && of(A - 0x1000, 0).is_empty());
        assert!(of(A & 0xffff_ffff, 0).is_empty(), "another half");
    }

    #[test]
    fn what_is_known_is_not_noted() {
        let known = KnownBlocks::of(vec![entry((A, false), 0)]);
        known.note((A + 1, false), 0);
        assert!(known.noted().is_empty());
    }
}
