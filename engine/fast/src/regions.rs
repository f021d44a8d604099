//! Who has which part of a wedge's address space.
//!
//! User addresses are the host's own; kernel addresses appear [`BIAS`] above theirs, modulo 2^64, among
//! them. Regions of 1 GiB keep the two apart: a region belongs to user code until kernel memory is to
//! be mapped there, and to the kernel from then on. A user page in a kernel region is never installed:
//! user code faults on it and is interpreted, and translated code that accesses user memory finds the
//! address poisoned ([`wedge::Pages::give_to_kernel`]). A kernel has memory in some dozen regions of
//! 131,072, so programs hardly ever meet one.

use frame::{BIAS, KERNEL_START, NO_USER, REGION_BITS, SITES, SITES_LEN, TOP, UPPER_USER, region};
use std::collections::BTreeSet;

/// What translated code adds to an address, while no region has changed hands.
pub fn host_bias(gva: u64) -> u64 {
    if gva >> 47 == 0 { 0 } else { BIAS }
}

/// Some regions.
#[derive(Clone, Debug, Default)]
pub struct Regions(BTreeSet<usize>);

impl Regions {
    /// Adds the region of an HVA; false if it was there already.
    pub fn add(&mut self, hva: u64) -> bool {
        self.0.insert(region(hva))
    }

    /// Whether the region of an HVA is there.
    pub fn has(&self, hva: u64) -> bool {
        self.0.contains(&region(hva))
    }

    /// Takes all out: first HVAs.
    pub fn take(&mut self) -> impl Iterator<Item = u64> + use<> {
        std::mem::take(&mut self.0).into_iter().map(|region| (region as u64) << REGION_BITS)
    }
}

/// First HVA of an HVA's region, and its length in bytes.
pub fn extent(hva: u64) -> (u64, u64) {
    let len = 1 << REGION_BITS;
    (hva & !(len - 1), len)
}

/// The HVA of a kernel page, if one may be installed there.
pub fn kernel_hva(gva: u64) -> Option<u64> {
    let hva = gva.wrapping_add(BIAS);
    (gva >= KERNEL_START && is_mappable(hva)).then_some(hva)
}

/// The ranges of HVAs that may hold guest pages. The host maps nothing at the lowest addresses for an ordinary user, and a wedge is
/// one: a guest's program may have pages there.
pub fn mappable() -> [(u64, u64); 3] {
    let lowest = wedge::lowest_address().min(SITES as u64);
    [(lowest, SITES as u64), ((SITES + SITES_LEN) as u64, NO_USER), (UPPER_USER, TOP as u64)]
}

/// The parts of a range that may hold guest pages.
pub fn mappable_parts(start: u64, len: u64) -> impl Iterator<Item = (u64, u64)> {
    let cut = move |(from, to): (u64, u64)| (from.max(start), to.min(start + len));
    mappable().into_iter().map(cut).filter(|(from, to)| from < to)
}

/// An HVA lies in the table of patched system calls.
pub fn is_in_sites(hva: u64) -> bool {
    hva.wrapping_sub(SITES as u64) < SITES_LEN as u64
}

/// A guest page may lie at this HVA.
pub fn is_mappable(hva: u64) -> bool {
    mappable().iter().any(|(from, to)| (*from..*to).contains(&hva))
}

#[cfg(test)]
mod tests {
    use super::*;
    use frame::WINDOW;

    #[test]
    fn a_region_changes_hands_once() {
        let mut kernel = Regions::default();
        let hva = kernel_hva(0xffff_8880_4000_0000).expect("the direct map has a place");
        assert_eq!(hva, 0x0680_4000_0000);
        assert!(!kernel.has(hva));
        assert!(kernel.add(hva));
        assert!(!kernel.add(hva + 0x3fff_ffff));
        assert!(kernel.has(hva) && !kernel.has(hva - 1) && !kernel.has(hva + 0x4000_0000));
        assert_eq!(kernel.take().collect::<Vec<_>>(), [hva]);
    }

    #[test]
    fn what_is_nobodys() {
        assert!(!is_mappable(WINDOW as u64 + 0x1000));
        assert!(!is_mappable(NO_USER));
        assert!(is_mappable(UPPER_USER));
        assert!(!is_mappable(1 << 47));
        assert!(!is_mappable(0) && !is_mappable(0xf000) && is_mappable(SITES as u64 - 1));
        assert_eq!(kernel_hva(0xffff_8000_0000_0000), None);
        assert_eq!(kernel_hva(0xffff_ffff_8000_0000), Some(0x7dff_8000_0000));
    }

    /// What is the wedge's own and what is the guest's have nothing in common.
    #[test]
    fn the_reserved_part_holds_all_there_is() {
        let reserved = NO_USER..UPPER_USER;
        let table = frame::REGIONS as u64..(frame::REGIONS + frame::REGIONS_LEN) as u64;
        let window = WINDOW as u64..frame::WINDOW_END as u64;
        let ram = frame::RAM as u64..(frame::RAM + frame::RAM_MAX) as u64;
        for (part, next) in [(&table, &window), (&window, &ram)] {
            assert!(reserved.contains(&part.start) && part.end <= next.start);
        }
        assert!(ram.end <= reserved.end && frame::WINDOW_END <= WINDOW + frame::WINDOW_LEN);
    }
}
