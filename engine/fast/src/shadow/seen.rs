//! What page tables held when the user's pages were last compared with them.
//!
//! A flush asks of each page that is mapped whether the page tables still say so. Programs flush often, whenever they
//! give memory back, and may have tens of thousands of pages mapped, of which hardly any has another entry than at the
//! last flush. So a copy of each table of small pages is kept, and a page is looked at only if its entry is another one
//! now, or if what is mapped there has changed since.
//!
//! What holds between two comparisons: a page that is mapped, and not doubted, is what its entry in the copy says.

use super::{LARGE_BITS, PAGE_BITS};
use ram::Ram;
use rustc_hash::FxHashMap;
use x86::paging::{Descent, Roots, WalkMemory};

/// Entries of a page table.
const ENTRIES: usize = 512;
/// Bytes of an entry.
const ENTRY: usize = 8;
/// Copies that a space may have at most: 4 MiB.
const MOST: usize = 1024;
/// In entries of other tables (`budget`), what a copy takes.
const WEIGHT: usize = ENTRIES * ENTRY / 40;

/// The copies, by the number of the 2 MiB (HVA) that their tables are for.
#[derive(Default)]
pub(super) struct SeenTables {
    tables: FxHashMap<u64, SeenTable>,
    /// What the entries were read by.
    roots: Roots,
    /// How often there has been a comparison.
    round: u64,
}

/// A copy of a table, and the way to it.
struct SeenTable {
    /// As [`Descent::table`] has it.
    upper: u64,
    entries: Box<[u8; ENTRIES * ENTRY]>,
    /// A bit for each entry: what is mapped there has not been compared with it.
    doubted: [u64; ENTRIES / 64],
    /// The last comparison that came here.
    round: u64,
}

impl SeenTables {
    /// What is kept, in entries of other tables.
    pub(super) fn weight(&self) -> usize {
        self.tables.len() * WEIGHT
    }

    /// What is mapped at a page (HVA) is another thing now, or has other rights.
    pub(super) fn doubt(&mut self, hva: u64) {
        if let Some(table) = self.tables.get_mut(&(hva >> LARGE_BITS)) {
            let index = index(hva);
            table.doubted[index / 64] |= 1 << (index % 64);
        }
    }

    /// Nothing is known of a range any more: first HVA and bytes, whole tables.
    pub(super) fn forget(&mut self, start: u64, len: u64) {
        self.tables.retain(|block, _| (block << LARGE_BITS).wrapping_sub(start) >= len);
    }

    /// A comparison begins with these page tables.
    pub(super) fn begin(&mut self, roots: Roots) {
        let modes = Roots { cr3: 0, ..roots };
        if self.roots != modes {
            self.tables.clear();
        }
        (self.roots, self.round) = (modes, self.round + 1);
    }

    /// A comparison is over: copies of tables that nothing is mapped by are dropped.
    pub(super) fn end(&mut self) {
        self.tables.retain(|_, table| table.round == self.round);
    }

    /// Whether there is a copy of the table for the 2 MiB at an HVA.
    pub(super) fn has(&self, hva: u64) -> bool {
        self.tables.contains_key(&(hva >> LARGE_BITS))
    }

    /// Whether one copy more may be kept.
    pub(super) fn has_room(&self) -> bool {
        self.tables.len() < MOST
    }

    /// The pages (HVA) in the 2 MiB at `hva` that have to be compared, ascending, and the entry of each; `upper` leads to
    /// their table. `None` if there is no such table in RAM.
    pub(super) fn changed(
        &mut self,
        mut ram: &Ram,
        upper: Descent,
        hva: u64,
    ) -> Option<Vec<(u64, u64)>> {
        let mut now = [0; ENTRIES * ENTRY];
        let first = upper.next(0);
        ram.read_gpa(first, &mut now).ok()?;
        let block = hva >> LARGE_BITS;
        let table = self.tables.entry(block).or_insert_with(SeenTable::new);
        table.round = self.round;
        let page = |index: usize| (block << LARGE_BITS) + ((index as u64) << PAGE_BITS);
        let changed = table.take_changed(upper.table()?, &now).into_iter().map(|index| {
            // The copy may have been read while the entry was being written.
            let entry = ram.read_u64(first + (index * ENTRY) as u64);
            table.set(index, entry);
            (page(index), entry)
        });
        Some(changed.collect())
    }
}

impl SeenTable {
    fn new() -> Self {
        let entries = Box::new([0; ENTRIES * ENTRY]);
        Self { upper: 0, entries, doubted: [u64::MAX; ENTRIES / 64], round: 0 }
    }

    /// Which entries are others than in the copy, or doubted; they are in the copy then, and not doubted any more.
    fn take_changed(&mut self, upper: u64, now: &[u8; ENTRIES * ENTRY]) -> Vec<usize> {
        if self.upper != upper {
            (self.upper, self.doubted) = (upper, [u64::MAX; ENTRIES / 64]);
        }
        if self.doubted == [0; ENTRIES / 64] && *self.entries == *now {
            return Vec::new();
        }
        let (old, new) = (self.entries.as_chunks::<ENTRY>().0, now.as_chunks::<ENTRY>().0);
        let is_doubted = |index: usize| self.doubted[index / 64] >> (index % 64) & 1 != 0;
        let changed = (0..ENTRIES).filter(|index| is_doubted(*index) || old[*index] != new[*index]);
        let changed = changed.collect();
        (*self.entries, self.doubted) = (*now, [0; ENTRIES / 64]);
        changed
    }

    fn set(&mut self, index: usize, entry: u64) {
        self.entries[index * ENTRY..][..ENTRY].copy_from_slice(&entry.to_le_bytes());
    }
}

/// Which entry of its table maps a page.
fn index(hva: u64) -> usize {
    (hva >> PAGE_BITS) as usize % ENTRIES
}
