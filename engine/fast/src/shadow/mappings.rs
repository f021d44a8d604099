//! What is mapped in a wedge, as far as the monitor knows.
//!
//! These are books: nothing here reaches the wedge, so what is written down can be read, and counted, without asking
//! who has ordered what. Whoever orders a mapping writes it down first. What the wedge maps by itself it tells, and
//! `reports` writes that down. `count` says how much there is.
//!
//! The fields are this module's alone. Others read through methods, and a change of more than one table is one method,
//! so that no two tables can come to say different things.

mod count;
mod reports;
mod user;

use super::{
    EMPTY, EXECUTE, KERNEL_PAGE, LARGE_BITS, LARGE_PAGES, PAGE, Place, READ, WRITE,
    local::Locals,
    near::NearSites,
    part,
    places::Places,
    seen::{PageBlock, SeenTables},
};
use crate::regions::{Regions, extent};
use rustc_hash::FxHashSet;
use std::{collections::BTreeMap, ops::Range};
use user::UserPages;
use x86::paging::Translation;

/// Mappings of one page each, by HVA: offset in RAM, and protection.
pub(super) type MappedPages = BTreeMap<u64, (u64, u64)>;

/// A mapping larger than a page.
#[derive(Clone, Copy, Debug)]
pub(super) struct Large {
    /// Bytes.
    pub(super) len: u64,
    /// Where its memory begins in RAM.
    pub(super) offset: u64,
    pub(super) writable: bool,
    pub(super) protection: u64,
}

/// What is mapped.
#[derive(Default)]
pub(super) struct Mappings {
    /// Mappings made since the last clearing, or since they were counted.
    made: usize,
    /// So many of them are not in `user`.
    others: usize,
    /// The user's pages. The protection is zero where one is closed and left.
    user: UserPages,
    /// The kernel's pages.
    kernel: MappedPages,
    /// Large mappings by HVA.
    large: BTreeMap<u64, Large>,
    /// The guest's large pages that are mapped in pieces, by first HVA and bytes: a flush of any part of
    /// one drops all.
    parts: FxHashSet<(u64, u64)>,
    /// The HVA of the last byte of the highest large kernel page that has ever been in `parts`.
    last_of_parts: Option<u64>,
    /// Where RAM pages (by offset) are mapped writable one by one, as pages of the user's: HVAs.
    writable: Places,
    /// The same of the kernel's pages. Their number grows, so they are kept apart: to drop the user's places must not take longer and
    /// longer.
    kernel_writable: Places,
    /// Where changed copies of RAM pages (by offset) are mapped as pages of the user's: HVAs.
    copies: Places,
    /// Regions with anything of the user's in them.
    user_regions: Regions,
    /// The kernel's mappings that are not global.
    local: Locals,
    /// See [`Self::has_user_large`].
    user_large: bool,
    /// RAM pages (by offset) that memory without content may stand for.
    empty: FxHashSet<u64>,
    /// Pages that the wedge has refused to have executed since they were last asked for: HVAs.
    refused: FxHashSet<u64>,
    /// What the program has near the table of patched system calls.
    near: NearSites,
    /// What the user's pages were last compared with.
    seen: SeenTables,
}

impl Mappings {
    pub(super) fn user(&self) -> &MappedPages {
        &self.user
    }

    /// The 2 MiB in which there are pages of the user's, ascending.
    pub(super) fn user_blocks(&self) -> impl Iterator<Item = PageBlock> {
        self.user.blocks()
    }

    pub(super) fn kernel(&self) -> &MappedPages {
        &self.kernel
    }

    pub(super) fn large(&self) -> &BTreeMap<u64, Large> {
        &self.large
    }

    pub(super) fn local(&self) -> &Locals {
        &self.local
    }

    pub(super) fn parts(&self) -> &FxHashSet<(u64, u64)> {
        &self.parts
    }

    /// The HVA of the last byte of the highest large kernel page that has ever been mapped in pieces.
    pub(super) fn last_of_parts(&self) -> Option<u64> {
        self.last_of_parts
    }

    pub(super) fn near(&self) -> &NearSites {
        &self.near
    }

    pub(super) fn near_mut(&mut self) -> &mut NearSites {
        &mut self.near
    }

