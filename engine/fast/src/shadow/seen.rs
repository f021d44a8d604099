//! What page tables held when the user's pages were last compared with them.
//!
//! A flush asks of each page that is mapped whether the page tables still say so. Programs flush often, whenever they
//! give memory back, and may have tens of thousands of pages mapped, of which hardly any has another entry than at the
//! last flush. So a copy of each table of small pages is kept, and a page is looked at only if its entry is another one
//! now, or if what is mapped there has changed since. A table is copied in parts, and only those parts that map pages. So a heap
//! with 64 pages in each of many 2 MiB has an eighth of each table to compare. A copy that has not changed for long
//! makes room for a hash: page tables of a gigabyte and copies of them are 4 MiB, which is more than the cache of one CPU.
//!
//! What holds between two comparisons: a page that is mapped, and not doubted, is what its entry in the copy says.

mod table;

use super::{LARGE_BITS, PAGE_BITS};
use foldhash::quality::RandomState;
use ram::Ram;
use table::SeenTable;
use x86::paging::{Descent, Roots};

/// Entries of a page table.
pub(super) const ENTRIES: usize = 512;
/// How many parts a page table has. Each part is copied by itself.
pub(super) const PARTS: usize = 8;
/// Entries of a part.
const PART: usize = ENTRIES / PARTS;
/// Bytes of an entry of a page table.
pub(super) const ENTRY: usize = 8;
/// Copies of parts that a space may have at most: 16 MiB, for 8 GiB of pages.
const MOST: usize = 1 << 15;
/// While a table is compared, the CPU loads the table that comes so many places later.
const AHEAD: usize = 2;
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

/// What is known of page tables.
#[derive(Default)]
pub(super) struct SeenTables {
    /// In ascending order of the 2 MiB (HVA) that they are for.
    tables: Vec<SeenTable>,
    /// Tables that the comparison in progress has met for the first time.
    fresh: Vec<SeenTable>,
    /// How many of `tables` the comparison in progress has passed.
    passed: usize,
    /// Whether the comparison in progress has met a table by which nothing is mapped any more.
    is_one_unused: bool,
    /// What the entries were read by.
    roots: Roots,
    /// How many parts are copied.
    copied: usize,
    /// Room for what is read from a table.
    now: Vec<u8>,
    /// The secret that hashes are made with. Each space has another one, so a guest cannot make a table that has the hash of a different
    /// table. Any two have the same hash with a probability of one in 2^64.
    hashes: RandomState,
}

impl SeenTables {
    /// What is kept, in entries of other tables.
    pub(super) fn weight(&self) -> usize {
        self.copied * WEIGHT
    }

    /// What is mapped at a page (HVA) is another thing now, or has other rights.
    pub(super) fn doubt(&mut self, hva: u64) {
        let place = self.tables.binary_search_by_key(&(hva >> LARGE_BITS), |table| table.block());
        if let Ok(place) = place {
            self.tables[place].doubt(index(hva));
        }
    }

    /// Nothing is known of a range any more: first HVA and bytes, whole tables.
    pub(super) fn forget(&mut self, start: u64, len: u64) {
        self.retain(|table| (table.block() << LARGE_BITS).wrapping_sub(start) >= len);
    }

    fn retain(&mut self, stays: impl Fn(&SeenTable) -> bool) {
        self.tables.retain(stays);
        self.copied = self.tables.iter().map(SeenTable::copied).sum();
    }

    /// A comparison begins with these page tables.
    pub(super) fn begin(&mut self, roots: Roots) {
        let modes = Roots { cr3: 0, ..roots };
        if self.roots != modes {
            self.retain(|_| false);
        }
        (self.roots, self.passed, self.is_one_unused) = (modes, 0, false);
        self.now.resize(ENTRIES * ENTRY, 0);
    }

    /// A comparison is over: what is known of tables that nothing is mapped by is dropped.
    pub(super) fn end(&mut self) {
        self.pass(u64::MAX);
        if !self.fresh.is_empty() {
            self.tables.append(&mut self.fresh);
            self.tables.sort_by_key(SeenTable::block);
        }
        if self.is_one_unused {
            self.retain(SeenTable::is_used);
        }
    }

    /// Goes on to the table for the 2 MiB of this number. The comparison has not asked for the tables on the way: nothing is mapped by
    /// them any more.
    fn pass(&mut self, block: u64) {
        while let Some(table) =
            self.tables.get_mut(self.passed).filter(|table| table.block() < block)
        {
            table.give_up();
            (self.passed, self.is_one_unused) = (self.passed + 1, true);
        }
    }

    /// Which pages of a block have to be compared: their HVAs, ascending, each with the page's entry. `upper` leads to the page table
    /// of the block. A comparison asks for blocks in ascending order. `None` if all pages have to be compared: because no such table is
    /// in RAM, or because no copy of the table is kept, as the table is not `worth` a copy or there is no room for another.
    pub(super) fn changed(
        &mut self,
        ram: &Ram,
        upper: Descent,
        block: PageBlock,
        worth: bool,
    ) -> Option<Vec<(u64, u64)>> {
        let (way, number) = (upper.table()?, block.start >> LARGE_BITS);
        self.pass(number);
        if let Some(ahead) = self.tables.get(self.passed + AHEAD) {
            ram.prefetch(ahead.span());
        }
        let table = match self.tables.get_mut(self.passed).filter(|table| table.block() == number) {
            Some(table) => {
                self.passed += 1;
                table
            }
            None if worth && self.copied < MOST => {
                self.fresh.push(SeenTable::new(number));
                self.fresh.last_mut()?
            }
            None => return None,
        };
        self.copied -= table.copied();
        let changed = table.compare(ram, (way, block.parts), &self.hashes, &mut self.now);
        self.copied += table.copied();
        self.is_one_unused |= changed.is_none();
        let page = |index: usize| block.start + ((index as u64) << PAGE_BITS);
        Some(changed?.into_iter().map(|(index, entry)| (page(index), entry)).collect())
    }
}

/// Which entry of its table maps a page.
fn index(hva: u64) -> usize {
    (hva >> PAGE_BITS) as usize % ENTRIES
}

#[cfg(test)]
mod tests {
    use super::{table::CALM, *};
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

    #[test]
    fn of_what_stays_as_it_is_no_copy_is_kept() {
        let (ram, mut seen) = (ram(), SeenTables::default());
        compare(&mut seen, &ram);
        for _ in 0..CALM {
            assert_ne!(seen.weight(), 0);
            assert_eq!(compare(&mut seen, &ram), 0);
        }
        assert_eq!((seen.weight(), compare(&mut seen, &ram)), (0, 0));
        seen.doubt((1 << LARGE_BITS) + ((PART as u64) << PAGE_BITS));
        assert_eq!(compare(&mut seen, &ram), PART, "the part of the second table that is doubted");
        assert_eq!(seen.weight(), WEIGHT);
        ram.store64(TABLES[3] + 8, USED);
        let first = BLOCKS as usize / PARTS;
        assert_eq!(compare(&mut seen, &ram), first * PART, "where the first part is in use");
        assert_eq!(compare(&mut seen, &ram), 0);
        ram.store64(TABLES[3] + 8, USED & !RW);
        assert_eq!(compare(&mut seen, &ram), first);
    }

    #[test]
    fn what_nothing_is_mapped_by_is_dropped() {
        let (ram, mut seen) = (ram(), SeenTables::default());
        compare(&mut seen, &ram);
        seen.begin(roots());
        seen.end();
        assert_eq!((seen.weight(), seen.tables.len()), (0, 0));
    }
}
