//! Tables of a wedge's own. Look-ups: a software TLB that translated user code consults. Verified pages: that TLB for
//! what it executes. Copies: where kernel code must not read what user code executes.
//!
//! The wedge and translated code write them too, and may be hostile: all of it is atomic, and the monitor
//! reads of it only what it may forget.

use crate::{
    CODE_PAGE_WORDS, COPIES_LEN, COPY_COUNT, MAX_TEXTS, MAX_VERSIONS, POISON, SITES, SITES_LEN,
    TextPage, code_page, copy_slot, distance, is_place, text_of,
};
use core::cell::Cell;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

/// Entries: of as many pages, 4 GiB, no two are in each other's way.
pub const LOOKUP_COUNT: usize = 1 << 20;
/// Entries of which it is noted together whether any has been used.
const CHUNK: usize = 1 << 6;
/// Words of those notes.
const WORDS: usize = LOOKUP_COUNT / CHUNK / 64;
/// Bytes of a page.
const PAGE: u64 = 4096;
/// Bytes of the largest page of the guest's that has entries.
const LARGE: u64 = 1 << 21;
/// In [`Lookups::writers`]: more than one entry may let the page be written.
const SEVERAL: u32 = u32::MAX;

/// A page of the user's in the software TLB.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lookup {
    /// The page's negated GVA, and [`LOOKUP_READ_ONLY`] added if it may not be written; zero for none. The
    /// page at zero has no entry.
    pub tag: u64,
    /// What has to be added to an address in the page to get the same place in the wedge's view of guest RAM.
    pub distance: u64,
}

/// In [`Lookup::tag`]: the page may be read only. No program has an address with this bit.
pub const LOOKUP_READ_ONLY: u64 = 1 << 63;

impl Lookup {
    /// The entry for a page.
    pub const fn new(page: u64, hva: u64, writable: bool) -> Self {
        let right = if writable { 0 } else { LOOKUP_READ_ONLY };
        Self { tag: page.wrapping_neg().wrapping_add(right), distance: hva.wrapping_sub(page) }
    }

    /// The entry is for this page.
    pub const fn is_of(&self, page: u64) -> bool {
        self.tag.wrapping_add(page) & LOOKUP_READS == 0 && self.tag != 0
    }

    /// Its page may be written: the tag, a negated address, has the highest bit.
    pub const fn is_writable(&self) -> bool {
        self.tag & LOOKUP_READ_ONLY != 0
    }

    /// The page that the entry is for.
    const fn page(&self) -> u64 {
        self.tag.wrapping_neg() & !LOOKUP_READ_ONLY
    }

    /// Where in the wedge's process that page lies.
    pub const fn target(&self) -> u64 {
        self.distance.wrapping_add(self.page())
    }
}

/// Index of the entry for a page of the user's.
pub const fn lookup_slot(gva: u64) -> usize {
    (gva >> 12) as usize & (LOOKUP_COUNT - 1)
}

/// The bits of an address that are the index of its entry.
pub const LOOKUP_INDEX: u64 = (LOOKUP_COUNT as u64 - 1) << 12;
/// The bits of an entry's tag and the address of an access's last byte, added, that are zero if the entry
/// allows it to be written; or read.
pub const LOOKUP_WRITES: u64 = !0xfff;
/// See [`LOOKUP_WRITES`].
pub const LOOKUP_READS: u64 = LOOKUP_WRITES & !LOOKUP_READ_ONLY;
/// In [`crate::ExitState::info`] of a look-up that has missed: the access writes. The rest is its bytes.
pub const LOOKUP_WRITE: u64 = 1 << 16;

/// An entry as it lies in memory: its tag and its distance.
#[repr(C)]
#[derive(Debug)]
struct Entry([AtomicU64; 2]);

impl Entry {
    fn get(&self) -> Lookup {
        let [tag, distance] = self.0.each_ref().map(|word| word.load(Relaxed));
        Lookup { tag, distance }
    }

    /// One thread has the turn, so nobody looks between the two.
    fn set(&self, to: Lookup) {
        let [tag, distance] = &self.0;
        distance.store(to.distance, Relaxed);
        tag.store(to.tag, Relaxed);
    }

    /// It is not in use any more.
    fn clear(&self) {
        self.set(Lookup { tag: 0, distance: 0 });
    }
}

