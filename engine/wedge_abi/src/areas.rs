//! Thread-local segments: the entries of the GDT that Linux gives to its programs' threads, and the host to a
//! wedge.
//!
//! 32-bit programs reach their threads' memory by them. A wedge has its host know the guest's own descriptors,
//! so that a program that loads one of their selectors gets what it would get in the guest.

use crate::{
    sites::{SITES, SITES_LEN},
    window::{VCPU_PAGE, VCPU_PAGE_LEN},
};

/// How many there are.
pub const AREAS: usize = 3;
/// The first one's entry of the GDT, on 64-bit Linux.
pub const FIRST_AREA: u32 = 12;
/// Bytes of the page by which the host is told of one.
pub const AREA_LEN: usize = 0x1000;
/// Where a wedge has its host read what a segment is to be: the call for it is a 32-bit one and takes such
/// addresses only. Nobody can write it here.
pub const AREA: usize = SITES + SITES_LEN - AREA_LEN;
/// The same page, where the wedge writes it.
pub const AREA_ALIAS: usize = VCPU_PAGE + VCPU_PAGE_LEN - AREA_LEN;

/// Which thread-local segment a selector is of.
pub const fn area_of(selector: u64) -> Option<usize> {
    let first = (FIRST_AREA as u64) << 3 | 3;
    let index = selector.wrapping_sub(first) / 8;
    if selector & 7 == 3 && index < AREAS as u64 { Some(index as usize) } else { None }
}

/// What the host is told: entry, base, limit and flags of a descriptor that it can have just so
/// (`struct user_desc`). Linux takes data segments for programs, 32-bit and present.
pub const fn area(at: usize, descriptor: u64) -> Option<[u32; 4]> {
    let entry = FIRST_AREA + at as u32;
    if descriptor == 0 {
        return Some([entry, 0, 0, EMPTY]);
    }
    // Accessed, data, for programs, present, not 64-bit code, 32-bit.
    if descriptor >> 40 & 0xf9 != 0xf1 || descriptor >> 53 & 3 != 2 {
        return None;
    }
    let base = descriptor >> 16 & 0xff_ffff | descriptor >> 32 & 0xff00_0000;
    let limit = descriptor & 0xffff | descriptor >> 32 & 0xf_0000;
    let down = descriptor >> 42 & 1;
    let read_only = (descriptor >> 41 & 1) ^ 1;
    let pages = descriptor >> 55 & 1;
    let usable = descriptor >> 52 & 1;
    let flags = 1 | down << 1 | read_only << 3 | pages << 4 | usable << 6;
    Some([entry, base as u32, limit as u32, flags as u32])
}

/// Not present, read-only, and nothing else: the host empties the entry.
const EMPTY: u32 = 1 << 3 | 1 << 5;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selectors_are_told_apart() {
        assert_eq!([0x63, 0x6b, 0x73].map(area_of), [Some(0), Some(1), Some(2)]);
        for other in [0, 3, 0x23, 0x2b, 0x33, 0x5b, 0x60, 0x62, 0x67, 0x7b, 0x1_0063, u64::MAX] {
            assert_eq!(area_of(other), None, "{other:#x}");
        }
    }

    #[test]
    fn what_linux_makes_is_told() {
        // As glibc asks for it: base 0xf7d81234, 4 GiB, writable, usable.
        assert_eq!(area(0, 0xf7df_f3d8_1234_ffff), Some([12, 0xf7d8_1234, 0xf_ffff, 0x51]));
        assert_eq!(area(1, 0x0040_f500_1000_0fff), Some([13, 0x1000, 0xfff, 0x0b]));
        assert_eq!(area(2, 0), Some([14, 0, 0, 0x28]));
    }

    #[test]
    fn what_the_host_cannot_have_is_refused() {
        let good = 0x00cf_f300_0000_ffff_u64;
        assert!(area(0, good).is_some());
        // Not accessed, code, the kernel's, absent, 64-bit, 16-bit, a system's.
        for bit in [40, 43, 45, 46, 47, 53, 54, 44] {
            assert_eq!(area(0, good ^ 1 << bit), None, "bit {bit}");
        }
    }
}
