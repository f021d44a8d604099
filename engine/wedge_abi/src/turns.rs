//! Hand-off: which process runs the vCPU.

use core::sync::atomic::{AtomicU32, AtomicU64};

/// Wedges of a vCPU; their numbers start at one.
pub const MAX_WEDGES: usize = 128;
/// The monitor's number.
pub const MONITOR: usize = 0;
/// The signal that makes running guest code come back.
pub const KICK: i32 = 10;

/// Whose turn it is: the monitor's or one wedge's, by number. Wedges can write it as they like; what they
/// gain is that guest code runs in several of them at once.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct TurnsPage {
    /// Not zero: it is the turn of the one with this number, who waits for that.
    pub words: [AtomicU32; MAX_WEDGES + 1],
    /// The wedge that has the turn or had it last.
    pub current: AtomicU32,
    /// By wedge, the PCID of the space it holds plus one: it can go on there by itself, the monitor has no
    /// orders for it. Zero if not.
    pub spaces: [AtomicU32; MAX_WEDGES + 1],
    /// By wedge, the version of its space ([`SpaceVersion::words`]) at which the wedge can go on there by itself, whatever PCID the
    /// space had. Zeros if it cannot.
    pub versions: [[AtomicU64; SpaceVersion::WORDS]; MAX_WEDGES + 1],
    /// By wedge, the version at which guest code last left its space. Guest code had flushed there all that was taken back until
    /// then. Zeros if nobody has seen it leave.
    pub left: [[AtomicU64; SpaceVersion::WORDS]; MAX_WEDGES + 1],
    /// Where the guest's kernel has its count of flushes, relative to GS ([`SpaceVersion`]). Zero if nobody knows.
    pub counts: AtomicU64,
    /// Not zero: there is something new in `left` or in `moves`.
    pub moved: AtomicU32,
    /// By wedge, what wedges have done with the PCID of its space since the monitor last looked. A PCID plus one: the space has
    /// this PCID now. [`LEFT`]: another space has the PCID that this one had. Zero: nothing.
    pub moves: [AtomicU32; MAX_WEDGES + 1],
}

/// In [`TurnsPage::moves`]: another space has the PCID.
pub const LEFT: u32 = u32::MAX;

/// An address space as Linux counts its flushes.
///
/// For each PCID a CPU has two words, in its `cpu_tlbstate.ctxs`. They say whose memory has this PCID (`ctx_id`), and how
/// often translations of that memory had been taken back when this CPU last heard of it (`tlb_gen`). Linux writes both before it
/// loads CR3 with a flush (`switch_mm_irqs_off`, `arch/x86/mm/tlb.c`). Each translation that is taken back later raises the count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpaceVersion {
    /// GPA of the top page table.
    pub root: u64,
    /// Whose memory it is, never zero: Linux gives no number twice.
    pub owner: u64,
    /// The count.
    pub flushes: u64,
}

impl SpaceVersion {
    /// Words that it takes.
    pub const WORDS: usize = 3;
    /// PCIDs that Linux gives to address spaces of processes: from one to this.
    pub const PCIDS: u64 = 6;
    /// Bytes of the two words of a PCID.
    const STEP: u64 = 16;

    /// Reads the version that the guest's kernel has written down for a PCID, of the space with this top page table (GPA).
    ///
    /// `counts` is the distance of PCID 1's words from the kernel's GS base. `bases` are the GS base, and the one that SWAPGS would
    /// load. `word` reads the kernel's memory at a GVA. `None` if there is nothing to read, or if the PCID is nobody's.
    pub fn read(
        (pcid, root): (u64, u64),
        counts: u64,
        bases: [u64; 2],
        mut word: impl FnMut(u64) -> Option<u64>,
    ) -> Option<Self> {
        let [owner, flushes] = Self::places(counts, bases, pcid)?;
        let owner = word(owner).filter(|owner| *owner != 0)?;
        Some(Self { root, owner, flushes: word(flushes)? })
    }

    /// GVAs of the two words that Linux keeps for a PCID: whose memory the PCID stands for, and how often translations of that memory have
    /// been taken back. `None` if there are no such words for this PCID.
    ///
    /// Programs choose a GS base, and the kernel's entry code runs with that base for a moment. So there are no words unless one
    /// base is in the kernel's half and the other is not.
    const fn places(counts: u64, bases: [u64; 2], pcid: u64) -> Option<[u64; 2]> {
        let [kernels, other] = bases;
        let is_kernels = kernels >> 63 == 1 && other >> 63 == 0;
        if counts == 0 || !is_kernels || pcid == 0 || pcid > Self::PCIDS {
            return None;
        }
        let owner = kernels.wrapping_add(counts).wrapping_add((pcid - 1) * Self::STEP);
        Some([owner, owner.wrapping_add(8)])
    }

    /// As [`TurnsPage::versions`] has it.
    #[must_use]
    pub const fn words(self) -> [u64; Self::WORDS] {
        [self.root, self.owner, self.flushes]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_the_kernels_whatever_base_a_program_has_chosen() {
        const KERNELS: u64 = 0xffff_8880_0000_0000;
        let places = |bases, pcid| SpaceVersion::places(0x50, bases, pcid);
        assert_eq!(places([KERNELS, 0x7000], 1), Some([KERNELS + 0x50, KERNELS + 0x58]));
        assert_eq!(places([KERNELS, 0], 6), Some([KERNELS + 0xa0, KERNELS + 0xa8]));
        assert_eq!(places([0x7000, KERNELS], 1), None, "the entry code");
        assert_eq!(places([KERNELS, KERNELS], 1), None, "nobody knows which is whose");
        assert_eq!(places([KERNELS, 0], 0), None, "no PCID");
        assert_eq!(places([KERNELS, 0], 7), None, "none that Linux gives a process");
        assert_eq!(SpaceVersion::places(0, [KERNELS, 0], 1), None, "nobody knows where they are");
    }
}