/// The tables. That of look-ups is direct-mapped by page number.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct Lookups {
    /// Not zero where the page of an address, or another of the same index, is not to be read as it is
    /// mapped.
    copies: [AtomicU64; COPY_COUNT],
    /// The entries.
    entries: [Entry; LOOKUP_COUNT],
    /// By the number of a page that entries lead to (HVA): zero if none of them lets it be written, one more than the
    /// index of the only one that may, or [`SEVERAL`].
    writers: [AtomicU32; LOOKUP_COUNT],
    /// A bit for each [`CHUNK`] of entries: some may be in use.
    used: [AtomicU64; WORDS],
    /// Not zero: a bit of those is set.
    any: AtomicU64,
    /// Not zero: some are of pages that are parts of the guest's large ones.
    large: AtomicU64,
    /// By the index of a page of translated user code: [`crate::MonitorData::code_generation`] if the guest's page tables
    /// let the page be executed, at its place.
    verified: [AtomicU64; MAX_VERSIONS],
    /// All behind this one are zero.
    verified_end: AtomicU64,
    /// The generation of the pages that were verified last. Another generation has other texts.
    generation: AtomicU64,
    /// A bit for each text whose origin is settled: some page of it may be executed.
    settled: [AtomicU64; MAX_TEXTS / 64],
    /// A bit for each page (GVA) that may be executed, and for others, by [`code_page`].
    code_pages: [AtomicU64; CODE_PAGE_WORDS],
    /// The GVA of each text's origin, as far as it is settled. Who is in translated code needs it even when that is over.
    origins: [AtomicU64; MAX_TEXTS],
}

/// Offset of the entries of look-ups.
pub const LOOKUP_ENTRIES: usize = COPIES_LEN;
/// Offset of the words that say which pages of translated user code may be executed.
pub const VERIFIED: usize = core::mem::offset_of!(Lookups, verified);
/// Offset of the origins (GVA) of texts, by which translated user code finds addresses.
pub const ORIGINS: usize = core::mem::offset_of!(Lookups, origins);
const _: () = assert!(core::mem::offset_of!(Lookups, entries) == LOOKUP_ENTRIES);
const _: () = assert!(size_of::<Entry>() == size_of::<Lookup>());

impl Lookups {
    /// What user code executes at this page is a changed copy: kernel code that reads it faults, and is
    /// interpreted.
    pub fn hide(&self, page: u64) {
        if let Some(entry) = self.copies.get(copy_slot(page)) {
            entry.store(POISON, Relaxed);
        }
    }

    /// This page, and others of the same index, are to be read as they are mapped.
    pub fn show(&self, page: u64) {
        if let Some(entry) = self.copies.get(copy_slot(page)) {
            entry.store(0, Relaxed);
        }
    }

    /// What is at [`SITES`] is never the program's.
    pub fn hide_sites(&self) {
        let sites = SITES as u64..(SITES + SITES_LEN) as u64;
        sites.step_by(PAGE as usize).for_each(|page| self.hide(page));
    }

    /// The page of an address is to be read as it is mapped.
    pub fn is_shown(&self, address: u64) -> bool {
        self.copies.get(copy_slot(address)).is_none_or(|entry| entry.load(Relaxed) == 0)
    }

    /// No entry is in use.
    pub fn is_empty(&self) -> bool {
        self.any.load(Relaxed) == 0
    }

    /// The entry that a page has, if it has one.
    pub fn get(&self, page: u64) -> Option<Lookup> {
        self.entries.get(lookup_slot(page)).map(Entry::get).filter(|entry| entry.is_of(page))
    }

    /// A page, not that at zero, lies at an HVA from now on; with `large` it is part of a larger one of the
    /// guest's.
    pub fn set(&self, page: u64, hva: u64, writable: bool, large: bool) {
        let slot = lookup_slot(page);
        let (chunk, Some(entry)) = (slot / CHUNK, self.entries.get(slot)) else { return };
        entry.set(Lookup::new(page, hva, writable));
        if writable {
            self.note_writer(slot, hva);
        }
        self.any.store(1, Relaxed);
        set_bit(&self.used, chunk / 64, chunk as u32 % 64);
        if large {
            self.large.store(1, Relaxed);
        }
    }

