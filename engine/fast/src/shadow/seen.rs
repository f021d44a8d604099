//! What page tables held when the user's pages were last compared with them.
//!
//! A flush asks of each page that is mapped whether the page tables still say so. Programs flush often, whenever they
//! give memory back, and may have tens of thousands of pages mapped, of which hardly any has another entry than at the
//! last flush. So a copy of each table of small pages is kept, and a page is looked at only if its entry is another one
//! now, or if what is mapped there has changed since. A table is copied in parts, and only those parts that map pages. So a heap
//! with 64 pages in each of many 2 MiB has an eighth of each table to compare.
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
const ENTRIES: usize = 512;
/// How many parts a page table has. Each part is copied by itself.
pub(super) const PARTS: usize = 8;
/// Entries of a part.
const PART: usize = ENTRIES / PARTS;
/// Bytes of an entry.
const ENTRY: usize = 8;
/// Copies of parts that a space may have at most: 16 MiB, for 8 GiB of pages.
const MOST: usize = 1 << 15;
/// In entries of other tables (`budget`), what the copy of a part takes.
const WEIGHT: usize = PART * ENTRY / 40;

/// 2 MiB of addresses in which pages are mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PageBlock {
    /// First HVA.
    pub(super) start: u64,
    /// How many pages are mapped.
    pub(super) pages: usize,
    /// A bit for each part of their page table by which any are mapped, the lowest for the first.
    pub(super) parts: u8,
}

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
    /// How many parts are copied.
    copied: usize,
}

/// A copy of parts of a table, and the way to it.
#[derive(Default)]
struct SeenTable {
    /// As [`Descent::table`] has it.
    upper: u64,
    parts: [Option<Box<SeenPart>>; PARTS],
    /// The last comparison that came here.
    round: u64,
}

/// A copy of a part of a table.
struct SeenPart {
    entries: [u8; PART * ENTRY],
    /// A bit for each entry: what is mapped there has not been compared with it.
    doubted: u64,
}

impl SeenTables {
    /// What is kept, in entries of other tables.
    pub(super) fn weight(&self) -> usize {
        self.copied * WEIGHT
    }

    /// What is mapped at a page (HVA) is another thing now, or has other rights.
    pub(super) fn doubt(&mut self, hva: u64) {
        if let Some(table) = self.tables.get_mut(&(hva >> LARGE_BITS)) {
            let index = index(hva);
            let part = &mut table.parts[index / PART];
            part.iter_mut().for_each(|part| part.doubted |= 1 << (index % PART));
        }
    }

    /// Nothing is known of a range any more: first HVA and bytes, whole tables.
    pub(super) fn forget(&mut self, start: u64, len: u64) {
        self.retain(|block, _| (block << LARGE_BITS).wrapping_sub(start) >= len);
    }

    fn retain(&mut self, stays: impl Fn(u64, &SeenTable) -> bool) {
        self.tables.retain(|block, table| {
            let stays = stays(*block, table);
            if !stays {
                self.copied -= table.copied();
            }
            stays
        });
    }

    /// A comparison begins with these page tables.
    pub(super) fn begin(&mut self, roots: Roots) {
        let modes = Roots { cr3: 0, ..roots };
        if self.roots != modes {
            self.retain(|_, _| false);
        }
        (self.roots, self.round, self.visited) = (modes, self.round + 1, 0);
    }

    /// A comparison is over: copies of tables that nothing is mapped by are dropped.
    pub(super) fn end(&mut self) {
        if self.visited != self.tables.len() {
            let round = self.round;
            self.retain(|_, table| table.round == round);
        }
    }

    /// Which pages of a block have to be compared: their HVAs, ascending, each with the page's entry. `upper` leads to the page table
    /// of the block. `None` if there is no such table in RAM. `None`, too, if there is no copy of the table and none is made:
    /// because the table is not `worth` a copy, or because there is no room for one more.
    pub(super) fn changed(
        &mut self,
        ram: &Ram,
        upper: Descent,
        block: PageBlock,
        worth: bool,
    ) -> Option<Vec<(u64, u64)>> {
        let way = upper.table()?;
        let may_add = worth && self.copied < MOST;
        let table = match self.tables.entry(block.start >> LARGE_BITS) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) if may_add => entry.insert(SeenTable::default()),
            Entry::Vacant(_) => return None,
        };
        self.copied -= table.copied();
        table.keep(way, block.parts);
        self.copied += table.copied();
        let changed = table.take_changed(ram, upper.next(0))?;
        (table.round, self.visited) = (self.round, self.visited + 1);
        let page = |index: usize| block.start + ((index as u64) << PAGE_BITS);
        Some(changed.into_iter().map(|(index, entry)| (page(index), entry)).collect())
    }
}

