//! Who has which part of a wedge's address space.
//!
//! User addresses are the host's own; kernel addresses appear [`BIAS`] above theirs, modulo 2^64, among
//! them. Regions of 512 GiB keep the two apart: a region belongs to user code until kernel memory is to
//! be mapped there, and to the kernel from then on. A user page in a kernel region is never installed:
//! user code faults on it and is interpreted, and translated code that accesses user memory finds the
//! address poisoned ([`wedge::Pages::give_to_kernel`]).

use frame::{BIAS, KERNEL_START, NO_USER, RAM, RAM_MAX, SITES, SITES_LEN, TOP, UPPER_USER, WINDOW};

const _: () =
    assert!(WINDOW >> REGION_BITS == 3 && RAM >> REGION_BITS == 4 && RAM_MAX >> REGION_BITS == 2);

/// log2 of a region's bytes.
const REGION_BITS: u32 = 39;

/// What translated code adds to an address, while no region has changed hands.
pub fn host_bias(gva: u64) -> u64 {
    if gva >> 47 == 0 { 0 } else { BIAS }
}

/// Whose regions are whose.
#[derive(Clone, Debug, Default)]
pub struct Regions {
    kernel: [u64; 4],
}

impl Regions {
    /// The region of an HVA.
    pub fn of(hva: u64) -> usize {
        (hva >> REGION_BITS) as usize & 0xff
    }

    /// A user page may be installed here.
    pub fn user(&self, gva: u64) -> bool {
        Self::mappable(gva) && !self.is_kernel(Self::of(gva))
    }

    /// The HVA of a kernel page, if one may be installed there.
    pub fn kernel(gva: u64) -> Option<u64> {
        let hva = gva.wrapping_add(BIAS);
        (gva >= KERNEL_START && Self::mappable(hva)).then_some(hva)
    }

    /// Gives a region to the kernel; false if it was its own already.
    pub fn give_to_kernel(&mut self, region: usize) -> bool {
        let (word, bit) = (&mut self.kernel[(region / 64) & 3], 1 << (region & 63));
        let news = *word & bit == 0;
        *word |= bit;
        news
    }

    /// The ranges of HVAs that may hold guest pages.
    pub fn all() -> [(u64, u64); 4] {
        let window = extent(Self::of(WINDOW as u64)).0;
        let (sites, sites_end) = (SITES as u64, (SITES + SITES_LEN) as u64);
        [
            (0, sites),
            (sites_end, window),
            ((RAM + RAM_MAX) as u64, NO_USER),
            (UPPER_USER, TOP as u64),
        ]
    }

    /// The parts of a range that may hold guest pages.
    pub fn parts(start: u64, len: u64) -> impl Iterator<Item = (u64, u64)> {
        let cut = move |(from, to): (u64, u64)| (from.max(start), to.min(start + len));
        Self::all().into_iter().map(cut).filter(|(from, to)| from < to)
    }

    /// A guest page may lie at this HVA.
    pub fn mappable(hva: u64) -> bool {
        Self::all().iter().any(|(from, to)| (*from..*to).contains(&hva))
    }

    /// Whether a region is the kernel's.
    pub fn is_kernel(&self, region: usize) -> bool {
        self.kernel[(region / 64) & 3] >> (region & 63) & 1 == 1
    }
}

/// First HVA of a region, and its length in bytes.
pub fn extent(region: usize) -> (u64, u64) {
    ((region as u64) << REGION_BITS, 1 << REGION_BITS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_changes_hands_once() {
        let mut regions = Regions::default();
        assert!(regions.user(0x5555_0000_0000));
        let hva = Regions::kernel(0xffff_8880_0000_0000).expect("the direct map has a place");
        assert_eq!(hva, 0x0680_0000_0000);
        assert!(regions.user(hva));
        assert!(regions.give_to_kernel(Regions::of(hva)));
        assert!(!regions.give_to_kernel(Regions::of(hva)));
        assert!(!regions.user(hva));
    }

    #[test]
    fn what_is_nobodys() {
        let regions = Regions::default();
        assert!(!regions.user(WINDOW as u64 + 0x1000));
        assert!(!regions.user(NO_USER));
        assert!(regions.user(UPPER_USER));
        assert!(!regions.user(1 << 47));
        assert_eq!(Regions::kernel(0xffff_8000_0000_0000), None);
        assert_eq!(Regions::kernel(0xffff_ffff_8000_0000), Some(0x7dff_8000_0000));
    }
}
