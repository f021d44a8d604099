//! Maps and unmaps in a wedge, and writes down what is mapped.
//!
//! The wedge and the books about it have one owner, so that nothing is ordered that is not written down. Why
//! something is to be mapped is [`super::Space`]'s to decide. `large` maps large pages, `copies` changed copies
//! of pages.

mod copies;
mod large;

use super::{
    KERNEL_PAGE, LARGE, LARGE_BITS, LARGE_PAGES, PAGE, Place, hidden::Hidden, mappings::Mappings,
    near::SitesTable, runs, seen::SeenTables,
};
use crate::{
    process::Process,
    regions::{self, extent},
    scan::Patch,
};
use ram::Ram;
use wedge::{Error, MapCommand, MapReport, Owner, Rights};
use wedge_abi::{BORDER, Base};
use x86::{
    narrow::{KERNEL_START, wide},
    paging::{Roots, Translation},
};

pub(super) use large::is_still_large;

/// A wedge, and what is mapped in it.
pub(super) struct Mapper<W> {
    /// Where the reserved part of the wedge's address space lies.
    base: Base,
    wedge: W,
    mappings: Mappings,
    /// Which copies of pages kernel code is kept from reading.
    hidden: Hidden,
}

impl<W: Process> Mapper<W> {
    /// Nothing is mapped in the wedge.
    pub(super) fn new(wedge: W, base: Base) -> Self {
        Self { base, wedge, mappings: Mappings::default(), hidden: Hidden::default() }
    }

    pub(super) fn base(&self) -> Base {
        self.base
    }

    pub(super) fn wedge(&self) -> &W {
        &self.wedge
    }

    /// The wedge, which must not be given orders but here.
    pub(super) fn wedge_mut(&mut self) -> &mut W {
        &mut self.wedge
    }

    /// What is mapped.
    pub(super) fn mappings(&self) -> &Mappings {
        &self.mappings
    }

    /// Takes note of what the wedge has done. Returns the page (GVA) whose translation it has dropped, if it has.
    pub(super) fn absorb(&mut self, report: MapReport) -> Option<u64> {
        let hva = self.mappings.absorb(report)?;
        Some(match report {
            MapReport::KernelDropped { .. } => hva.wrapping_sub(self.base.bias()),
            _ => hva,
        })
    }

    /// Whether the wedge has refused to have a page executed since this was last asked.
    pub(super) fn take_refused(&mut self, hva: u64) -> bool {
        self.mappings.take_refused(hva)
    }

    /// Takes out what the user's pages were last compared with ([`Mappings::take_seen`]).
    pub(super) fn take_seen(&mut self) -> SeenTables {
        self.mappings.take_seen()
    }

    /// What the user's pages have just been compared with ([`Mappings::put_seen`]).
    pub(super) fn put_seen(&mut self, seen: SeenTables) {
        self.mappings.put_seen(seen);
    }

    /// Counts the mappings that are left.
    pub(super) fn recount(&mut self) -> usize {
        self.mappings.recount()
    }

    /// Forgets where RAM pages were mapped once.
    pub(super) fn compact(&mut self) {
        self.mappings.compact();
    }

    /// Orders have failed: anything may be mapped, whatever is written down.
    pub(super) fn doubt(&mut self) {
        self.mappings.doubt();
    }

    /// Another program may have come, with other page tables.
    pub(super) fn forget_program(&mut self) {
        // To fill one again costs less than to compare it.
        self.wedge.clear_lookups();
        self.mappings.near_mut().forget();
    }

    /// Drops every mapping.
    pub(super) fn clear_all(&mut self) -> Result<(), Error> {
        self.wedge.clear_lookups();
        if self.mappings.made() != 0 {
            for (from, to) in regions::mappable(self.base) {
                self.unmap(from, to - from)?;
            }
        }
        self.mappings.clear();
        self.hidden.show_all(&mut self.wedge);
        Ok(())
    }

    /// Drops every mapping of the user's.
    pub(super) fn clear_user(&mut self) -> Result<(), Error> {
        self.wedge.clear_lookups();
        for start in self.mappings.take_user_regions() {
            self.unmap_range(start, extent(start).1)?;
        }
        self.mappings.forget_user();
        Ok(())
    }

    /// Makes room for the kernel in the region of an HVA, and drops what lies right before and behind it.
    pub(super) fn give_to_kernel(&mut self, hva: u64) -> Result<(), Error> {
        self.clear_region(hva)?;
        let (start, len) = extent(hva);
        let borders = [start.checked_sub(BORDER), Some(start + len)];
        borders.into_iter().flatten().try_for_each(|border| self.drop_range(border, BORDER))
    }

    /// Drops everything in the region of an HVA.
    fn clear_region(&mut self, hva: u64) -> Result<(), Error> {
        let (start, len) = extent(hva);
        self.mappings.forget_region(start, len);
        self.unmap_range(start, len)
    }

