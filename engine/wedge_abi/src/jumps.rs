//! The tables by which guest addresses of code become addresses in the code cache.

use crate::{places::PLACE, sites::STUBS};

/// Slots of the table of landings, by [`landing_slot`]: 8 bytes each, the HVA of code that asks whether the GVA that is jumped to is its own.
/// The kernel's tables begin with it.
pub const LANDING_SLOTS: usize = 1 << 16;
/// A GVA's slot there is the GVA without so many low bits. Calls beside each other return to places beside each other, whose slots are in
/// one cache line.
pub const LANDING_SHIFT: u32 = 2;
/// Bytes of the table.
pub const LANDINGS_LEN: usize = LANDING_SLOTS * 8;

/// Where the landing for a GVA is, if it is there.
pub const fn landing_slot(guest: u64) -> usize {
    (guest >> LANDING_SHIFT) as usize % LANDING_SLOTS
}

/// Slots of the table with which those of translated user code begin: one for each value of an address's low 16 bits.
pub const TABLE_SLOTS: usize = 1 << 16;
/// Bytes of it: an 8-byte key, the negated GVA, and an 8-byte HVA a slot.
pub const TABLE_LEN: usize = TABLE_SLOTS * 16;
/// Slots of the table behind, which is searched: an 8-byte key, the GVA of a block for RFLAGS.AC clear, and an 8-byte HVA.
pub const DEEP_SLOTS: usize = 1 << 17;
/// Slots looked at for one GVA.
pub const DEEP_REACH: usize = 8;
/// Offset in the tables of that table, which is that much longer than its slots.
pub const DEEP: usize = 2 * TABLE_LEN;
/// A GVA times this, without its lowest [`DEEP_SHIFT`] bits, is where the search for it starts.
pub const DEEP_FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
/// See [`DEEP_FACTOR`].
pub const DEEP_SHIFT: u32 = 64 - DEEP_SLOTS.trailing_zeros();

/// The key in the searched table of a kernel's block at a GVA: the GVA for RFLAGS.AC clear, and for RFLAGS.AC set what is no address.
pub const fn kernel_key(guest: u64, ac: bool) -> u64 {
    guest.wrapping_add((ac as u64) << 62)
}

/// Where the search for a GVA starts; it ends before `DEEP_REACH` slots, the table never.
pub const fn deep_slot(guest: u64) -> usize {
    (guest.wrapping_mul(DEEP_FACTOR) >> DEEP_SHIFT) as usize
}

/// Offset in the tables of translated user code of its pages, where the kernel's tables have blocks for RFLAGS.AC set: by
/// [`version_slot`], 8 bytes with the [`version_key`] of a page and 8 with its index among all that there are. Where code is translated
/// for places, 8 bytes with its [`placed_key`] and 8 with a [`crate::TextPage`].
pub const VERSIONS: usize = TABLE_LEN;
/// How many slots that has.
pub const VERSION_SLOTS: usize = 1 << 14;
/// Slots looked at for one page.
pub const VERSION_REACH: usize = 8;
/// So many pages of translated user code there can be, less the first indices, which no page has.
pub const MAX_VERSIONS: usize = 1 << 16;
/// The first index of a page of translated user code.
pub const FIRST_VERSION: usize = 2;

/// Offset in the tables of translated user code of what is known of host PCs there that have faulted, by [`fault_slot`]:
/// 8 bytes with the PC and 8 with a [`FaultState`].
pub const FAULTS: usize = VERSIONS + (VERSION_SLOTS + VERSION_REACH) * 16;
/// How many slots that has.
pub const FAULT_SLOTS: usize = 1 << 10;
const _: () = assert!(FAULTS + FAULT_SLOTS * 16 <= VERSIONS + TABLE_LEN);

/// Where what is known of a host PC is, if it is known.
pub const fn fault_slot(pc: u64) -> usize {
    (pc.wrapping_mul(DEEP_FACTOR) >> (64 - FAULT_SLOTS.trailing_zeros())) as usize
}

/// What the state of guest code was at the start of the instruction that has faulted at a host PC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultState {
    /// GVA of the instruction, as far as it is not the same for all of the kernel's, or its place.
    pub rip: u64,
    /// Registers, by encoding, whose values are in the spill slots of the same positions.
    pub spilled: [Option<u8>; FAULT_SPILLS],
}