impl SeenTable {
    /// How many parts are copied.
    fn copied(&self) -> usize {
        self.parts.iter().flatten().count()
    }

    /// From now on these parts are copied and no others; `upper` leads to the table.
    fn keep(&mut self, upper: u64, parts: u8) {
        let doubted = if self.upper == upper { 0 } else { u64::MAX };
        for (number, part) in self.parts.iter_mut().enumerate() {
            match parts >> number & 1 {
                0 => *part = None,
                _ => part.get_or_insert_with(SeenPart::unknown).doubted |= doubted,
            }
        }
        self.upper = upper;
    }

    /// The entries of the table at a GPA that differ from the copies, or are doubted, and the index of each. Afterwards the copies have
    /// these entries, and no entry is doubted. `None` if the table is not in RAM: then the copies are worth nothing.
    fn take_changed(&mut self, ram: &Ram, table: u64) -> Option<Vec<(usize, u64)>> {
        let mut changed = Vec::new();
        for (number, part) in self.parts.iter_mut().enumerate() {
            let Some(part) = part else { continue };
            let first = number * PART;
            part.take_changed(ram, table + (first * ENTRY) as u64, |index, entry| {
                changed.push((first + index, entry));
            })?;
        }
        Some(changed)
    }
}

impl SeenPart {
    /// Nothing has been compared with it.
    fn unknown() -> Box<Self> {
        Box::new(Self { entries: [0; PART * ENTRY], doubted: u64::MAX })
    }

    /// See [`SeenTable::take_changed`]; `first` is the GPA of the part.
    fn take_changed(
        &mut self,
        ram: &Ram,
        first: u64,
        mut changed: impl FnMut(usize, u64),
    ) -> Option<()> {
        let mut now = [0; PART * ENTRY];
        ram.read_gpa(first, &mut now).ok()?;
        for index in ones(differing(&self.entries, &now) | take(&mut self.doubted)) {
            // What was read may have been read while it was being written.
            let entry = { ram }.read_u64(first + (index * ENTRY) as u64);
            self.entries[index * ENTRY..][..ENTRY].copy_from_slice(&entry.to_le_bytes());
            changed(index, entry);
        }
        Some(())
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

#[cfg(test)]
mod tests {
    use super::*;
    use x86::paging::{A, P, RW, US};
    use x86_interp::GuestRam;

    /// The tables from the top down, as GPAs; each entry of one leads to the next.
    const TABLES: [u64; 4] = [0x1000, 0x2000, 0x3000, 0x4000];
    const USED: u64 = P | A | RW | US;
    /// So many 2 MiB have 64 pages each: more than 4 MiB of whole tables are for.
    const BLOCKS: u64 = 5000;

    fn roots() -> Roots {
        Roots { cr3: TABLES[0], ..Roots::default() }
    }

    fn ram() -> Ram {
        let ram = Ram::new(1 << 20).expect("the host gives memory");
        for (table, below) in TABLES.iter().zip(&TABLES[1..]) {
            (0..512).for_each(|entry| ram.store64(table + entry * 8, below | USED));
        }
        ram
    }

    /// Has everything compared once: how many pages had to be looked at.
    fn compare(seen: &mut SeenTables, ram: &Ram) -> usize {
        seen.begin(roots());
        let blocks = (0..BLOCKS).map(|number| {
            let (start, parts) = (number << LARGE_BITS, 1 << (number % PARTS as u64));
            let way = (LARGE_BITS, P | A);
            let upper = Descent::top(roots()).look(&mut &*ram, roots(), start, way);
            let block = PageBlock { start, pages: PART, parts };
            let changed = seen.changed(ram, upper.expect("a table"), block, true);
            changed.expect("a copy of each table").len()
        });
        let looked_at = blocks.sum();
        seen.end();
        looked_at
    }

    #[test]
    fn many_tables_of_few_pages_are_copied_in_part() {
        let (ram, mut seen) = (ram(), SeenTables::default());
        assert_eq!(compare(&mut seen, &ram), BLOCKS as usize * PART, "nothing is known at first");
        assert_eq!(compare(&mut seen, &ram), 0);
        ram.store64(TABLES[3], USED);
        assert_eq!(
            compare(&mut seen, &ram),
            BLOCKS as usize / PARTS,
            "where the first part is in use"
        );
        seen.doubt(0x5000);
        assert_eq!(compare(&mut seen, &ram), 1);
        assert_eq!(seen.weight(), BLOCKS as usize * WEIGHT);
        seen.forget(0, 1 << LARGE_BITS);
        assert_eq!(seen.weight(), (BLOCKS as usize - 1) * WEIGHT);
        assert_eq!(compare(&mut seen, &ram), PART, "what was forgotten");
    }
}
