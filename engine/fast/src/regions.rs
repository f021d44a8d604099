//! Who has which part of a wedge's address space.
//!
//! User addresses are the host's own; kernel addresses appear [`Base::bias`] above theirs, modulo 2^64, among
//! them. Regions of 1 GiB keep the two apart: a region belongs to user code until kernel memory is to
//! be mapped there, and to the kernel from then on. A user page in a kernel region is never installed:
//! user code faults on it and is interpreted, and translated code that accesses user memory finds the
//! address poisoned ([`wedge::Pages::give_to_kernel`]). A kernel has memory in some dozen regions of
//! 131,072, so programs hardly ever meet one.
//!
//! Without protection keys user code that has a page in such a region would not fault: it would see what the kernel
//! or the wedge has there. So no user code runs in a wedge while its page tables lead to one of them
//! ([`wedge_abi::Claim`]); who decides that, `crate::claims`, has it interpreted.

use std::collections::{BTreeMap, BTreeSet};
use wedge_abi::{
    BORDER, Base, Claim, NO_USER, REGION_BITS, SITES, SITES_LEN, TOP, UPPER_USER, region,
};

/// What translated code adds to an address, while no region has changed hands.
pub fn host_bias(base: Base, gva: u64) -> u64 {
    if gva >> 47 == 0 { 0 } else { base.bias() }
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

    /// The HVA lies in one of them, or so near that an access may reach into it.
    pub fn borders(&self, hva: u64) -> bool {
        self.has(hva) || self.has(hva + BORDER) || hva >= BORDER && self.has(hva - BORDER)
    }

    /// Where programs must have no pages if these are the kernel's.
    pub fn claims(&self, base: Base) -> Vec<Claim> {
        let reserved = [base.at(NO_USER), base.at(UPPER_USER) - 1].map(region);
        let all = self.0.iter().copied().chain(reserved);
        let mut claims = BTreeMap::new();
        for (entry, at) in all.map(|region| ((region >> 9) as u16, (region & 0x1ff) as u16)) {
            let claim = claims.entry(entry).or_insert(Claim { entry, first: at, last: at });
            (claim.first, claim.last) = (claim.first.min(at), claim.last.max(at));
        }
        claims.into_values().collect()
    }

    /// Their first HVAs, ascending.
    pub fn starts(&self) -> impl Iterator<Item = u64> {
        self.0.iter().map(|region| (*region as u64) << REGION_BITS)
    }
}

/// First HVA of an HVA's region, and its length in bytes.
pub fn extent(hva: u64) -> (u64, u64) {
    let len = 1 << REGION_BITS;
    (hva & !(len - 1), len)
}

/// The HVA of a kernel page, if one may be installed there.
pub fn kernel_hva(base: Base, gva: u64) -> Option<u64> {
    let hva = gva.wrapping_add(base.bias());
    (gva >= base.kernel_start() && is_mappable(base, hva)).then_some(hva)
}

/// The ranges of HVAs that may hold guest pages. The host maps nothing at the lowest addresses for an ordinary user, and a wedge is
/// one: a guest's program may have pages there.
pub fn mappable(base: Base) -> [(u64, u64); 3] {
    let (reserved, end) = (base.at(NO_USER), base.at(UPPER_USER));
    let lowest = host::current().facts().lowest_address.min(SITES as u64);
    [(lowest, SITES as u64), ((SITES + SITES_LEN) as u64, reserved), (end, TOP as u64)]
}

/// The parts of a range that may hold guest pages.
pub fn mappable_parts(base: Base, start: u64, len: u64) -> impl Iterator<Item = (u64, u64)> {
    let cut = move |(from, to): (u64, u64)| (from.max(start), to.min(start + len));
    mappable(base).into_iter().map(cut).filter(|(from, to)| from < to)
}

/// Whether guest pages may be mapped at each address of a range: first HVA and bytes.
pub fn is_wholly_mappable(base: Base, start: u64, len: u64) -> bool {
    mappable_parts(base, start, len).eq([(start, start + len)])
}

/// An HVA lies in the table of patched system calls.
pub fn is_in_sites(hva: u64) -> bool {
    hva.wrapping_sub(SITES as u64) < SITES_LEN as u64
}

/// A guest page may lie at this HVA.
pub fn is_mappable(base: Base, hva: u64) -> bool {
    mappable(base).iter().any(|(from, to)| (*from..*to).contains(&hva))
}