/// Spill slots that a [`FaultState`] tells of.
pub const FAULT_SPILLS: usize = 3;
/// Bits of a word for a GVA or a place, and for a register: its encoding and one more, or zero.
const GVA_BITS: u32 = 47;
const REGISTER_BITS: u32 = 5;
/// The bits in which GVAs differ, or places.
pub(crate) const GVA_MASK: u64 = (1 << GVA_BITS) - 1;
/// The bits that all of the kernel's addresses have.
const KERNEL_HALF: u64 = !GVA_MASK;
/// The bits of a GVA or a place.
const RIP_BITS: u64 = PLACE | GVA_MASK;
const _: () = assert!(GVA_BITS + REGISTER_BITS * FAULT_SPILLS as u32 <= PLACE.trailing_zeros());

impl FaultState {
    /// As a word.
    pub fn to_word(self) -> u64 {
        let registers = self.spilled.iter().rev().fold(0, |word, register| {
            word << REGISTER_BITS | register.map_or(0, |number| u64::from(number & 15) + 1)
        });
        self.rip & RIP_BITS | registers << GVA_BITS
    }

    /// What a word says.
    pub fn from_word(word: u64) -> Self {
        let register = |at: usize| {
            let code = word >> (GVA_BITS + REGISTER_BITS * at as u32) & ((1 << REGISTER_BITS) - 1);
            (code as u8).checked_sub(1).map(|number| number & 15)
        };
        Self { rip: word & RIP_BITS, spilled: core::array::from_fn(register) }
    }
}

/// Registers, by encoding. A string instruction of the kernel's that may access the user's memory executes with RSI and RDI changed: the
/// first of these registers holds what has been added to RSI, the second what has been added to RDI.
pub const STRING_BIASES: [u8; 2] = [2, 3];

/// The registers, by encoding, for all string instructions of 32-bit kernels: the first holds what has been added to RSI, the second what has
/// been added to RDI. If the instruction does not use a pointer, the pointer's register holds anything.
pub const NARROW_STRING_BIASES: [u8; 2] = [9, 11];

/// What the state of the kernel's code was at the start of the instruction that has faulted at a host PC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelFaultState {
    /// The state, but for what has been added to RSI and RDI.
    pub state: FaultState,
    /// Whether something has been added to RSI, and to RDI ([`STRING_BIASES`]).
    pub moved: [bool; 2],
}

/// The bits of a word that say whether RSI and RDI are moved. The address in the word can
/// spare them, as the upper bits of all kernel addresses are alike.
const MOVED: [u64; 2] = [1 << 62, 1 << 63];

impl KernelFaultState {
    /// As a word.
    pub fn to_word(self) -> u64 {
        let word = self.state.to_word() & !(MOVED[0] | MOVED[1]);
        let moved = self.moved.iter().zip(MOVED).filter(|(moved, _)| **moved);
        moved.fold(word, |word, (_, bit)| word | bit)
    }

    /// What a word says.
    pub fn from_word(word: u64) -> Self {
        let state = FaultState::from_word(word & !(MOVED[0] | MOVED[1]));
        let state = FaultState { rip: state.rip | KERNEL_HALF, ..state };
        Self { state, moved: MOVED.map(|bit| word & bit != 0) }
    }
}

/// A page of user code: which GVA has it, or which place, and which page of RAM it is, by its offset. The bit that all places have is
/// shifted out.
pub const fn version_key(guest: u64, offset: u64) -> u64 {
    guest >> 12 << 28 | offset >> 12
}

/// What wedges find a page of RAM by, by its offset, where code is translated for places.
pub const fn placed_key(offset: u64) -> u64 {
    1 << 62 | offset >> 12
}

/// Where the search for a [`version_key`], or a [`placed_key`], starts.
pub const fn version_slot(key: u64) -> usize {
    (key.wrapping_mul(DEEP_FACTOR) >> (64 - VERSION_SLOTS.trailing_zeros())) as usize
}

/// Beside the HVA of a block of user code in the searched table, which is even: the block ends in the page behind the one it begins in.
pub const CROSSES: u64 = 1;

/// What the searched table has for a GVA of user code, or a place, in a page of this index.
pub const fn versioned(guest: u64, index: u64) -> u64 {
    guest & GVA_MASK | index << GVA_BITS
}

/// Offset in the tables of a bit for each page of user code, by [`site_page`]: it may hold patched
/// system calls.
pub const SITE_PAGES: usize = DEEP + (DEEP_SLOTS + DEEP_REACH) * 16;
/// log2 of those bits.
const SITE_PAGE_BITS: u32 = 16;

