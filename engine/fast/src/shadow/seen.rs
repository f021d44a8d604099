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
use std::{collections::hash_map::Entry, mem::take};
use x86::{
    bits::ones,
    paging::{Descent, Roots, WalkMemory},
};

/// Entries of a page table.
const ENTRIES: usize = PARTS * PART;
/// Parts of a page table, each of which has a word of bits in [`SeenTable::doubted`].
const PARTS: usize = 8;
/// Entries of a part.
const PART: usize = 64;
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
    /// How many tables the comparison has come to that is going on.
    visited: usize,
}

/// A copy of a table, and the way to it.
struct SeenTable {
    /// As [`Descent::table`] has it.
    upper: u64,
    entries: Box<[[u8; PART * ENTRY]; PARTS]>,
    /// A bit for each entry: what is mapped there has not been compared with it.
    doubted: [u64; PARTS],
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
            table.doubted[index / PART] |= 1 << (index % PART);
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
        (self.roots, self.round, self.visited) = (modes, self.round + 1, 0);
    }

    /// A comparison is over: copies of tables that nothing is mapped by are dropped.
    pub(super) fn end(&mut self) {
        if self.visited != self.tables.len() {
            self.tables.retain(|_, table| table.round == self.round);
        }
    }

    /// The pages (HVA) in the 2 MiB at `hva` that have to be compared, ascending, and the entry of each; `upper` leads to
    /// their table. `None` if there is no such table in RAM. `None`, too, if there is no copy of the table and none is made:
    /// because the table is not `worth` a copy, or because there is no room for one more.
    pub(super) fn changed(
        &mut self,
        ram: &Ram,
        upper: Descent,
        hva: u64,
        worth: bool,
    ) -> Option<Vec<(u64, u64)>> {
        let (block, way) = (hva >> LARGE_BITS, upper.table()?);
        let may_add = worth && self.tables.len() < MOST;
        let table = match self.tables.entry(block) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) if may_add => entry.insert(SeenTable::new()),
            Entry::Vacant(_) => return None,
        };
        let changed = table.take_changed(ram, upper.next(0), way)?;
        (table.round, self.visited) = (self.round, self.visited + 1);
        let page = |index: usize| (block << LARGE_BITS) + ((index as u64) << PAGE_BITS);
        Some(changed.into_iter().map(|(index, entry)| (page(index), entry)).collect())
    }
}

impl SeenTable {
    fn new() -> Self {
        let entries = Box::new([[0; PART * ENTRY]; PARTS]);
        Self { upper: 0, entries, doubted: [u64::MAX; PARTS], round: 0 }
    }

    /// Which entries of the table at a GPA are others than in the copy, or doubted; they are in the copy then, and not
    /// doubted any more. `None` if the table is not in RAM: then the copy is worth nothing.
    fn take_changed(&mut self, ram: &Ram, table: u64, upper: u64) -> Option<Vec<(usize, u64)>> {
        if self.upper != upper {
            (self.upper, self.doubted) = (upper, [u64::MAX; PARTS]);
        }
        let (mut changed, mut now) = (Vec::new(), [0; PART * ENTRY]);
        for (part, (copied, doubted)) in self.entries.iter_mut().zip(&mut self.doubted).enumerate()
        {
            let first = table + (part * PART * ENTRY) as u64;
            ram.read_gpa(first, &mut now).ok()?;
            for index in ones(differing(copied, &now) | take(doubted)) {
                // What was read may have been read while it was being written.
                let entry = { ram }.read_u64(first + (index * ENTRY) as u64);
                copied[index * ENTRY..][..ENTRY].copy_from_slice(&entry.to_le_bytes());
                changed.push((part * PART + index, entry));
            }
        }
        Some(changed)
    }
}

/// Which entries are others, a bit for each. Nearly always there are none, which a comparison of all at once tells.
fn differing(old: &[u8; PART * ENTRY], new: &[u8; PART * ENTRY]) -> u64 {
    if old == new {
        return 0;
    }
    let entries = old.as_chunks::<ENTRY>().0.iter().zip(new.as_chunks::<ENTRY>().0);
    entries.rev().fold(0, |bits, (old, new)| bits << 1 | u64::from(old != new))
}

/// Which entry of its table maps a page.
fn index(hva: u64) -> usize {
    (hva >> PAGE_BITS) as usize % ENTRIES
}
