//! Host mappings for a guest address space: filled on faults, dropped on flushes.
//!
//! Each owner has one kind of state:
//!
//! - [`Space`] answers faults, is parked and comes back. `budget` keeps the number of its mappings down, `compare` says
//!   which survive a flush.
//! - `mapper` has the wedge, and maps and unmaps there; it asks nobody why. `hidden` keeps the kernel from reading the
//!   changed copies of code that it maps.
//! - `mappings` has the books of what is mapped, and no wedge: what is written down can be read and counted by itself.
//!   `local` knows the kernel's pages that are not global, `near` what lies near the table of patched system calls, `places`
//!   where RAM pages are mapped.
//!
//! Of pages of code `copies` says what is changed in them, `closed` what may be executed where there are protection keys, and
//! `texts` which programs read their own code. `pressure` tells which spaces have more pages than there can be mappings,
//! `walk` reads the guest's page tables.

pub(crate) mod budget;
mod closed;
mod compare;
mod copies;
mod hidden;
mod local;
mod mapper;
mod mappings;
mod near;
mod places;
pub(crate) mod pressure;
mod texts;
mod walk;

use crate::{
    Scattered,
    probes::Probed,
    process::Process,
    regions::{self, Regions},
    scan_cache::{ScanCache, Search},
    sites::Sites,
};
use frame::Base;
use mapper::Mapper;
use pressure::Pressure;
use ram::Ram;
use texts::Texts;
use walk::leaf;
use wedge::{Error, MapCommand, MapReport, Wedge};
use x86::paging::{self, Access, Roots, Translation};
use x86_interp::GuestRam;

const READ: u64 = 1;
const WRITE: u64 = 2;
const EXECUTE: u64 = 4;
/// Beside the rights of a page: the kernel's.
const KERNEL_PAGE: u64 = 1 << 16;
/// Beside the rights of a page: memory without content stands for the page of RAM, which is empty.
const EMPTY: u64 = 1 << 17;
const PAGE: u64 = 4096;
const LARGE: u64 = 1 << 21;
/// Pages looked at around a fault.
const AROUND: u64 = 16;

/// log2 of the bytes of a large page.
const LARGE_BITS: u32 = 21;
/// The sizes of the guest's large pages, in the same way.
const LARGE_PAGES: [u32; 3] = [LARGE_BITS, 22, 30];

/// Bits that make an entry of a page table fault.
const RESERVED: u64 = (1 << 52) - (1 << paging::PHYS_BITS);

const _: () = assert!(frame::EMPTY_PAGE == ram::EMPTY_PAGE);

/// What a page fault came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The page is mapped now: go on.
    Mapped,
    /// The page is the kernel's, at an HVA in a region that has not been given to it.
    NeedsRegion(u64),
    /// Not the host's to answer: interpret the instruction.
    Interpret,
}

/// Where a page goes.
#[derive(Clone, Copy, Debug)]
struct Place {
    gva: u64,
    hva: u64,
    kernel: bool,
}

/// A wedge and what is mapped in it.
pub struct Space<W = Wedge> {
    /// The wedge, and what is mapped in it.
    mapper: Mapper<W>,
    /// Process-context identifier, zero if the guest uses none; `None` while the slot is parked: nothing may run
    /// here then before it has been compared with page tables.
    pub pcid: Option<u64>,
    /// GPA of the top page table that guest code ran with here last.
    pub root: u64,
    /// The user's pages behind this HVA are given up next, if there are too many.
    given_up: u64,
    invalidated: Vec<u64>,
    marked: Vec<u64>,
    /// What is executed next is 32-bit code.
    pub is_narrow: bool,
    /// Prints of pages of code that have been searched, and nothing found.
    plain: Vec<u64>,
    /// Patched system calls, of all spaces.
    sites: Sites,
    /// What is known of pages of code, of all spaces.
    scans: ScanCache,
    /// Pages of user code with breakpoints, of all spaces.
    probed: Probed,
    /// There was a flush of everything while nothing ran here.
    stale: bool,
    /// Code that the program has read.
    texts: Texts,
    /// Whether mappings suffice.
    pressure: Pressure,
}

impl<W: Process> Space<W> {
    pub(crate) fn new(
        wedge: W,
        base: Base,
        pcid: u64,
        (sites, scans, probed): (Sites, ScanCache, Probed),
    ) -> Self {
        Self {
            mapper: Mapper::new(wedge, base),
            pcid: Some(pcid),
            root: 0,
            given_up: 0,
            invalidated: Vec::new(),
            is_narrow: false,
            marked: Vec::new(),
            plain: Vec::new(),
            sites,
            scans,
            probed,
            stale: false,
            texts: Texts::default(),
            pressure: Pressure::default(),
        }
    }

    /// The process.
    pub fn wedge(&self) -> &W {
        &self.mapper.wedge
    }