    /// Pages in this range have none any more, nor have parts of a large page that reaches into it.
    pub fn forget(&self, start: u64, len: u64) {
        if self.is_empty() {
            return;
        }
        let unit = if self.large.load(Relaxed) == 0 { PAGE } else { LARGE };
        let first = start & !(unit - 1);
        let end = start.saturating_add(len).saturating_add(unit - 1) & !(unit - 1);
        if (end - first) / PAGE >= LOOKUP_COUNT as u64 {
            return self.forget_if(|entry| entry.page() >= first && entry.page() < end);
        }
        let mut page = first;
        while page < end {
            let (chunk, within) = (lookup_slot(page) / CHUNK, lookup_slot(page) % CHUNK);
            if !has_bit(&self.used, chunk / 64, chunk as u32 % 64) {
                page += (CHUNK - within) as u64 * PAGE;
                continue;
            }
            let entry = self.entries.get(lookup_slot(page));
            if let Some(entry) = entry.filter(|entry| entry.get().is_of(page)) {
                entry.clear();
            }
            page += PAGE;
        }
    }

    /// Notes that the entry at an index lets the page at an HVA be written.
    fn note_writer(&self, slot: usize, hva: u64) {
        let Some(writer) = self.writers.get(lookup_slot(hva)) else { return };
        let before = writer.load(Relaxed);
        let only = slot as u32 + 1;
        if before != 0 && before != only {
            // The one before may be gone, or may be of another page with the same index.
            let before = self.entries.get((before as usize).wrapping_sub(1)).map(Entry::get);
            let is_gone = before.is_some_and(|entry| {
                !entry.is_writable() || lookup_slot(entry.target()) != lookup_slot(hva)
            });
            writer.store(if is_gone { only } else { SEVERAL }, Relaxed);
        } else {
            writer.store(only, Relaxed);
        }
    }

    /// No page may be written any more that lies at this HVA.
    pub fn protect(&self, hva: u64) {
        let Some(writer) = self.writers.get(lookup_slot(hva)) else { return };
        let writes = |entry: &Lookup| entry.is_writable() && entry.target() == hva;
        match writer.load(Relaxed) {
            0 => {}
            SEVERAL => {
                let others = Cell::new(false);
                self.forget_if(|entry| {
                    let alike =
                        entry.is_writable() && lookup_slot(entry.target()) == lookup_slot(hva);
                    others.set(others.get() || alike && !writes(entry));
                    writes(entry)
                });
                writer.store(if others.get() { SEVERAL } else { 0 }, Relaxed);
            }
            only => {
                let entry = self.entries.get(only as usize - 1);
                entry.filter(|entry| writes(&entry.get())).into_iter().for_each(Entry::clear);
            }
        }
    }

    /// A page of translated user code may be executed at a GVA. False if its text lies elsewhere: then the page may not.
    #[must_use]
    pub fn verify(&self, page: TextPage, gva: u64, generation: u64) -> bool {
        if self.generation.swap(generation, Relaxed) != generation {
            self.forget_code();
        }
        let index = page.index as usize;
        let Some(word) = self.verified.get(index) else { return false };
        if is_place(page.place) && !self.settle(page.place, gva & !(PAGE - 1)) {
            return false;
        }
        word.store(generation, Relaxed);
        let end = self.verified_end.load(Relaxed).max(index as u64 + 1);
        self.verified_end.store(end, Relaxed);
        let (word, bit) = code_page(gva);
        set_bit(&self.code_pages, word, bit);
        true
    }

    /// A place is at a GVA from now on, or is there already. False if its text lies elsewhere.
    fn settle(&self, place: u64, gva: u64) -> bool {
        let (text, origin) = (text_of(place), gva.wrapping_sub(distance(place) as u64));
        let (word, bit) = (text / 64, text as u32 % 64);
        let Some(known) = self.origins.get(text) else { return false };
        if has_bit(&self.settled, word, bit) {
            return known.load(Relaxed) == origin;
        }
        known.store(origin, Relaxed);
        set_bit(&self.settled, word, bit);
        true
    }

    /// The GVA of a place: where it is, or was when translated code was last entered. What is no place stays.
    pub fn resolve(&self, word: u64) -> u64 {
        let origin = self.origins.get(text_of(word)).filter(|_| is_place(word));
        origin.map_or(word, |origin| origin.load(Relaxed).wrapping_add(distance(word) as u64))
    }