    /// Each INVLPG is the monitor's to do. A part of a large page of the user's is mapped, and the wedge cannot take away the whole
    /// page: the page is larger than 2 MiB, or not all of its addresses may hold guest pages.
    pub(super) fn has_user_large(&self) -> bool {
        self.user_large
    }

    /// See [`Self::has_user_large`].
    pub(super) fn note_odd_large(&mut self) {
        self.user_large = true;
    }

    /// A changed copy of a RAM page has been mapped at an HVA.
    pub(super) fn has_copy(&self, offset: u64, hva: u64) -> bool {
        self.copies.has(offset, hva)
    }

    /// Offset in RAM of what is mapped at a user page (HVA), if user code may execute that.
    pub(super) fn executed(&self, hva: u64) -> Option<u64> {
        let (offset, rights) = self.user.get(&hva)?;
        (rights & EXECUTE != 0).then_some(*offset)
    }

    /// Something of the kernel's is mapped at the page of an HVA, or in pieces around it.
    pub(super) fn shows_kernel(&self, hva: u64) -> bool {
        let is_part = |bits: &u32| self.parts.contains(&part(hva, *bits));
        self.kernel.contains_key(&(hva & !(PAGE - 1)))
            || self.large_at(hva).is_some()
            || LARGE_PAGES.iter().any(is_part)
    }

    /// The large mapping around an HVA.
    pub(super) fn large_at(&self, hva: u64) -> Option<(u64, Large)> {
        let (start, large) = self.large.range(..=hva).next_back()?;
        (hva - start < large.len).then_some((*start, *large))
    }

    /// Large mappings that reach into a range and out of it: first HVA and bytes.
    pub(super) fn partly_covered(&self, hva: u64, len: u64) -> Vec<(u64, u64)> {
        let partly = |(at, l): (&u64, &Large)| {
            let (start, end) = (*at, at + l.len);
            let apart = end <= hva || start >= hva + len;
            let covered = start >= hva && end <= hva + len;
            (!apart && !covered).then_some((start, l.len))
        };
        self.large.iter().filter_map(partly).collect()
    }

    /// Where large mappings show the RAM page at this offset writable: HVAs.
    pub(super) fn written_through_large(&self, offset: u64) -> Vec<u64> {
        let within = |l: &Large| l.writable && offset.wrapping_sub(l.offset) < l.len;
        let large = self.large.iter().filter(|(_, l)| within(l));
        large.map(|(hva, l)| hva + (offset - l.offset)).collect()
    }

    /// Something is about to be mapped at a place because of a translation.
    pub(super) fn note(&mut self, place: Place, found: &Translation) {
        if found.page_bits > 12 {
            let (start, len) = part(place.hva, found.page_bits);
            self.parts.insert((start, len));
            if place.kernel {
                self.last_of_parts = self.last_of_parts.max(Some(start + (len - 1)));
            }
        }
        if !place.kernel {
            self.user_regions.add(place.hva);
        }
    }

    /// A page of RAM is about to be mapped. `global` says that the guest's translation of the page is a global one.
    pub(super) fn add_page(&mut self, hva: u64, offset: u64, protection: u64, global: bool) {
        self.insert(hva, offset, protection);
        if protection & KERNEL_PAGE != 0 {
            self.local.forget(hva, PAGE);
            if !global {
                self.local.add(hva, PAGE);
            }
        }
    }

    fn insert(&mut self, hva: u64, offset: u64, protection: u64) {
        self.seen.doubt(hva);
        let writable = match protection & KERNEL_PAGE {
            0 => {
                self.user.insert(hva, (offset, protection));
                &mut self.writable
            }
            _ => {
                self.kernel.insert(hva, (offset, protection));
                &mut self.kernel_writable
            }
        };
        if protection & WRITE != 0 {
            writable.add(offset, hva);
        }
    }

    /// A page of the user's is about to be mapped in place of another.
    pub(super) fn replace(&mut self, hva: u64, offset: u64, protection: u64) {
        if let Some((before, _)) = self.user.get(&hva) {
            self.writable.remove(*before, hva);
        }
        self.insert(hva, offset, protection);
    }

    /// A page of the user's is about to be mapped as a copy that was searched for what opens protection keys.
    pub(super) fn add_closed(&mut self, hva: u64, offset: u64) {
        self.writable.remove(offset, hva);
        self.insert(hva, offset, READ | EXECUTE);
    }

