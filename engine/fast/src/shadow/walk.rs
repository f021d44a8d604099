//! Walks of the guest's page tables that leave no trace, and what they say of mappings made before.

use super::{EXECUTE, RESERVED, WRITE};
use ram::Ram;
use x86::paging::{self, Roots, Translation, WalkMemory};
use x86_interp::GuestRam;

/// What has become of a mapping.
pub(super) enum Standing {
    Good,
    /// It may not be written any more.
    ReadOnly,
    Gone,
}

/// Compares a page's mapping with what would be mapped now.
pub(super) fn still_good(
    ram: &Ram,
    roots: Roots,
    hva: u64,
    offset: u64,
    protection: u64,
) -> Standing {
    let Some(found) = leaf(ram, roots, hva, true) else { return Standing::Gone };
    let same = ram.page(found.gpa).is_some_and(|page| page.offset == offset);
    if !same || protection & EXECUTE != 0 && !found.executable {
        return Standing::Gone;
    }
    match protection & WRITE != 0 && !(found.writable && found.dirty) {
        false => Standing::Good,
        true if protection & EXECUTE == 0 => Standing::ReadOnly,
        true => Standing::Gone,
    }
}

/// The large translation of a GVA, if the guest has used it already.
pub(super) fn large_leaf(ram: &Ram, roots: Roots, gva: u64) -> Option<Translation> {
    descend(ram, roots, gva).filter(|found| found.page_bits >= 21)
}

/// The small translation of a GVA, if the guest has used it already.
pub(super) fn leaf(ram: &Ram, roots: Roots, gva: u64, user: bool) -> Option<Translation> {
    descend(ram, roots, gva).filter(|found| found.page_bits == 12 && found.user == user)
}

/// Walks without setting any bit; only through entries that are present and accessed.
fn descend(mut memory: &Ram, roots: Roots, gva: u64) -> Option<Translation> {
    let mut table = roots.cr3 & paging::ADDRESS;
    let mut rights = paging::RW | paging::US;
    let mut no_execute = 0;
    for shift in [39, 30, 21, 12] {
        let entry = memory.read_u64(table + (gva >> shift & 0x1ff) * 8);
        let used = paging::P | paging::A;
        if entry & used != used || entry & RESERVED != 0 {
            return None;
        }
        rights &= entry;
        no_execute |= entry & paging::NX;
        let large = shift != 39 && shift != 12 && entry & paging::PS != 0;
        if large || shift == 12 {
            let inside = (1 << shift) - 1;
            return Some(Translation {
                gpa: entry & paging::ADDRESS & !inside | gva & inside,
                page_bits: shift,
                writable: rights & paging::RW != 0,
                user: rights & paging::US != 0,
                executable: no_execute == 0,
                global: entry & paging::G != 0,
                dirty: entry & paging::D != 0,
            });
        }
        table = entry & paging::ADDRESS;
    }
    None
}

/// There is a table of small pages for a GVA, or a large page.
pub(super) fn has_table(mut memory: &Ram, roots: Roots, gva: u64) -> bool {
    let mut table = roots.cr3 & paging::ADDRESS;
    for shift in [39, 30, 21] {
        let entry = memory.read_u64(table + (gva >> shift & 0x1ff) * 8);
        if entry & paging::P == 0 || shift != 39 && entry & paging::PS != 0 {
            return entry & paging::P != 0;
        }
        table = entry & paging::ADDRESS;
    }
    true
}
