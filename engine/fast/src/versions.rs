//! Pages of translated user code: which GVA has which page of RAM. Programs have different pages at one address, and
//! translations of all of them are kept. Each page has an index, by which blocks ask whether it may be executed
//! ([`wedge_abi::Lookups::verify`]), and wedges find the index by the page tables.

use jit::cache::CodeMemory;
use rustc_hash::FxHashMap;
use wedge_abi::{
    FIRST_VERSION, MAX_VERSIONS, VERSION_REACH, VERSION_SLOTS, VERSIONS, version_key, version_slot,
};

/// Pages that may be new while blocks are made for one that is asked for.
const SPARE: usize = 64;

/// The pages that code has been made from since everything was dropped.
pub struct Versions {
    indices: FxHashMap<u64, u32>,
    /// The keys in the slots of the wedges' table, zero for an empty slot.
    slots: Vec<u64>,
    /// The value of a page's word in [`wedge_abi::Lookups`] if the page may be executed.
    pub generation: u32,
}

impl Default for Versions {
    fn default() -> Self {
        let slots = vec![0; VERSION_SLOTS + VERSION_REACH];
        Self { indices: FxHashMap::default(), slots, generation: 1 }
    }
}

impl Versions {
    /// The index of a page: GVA and RAM offset. `None` if there are as many as can be.
    pub fn index(&mut self, memory: &mut impl CodeMemory, gva: u64, offset: u64) -> Option<u32> {
        let key = version_key(gva, offset);
        if let Some(index) = self.indices.get(&key) {
            return Some(*index);
        }
        let index = FIRST_VERSION + self.indices.len();
        if index >= MAX_VERSIONS {
            return None;
        }
        self.indices.insert(key, index as u32);
        self.show(memory, key, index as u64);
        Some(index as u32)
    }

    /// There are indices left for a block's two pages, and for some more.
    pub fn have_room(&self) -> bool {
        self.indices.len() + SPARE < MAX_VERSIONS
    }

    /// Has wedges find a page. If the table is full there, another page is not found any more.
    fn show(&mut self, memory: &mut impl CodeMemory, key: u64, index: u64) {
        let first = version_slot(key);
        let free = (first..first + VERSION_REACH).find(|at| self.slots[*at] == 0);
        let slot = free.unwrap_or(first);
        self.slots[slot] = key;
        let at = (VERSIONS + slot * 16) as u64;
        memory.write_table(at + 8, index);
        memory.write_table(at, key);
    }

    /// RAM offsets of the pages that a GVA has had.
    pub fn of(&self, gva: u64) -> Vec<u64> {
        let page = version_key(gva, 0);
        let offsets = self.indices.keys().map(|key| key ^ page);
        offsets.filter(|number| number >> 28 == 0).map(|number| number << 12).collect()
    }

    /// Forgets all pages, and has each be verified anew.
    pub fn clear(&mut self, memory: &mut impl CodeMemory) {
        self.indices.clear();
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
        /// The index that a wedge would find.
        fn find(&self, gva: u64, offset: u64) -> Option<u64> {
            let key = version_key(gva, offset);
            let slots = version_slot(key)..version_slot(key) + VERSION_REACH;
            let mut at = slots.map(|slot| (VERSIONS + slot * 16) as u64);
            at.find(|at| self.0.get(at) == Some(&key)).map(|at| self.0[&(at + 8)])
        }
    }

    #[test]
    fn pages_at_one_address_are_told_apart_until_all_are_dropped() {
        const GVA: u64 = 0x7f00_1234_5000;
        let (mut words, mut versions) = (Words::default(), Versions::default());
        let index = |versions: &mut Versions, words: &mut Words, offset| {
            versions.index(words, GVA, offset).expect("there are few")
        };
        let first = index(&mut versions, &mut words, 0x1000);
        let second = index(&mut versions, &mut words, 0x2000);
        assert!(first != second && first as usize >= FIRST_VERSION);
        assert_eq!(index(&mut versions, &mut words, 0x1000), first);
        assert_eq!(words.find(GVA, 0x2000), Some(second.into()));
        let mut offsets = versions.of(GVA);
        offsets.sort_unstable();
        assert_eq!(offsets, [0x1000, 0x2000]);
        assert!(versions.of(GVA + 0x1000).is_empty());
        let before = versions.generation;
        versions.clear(&mut words);
        assert!(versions.generation != before && words.find(GVA, 0x2000).is_none());
    }

    #[test]
    fn there_is_an_end_to_them() {
        let (mut words, mut versions) = (Words::default(), Versions::default());
        let made = (0..).map_while(|n| versions.index(&mut words, n << 12, n << 12)).count();
        assert_eq!(made, MAX_VERSIONS - FIRST_VERSION);
    }
}
