//! What is kept of a page table: copies of its parts, or hashes of those that have been as they are for long.

use super::{ENTRY, PART, PARTS};
use foldhash::quality::RandomState;
use ram::Ram;
use std::{
    hash::{BuildHasher, Hasher},
    mem::take,
    ops::Range,
};
use x86::{
    bits::ones,
    paging::{ADDRESS, WalkMemory},
};

/// A part that has not changed for so many comparisons is hashed. A hash does not tell which entry has changed, so if one has, all pages
/// of the part are looked at. That costs as much as some hundred comparisons with a copy.
pub(super) const CALM: u8 = 100;
/// Bytes of a part.
const PART_BYTES: usize = PART * ENTRY;

/// What is known of a page table, and the way to it. A part in use that is neither hashed nor copied is unknown.
#[derive(Default)]
pub(super) struct SeenTable {
    /// The number of the 2 MiB (HVA) that it is for.
    block: u64,
    /// As [`Descent::table`](x86::paging::Descent::table) has it.
    way: u64,
    /// A bit for each part that maps pages, the lowest for the first.
    used: u8,
    /// A bit for each part of which a hash is kept, the lowest for the first. What such a part maps has been compared with the entries
    /// that were hashed.
    hashed: u8,
    hashes: [u64; PARTS],
    copies: Vec<PartCopy>,
}

/// A copy of a part of a table.
struct PartCopy {
    /// Which part.
    part: usize,
    entries: [u8; PART_BYTES],
    /// A bit for each entry: what is mapped there has not been compared with it.
    doubted: u64,
    /// Comparisons since it changed.
    calm: u8,
}

impl SeenTable {
    /// The table for the 2 MiB (HVA) of this number, of which nothing is known.
    pub(super) fn new(block: u64) -> Self {
        Self { block, ..Self::default() }
    }

    /// The number of the 2 MiB (HVA) that it is for.
    pub(super) fn block(&self) -> u64 {
        self.block
    }

    /// Whether pages are mapped by it.
    pub(super) fn is_used(&self) -> bool {
        self.used != 0
    }

    /// How many parts are copied.
    pub(super) fn copied(&self) -> usize {
        self.copies.len()
    }

    /// The GPAs of the parts that map pages, from the first to the last, with any other parts between them.
    pub(super) fn span(&self) -> Range<u64> {
        let (first, end) = span(self.used);
        let gpa = self.way & ADDRESS;
        gpa + first as u64..gpa + end as u64
    }

    /// Nothing is mapped by it any more.
    pub(super) fn give_up(&mut self) {
        *self = Self::new(self.block);
    }

    /// The entry at an index has to be looked at again, because something else is mapped at the entry's page now.
    pub(super) fn doubt(&mut self, index: usize) {
        let part = index / PART;
        self.hashed &= !(1 << part);
        let copy = self.copies.iter_mut().find(|copy| copy.part == part);
        copy.into_iter().for_each(|copy| copy.doubted |= 1 << (index % PART));
    }

    /// Reads the table that `way` leads to, of which these `parts` map pages. Returns the entries that are doubted, or may have changed
    /// since they were last read, each with its index. Afterwards all entries are known, and none is doubted. `None` if the table is not
    /// in RAM. What was known of the table has then been forgotten.
    pub(super) fn compare(
        &mut self,
        ram: &Ram,
        (way, parts): (u64, u8),
        hashes: &RandomState,
        now: &mut [u8],
    ) -> Option<Vec<(usize, u64)>> {
        self.keep(way, parts);
        let (first, end) = span(parts);
        if ram.read_gpa((way & ADDRESS) + first as u64, &mut now[first..end]).is_err() {
            self.give_up();
            return None;
        }
        let mut changed = Vec::new();
        for part in ones(u64::from(parts)) {
            let now = &now[part * PART_BYTES..][..PART_BYTES];
            if self.hashed >> part & 1 == 0 || self.hashes[part] != hash(hashes, now) {
                self.look_closer(ram, part, now, hashes, &mut changed);
            }
        }
        Some(changed)
    }

    /// From now on these parts are kept and no others, and this is the way to the table.
    fn keep(&mut self, way: u64, parts: u8) {
        if self.way != way {
            self.give_up();
            self.way = way;
        }
        if self.used != parts {
            (self.used, self.hashed) = (parts, self.hashed & parts);
            self.copies.retain(|copy| parts >> copy.part & 1 != 0);
        }
    }

    /// Compares a part of the table, of which `now` has been read, with its copy.
    fn look_closer(
        &mut self,
        ram: &Ram,
        part: usize,
        now: &[u8],
        hashes: &RandomState,
        changed: &mut Vec<(usize, u64)>,
    ) {
        let bit = 1 << part;
        self.hashed &= !bit;
        let known = self.copies.iter().position(|copy| copy.part == part);
        let place = known.unwrap_or_else(|| {
            self.copies.push(PartCopy::unknown(part));
            self.copies.len() - 1
        });
        self.copies[place].take_changed(ram, self.way & ADDRESS, now, changed);
        if self.copies[place].calm == CALM {
            self.copies.swap_remove(place);
            (self.hashes[part], self.hashed) = (hash(hashes, now), self.hashed | bit);
        }
    }
}

impl PartCopy {
    /// Nothing has been compared with it.
    fn unknown(part: usize) -> Self {
        Self { part, entries: [0; PART_BYTES], doubted: u64::MAX, calm: 0 }
    }

    /// See [`SeenTable::compare`]; `now` has been read from this part of the table at a GPA.
    fn take_changed(&mut self, ram: &Ram, table: u64, now: &[u8], changed: &mut Vec<(usize, u64)>) {
        let different = differing(&self.entries, now) | take(&mut self.doubted);
        self.calm = if different == 0 { self.calm + 1 } else { 0 };
        for place in ones(different) {
            let index = self.part * PART + place;
            // What was read may have been read while it was being written.
            let entry = { ram }.read_u64(table + (index * ENTRY) as u64);
            self.entries[place * ENTRY..][..ENTRY].copy_from_slice(&entry.to_le_bytes());
            changed.push((index, entry));
        }
    }
}

/// The bytes of a table from the first of these parts to the end of the last: begin and end.
fn span(parts: u8) -> (usize, usize) {
    let first = parts.trailing_zeros().min(PARTS as u32) as usize;
    let end = PARTS - parts.leading_zeros() as usize;
    (first.min(end) * PART_BYTES, end * PART_BYTES)
}

/// The hash of a part's bytes.
fn hash(hashes: &RandomState, bytes: &[u8]) -> u64 {
    let mut hasher = hashes.build_hasher();
    hasher.write(bytes);
    hasher.finish()
}

/// Which entries are others, a bit for each. Nearly always there are none, which a comparison of all at once tells.
fn differing(old: &[u8], new: &[u8]) -> u64 {
    if old == new {
        return 0;
    }
    let entries = old.as_chunks::<ENTRY>().0.iter().zip(new.as_chunks::<ENTRY>().0);
    entries.rev().fold(0, |bits, (old, new)| bits << 1 | u64::from(old != new))
}
