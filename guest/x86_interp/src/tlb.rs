//! The software TLB: linear page to RAM offset, one comparison per access.
//!
//! There is one set per *view*: what may be accessed depends on the privilege level and, under
//! SMAP, on RFLAGS.AC, so a change of those selects another set instead of flushing. An entry
//! caches each right separately by holding the page's address as the tag of that right or
//! [`never`]. A write tag is present only if the dirty bit is already set in the page table and the
//! page holds no decoded code, so a hit needs no bookkeeping at all.
//!
//! Entries of large pages are cached 4 KB at a time. INVLPG must drop all of them, so two small
//! filters remember in which 2 MB and 1 GB regions there are such pieces: a page flush in a marked
//! region drops the whole region. Any flush may drop too much: x86 allows a TLB to forget at any
//! time.

use x86::bits::ones;

const SLOTS: usize = 1024;

/// Who is looking: the rights an access is checked with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum View {
    /// CPL 0 to 2, and implicit supervisor accesses.
    Supervisor = 0,
    /// CPL 0 to 2 with RFLAGS.AC set: SMAP does not apply.
    SupervisorAc = 1,
    /// CPL 3.
    User = 2,
    /// CPL 3 with alignment checks on. Never filled, so that every access takes the slow path.
    UserAligned = 3,
}

impl View {
    /// The view of privilege level `cpl` for accesses SMAP does not concern.
    pub fn at_level(cpl: u8) -> Self {
        if cpl == 3 { Self::User } else { Self::Supervisor }
    }

    /// The same rights without alignment checks.
    pub fn unaligned(self) -> Self {
        if self == Self::UserAligned { Self::User } else { self }
    }
}

/// Which right is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Right {
    /// Load.
    Read = 0,
    /// Store.
    Write = 1,
    /// Instruction fetch.
    Execute = 2,
}

#[derive(Clone, Copy)]
struct Entry {
    tags: [u64; 3],
    /// RAM offset of the page.
    offset: u64,
}

/// A tag no address looked up in this slot matches: it belongs to another slot.
const fn never(slot: usize) -> u64 {
    1 << 63 | (slot as u64 ^ 1) << 12
}

const fn empty(slot: usize) -> Entry {
    Entry { tags: [never(slot); 3], offset: 0 }
}

/// The entries of one view, and which of them were filled since the last flush.
struct Set {
    entries: [Entry; SLOTS],
    used: [u64; SLOTS / 64],
}

impl Set {
    fn new() -> Self {
        Self { entries: std::array::from_fn(empty), used: [0; SLOTS / 64] }
    }

    fn flush(&mut self) {
        for slot in slots_in(std::mem::take(&mut self.used)) {
            self.entries[slot] = empty(slot);
        }
    }

    fn forbid_writes(&mut self, offset: u64) {
        for slot in slots_in(self.used) {
            let entry = &mut self.entries[slot];
            if entry.offset == offset {
                entry.tags[Right::Write as usize] = never(slot);
            }
        }
    }
}

/// The slots whose bits are set in a bitmap of the slots in use.
fn slots_in(used: [u64; SLOTS / 64]) -> impl Iterator<Item = usize> {
    let words = used.into_iter().enumerate();
    words.flat_map(|(word, bits)| ones(bits).map(move |bit| word * 64 + bit))
}

/// The TLB.
pub struct Tlb {
    sets: Box<[Set; 4]>,
    /// Regions of 2 MB (by address bits 30:21) with pieces of a large page.
    large: [u64; 16],
    /// Regions of 1 GB (by address bits 35:30) with pieces of a page above 2 MB.
    huge: u64,
}

impl Tlb {
    pub fn new() -> Self {
        let sets = Box::new(std::array::from_fn(|_| Set::new()));
        Self { sets, large: [0; 16], huge: 0 }
    }

    /// RAM offset of `size` bytes at linear address `linear`, if they lie in one page for which
    /// the right is cached.
    #[inline(always)]
    pub fn lookup(&self, view: View, right: Right, linear: u64, size: u64) -> Option<u64> {
        let entry = &self.sets[view as usize].entries[slot(linear)];
        let distance = linear ^ entry.tags[right as usize];
        if distance <= 4096 - size { Some(entry.offset + distance) } else { None }
    }

    /// Caches a right. `linear` and `offset` are page-aligned; `page_bits` is log2 of the size in
    /// bytes of the guest's page they are part of.
    pub fn fill(&mut self, view: View, right: Right, linear: u64, offset: u64, page_bits: u32) {
        let (index, set) = (slot(linear), &mut self.sets[view as usize]);
        let entry = &mut set.entries[index];
        if entry.offset != offset || !entry.tags.contains(&linear) {
            *entry = Entry { tags: [never(index); 3], offset };
        }
        entry.tags[right as usize] = linear;
        set.used[index / 64] |= 1 << (index % 64);
        match page_bits {
            0..=12 => {}
            13..=21 => self.large[region(linear) / 64] |= 1 << (region(linear) % 64),
            _ => self.huge |= 1 << (linear >> 30 & 63),
        }
    }