    /// The process. What is mapped in it is not to be changed but by this space.
    pub fn wedge_mut(&mut self) -> &mut W {
        &mut self.mapper.wedge
    }

    /// Has guest code run, or orders carried out; false if they could not be.
    pub fn run(&mut self) -> Result<bool, Error> {
        let Mapper { wedge, mappings, .. } = &mut self.mapper;
        wedge.allow(W::max_mappings().saturating_sub(mappings.made()), mappings.has_user_large());
        wedge.look_up(self.pressure.is_on());
        wedge.run()
    }

    /// Guest code may go on here whenever a wedge selects this space.
    pub(crate) fn publish(&self, passing: bool) {
        let may = passing && self.mapper.mappings.near().is_known();
        self.mapper.wedge.publish(self.pcid.filter(|_| may));
    }

    /// Opens or closes the table of patched system calls for the program with these page tables, which is about to run;
    /// `low` if it has been given memory near the table, touched or not.
    pub(crate) fn attend_to_sites(
        &mut self,
        ram: &Ram,
        roots: Roots,
        low: bool,
    ) -> Result<(), Error> {
        self.mapper.attend_to_sites(ram, roots, low)
    }

    /// Kernel code has read what is hidden, or what has its place in the table.
    pub(crate) fn note_hidden_read(&mut self) {
        self.mapper.note_hidden_read();
    }

    /// User code here is to be run translated, with look-ups, as `scattered` says.
    pub fn looks_up(&mut self, scattered: Scattered) -> bool {
        self.pressure.look(scattered)
    }

    /// Drops every mapping.
    pub fn clear_all(&mut self) -> Result<(), Error> {
        self.mapper.clear_all()?;
        self.texts.clear();
        Ok(())
    }

    /// Makes room for the kernel in the region of an HVA, and drops what lies right before it.
    pub fn give_to_kernel(&mut self, hva: u64) -> Result<(), Error> {
        self.mapper.give_to_kernel(hva)
    }

    /// After orders have failed: starts over with nothing mapped.
    pub fn forget(&mut self) {
        self.mapper.mappings.doubt();
        // A failure here shows again at the next run.
        let _ = self.clear_all();
    }

    /// Drops the mapping of one page.
    pub fn drop_page(&mut self, gva: u64) -> Result<(), Error> {
        self.mapper.drop_page(gva)
    }

    /// Drops the changed copies of a RAM page (by offset) that has been written, and what stands for it
    /// while it is empty.
    pub fn drop_copies(&mut self, offset: u64) -> Result<(), Error> {
        self.mapper.drop_copies(offset)
    }

    /// The RAM page at this offset may not be written without a fault any more.
    pub fn protect(&mut self, offset: u64) -> Result<(), Error> {
        self.mapper.protect(offset)
    }

    /// Takes note of what the wedge has done by itself; how much that was.
    pub fn catch_up(&mut self) -> Result<usize, Error> {
        let made = self.mapper.wedge.take_made();
        made.iter().for_each(|report| self.absorb(*report));
        if self.mapper.mappings.made() > W::max_mappings() + frame::MAX_MADE {
            self.clear_all()?; // more than it was allowed: it is not the wedge's own code that counts
        }
        Ok(made.len())
    }

    /// Takes note of what the wedge has done.
    fn absorb(&mut self, report: MapReport) {
        if matches!(report, MapReport::Refused { .. }) {
            self.scans.count(Search::Refused);
        }
        self.invalidated.extend(self.mapper.mappings.absorb(report));
    }

