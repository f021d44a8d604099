//! Large pages, each one mapping of the host's, and in kernel memory several.
//!
//! Those that become one mapping lie in one window of fixed place, so two faults find the same pages or pages
//! apart. Around each fault as many would be mappings that overlap, of which each drops the other, and a copy
//! from one to the other never ends.

use super::{
    super::{LARGE, Place, mappings::Large, protection, runs_over, walk::large_leaf},
    KERNEL_PAGE, Mapper, PAGE,
};
use crate::{process::Process, regions};
use ram::Ram;
use wedge::{Error, Rights};
use wedge_abi::Base;
use x86::paging::{Roots, Translation};
use x86_interp::{GuestRam, RamPage};

/// Bytes of kernel memory that may become one mapping, aligned to as many.
const WINDOW: u64 = 32 * LARGE;
/// The most bytes that are closed to writes with two pages of a kernel's code, because they lie between the two. Most are code
/// as well, which is hardly ever written, and to close all of it takes one order.
const GAP: u64 = 16 * PAGE;

impl<W: Process> Mapper<W> {
    /// Maps the large page around `place` as one mapping, with its neighbours of the same kind if it
    /// is the kernel's; its code pages are not writable. False if it is not all RAM.
    pub(in super::super) fn map_large(
        &mut self,
        ram: &Ram,
        roots: Roots,
        place: Place,
        found: &Translation,
    ) -> Result<bool, Error> {
        let Some(first) = large_page(ram, found) else { return Ok(false) };
        let writable = found.writable && found.dirty;
        if self.mappings.large_at(place.hva).is_some_and(|(_, l)| l.writable == writable) {
            return Ok(false); // a page of it has been mapped apart
        }
        let base = place.gva & !(LARGE - 1);
        let (start, end) = match place.kernel {
            true => widest(ram, roots, base, found, first.offset),
            false => (base, base + (LARGE - 1)),
        };
        let len = end - start + 1;
        let hva = start.wrapping_add(place.hva.wrapping_sub(place.gva));
        if !regions::is_wholly_mappable(self.base, hva, len) {
            return Ok(false);
        }
        self.mappings.note(place, found);
        let (offset, protection) =
            (first.offset - (base - start), protection(place, false, writable));
        self.map_run(ram, hva, Large { len, offset, writable, protection }, found.global)?;
        self.tell_of_large(place, found)?;
        Ok(true)
    }

    fn map_run(&mut self, ram: &Ram, hva: u64, large: Large, global: bool) -> Result<(), Error> {
        let Large { len, offset, writable, protection } = large;
        self.drop_partly_covered(hva, len)?;
        self.mappings.add_large(hva, large);
        if protection & KERNEL_PAGE != 0 && !global {
            self.mappings.add_local(hva, len);
        }
        self.map(hva, len, offset, protection)?;
        if !writable {
            return Ok(());
        }
        let pages = (0..len).step_by(PAGE as usize);
        let code: Vec<u64> = pages.filter(|at| ram.is_code(offset + at)).collect();
        for (start, end) in runs_over(&code, PAGE, GAP) {
            self.mappings.count_cut();
            self.protect_range(hva + start, end - start, Rights::READ)?;
        }
        Ok(())
    }

    /// Drops large mappings of which a part would stay when a range is mapped anew.
    fn drop_partly_covered(&mut self, hva: u64, len: u64) -> Result<(), Error> {
        let gone = self.mappings.partly_covered(hva, len);
        self.drop_ranges(&gone)
    }
}

/// The page tables say of every large page in a mapping what is mapped; with `global`, as global ones.
pub(in super::super) fn is_still_large(
    base: Base,
    ram: &Ram,
    roots: Roots,
    hva: u64,
    large: &Large,
    global: bool,
) -> bool {
    let kernel = large.protection & KERNEL_PAGE != 0;
    let gva = if kernel { hva.wrapping_sub(base.bias()) } else { hva };
    (0..large.len).step_by(LARGE as usize).all(|at| {
        large_leaf(ram, roots, gva.wrapping_add(at)).is_some_and(|found| {
            let here = large_page(ram, &found).is_some_and(|page| page.offset == large.offset + at);
            let writable = found.writable && found.dirty;
            here && found.user != kernel
                && (found.global || !global)
                && (writable || !large.writable)
        })
    })
}

/// The first page of the 2 MiB around a translation, if all of them are contiguous writable RAM.
fn large_page(ram: &Ram, found: &Translation) -> Option<RamPage> {
    let gpa = found.gpa & !(LARGE - 1);
    let (first, last) = (ram.page(gpa)?, ram.page(gpa + LARGE - PAGE)?);
    let plain = first.writable && last.writable && last.offset == first.offset + LARGE - PAGE;
    plain.then_some(first)
}

/// The kernel's memory around the large page at `base` (GVA), whose RAM starts at `offset`, that can be one mapping with
/// that page: its first and its last GVA.
fn widest(ram: &Ram, roots: Roots, base: u64, found: &Translation, offset: u64) -> (u64, u64) {
    let (mut start, mut end) = (base, base + (LARGE - 1));
    let fits = |gva: u64| neighbour(ram, roots, gva, found, offset, base);
    while start & (WINDOW - 1) != 0 && fits(start - LARGE) {
        start -= LARGE;
    }
    while end.wrapping_add(1) & (WINDOW - 1) != 0 && fits(end + 1) {
        end += LARGE;
    }
    (start, end)
}

/// The large page at `gva` is like the one at `base`, whose RAM starts at `offset`, and continues it.
fn neighbour(
    ram: &Ram,
    roots: Roots,
    gva: u64,
    like: &Translation,
    offset: u64,
    base: u64,
) -> bool {
    let Some(found) = large_leaf(ram, roots, gva) else { return false };
    let same = (found.writable, found.user, found.global, found.dirty)
        == (like.writable, like.user, like.global, like.dirty);
    let expected = offset.wrapping_add(gva.wrapping_sub(base));
    same && large_page(ram, &found).is_some_and(|page| page.offset == expected)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::listener::Listener;
    use wedge_abi::{MapCommand, TOP};

    /// Where not all of a large page may be mapped, wedges would take away what is theirs, or what the host does not have.
    #[test]
    fn wedges_are_told_of_large_pages_that_they_can_take_away() {
        let small = TOP as u64 - PAGE;
        for (hva, told) in [(0x12_0000, false), (0x4567_8000, true), (small, false)] {
            let mut mapper = Mapper::new(Listener::default(), Base::default());
            let (place, gpa) = (Place { gva: hva, hva, kernel: false }, hva % LARGE);
            let found = Translation {
                gpa,
                page_bits: 21,
                writable: false,
                user: true,
                executable: false,
                global: false,
                dirty: false,
                seems_written: false,
            };
            mapper.map_page(place, &found, gpa, Rights::READ.bits(), &[]).expect("listens");
            let large = MapCommand::Large { base: hva & !(LARGE - 1) };
            assert_eq!(mapper.wedge().told.contains(&large), told, "{hva:#x}");
            assert_eq!(mapper.mappings().has_user_large(), !told, "{hva:#x}");
        }
    }

    #[test]
    fn pages_that_lie_near_each_other_are_closed_together() {
        let pages = [1, 2, 5, 22, 40].map(|page| page * PAGE);
        let expected = [(1, 23), (40, 41)].map(|(start, end)| (start * PAGE, end * PAGE));
        assert_eq!(runs_over(&pages, PAGE, GAP), expected);
        assert!(runs_over(&[], PAGE, GAP).is_empty());
    }
}