    /// Translated user code may be executed at the page of a GVA.
    pub fn may_be_code(&self, gva: u64) -> bool {
        let (word, bit) = code_page(gva);
        has_bit(&self.code_pages, word, bit)
    }

    /// It has been verified.
    pub fn is_verified(&self, index: usize, generation: u64) -> bool {
        self.verified.get(index).is_some_and(|word| word.load(Relaxed) == generation)
    }

    /// Some page of translated user code may be executed.
    pub fn has_verified(&self) -> bool {
        self.verified_end.load(Relaxed) != 0
    }

    /// No page of translated user code may be executed before it is verified again.
    pub fn forget_code(&self) {
        let end = self.verified_end.swap(0, Relaxed) as usize;
        if end != 0 {
            self.verified.iter().take(end).for_each(|word| word.store(0, Relaxed));
            self.settled.iter().chain(&self.code_pages).for_each(|word| word.store(0, Relaxed));
        }
    }

    /// No page has any.
    pub fn clear(&self) {
        self.forget_code();
        if self.is_empty() {
            return;
        }
        self.forget_if(|_| true);
        self.used.iter().for_each(|word| word.store(0, Relaxed));
        self.any.store(0, Relaxed);
        self.large.store(0, Relaxed);
    }

    /// Of the entries that may be in use, some are so no more.
    fn forget_if(&self, gone: impl Fn(&Lookup) -> bool) {
        for (at, word) in self.used.iter().enumerate() {
            let mut bits = word.load(Relaxed);
            while bits != 0 {
                let start = (at * 64 + bits.trailing_zeros() as usize) * CHUNK;
                bits &= bits - 1;
                let entries = self.entries.get(start..start + CHUNK).into_iter().flatten();
                entries.filter(|entry| gone(&entry.get())).for_each(Entry::clear);
            }
        }
    }
}

fn has_bit(words: &[AtomicU64], word: usize, bit: u32) -> bool {
    words.get(word).is_some_and(|word| word.load(Relaxed) >> bit & 1 == 1)
}

fn set_bit(words: &[AtomicU64], word: usize, bit: u32) {
    if let Some(word) = words.get(word) {
        word.store(word.load(Relaxed) | 1 << bit, Relaxed);
    }
}

// UNSAFETY: a table is too large for a stack.
#[cfg(test)]
#[allow(unsafe_code)]
mod tests {
    use super::*;
    use crate::place;
    extern crate std;
    use std::{alloc, boxed::Box};

    fn table() -> Box<Lookups> {
        let layout = alloc::Layout::new::<Lookups>();
        // SAFETY: plain numbers, for which zero is a value.
        unsafe { Box::from_raw(alloc::alloc_zeroed(layout).cast()) }
    }

    #[test]
    fn what_is_hidden_is_so_until_it_is_shown() {
        let table = table();
        table.hide_sites();
        assert!(!table.is_shown(SITES as u64 + 0x1234) && table.is_shown(A));
        table.hide(A);
        assert!(!table.is_shown(A + 0xfff) && table.is_shown(A + PAGE) && table.is_shown(A - 1));
        assert!(table.is_shown(A | 1 << 47), "the kernel's");
        table.show(A);
        assert!(table.is_shown(A) && !table.is_shown(SITES as u64));
    }

    const A: u64 = 0x7f12_3456_7000;
    const HVA: u64 = 0x7e48_0000_5000;

    #[test]
    fn what_translated_code_computes_is_zero_for_what_is_allowed() {
        for writable in [false, true] {
            let entry = Lookup::new(A, HVA, writable);
            let sum = |last: u64| entry.tag.wrapping_add(last);
            assert_eq!(sum(A + 0xfff) & LOOKUP_READS, 0);
            assert_eq!(sum(A + 0xfff) & LOOKUP_WRITES == 0, writable);
            for other in [A - 1, A + 0x1000, A + (1 << 47), A + (1 << 62), A ^ 1 << 12] {
                assert_ne!(sum(other) & LOOKUP_READS, 0, "{other:#x}");
            }
            assert_eq!((entry.target(), entry.is_writable()), (HVA, writable));
            assert_eq!(A.wrapping_add(entry.distance), HVA);
        }
    }