    /// Drops a page of the kernel's (GVA) that has been dropped in another process, if anything is mapped there.
    pub(super) fn drop_if_shown(&mut self, gva: u64) -> Result<(), Error> {
        if self.hva(gva).is_some_and(|hva| self.mappings.shows_kernel(hva)) {
            return self.drop_page(gva);
        }
        self.forget_look_up(gva & !(PAGE - 1));
        Ok(())
    }

    /// The page at a GVA has no look-up any more.
    fn forget_look_up(&mut self, gva: u64) {
        // A 32-bit kernel's pages are looked up by their addresses of 32 bits.
        let sought = if gva >= wide(KERNEL_START) { gva & u64::from(u32::MAX) } else { gva };
        self.wedge.forget_lookups(sought, PAGE);
    }

    /// Drops the mapping of one page.
    pub(super) fn drop_page(&mut self, gva: u64) -> Result<(), Error> {
        let gva = gva & !(PAGE - 1);
        self.forget_look_up(gva);
        let Some(hva) = self.hva(gva).filter(|_| self.mappings.made() != 0) else {
            return Ok(());
        };
        self.mappings.count_others((gva >> 63) as usize); // what is cut in two
        for bits in LARGE_PAGES {
            if let Some((start, len)) = self.mappings.take_part(hva, bits) {
                self.drop_range(start, len)?;
            }
        }
        self.drop_range(hva, PAGE)
    }

    /// The HVA of a GVA, if a guest page may lie there.
    fn hva(&self, gva: u64) -> Option<u64> {
        let hva = if gva >> 63 == 0 { Some(gva) } else { regions::kernel_hva(self.base, gva) };
        hva.filter(|hva| regions::is_mappable(self.base, *hva))
    }

    /// Drops the mappings of a range, and large ones that reach into it as a whole.
    pub(super) fn drop_range(&mut self, start: u64, len: u64) -> Result<(), Error> {
        for (at, len) in self.mappings.take_reaching(start, len) {
            self.unmap(at, len)?;
        }
        self.mappings.forget_pages(start, len);
        self.unmap_range(start, len)
    }

    /// Drops the mappings of ranges, given by first HVA and bytes.
    pub(super) fn drop_ranges(&mut self, ranges: &[(u64, u64)]) -> Result<(), Error> {
        ranges.iter().try_for_each(|(start, len)| self.drop_range(*start, *len))
    }

    /// The RAM page at this offset may not be written without a fault any more.
    pub(super) fn protect(&mut self, offset: u64) -> Result<(), Error> {
        self.wedge.protect_lookups(offset);
        let large = self.mappings.written_through_large(offset);
        for hva in self.mappings.take_writable(offset) {
            if !large.contains(&hva) {
                self.unmap(hva, PAGE)?;
            }
        }
        for hva in large {
            self.mappings.count_cut();
            self.protect_range(hva, PAGE, Rights::READ)?;
        }
        Ok(())
    }

    /// Drops pages, given in ascending order.
    pub(super) fn unmap_pages(&mut self, gone: &[u64]) -> Result<(), Error> {
        for (start, end) in runs(gone, PAGE) {
            self.unmap(start, end - start)?;
        }
        self.mappings.forget_each(gone);
        Ok(())
    }

    /// Drops pages of the kernel's, given in ascending order.
    pub(super) fn unmap_kernel_pages(&mut self, gone: &[u64]) -> Result<(), Error> {
        self.mappings.count_others(runs(gone, PAGE).len()); // what is cut in two
        self.unmap_pages(gone)
    }

    /// Closes pages of the user's, given in ascending order.
    pub(super) fn close(&mut self, pages: &[u64]) -> Result<(), Error> {
        self.protect_pages(pages, Rights::NONE)?;
        self.mappings.close(pages);
        Ok(())
    }

    /// Makes pages of the user's read-only, given in ascending order.
    pub(super) fn close_to_writes(&mut self, pages: &[u64]) -> Result<(), Error> {
        self.protect_pages(pages, Rights::READ)?;
        self.mappings.close_to_writes(pages);
        Ok(())
    }

    fn protect_pages(&mut self, pages: &[u64], rights: Rights) -> Result<(), Error> {
        for (start, end) in runs(pages, PAGE) {
            self.protect_range(start, end - start, rights)?;
        }
        Ok(())
    }

    fn protect_range(&mut self, start: u64, len: u64, rights: Rights) -> Result<(), Error> {
        self.wedge.order(MapCommand::Protect { start, len, rights })
    }

    /// Unmaps what a guest may have in a range.
    fn unmap_range(&mut self, start: u64, len: u64) -> Result<(), Error> {
        for (from, to) in regions::mappable_parts(self.base, start, len) {
            self.unmap(from, to - from)?;
        }
        Ok(())
    }