#[cfg(test)]
mod tests {
    use super::*;
    use wedge_abi::{ENTRY_BITS, WINDOW};

    const USUAL: Base = Base::of_entry(252);

    #[test]
    fn a_region_changes_hands_once() {
        let mut kernel = Regions::default();
        let hva = kernel_hva(USUAL, 0xffff_8880_4000_0000).expect("the direct map has a place");
        assert_eq!(hva, 0x0680_4000_0000);
        assert!(!kernel.has(hva));
        assert!(kernel.add(hva));
        assert!(!kernel.add(hva + 0x3fff_ffff));
        assert!(kernel.has(hva) && !kernel.has(hva - 1) && !kernel.has(hva + 0x4000_0000));
        assert_eq!(kernel.starts().collect::<Vec<_>>(), [hva]);
    }

    #[test]
    fn claims_are_what_the_kernel_has_and_the_reserved_part() {
        let mut kernel = Regions::default();
        let claim = |entry, first, last| Claim { entry, first, last };
        assert_eq!(kernel.claims(USUAL), [claim(252, 0, 511)]);
        for hva in [0x0680_4000_0000, 0x0680_c000_0000, 0x7dff_8000_0000] {
            kernel.add(hva);
        }
        assert_eq!(
            kernel.claims(USUAL),
            [claim(13, 1, 3), claim(251, 510, 510), claim(252, 0, 511)]
        );
        let borders = [0x0680_3fe0_0000, 0x0680_3fff_ffff, 0x0680_4000_0000, 0x0680_7fff_ffff];
        assert!(borders.iter().all(|hva| kernel.borders(*hva)));
        // Two more begin behind that one's neighbour.
        assert!([0x0680_8000_0000, 0x0680_801f_ffff].iter().all(|hva| kernel.borders(*hva)));
        assert!(!kernel.borders(0x0680_3fdf_ffff) && !kernel.borders(0x0680_8020_0000));
    }

    #[test]
    fn what_is_nobodys() {
        assert!(!is_mappable(USUAL, WINDOW as u64 + 0x1000));
        assert!(!is_mappable(USUAL, NO_USER));
        assert!(is_mappable(USUAL, UPPER_USER));
        assert!(!is_mappable(USUAL, 1 << 47));
        let lowest = [0, 0xf000, SITES as u64 - 1].map(|hva| is_mappable(USUAL, hva));
        assert_eq!(lowest, [false, false, true]);
        assert_eq!(kernel_hva(USUAL, 0xffff_8000_0000_0000), None);
        assert_eq!(kernel_hva(USUAL, 0xffff_ffff_8000_0000), Some(0x7dff_8000_0000));
    }

    #[test]
    fn another_base_is_as_good() {
        assert_eq!((USUAL, USUAL.entry()), (Base::default(), 252));
        for entry in 241..252 {
            let base = Base::of_entry(entry);
            let start = u64::from(entry) << ENTRY_BITS;
            assert_eq!((base.entry(), base.bias()), (entry, start));
            assert!(!is_mappable(base, start) && !is_mappable(base, start + (511 << 30)));
            assert!(is_mappable(base, start - 1) && is_mappable(base, start + (512 << 30)));
            let top = kernel_hva(base, 0xffff_ffff_8000_0000);
            assert_eq!(top, Some(start - 0x8000_0000));
            assert!(kernel_hva(base, 0xffff_8880_0000_0000).is_some());
            assert_eq!(kernel_hva(base, base.kernel_start() - 1), None);
        }
    }

    /// What is the wedge's own and what is the guest's have nothing in common.
    #[test]
    fn the_reserved_part_holds_all_there_is() {
        let reserved = NO_USER..UPPER_USER;
        let table = wedge_abi::REGIONS as u64..wedge_abi::NEAR_END as u64;
        let window = WINDOW as u64..wedge_abi::WINDOW_END as u64;
        let ram = wedge_abi::RAM as u64..(wedge_abi::RAM + wedge_abi::RAM_MAX) as u64;
        for (part, next) in [(&table, &window), (&window, &ram)] {
            assert!(reserved.contains(&part.start) && part.end <= next.start);
        }
        assert!(ram.end <= reserved.end && wedge_abi::WINDOW_END <= WINDOW + wedge_abi::WINDOW_LEN);
    }
}
