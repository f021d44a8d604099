//! Walks of the guest's page tables that leave no trace, and what they say of mappings made before.

use super::{EXECUTE, KERNEL_PAGE, RESERVED, WRITE, part};
use ram::Ram;
use std::collections::HashSet;
use x86::paging::{self, Roots, Translation, WalkMemory};
use x86_interp::GuestRam;

/// What has become of a mapping.
pub(super) enum Standing {
    Good,
    /// It may not be written any more.
    ReadOnly,
    Gone,
}

/// Compares a page's mapping, at an offset and with a protection, with what would be mapped now; with `global`, as
/// a global one.
pub(super) fn still_good(
    ram: &Ram,
    roots: Roots,
    hva: u64,
    (offset, protection): (u64, u64),
    parts: &HashSet<(u64, u64)>,
    global: bool,
) -> Standing {
    let kernel = protection & KERNEL_PAGE != 0;
    let gva = if kernel { hva.wrapping_sub(frame::BIAS) } else { hva };
    // Of a large page only what is known to be a part of it: a flush of any part drops all.
    let small = |bits: u32| bits == 12 || parts.contains(&part(hva, bits));
    let right = |found: &Translation| {
        found.user != kernel && (found.global || !global) && small(found.page_bits)
    };
    let Some(found) = descend(ram, roots, gva).filter(right) else { return Standing::Gone };
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

/// The entries that lead to a GVA, each with log2 of the bytes it stands for, down to that of a page or the first that
/// is not present.
fn path(mut memory: &Ram, roots: Roots, gva: u64) -> impl Iterator<Item = (u32, u64)> {
    let mut table = Some(roots.cr3 & paging::ADDRESS);
    [39, 30, 21, 12].into_iter().map_while(move |shift| {
        let entry = memory.read_u64(table? + (gva >> shift & 0x1ff) * 8);
        let leads_on = entry & paging::P != 0 && !is_leaf(shift, entry);
        table = leads_on.then_some(entry & paging::ADDRESS);
        Some((shift, entry))
    })
}

fn is_leaf(shift: u32, entry: u64) -> bool {
    shift == 12 || shift != 39 && entry & paging::PS != 0
}

/// Walks without setting any bit; only through entries that are present and accessed.
fn descend(ram: &Ram, roots: Roots, gva: u64) -> Option<Translation> {
    let mut rights = paging::RW | paging::US;
    let mut no_execute = 0;
    for (shift, entry) in path(ram, roots, gva) {
        let used = paging::P | paging::A;
        if entry & used != used || entry & RESERVED != 0 {
            return None;
        }
        rights &= entry;
        no_execute |= entry & paging::NX;
        if is_leaf(shift, entry) {
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
    }
    None
}

/// There is a table of small pages for a GVA, or a large page.
pub(super) fn has_table(ram: &Ram, roots: Roots, gva: u64) -> bool {
    path(ram, roots, gva)
        .take_while(|(shift, _)| *shift > 12)
        .all(|(_, entry)| entry & paging::P != 0)
}