    /// User pages whose translations the wedge has dropped by itself: GVAs.
    pub fn take_invalidated(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.invalidated)
    }

    /// Answers a page fault on an access to `gva`.
    pub fn answer(
        &mut self,
        ram: &Ram,
        roots: Roots,
        kernel_regions: &Regions,
        gva: u64,
        access: Access,
    ) -> Result<Answer, Error> {
        let kernel = gva >> 63 == 1;
        let hva = match kernel {
            true => {
                regions::kernel_hva(self.mapper.base, gva).filter(|_| !access.user && !access.fetch)
            }
            false => {
                let free = |gva: &u64| {
                    regions::is_mappable(self.mapper.base, *gva) && !kernel_regions.borders(*gva)
                };
                Some(gva).filter(free)
            }
        };
        let Some(hva) = hva else { return Ok(Answer::Interpret) };
        let Ok(found) = paging::walk(&mut &*ram, roots, gva, access) else {
            return Ok(Answer::Interpret);
        };
        if access.write && !found.writable || !kernel && !found.user {
            return Ok(Answer::Interpret);
        }
        if kernel && !kernel_regions.has(hva) {
            return Ok(Answer::NeedsRegion(hva));
        }
        if access.fetch && self.probed.has(gva & !(PAGE - 1)) {
            return Ok(Answer::Interpret);
        }
        if access.fetch && self.mapper.mappings.take_refused(hva & !(PAGE - 1)) {
            return Ok(Answer::Interpret);
        }
        self.make_room()?;
        if !kernel && !access.fetch && !access.write && found.executable && !found.writable {
            self.text_is_read(ram, roots, gva)?;
        }
        self.install(ram, roots, Place { gva, hva, kernel }, &found, access)
    }

    fn install(
        &mut self,
        ram: &Ram,
        roots: Roots,
        place: Place,
        found: &Translation,
        Access { write, fetch, .. }: Access,
    ) -> Result<Answer, Error> {
        // Writes to code go through the interpreter, which has what was made from it dropped.
        let page = ram.page(found.gpa & !(PAGE - 1));
        if write && page.is_some_and(|page| ram.is_code(page.offset)) {
            return Ok(Answer::Interpret);
        }
        let code = found.executable && !place.kernel;
        if found.page_bits >= 21 && !code && self.mapper.map_large(ram, roots, place, found)? {
            return Ok(Answer::Mapped);
        }
        if fetch && self.mapper.wedge.searches() {
            return self.map_code(ram, roots, place, found);
        }
        if !self.map_page(ram, place, found, write, fetch)? {
            return Ok(Answer::Interpret);
        }
        // The wedge maps by itself what lies around the user's.
        if found.page_bits == 12 && place.kernel {
            self.map_around(ram, roots, place)?;
        }
        Ok(Answer::Mapped)
    }

    /// Maps one 4 KiB page; false if it is not RAM, or written and not writable RAM, or to be changed before it is
    /// executed while the program reads it. What is to be changed is so only for a fetch: until then it is shown as it is, and not
    /// to be executed.
    fn map_page(
        &mut self,
        ram: &Ram,
        place: Place,
        found: &Translation,
        write: bool,
        fetch: bool,
    ) -> Result<bool, Error> {
        let Some(page) = ram.page(found.gpa & !(PAGE - 1)) else { return Ok(false) };
        if write && !page.writable {
            return Ok(false);
        }
        let written = found.writable && found.dirty && page.writable;
        let writable = written && !ram.is_code(page.offset);
        let executable = found.executable && !place.kernel;
        let hva = place.hva & !(PAGE - 1);
        let touched = found.writable || found.dirty;
        let mut execute = executable && !self.mapper.wedge.searches() && !self.probed.has(hva);
        if execute
            && (!fetch || self.texts.has(hva))
            && self.is_changed(ram, hva, page.offset, touched)
        {
            if fetch && self.texts.is_interpreted(hva) {
                return Ok(false);
            }
            execute = fetch;
        }
        self.mapper.mappings.note(place, found);
        let patches =
            if execute { self.patches(ram, hva, page.offset, touched) } else { Vec::new() };
        if !place.kernel && !executable && !found.writable && !ram.is_code(page.offset) {
            self.mark_empty(ram, page.offset);
        }
        let rights = protection(place, execute, writable);
        self.mapper.mappings.add_page(hva, page.offset, rights, found.global);
        self.mapper.map_page(hva, page.offset, rights, &patches)?;
        match patches.is_empty() {
            true if fetch && execute => self.note_plain(ram, page.offset),
            false if !touched => {
                self.mapper.wedge.order(MapCommand::Keep { page: hva, offset: page.offset })?;
            }
            _ => {}
        }
        Ok(true)
    }

    /// Maps the neighbours whose page-table entries the guest has used already: a fault each
    /// would bring the same.
    fn map_around(&mut self, ram: &Ram, roots: Roots, place: Place) -> Result<(), Error> {
        let start = place.gva & !(AROUND * PAGE - 1);
        for n in 0..AROUND {
            let gva = start + n * PAGE;
            if gva == place.gva & !(PAGE - 1) {
                continue;
            }
            let Some(found) = leaf(ram, roots, gva, !place.kernel) else { continue };
            let hva = gva.wrapping_add(place.hva.wrapping_sub(place.gva));
            let plain = ram.page(found.gpa).is_some_and(|page| !ram.is_code(page.offset));
            if plain && regions::is_mappable(self.mapper.base, hva) {
                self.map_page(ram, Place { gva, hva, ..place }, &found, false, false)?;
            }
        }
        Ok(())
    }
}

fn protection(place: Place, execute: bool, writable: bool) -> u64 {
    let execute = if execute { EXECUTE } else { 0 };
    let kernel = if place.kernel { KERNEL_PAGE } else { 0 };
    READ | execute | kernel | if writable { WRITE } else { 0 }
}

/// The page of so many bits around an HVA: its first HVA and its bytes.
fn part(hva: u64, bits: u32) -> (u64, u64) {
    (hva >> bits << bits, 1 << bits)
}

/// Adjacent pages of this size, ascending, as ranges.
fn runs(pages: &[u64], size: u64) -> Vec<(u64, u64)> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for page in pages {
        match runs.last_mut() {
            Some((_, end)) if *end == *page => *end += size,
            _ => runs.push((*page, *page + size)),
        }
    }
    runs
}