    /// Each entry that lets a page be written is found, however many there are, and whatever lies between.
    #[test]
    fn no_page_is_written_that_is_protected() {
        let table = table();
        let page = |n: u64| A + n * PAGE;
        // As far apart as pages of one index are: the host has them in one place of `writers`.
        let far = HVA + LOOKUP_COUNT as u64 * PAGE;
        for others in 0..32_u64 {
            let lies = |n: u64| if others >> n & 1 == 1 { far } else { HVA };
            (0..5).for_each(|n| table.set(page(n), lies(n), true, false));
            table.set(page(1), lies(1), false, false);
            table.set(page(2) + LOOKUP_COUNT as u64 * PAGE, HVA + PAGE, true, false);
            for protected in [HVA, far] {
                table.protect(protected);
                let left = (0..5).filter_map(|n| table.get(page(n)));
                let mut left = left.filter(|entry| entry.target() == protected);
                assert!(left.all(|entry| !entry.is_writable()), "{others:05b}");
            }
            assert!((3..5).all(|n| table.get(page(n)).is_none()));
            assert_eq!(table.get(page(1)), Some(Lookup::new(page(1), lies(1), false)));
            table.clear();
        }
    }

    /// A text lies where the first of its pages was seen, until all is forgotten.
    #[test]
    fn pages_of_a_text_keep_their_distances() {
        let (table, page) = (table(), |index, far| TextPage { place: place(7, far), index });
        assert!(table.verify(page(2, 0x5000), A + 0x123, 1));
        assert!(table.verify(page(3, 0x6000), A + PAGE, 1), "as far as it is");
        assert!(!table.verify(page(4, 0x7000), A + PAGE, 1), "elsewhere");
        assert_eq!([2, 3, 4].map(|n| table.is_verified(n, 1)), [true, true, false]);
        assert_eq!(table.resolve(place(7, 0x5010)), A + 0x10);
        assert_eq!(table.resolve(A), A);
        assert!(table.may_be_code(A + 0xfff) && table.may_be_code(A + PAGE));
        assert!(!table.may_be_code(A - PAGE));
        table.forget_code();
        assert!(!table.may_be_code(A) && !table.is_verified(2, 1));
        assert_eq!(table.resolve(place(7, 0x5010)), A + 0x10, "somebody may be in it");
        assert!(table.verify(page(4, 0x7000), A + PAGE, 1), "where it is seen now");
        assert_eq!(table.resolve(place(7, 0x7000)), A + PAGE);
        assert!(table.verify(TextPage { place: A, index: 9 }, A, 1), "one address");
        assert!(table.verify(page(2, 0x5000), HVA, 2), "another text of the same number");
        assert!(!table.is_verified(4, 1) && table.resolve(place(7, 0x5000)) == HVA);
    }

    #[test]
    fn entries_go_when_they_are_asked_to() {
        let table = table();
        assert!(table.is_empty());
        let page = |n: u64| A + n * PAGE;
        (0..8).for_each(|n| table.set(page(n), HVA + n * PAGE, n % 2 == 0, false));
        table.forget(page(1), 1);
        assert!(table.get(page(0)).is_some() && table.get(page(1)).is_none());
        assert!(table.get(page(2)).is_some());
        table.protect(HVA + 2 * PAGE);
        table.protect(HVA + 3 * PAGE);
        assert!(table.get(page(2)).is_none(), "it could be written");
        assert!(table.get(page(3)).is_some(), "it could only be read");
        table.set(page(600), HVA, false, true);
        table.forget(page(601), PAGE);
        assert!(table.get(page(600)).is_none(), "a part of the same large page");
        table.forget(0, 1 << 47);
        assert!((0..8).all(|n| table.get(page(n)).is_none()));
        table.set(page(5), HVA, true, false);
        table.clear();
        assert!(table.is_empty() && table.get(page(5)).is_none());
        // Of many pages few have entries.
        for n in [0, 63, 64, 500, 511] {
            table.set(page(n), HVA, true, true);
        }
        table.forget(page(64), PAGE);
        let large = page(64) & !(LARGE - 1)..(page(64) & !(LARGE - 1)) + LARGE;
        for n in [0, 63, 64, 500, 511] {
            assert_eq!(table.get(page(n)).is_some(), !large.contains(&page(n)), "{n}");
        }
    }
}
