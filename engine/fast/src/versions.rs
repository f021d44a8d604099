//! Pages of translated user code. Programs have different pages at one address, and translations of all of them are kept.
//!
//! Each page has an index. By its index a block asks whether its page may be executed ([`wedge_abi::Lookups::verify`]). A wedge walks
//! the page tables to a page, and finds the index of that page in a table.
//!
//! Programs and libraries lie elsewhere each time they are loaded. So a page of RAM has a place ([`wedge_abi::place`]), by the pages
//! that were beside it when code was first made from it. Two libraries that lay beside each other may have got one text; where they lie
//! otherwise, one of them moves away, page by page as they are needed.

use jit::cache::CodeMemory;
use rustc_hash::FxHashMap;
use wedge_abi::{
    FIRST_VERSION, MAX_TEXTS, MAX_VERSIONS, TEXT_REACH, TextPage, VERSION_REACH, VERSION_SLOTS,
    VERSIONS, distance, place, placed_key, text_of, version_key, version_slot,
};

const PAGE: u64 = 4096;
/// Pages that may be new while blocks are made for one that is asked for, and so may texts.
const SPARE: usize = 64;
/// A page belongs to the text of a page that is so many pages away at the most.
const NEAR: u64 = 512;
/// The same of a page that has a place, and has been written: some are written often.
const NEAR_STALE: u64 = 64;

/// Where a page of RAM is.
#[derive(Clone, Copy)]
struct Placed {
    place: u64,
    /// The page has been written since: perhaps it is another program's now, and beside others.
    stale: bool,
}

/// The pages that code has been made from since everything was dropped.
pub struct Versions {
    /// Code is made for places; otherwise for addresses.
    placed: bool,
    /// The index of each page, by its [`version_key`].
    indices: FxHashMap<u64, u32>,
    /// The place of each page of RAM, by its offset.
    places: FxHashMap<u64, Placed>,
    texts: usize,
    /// The keys in the slots of the wedges' table, zero for an empty slot.
    slots: Vec<u64>,
    /// The value of a page's word in [`wedge_abi::Lookups`] if the page may be executed.
    pub generation: u32,
}

impl Versions {
    /// No pages.
    pub fn new(placed: bool) -> Self {
        Self {
            placed,
            indices: FxHashMap::default(),
            places: FxHashMap::default(),
            texts: 0,
            slots: vec![0; VERSION_SLOTS + VERSION_REACH],
            generation: 1,
        }
    }

    /// The page at a GVA, with this RAM offset. `near` says what RAM offsets pages at other GVAs have. `None` if there are as many pages
    /// as can be.
    pub fn page(
        &mut self,
        memory: &mut impl CodeMemory,
        gva: u64,
        offset: u64,
        near: impl Fn(u64) -> Option<u64>,
    ) -> Option<TextPage> {
        let gva = gva & !(PAGE - 1);
        if !self.placed {
            return self.page_of(memory, gva, offset);
        }
        let place = match self.places.get(&offset).copied() {
            Some(Placed { place, stale: false }) => place,
            Some(Placed { place, .. }) => {
                self.places.remove(&offset);
                self.place_beside(gva, None, NEAR_STALE, near).unwrap_or(place)
            }
            None => self.place_beside(gva, None, NEAR, near).or_else(|| self.place_apart())?,
        };
        self.page_of(memory, place, offset)
    }

    /// The page of RAM at an offset has been written.
    pub fn note_write(&mut self, offset: u64) {
        if let Some(placed) = self.places.get_mut(&offset) {
            placed.stale = true;
        }
    }

    /// A page for which there is a place already, or whose GVA is that.
    pub fn page_of(
        &mut self,
        memory: &mut impl CodeMemory,
        place: u64,
        offset: u64,
    ) -> Option<TextPage> {
        let key = version_key(place, offset);
        let known = self.indices.get(&key).copied();
        let index = known.unwrap_or((FIRST_VERSION + self.indices.len()) as u32);
        if index as usize >= MAX_VERSIONS {
            return None;
        }
        let page = TextPage { place, index };
        if known.is_none() {
            self.indices.insert(key, index);
        }
        if self.placed && !self.places.contains_key(&offset) {
            self.places.insert(offset, Placed { place, stale: false });
            self.show(memory, placed_key(offset), page.to_word());
        } else if !self.placed && known.is_none() {
            self.show(memory, key, index.into());
        }
        Some(page)
    }

    /// A page is at a GVA where its text is not: the page goes to another text. That is the text of a page beside it or, if it is to
    /// be `alone`, a new one. False if there are no more texts.
    pub fn move_away(
        &mut self,
        memory: &mut impl CodeMemory,
        (gva, offset): (u64, u64),
        alone: bool,
        near: impl Fn(u64) -> Option<u64>,
    ) -> bool {
        let Some(before) = self.places.get(&offset).map(|placed| placed.place) else {
            return false;
        };
        let beside = self.place_beside(gva & !(PAGE - 1), Some(text_of(before)), NEAR, near);
        let Some(place) = beside.filter(|_| !alone).or_else(|| self.place_apart()) else {
            return false;
        };
        self.places.remove(&offset);
        self.page_of(memory, place, offset).is_some()
    }