    fn unmap(&mut self, address: u64, len: u64) -> Result<(), Error> {
        self.wedge.order(MapCommand::Unmap { start: address, len })
    }

    /// The GVA behind the last large page of a 32-bit kernel that has been mapped in pieces.
    pub(super) fn end_of_parts(&self) -> u64 {
        let last = self.mappings.last_of_parts().map(|hva| hva.wrapping_sub(self.base.bias()));
        last.map_or(0, |gva| (gva & u64::from(u32::MAX)) + 1)
    }

    /// Maps the page of RAM at an offset for a translation, with these changes.
    pub(super) fn map_page(
        &mut self,
        place: Place,
        found: &Translation,
        offset: u64,
        protection: u64,
        patches: &[Patch],
    ) -> Result<(), Error> {
        let hva = place.hva & !(PAGE - 1);
        self.mappings.note(place, found);
        self.mappings.add_page(hva, offset, protection, found.global);
        match (patches.is_empty(), protection & KERNEL_PAGE != 0) {
            (false, _) => self.map_patched(hva, offset, patches),
            (true, false) => self.order_mapping(hva, PAGE, offset, protection),
            (true, true) => self.map(hva, PAGE, offset, protection),
        }?;
        // A wedge drops such pages of 32-bit kernels by itself.
        if self.is_in_last_gib(hva) && found.page_bits < LARGE_BITS {
            self.wedge
                .order(MapCommand::Small { page: hva, rights: Rights::from_bits(protection) })?;
        }
        self.tell_of_large(place, found)
    }

    /// An HVA is one of the last GiB of kernel addresses. A 32-bit kernel has all of its memory there.
    fn is_in_last_gib(&self, hva: u64) -> bool {
        hva.wrapping_sub(self.base.bias()) >= wide(KERNEL_START)
    }

    /// To be called when memory has been mapped at `place` by the translation `found`. If `found` is of a large page of the user's, INVLPG of
    /// any part has to take away the whole large page. So the wedge is told of such a page. Where the wedge cannot take all of the page
    /// away, the monitor carries out each INVLPG from now on.
    fn tell_of_large(&mut self, place: Place, found: &Translation) -> Result<(), Error> {
        if place.kernel || found.page_bits < LARGE_BITS {
            return Ok(());
        }
        let base = place.hva & !(LARGE - 1);
        if found.page_bits == LARGE_BITS && regions::is_wholly_mappable(self.base, base, LARGE) {
            return self.wedge.order(MapCommand::Large { base });
        }
        self.mappings.note_odd_large();
        Ok(())
    }

    /// Maps a page of the user's in place of another.
    pub(super) fn remap(&mut self, hva: u64, offset: u64, protection: u64) -> Result<(), Error> {
        self.mappings.replace(hva, offset, protection);
        self.order_mapping(hva, PAGE, offset, protection)
    }

    /// Maps what is no page of the user's.
    pub(super) fn map(
        &mut self,
        hva: u64,
        len: u64,
        offset: u64,
        protection: u64,
    ) -> Result<(), Error> {
        self.mappings.count_others(1);
        self.order_mapping(hva, len, offset, protection)
    }

    fn order_mapping(
        &mut self,
        hva: u64,
        len: u64,
        offset: u64,
        protection: u64,
    ) -> Result<(), Error> {
        self.mappings.count(hva, protection);
        self.wedge.order(mapping(hva, len, offset, protection))
    }

    /// Kernel code has read what is hidden, or what has its place in the table.
    pub(super) fn note_hidden_read(&mut self) {
        self.hidden.note_read(&mut self.wedge, &mut self.mappings);
    }

    /// Opens or closes the table of patched system calls for the program with these page tables, which is about to run;
    /// `low` if it has been given memory near the table, touched or not.
    pub(super) fn attend_to_sites(
        &mut self,
        ram: &Ram,
        roots: Roots,
        low: bool,
    ) -> Result<(), Error> {
        match self.mappings.near_mut().look(ram, roots, low) {
            Some(SitesTable::Open) => self.wedge.order(MapCommand::OpenSites),
            Some(_) => {
                let copies = self.mappings.take_all_copies();
                self.unmap_pages(&copies)?;
                self.wedge.order(MapCommand::CloseSites)
            }
            None => Ok(()),
        }
    }
}

/// The command that maps RAM from an offset on. The protection says with which rights, and whether for the kernel.
fn mapping(start: u64, len: u64, offset: u64, protection: u64) -> MapCommand {
    let owner = if protection & KERNEL_PAGE == 0 { Owner::User } else { Owner::Kernel };
    MapCommand::Map { start, len, offset, rights: Rights::from_bits(protection), owner }
}