    /// The shared copy of a page of code is about to be mapped at an HVA.
    pub(super) fn add_code(&mut self, hva: u64, offset: u64) {
        self.add_closed(hva, offset);
        self.add_copy(offset, hva);
    }

    /// A changed copy of a RAM page is about to be mapped at an HVA.
    pub(super) fn add_copy(&mut self, offset: u64, hva: u64) {
        self.copies.add(offset, hva);
    }

    /// A large mapping is about to be made in place of what is there.
    pub(super) fn add_large(&mut self, hva: u64, large: Large) {
        self.forget_large_within(hva, large.len);
        self.forget_pages(hva, large.len);
        self.large.insert(hva, large);
    }

    /// The kernel's mapping that is about to be made there is not global.
    pub(super) fn add_local(&mut self, hva: u64, len: u64) {
        self.local.add(hva, len);
    }

    /// Pages of the user's are closed now.
    pub(super) fn close(&mut self, pages: &[u64]) {
        for hva in pages {
            self.user.protect(*hva, |_| 0);
            self.seen.doubt(*hva); // the next comparison unmaps what is still closed
        }
    }

    /// Pages of the user's are read-only now. What page tables have said of them allows that, too.
    pub(super) fn close_to_writes(&mut self, pages: &[u64]) {
        for hva in pages {
            self.user.protect(*hva, |protection| protection & !WRITE);
        }
    }

    /// Whether the wedge has refused to have a page executed since this was last asked.
    pub(super) fn take_refused(&mut self, hva: u64) -> bool {
        self.refused.remove(&hva)
    }

    /// Takes out the large page of so many bits around an HVA, if it is mapped in pieces: first HVA and bytes.
    pub(super) fn take_part(&mut self, hva: u64, bits: u32) -> Option<(u64, u64)> {
        let part = part(hva, bits);
        self.parts.remove(&part).then_some(part)
    }

    /// Takes out large mappings that reach into a range: first HVA and bytes.
    pub(super) fn take_reaching(&mut self, start: u64, len: u64) -> Vec<(u64, u64)> {
        let reaches = |(at, large): (&u64, &Large)| {
            (at + large.len > start && *at < start + len).then_some((*at, large.len))
        };
        let reaching: Vec<_> = self.large.iter().filter_map(reaches).collect();
        for (at, len) in &reaching {
            self.large.remove(at);
            self.local.forget(*at, *len);
        }
        reaching
    }

    /// Takes out the pages where a RAM page may be written: HVAs.
    pub(super) fn take_writable(&mut self, offset: u64) -> Vec<u64> {
        let mut places = self.writable.take(offset);
        places.extend(self.kernel_writable.take(offset));
        self.forget_each(&places);
        places
    }

    /// Takes out the changed copies of a RAM page: HVAs.
    pub(super) fn take_copies(&mut self, offset: u64) -> Vec<u64> {
        let places = self.copies.take(offset);
        for hva in &places {
            self.user.remove(*hva);
        }
        places
    }

    /// Where there may be changed copies in a range, which count as copies no more: HVAs, ascending.
    pub(super) fn take_copies_within(&mut self, range: &Range<u64>) -> Vec<u64> {
        self.copies.take_within(range)
    }

    /// Where there may be changed copies, which count as copies no more: HVAs, ascending.
    pub(super) fn take_all_copies(&mut self) -> Vec<u64> {
        self.copies.take_all()
    }

    /// Keeps only the copies, by offset and HVA, that are still mapped, if only closed, and says where they are.
    pub(super) fn keep_copies(&mut self) -> FxHashSet<u64> {
        let mut copies = FxHashSet::default();
        let user = &self.user;
        self.copies.retain(|offset, hva| {
            // One that is closed may be shown again.
            let is = |(of, rights): &(u64, u64)| {
                *of == offset && (*rights == 0 || rights & EXECUTE != 0)
            };
            let kept = user.get(&hva).is_some_and(is);
            copies.extend(kept.then_some(hva));
            kept
        });
        copies
    }

    /// A RAM page is empty no more: where memory without content stands for it (HVAs, ascending).
    pub(super) fn take_stand_ins(&mut self, offset: u64) -> Vec<u64> {
        if !self.empty.remove(&offset) {
            return Vec::new();
        }
        let stands = |(of, protection): &(u64, u64)| *of == offset && protection & EMPTY != 0;
        let stand_ins = self.user.iter().filter(|(_, page)| stands(page));
        stand_ins.map(|(hva, _)| *hva).collect()
    }