/// The word and the bit in it that stand for the page of a GVA, and for others.
pub const fn site_page(gva: u64) -> (usize, u32) {
    let bit = (gva >> 12).wrapping_mul(DEEP_FACTOR) >> (64 - SITE_PAGE_BITS);
    (bit as usize / 64, bit as u32 % 64)
}

/// Offset in the tables of the [`print`]s of pages of code that the monitor has searched, and found nothing to
/// change in, by [`plain_slot`]: 8 bytes each.
pub const PLAIN_PAGES: usize = SITE_PAGES + (1 << SITE_PAGE_BITS) / 8;
/// How many there are.
pub const PLAIN_SLOTS: usize = 4096;

/// Where a print is kept, if it is; others go there, too.
pub const fn plain_slot(print: u64) -> usize {
    print as usize % PLAIN_SLOTS
}

/// A number for what a page holds (4096 bytes), never zero. Two pages that differ have the same with a
/// probability of 2^-64, unless somebody has sought them. A program that does so executes an instruction of
/// its own unchanged.
pub fn print(page: &[u8]) -> u64 {
    let words = page.chunks_exact(32).map(|chunk| {
        core::array::from_fn(|lane| {
            let mut word = [0; 8];
            word.copy_from_slice(&chunk[lane * 8..lane * 8 + 8]);
            u64::from_le_bytes(word)
        })
    });
    print_of(words)
}

/// The same of a page's words, four at a time.
#[inline]
pub fn print_of(words: impl Iterator<Item = [u64; 4]>) -> u64 {
    let step = |lane: u64, word: u64| (lane ^ word).wrapping_mul(DEEP_FACTOR).rotate_left(29);
    let mut lanes = [1, 2, 3, 4];
    for words in words {
        for (lane, word) in lanes.iter_mut().zip(words) {
            *lane = step(*lane, word);
        }
    }
    lanes.into_iter().fold(0, step).max(1)
}

/// Offset in the tables of what is known of host PCs in the kernel's code that have faulted, as [`FAULTS`].
pub const KERNEL_FAULTS: usize = PLAIN_PAGES + PLAIN_SLOTS * 8;
/// Offset in the tables of those for translated user code, whole pages.
pub const USER_TABLES: usize = (KERNEL_FAULTS + FAULT_SLOTS * 16).next_multiple_of(4096);
/// Bytes of all.
pub const TABLES_LEN: usize = USER_TABLES + SITE_PAGES;
/// Translated user code lies at the end of the code cache, before the stubs: bytes.
pub const USER_CACHE_LEN: usize = 80 << 20;
/// Its first byte.
pub const USER_CACHE: usize = STUBS - USER_CACHE_LEN;
/// Words of the bits that say where translated user code may be.
pub(crate) const CODE_PAGE_WORDS: usize = 64;

/// The word and the bit in it that stand for a page of translated user code, and for others.
pub(crate) const fn code_page(gva: u64) -> (usize, u32) {
    let bit = (gva >> 12).wrapping_mul(DEEP_FACTOR) >> 52;
    (bit as usize / 64, bit as u32 % 64)
}

#[cfg(test)]
mod tests {
    extern crate std;

    use super::*;

    #[test]
    fn what_is_known_of_a_fault_fits_into_a_word() {
        let spills = [[None; 3], [Some(1), None, Some(15)], [Some(0), Some(7), None]];
        for (spilled, rip) in spills.into_iter().zip([0x7fff_ffff_effe, 0x1000, PLACE | 0x1234]) {
            let state = FaultState { rip, spilled };
            assert_eq!(FaultState::from_word(state.to_word()), state);
            let state = FaultState { rip: KERNEL_HALF | rip & !PLACE, spilled };
            for moved in [[false; 2], [true, false], [false, true], [true; 2]] {
                let state = KernelFaultState { state, moved };
                assert_eq!(KernelFaultState::from_word(state.to_word()), state);
            }
        }
    }

    #[test]
    fn pages_that_differ_have_other_prints() {
        let mut prints = std::collections::HashSet::new();
        let mut page = [0; 4096];
        assert!(prints.insert(print(&page)));
        for at in 0..page.len() {
            for bit in [1, 0x80] {
                page[at] = bit;
                assert!(prints.insert(print(&page)), "byte {at}");
            }
            page[at] = 0;
        }
        assert!(!prints.contains(&0));
    }
}