    /// The place at a GVA by a page, at most so many pages away, that has a place already, in another text than this.
    fn place_beside(
        &self,
        gva: u64,
        but: Option<usize>,
        reach: u64,
        near: impl Fn(u64) -> Option<u64>,
    ) -> Option<u64> {
        let beside = |by: u64| {
            let known = self.places.get(&near(gva.wrapping_add(by))?)?;
            let place = known.place.wrapping_sub(by);
            let within = distance(place).abs() < TEXT_REACH;
            (within && !known.stale && but != Some(text_of(place))).then_some(place)
        };
        (1..=reach).flat_map(|n| [n * PAGE, (n * PAGE).wrapping_neg()]).find_map(beside)
    }

    /// The origin of a new text.
    fn place_apart(&mut self) -> Option<u64> {
        let text = self.texts;
        self.texts += 1;
        (text < MAX_TEXTS).then(|| place(text, 0))
    }

    /// There are indices and texts left for a block's two pages, and for some more.
    pub fn have_room(&self) -> bool {
        self.indices.len() + SPARE < MAX_VERSIONS && self.texts + SPARE < MAX_TEXTS
    }

    /// Has wedges find what is known of a page. If the table is full there, another page is not found any more.
    fn show(&mut self, memory: &mut impl CodeMemory, key: u64, value: u64) {
        let first = version_slot(key);
        let mut slots = first..first + VERSION_REACH;
        let own = slots.clone().find(|at| self.slots[*at] == key);
        let slot = own.or_else(|| slots.find(|at| self.slots[*at] == 0)).unwrap_or(first);
        self.slots[slot] = key;
        let at = (VERSIONS + slot * 16) as u64;
        memory.write_table(at + 8, value);
        memory.write_table(at, key);
    }

    /// RAM offsets of the pages that a GVA has had, where code is made for addresses.
    pub fn of(&self, gva: u64) -> Vec<u64> {
        let page = version_key(gva, 0);
        let offsets = self.indices.keys().filter(|_| !self.placed).map(|key| key ^ page);
        offsets.filter(|number| number >> 28 == 0).map(|number| number << 12).collect()
    }