    /// Forgets the regions that have anything of the user's, and all that is mapped in them. Returns their first HVAs, ascending.
    pub(super) fn take_user_regions(&mut self) -> Vec<u64> {
        let regions = std::mem::take(&mut self.user_regions);
        let starts: Vec<_> = regions.starts().collect();
        for start in &starts {
            self.forget_mapped(*start, extent(*start).1);
        }
        (self.writable, self.copies) = (Places::default(), Places::default());
        starts
    }

    /// These pages are not mapped any more.
    pub(super) fn forget_each(&mut self, gone: &[u64]) {
        for hva in gone {
            self.user.remove(*hva);
            self.kernel.remove(hva);
        }
    }

    /// No page in a range is mapped any more.
    pub(super) fn forget_pages(&mut self, start: u64, len: u64) {
        self.local.forget(start, len);
        self.user.remove_range(start, len);
        self.kernel.extract_if(start..start + len, |_, _| true).for_each(drop);
    }

    fn forget_large_within(&mut self, hva: u64, len: u64) {
        let first = self.large_at(hva).map_or(hva, |(start, _)| start);
        self.large.extract_if(first..hva + len, |_, _| true).for_each(drop);
    }

    /// Forgets all that is mapped in a region: first HVA and bytes.
    pub(super) fn forget_region(&mut self, start: u64, len: u64) {
        self.forget_mapped(start, len);
        for places in [&mut self.writable, &mut self.kernel_writable, &mut self.copies] {
            places.retain(|_, hva| hva.wrapping_sub(start) >= len);
        }
    }

    /// Forgets the mappings in a region: first HVA and bytes, but not where RAM pages are.
    fn forget_mapped(&mut self, start: u64, len: u64) {
        self.forget_large_within(start, len);
        self.parts.retain(|(hva, _)| hva.wrapping_sub(start) >= len);
        self.seen.forget(start, len);
        self.forget_pages(start, len);
    }

    /// Nothing of the user's is mapped any more; each region is forgotten already.
    pub(super) fn forget_user(&mut self) {
        self.user.clear();
        self.seen = SeenTables::default();
        self.user_large = false;
        self.near.forget();
    }

    /// Nothing is mapped any more.
    pub(super) fn clear(&mut self) {
        let mut near = self.near;
        near.forget();
        *self = Self { near, ..Self::default() };
    }

    /// Takes out what the user's pages were last compared with, for a comparison.
    pub(super) fn take_seen(&mut self) -> SeenTables {
        std::mem::take(&mut self.seen)
    }

    /// What the user's pages have just been compared with. What comes of that has not been carried out yet.
    pub(super) fn put_seen(&mut self, seen: SeenTables) {
        self.seen = seen;
    }

    /// Orders have failed: anything may be mapped, whatever is written here.
    pub(super) fn doubt(&mut self) {
        self.made = 1;
        self.near.doubt();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A page of the user's, and one of the kernel's: HVAs.
    const USER: u64 = 0x7f12_3456_7000;
    const KERNEL: u64 = 0x4700_1234_5000;
    const OFFSET: u64 = 0x5000;

    /// A page of RAM that both have mapped.
    fn both() -> Mappings {
        let mut mappings = Mappings::default();
        mappings.user_regions.add(USER);
        mappings.add_page(USER, OFFSET, READ | WRITE, false);
        mappings.add_page(KERNEL, OFFSET, READ | WRITE | KERNEL_PAGE, true);
        mappings
    }

    #[test]
    fn a_page_is_taken_from_all_who_may_write_it() {
        let mut mappings = both();
        assert_eq!(mappings.take_writable(OFFSET), [USER, KERNEL]);
        assert!(mappings.take_writable(OFFSET).is_empty());
        assert!(mappings.user().is_empty() && mappings.kernel().is_empty());
    }

    #[test]
    fn with_the_user_s_regions_go_the_user_s_places_alone() {
        let mut mappings = both();
        mappings.add_copy(OFFSET, USER + PAGE);
        assert_eq!(mappings.take_user_regions().len(), 1);
        assert!(mappings.user().is_empty() && mappings.take_copies(OFFSET).is_empty());
        assert_eq!(mappings.take_writable(OFFSET), [KERNEL]);
    }
}
