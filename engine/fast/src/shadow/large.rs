//! Large pages, each one mapping of the host's, and in kernel memory several.
//!
//! Those that become one mapping lie in one window of fixed place, so two faults find the same pages or pages
//! apart. Around each fault as many would be mappings that overlap, of which each drops the other, and a copy
//! from one to the other never ends.

use super::{
    KERNEL_PAGE, LARGE, PAGE, Place, Space, WRITE, mappings::Large, protection, runs,
    walk::large_leaf,
};
use crate::{process::Process, regions};
use frame::Base;
use ram::Ram;
use wedge::Error;
use x86::paging::{Roots, Translation};
use x86_interp::{GuestRam, RamPage};

/// Bytes of kernel memory that may become one mapping, aligned to as many.
const WINDOW: u64 = 32 * LARGE;

impl<W: Process> Space<W> {
    /// Maps the large page around `place` as one mapping, with its neighbours of the same kind if it
    /// is the kernel's; its code pages are not writable. False if it is not all RAM.
    pub(super) fn map_large(
        &mut self,
        ram: &Ram,
        roots: Roots,
        place: Place,
        found: &Translation,
    ) -> Result<bool, Error> {
        let Some(first) = large_page(ram, found) else { return Ok(false) };
        if self
            .mappings
            .large_at(place.hva)
            .is_some_and(|(_, l)| l.writable == (found.writable && found.dirty))
        {
            return Ok(false); // a page of it has been mapped apart
        }
        let base = place.gva & !(LARGE - 1);
        let (mut start, mut end) = (base, base + (LARGE - 1));
        if place.kernel {
            let fits = |gva: u64| neighbour(ram, roots, gva, found, first.offset, base);
            while start & (WINDOW - 1) != 0 && fits(start - LARGE) {
                start -= LARGE;
            }
            while end.wrapping_add(1) & (WINDOW - 1) != 0 && fits(end + 1) {
                end += LARGE;
            }
        }
        let len = end - start + 1;
        let offset = first.offset - (base - start);
        let hva = start.wrapping_add(place.hva.wrapping_sub(place.gva));
        let whole = regions::mappable_parts(self.base, hva, len).eq([(hva, hva + len)]);
        if !whole {
            return Ok(false);
        }
        self.mappings.note(place, found);
        self.map_run(ram, hva, len, offset, place, found)?;
        Ok(true)
    }

    /// Drops large pages, the kernel's global ones or the user's, that are not what the page tables say now.
    pub(super) fn revalidate_large(
        &mut self,
        ram: &Ram,
        roots: Roots,
        kernel: bool,
    ) -> Result<(), Error> {
        let stale = |(hva, large): (&u64, &Large)| {
            let asked = (large.protection & KERNEL_PAGE != 0) == kernel
                && !self.mappings.local().has(*hva, large.len);
            let gone = asked && !is_still_large(self.base, ram, roots, *hva, large, kernel);
            gone.then_some((*hva, large.len))
        };
        let gone: Vec<_> = self.mappings.large().iter().filter_map(stale).collect();
        gone.iter().try_for_each(|(hva, len)| self.drop_range(*hva, *len))
    }

    fn map_run(
        &mut self,
        ram: &Ram,
        hva: u64,
        len: u64,
        offset: u64,
        place: Place,
        found: &Translation,
    ) -> Result<(), Error> {
        let writable = found.writable && found.dirty;
        let protection = protection(place, false, writable);
        self.drop_partly_covered(hva, len)?;
        self.mappings.add_large(hva, Large { len, offset, writable, protection });
        if place.kernel && !found.global {
            self.mappings.add_local(hva, len);
        }
        self.map(hva, len, offset, protection)?;
        if !writable {
            return Ok(());
        }
        let pages = (0..len).step_by(PAGE as usize);
        let code: Vec<u64> = pages.filter(|at| ram.is_code(offset + at)).collect();
        for (start, end) in runs(&code, PAGE) {
            self.map(hva + start, end - start, offset + start, protection & !WRITE)?;
        }
        Ok(())
    }

    /// Drops large mappings of which a part would stay when a range is mapped anew.
    fn drop_partly_covered(&mut self, hva: u64, len: u64) -> Result<(), Error> {
        let gone = self.mappings.partly_covered(hva, len);
        gone.iter().try_for_each(|(at, len)| self.drop_range(*at, *len))
    }
}

/// The page tables say of every large page in a mapping what is mapped; with `global`, as global ones.
pub(super) fn is_still_large(
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