    /// Forgets all pages, and has each be verified anew.
    pub fn clear(&mut self, memory: &mut impl CodeMemory) {
        self.indices.clear();
        self.places.clear();
        self.texts = 0;
        for (slot, key) in self.slots.iter_mut().enumerate().filter(|(_, key)| **key != 0) {
            *key = 0;
            memory.write_table((VERSIONS + slot * 16) as u64, 0);
        }
        self.generation = self.generation % i32::MAX as u32 + 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The words of the tables.
    #[derive(Default)]
    struct Words(FxHashMap<u64, u64>);

    impl CodeMemory for Words {
        fn write_code(&mut self, _: u64, _: &[u8]) {}
        fn is_closed(&self, _: u64, _: &[u8]) -> bool {
            true
        }
        fn write_table(&mut self, offset: u64, value: u64) {
            self.0.insert(offset, value);
        }
        fn table_word(&self, offset: u64) -> u64 {
            self.0.get(&offset).copied().unwrap_or(0)
        }
    }

    impl Words {
        /// What a wedge would find.
        fn find(&self, key: u64) -> Option<u64> {
            let slots = version_slot(key)..version_slot(key) + VERSION_REACH;
            let mut at = slots.map(|slot| (VERSIONS + slot * 16) as u64);
            at.find(|at| self.0.get(at) == Some(&key)).map(|at| self.0[&(at + 8)])
        }
    }

    const GVA: u64 = 0x7f00_1234_5000;

    #[test]
    fn pages_at_one_address_are_told_apart_until_all_are_dropped() {
        let (mut words, mut versions) = (Words::default(), Versions::new(false));
        let index = |versions: &mut Versions, words: &mut Words, offset| {
            versions.page(words, GVA, offset, |_| None).expect("there are few").index
        };
        let first = index(&mut versions, &mut words, 0x1000);
        let second = index(&mut versions, &mut words, 0x2000);
        assert!(first != second && first as usize >= FIRST_VERSION);
        assert_eq!(index(&mut versions, &mut words, 0x1000), first);
        assert_eq!(words.find(version_key(GVA, 0x2000)), Some(second.into()));
        let mut offsets = versions.of(GVA);
        offsets.sort_unstable();
        assert_eq!(offsets, [0x1000, 0x2000]);
        assert!(versions.of(GVA + 0x1000).is_empty());
        let before = versions.generation;
        versions.clear(&mut words);
        assert!(versions.generation != before && words.find(version_key(GVA, 0x2000)).is_none());
    }

    /// A process: where it has which page of RAM.
    fn process(pages: &[(u64, u64)]) -> impl Fn(u64) -> Option<u64> + use<> {
        let pages: FxHashMap<u64, u64> = pages.iter().copied().collect();
        move |gva| pages.get(&gva).copied()
    }

    #[test]
    fn pages_of_a_text_have_their_places_wherever_it_is_loaded() {
        let (mut words, mut versions) = (Words::default(), Versions::new(true));
        for base in [GVA, GVA + 0x5000_0000] {
            let near = process(&[(base, 0x9000), (base + 0x3000, 0x2000)]);
            let first = versions.page(&mut words, base + 0x123, 0x9000, &near).expect("room");
            let second = versions.page(&mut words, base + 0x3000, 0x2000, &near).expect("room");
            assert_eq!((first.place, second.place), (place(0, 0), place(0, 0x3000)));
            assert_eq!((first.index, second.index), (2, 3));
            assert_eq!(words.find(placed_key(0x2000)), Some(second.to_word()));
        }
        let far = versions.page(&mut words, GVA, 0x7000, process(&[(GVA + 0x20_1000, 0x9000)]));
        assert_eq!(far.map(|page| page.place), Some(place(1, 0)), "too far away");
    }

    /// Two libraries that lie otherwise in another process become two texts.
    #[test]
    fn a_page_that_is_not_where_its_text_is_moves_away() {
        let (mut words, mut versions) = (Words::default(), Versions::new(true));
        let of = [0xa000, 0xb000, 0xc000].map(|offset| offset as u64);
        let all = process(&[(GVA, of[0]), (GVA + 0x1000, of[1]), (GVA + 0x2000, of[2])]);
        for (n, offset) in (0..).zip(of) {
            versions.page(&mut words, GVA + n * PAGE, offset, &all).expect("room");
        }
        let other = GVA + 0x9000;
        let near = process(&[(GVA, of[0]), (other, of[1]), (other + 0x1000, of[2])]);
        assert!(versions.move_away(&mut words, (other, of[1]), false, &near));
        assert!(versions.move_away(&mut words, (other + 0x1000, of[2]), false, &near));
        let places = of.map(|offset| versions.page(&mut words, 0, offset, |_| None));
        let places = places.map(|page| page.map(|page| page.place));
        // The second has but the first text beside it, from which it comes; the third has the second.
        assert_eq!(places, [place(0, 0), place(1, 0), place(1, 0x1000)].map(Some));
        assert!(versions.move_away(&mut words, (other, of[1]), true, &near));
        let alone = versions.page(&mut words, 0, of[1], |_| None);
        assert_eq!(alone.map(|page| page.place), Some(place(2, 0)));
        assert_eq!(words.find(placed_key(of[1])), alone.map(TextPage::to_word));
        assert!(versions.move_away(&mut words, (GVA + 0x1000, of[1]), false, &all));
        let back = versions.page(&mut words, 0, of[1], |_| None);
        let known = TextPage { place: place(1, 0), index: 5 };
        assert_eq!(back, Some(known), "beside the third, as before");
    }

    /// RAM is used again: pages of another program come together in one text, wherever they have been before.
    #[test]
    fn a_page_that_has_been_written_is_placed_anew() {
        let (mut words, mut versions) = (Words::default(), Versions::new(true));
        let of = [0xa000, 0xb000];
        for (n, offset) in (1..).zip(of) {
            versions.page(&mut words, n << 32, offset, |_| None).expect("room");
            versions.note_write(offset);
        }
        let near = process(&[(GVA, of[0]), (GVA + 0x1000, of[1])]);
        let mut place_of = |gva, offset| versions.page(&mut words, gva, offset, &near);
        let pages = [place_of(GVA, of[0]), place_of(GVA + 0x1000, of[1])];
        let places = pages.map(|page| page.map(|page| page.place));
        assert_eq!(places, [place(0, 0), place(0, 0x1000)].map(Some));
        assert_eq!(words.find(placed_key(of[1])), pages[1].map(TextPage::to_word));
    }

    #[test]
    fn there_is_an_end_to_them() {
        let (mut words, mut versions) = (Words::default(), Versions::new(false));
        let mut made = |n: u64| versions.page(&mut words, n << 12, n << 12, |_| None);
        assert_eq!((0..).map_while(&mut made).count(), MAX_VERSIONS - FIRST_VERSION);
        let mut versions = Versions::new(true);
        let mut made = |n: u64| versions.page(&mut words, n << 32, n << 12, |_| None);
        assert_eq!((0..).map_while(&mut made).count(), MAX_TEXTS);
    }
}