    /// Forgets everything.
    pub fn flush(&mut self) {
        self.sets.iter_mut().for_each(Set::flush);
        self.large = [0; 16];
        self.huge = 0;
    }

    /// Forgets the page of `linear`, whatever its size.
    pub fn flush_page(&mut self, linear: u64) {
        if self.huge >> (linear >> 30 & 63) & 1 != 0 {
            return self.flush();
        }
        let large = self.large[region(linear) / 64] >> (region(linear) % 64) & 1 != 0;
        let (first, count) = if large { (slot(linear) & !511, 512) } else { (slot(linear), 1) };
        for set in self.sets.iter_mut() {
            for slot in first..first + count {
                set.entries[slot] = empty(slot);
            }
        }
    }

    /// Forgets the right to write to the RAM page at `offset`, under every address.
    pub fn forbid_writes(&mut self, offset: u64) {
        self.sets.iter_mut().for_each(|set| set.forbid_writes(offset));
    }
}

fn slot(linear: u64) -> usize {
    (linear >> 12) as usize & (SLOTS - 1)
}

/// Index of a 2 MB region in the filter.
fn region(linear: u64) -> usize {
    (linear >> 21) as usize & 1023
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_are_forbidden_under_every_address() {
        let mut tlb = Tlb::new();
        // First and last slots of words of the bitmap, and two views.
        let pages = [0, 63, 64, 127, SLOTS as u64 - 1].map(|page| page << 12);
        for linear in pages {
            for right in [Right::Read, Right::Write] {
                tlb.fill(View::User, right, linear, 0x5000, 12);
                tlb.fill(View::Supervisor, right, linear + (1 << 30), 0x6000, 12);
            }
        }
        tlb.forbid_writes(0x5000);
        for linear in pages {
            let look = |view, right, linear| tlb.lookup(view, right, linear, 1);
            assert_eq!(look(View::User, Right::Write, linear), None);
            assert_eq!(look(View::User, Right::Read, linear), Some(0x5000));
            assert_eq!(look(View::Supervisor, Right::Write, linear + (1 << 30)), Some(0x6000));
        }
    }

    #[test]
    fn hits_stay_inside_the_page() {
        let mut tlb = Tlb::new();
        tlb.fill(View::User, Right::Read, 0xffff_8000_0000_1000, 0x5000, 12);
        let look = |a, s| tlb.lookup(View::User, Right::Read, a, s);
        assert_eq!(look(0xffff_8000_0000_1ff8, 8), Some(0x5ff8));
        assert_eq!(look(0xffff_8000_0000_1ff9, 8), None);
        assert_eq!(look(0xffff_8000_0000_1fff, 1), Some(0x5fff));
        assert_eq!(look(0x0000_8000_0000_1000, 1), None);
        assert_eq!(tlb.lookup(View::User, Right::Write, 0xffff_8000_0000_1000, 1), None);
        assert_eq!(tlb.lookup(View::Supervisor, Right::Read, 0xffff_8000_0000_1000, 1), None);
    }

    #[test]
    fn empty_never_hits() {
        let tlb = Tlb::new();
        for a in [0, never(0), never(1), 1 << 63, 1 << 63 | 0x7ff, 1 << 63 | 0x1000, u64::MAX] {
            assert_eq!(tlb.lookup(View::Supervisor, Right::Read, a, 1), None, "{a:#x}");
        }
    }

    #[test]
    fn a_page_flush_drops_all_pieces_of_a_large_page() {
        for (bits, distance) in [(12, 0), (21, 0x1f_f000), (22, 0x3f_f000), (30, 0x3fff_f000)] {
            let mut tlb = Tlb::new();
            tlb.fill(View::User, Right::Read, 0x4000_0000, 0x5000, bits);
            tlb.flush_page(0x4000_0000 + distance);
            assert_eq!(tlb.lookup(View::User, Right::Read, 0x4000_0000, 1), None, "{bits}");
        }
    }

    #[test]
    fn a_page_flush_spares_its_neighbours() {
        let mut tlb = Tlb::new();
        tlb.fill(View::User, Right::Read, 0x4000_0000, 0x5000, 12);
        tlb.flush_page(0x4000_1000);
        assert_eq!(tlb.lookup(View::User, Right::Read, 0x4000_0000, 1), Some(0x5000));
        tlb.flush();
        assert_eq!(tlb.lookup(View::User, Right::Read, 0x4000_0000, 1), None);
    }
}
