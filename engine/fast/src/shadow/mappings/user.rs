//! The pages that are mapped for user code, and the number of them in each 2 MiB of addresses and its parts.
//!
//! A comparison with page tables goes from one page table to the next. A page table is for 2 MiB, and most of memory has
//! no pages. To search all pages for the next 2 MiB that has any would take as long as to compare, so the 2 MiB that have
//! pages are kept in a list of their own.

use super::{
    super::{
        LARGE,
        seen::{PARTS, PageBlock},
    },
    MappedPages,
};
use std::{
    collections::BTreeMap,
    ops::{Deref, RangeBounds},
};

/// The user's pages. They are read as a map, and changed by methods.
#[derive(Default)]
pub(super) struct UserPages {
    pages: MappedPages,
    /// How many there are in each part of each 2 MiB that have any, by first HVA.
    blocks: BTreeMap<u64, [u8; PARTS]>,
}

impl Deref for UserPages {
    type Target = MappedPages;

    fn deref(&self) -> &MappedPages {
        &self.pages
    }
}

impl UserPages {
    /// The 2 MiB in which there are pages, ascending.
    pub(super) fn blocks(&self) -> impl ExactSizeIterator<Item = PageBlock> {
        self.blocks.iter().map(|(start, counts)| {
            let pages = counts.iter().map(|count| usize::from(*count)).sum();
            let bit = |part: usize| u8::from(counts[part] != 0) << part;
            PageBlock { start: *start, pages, parts: (0..PARTS).map(bit).sum() }
        })
    }

    pub(super) fn insert(&mut self, hva: u64, page: (u64, u64)) {
        if self.pages.insert(hva, page).is_none() {
            self.blocks.entry(block(hva)).or_default()[part_of(hva)] += 1;
        }
    }

    pub(super) fn remove(&mut self, hva: u64) {
        if self.pages.remove(&hva).is_some() {
            self.count_out(hva);
        }
    }

    /// Removes what is in a range.
    pub(super) fn remove_range(&mut self, start: u64, len: u64) {
        let gone: Vec<_> = self.pages.range(start..start + len).map(|(hva, _)| *hva).collect();
        gone.into_iter().for_each(|hva| self.remove(hva));
    }

    fn count_out(&mut self, hva: u64) {
        let start = block(hva);
        if let Some(counts) = self.blocks.get_mut(&start) {
            counts[part_of(hva)] -= 1;
            if *counts == [0; PARTS] {
                self.blocks.remove(&start);
            }
        }
    }

    /// Changes the protection of a page, if it is there.
    pub(super) fn protect(&mut self, hva: u64, change: impl FnOnce(u64) -> u64) {
        self.pages.entry(hva).and_modify(|(_, protection)| *protection = change(*protection));
    }

    /// Changes what is in a range, in ascending order.
    pub(super) fn range_mut(
        &mut self,
        range: impl RangeBounds<u64>,
    ) -> impl Iterator<Item = (&u64, &mut (u64, u64))> {
        self.pages.range_mut(range)
    }

    pub(super) fn clear(&mut self) {
        self.pages.clear();
        self.blocks.clear();
    }
}

/// The first HVA of the 2 MiB around one.
fn block(hva: u64) -> u64 {
    hva & !(LARGE - 1)
}

/// The part of its 2 MiB that an HVA is in.
fn part_of(hva: u64) -> usize {
    (hva % LARGE) as usize / (LARGE as usize / PARTS)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(user: &UserPages) -> Vec<(u64, usize, u8)> {
        user.blocks().map(|PageBlock { start, pages, parts }| (start, pages, parts)).collect()
    }

    #[test]
    fn pages_are_counted_by_what_they_lie_in() {
        let mut user = UserPages::default();
        for page in [0, 0x1000, 0x1000, LARGE - 0x1000, 3 * LARGE, 5 * LARGE] {
            user.insert(page, (page, 1));
        }
        assert_eq!(blocks(&user), [(0, 3, 0x81), (3 * LARGE, 1, 1), (5 * LARGE, 1, 1)]);
        [0, 0x2000, 3 * LARGE, 3 * LARGE].into_iter().for_each(|page| user.remove(page));
        assert_eq!(blocks(&user), [(0, 2, 0x81), (5 * LARGE, 1, 1)]);
        user.remove_range(LARGE - 0x1000, 4 * LARGE);
        assert_eq!(blocks(&user), [(0, 1, 1), (5 * LARGE, 1, 1)]);
        user.protect(0x1000, |protection| protection | 2);
        assert_eq!(user.get(&0x1000), Some(&(0x1000, 3)));
        user.clear();
        assert_eq!((blocks(&user), user.len()), (vec![], 0));
    }
}
