//! How much is mapped, and how much is kept of it.

use super::{super::LARGE, EXECUTE, KERNEL_PAGE, Mappings, PAGE, WRITE};

/// A mapped page: the page's HVA, and then its offset in RAM and its protection.
type MappedPage<'a> = (&'a u64, &'a (u64, u64));

impl Mappings {
    /// What is kept, in entries of all tables.
    pub(in super::super) fn entries(&self) -> usize {
        let pages = self.user.len() + self.kernel.len() + self.large.len();
        let writable = self.writable.len() + self.kernel_writable.len();
        let places = writable + self.copies.len() + self.local.len();
        let others = self.parts.len() + self.empty.len() + self.refused.len();
        pages + self.user.blocks().len() + places + others + self.seen.weight()
    }

    /// Mappings made since the last clearing, or since they were counted.
    pub(in super::super) fn made(&self) -> usize {
        self.made
    }

    /// A mapping is about to be made at an HVA, with this protection.
    pub(in super::super) fn count(&mut self, hva: u64, protection: u64) {
        self.made += 1;
        if protection & KERNEL_PAGE == 0 {
            self.near.note(hva);
        }
    }

    /// So many of the mappings are not pages of the user's, or are cut in two by what is dropped.
    pub(in super::super) fn count_others(&mut self, count: usize) {
        self.others += count;
    }

    /// A page is about to be mapped in the middle of a large mapping: there are three then.
    pub(in super::super) fn count_cut(&mut self) {
        self.made += 2;
        self.others += 2;
    }

    /// Counts the mappings that are left.
    pub(in super::super) fn recount(&mut self) -> usize {
        self.made = self.user_runs() + self.others;
        self.made
    }

    /// Mappings of the user's pages: data that continues what is mapped before it, in RAM as well, is part of the same one.
    fn user_runs(&self) -> usize {
        let continues = |(before, page): (MappedPage<'_>, MappedPage<'_>)| {
            let ((hva, (offset, rights)), (next, (next_offset, next_rights))) = (before, page);
            let data = *rights != 0 && rights & EXECUTE == 0 && rights == next_rights;
            data && *next == hva + PAGE && *next_offset == offset + PAGE
        };
        let pairs = self.user.iter().zip(self.user.iter().skip(1));
        self.user.len() - pairs.filter(|pair| continues(*pair)).count()
    }

    /// The 2 MiB that each of so many of the user's pages lies in, from an HVA onwards and then from the lowest.
    pub(in super::super) fn blocks_from(&self, hva: u64, count: usize) -> Vec<u64> {
        let onwards = self.user.range(hva..).chain(self.user.range(..hva));
        onwards.take(count).map(|(hva, _)| hva & !(LARGE - 1)).collect()
    }

    /// Forgets places of the user's where what was noted is mapped no more.
    pub(in super::super) fn compact(&mut self) {
        let pages = &self.user;
        let mapped = |hva: u64, of: u64, rights: u64| {
            let shown =
                |(offset, protection): &(u64, u64)| *offset == of && protection & rights == rights;
            pages.get(&hva).is_some_and(shown)
        };
        for (places, rights) in [(&mut self.writable, WRITE), (&mut self.copies, 0)] {
            places.retain(|offset, hva| mapped(hva, offset, rights));
        }
    }
}
