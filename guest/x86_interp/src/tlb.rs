//! The software TLB: linear page to RAM offset, one comparison per access.
//!
//! There is one set per *view*: what may be accessed depends on the privilege level and, under
//! SMAP, on RFLAGS.AC, so a change of those selects another set instead of flushing. An entry
//! caches each right separately by holding the page's address as the tag of that right or
//! [`NEVER`]. A write tag is present only if the dirty bit is already set in the page table and the
//! page holds no decoded code, so a hit needs no bookkeeping at all.
//!
//! Entries of large pages are cached 4 KB at a time. Any flush drops everything it might concern:
//! x86 allows a TLB to forget at any time.

/// A tag that matches no page-aligned address (distance from any address is at least 4096).
const NEVER: u64 = 1 << 63 | 0x7ff;
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

const EMPTY: Entry = Entry { tags: [NEVER; 3], offset: 0 };

/// The TLB.
pub struct Tlb {
    sets: Box<[[Entry; SLOTS]; 4]>,
}

impl Tlb {
    pub fn new() -> Self {
        Self { sets: Box::new([[EMPTY; SLOTS]; 4]) }
    }

    /// RAM offset of `size` bytes at linear address `linear`, if they lie in one page for which
    /// the right is cached.
    #[inline(always)]
    pub fn lookup(&self, view: View, right: Right, linear: u64, size: u64) -> Option<u64> {
        let entry = &self.sets[view as usize][slot(linear)];
        let distance = linear ^ entry.tags[right as usize];
        if distance <= 4096 - size { Some(entry.offset + distance) } else { None }
    }

    /// Caches a right. `linear` and `offset` are page-aligned.
    pub fn fill(&mut self, view: View, right: Right, linear: u64, offset: u64) {
        let entry = &mut self.sets[view as usize][slot(linear)];
        if entry.offset != offset || !entry.tags.contains(&linear) {
            *entry = Entry { tags: [NEVER; 3], offset };
        }
        entry.tags[right as usize] = linear;
    }

    /// Forgets everything.
    pub fn flush(&mut self) {
        for set in self.sets.iter_mut() {
            set.fill(EMPTY);
        }
    }

    /// Forgets the page of `linear`.
    pub fn flush_page(&mut self, linear: u64) {
        for set in self.sets.iter_mut() {
            set[slot(linear)] = EMPTY;
        }
    }

    /// Forgets the right to write to the RAM page at `offset`, under every address.
    pub fn forbid_writes(&mut self, offset: u64) {
        for entry in self.sets.iter_mut().flatten() {
            if entry.offset == offset {
                entry.tags[Right::Write as usize] = NEVER;
            }
        }
    }
}

fn slot(linear: u64) -> usize {
    (linear >> 12) as usize & (SLOTS - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hits_stay_inside_the_page() {
        let mut tlb = Tlb::new();
        tlb.fill(View::User, Right::Read, 0xffff_8000_0000_1000, 0x5000);
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
        for a in [0, NEVER, NEVER & !0xfff, 1 << 63, u64::MAX] {
            assert_eq!(tlb.lookup(View::Supervisor, Right::Read, a, 1), None, "{a:#x}");
        }
    }
}
