//! Answers page faults: walks the guest's page tables, and has mapped what they allow.

use super::{
    AROUND, Answer, EXECUTE, PAGE, Place, Space, code_pages::CodePage, protection, walk::leaf,
};
use crate::{
    process::Process,
    regions::{self, Regions},
};
use ram::Ram;
use wedge::Error;
use x86::paging::{self, Access, Roots, Translation};
use x86_interp::GuestRam;

impl<W: Process> Space<W> {
    /// Answers a page fault on an access to `gva`.
    pub fn answer(
        &mut self,
        ram: &Ram,
        roots: Roots,
        kernel_regions: &Regions,
        gva: u64,
        access: Access,
    ) -> Result<Answer, Error> {
        let Some(place) = self.place(kernel_regions, gva, access) else {
            return Ok(Answer::Interpret);
        };
        let Some(found) = allowed(ram, roots, place, access) else { return Ok(Answer::Interpret) };
        if place.kernel && !kernel_regions.has(place.hva) {
            return Ok(Answer::NeedsRegion(place.hva));
        }
        if access.fetch && !self.may_be_executed(place) {
            return Ok(Answer::Interpret);
        }
        self.make_room()?;
        let reads = !access.fetch && !access.write;
        if !place.kernel && reads && found.executable && !found.writable {
            self.text_is_read(ram, roots, gva)?;
        }
        self.install(ram, roots, place, &found, access)
    }

    /// Where the page of a GVA goes, if it may be mapped for such an access.
    fn place(&self, kernel_regions: &Regions, gva: u64, access: Access) -> Option<Place> {
        let base = self.mapper.base();
        let kernel = gva >> 63 == 1;
        let hva = match kernel {
            true => regions::kernel_hva(base, gva).filter(|_| !access.user && !access.fetch),
            false => {
                let free =
                    |gva: &u64| regions::is_mappable(base, *gva) && !kernel_regions.borders(*gva);
                Some(gva).filter(free)
            }
        };
        Some(Place { gva, hva: hva?, kernel })
    }

    /// The page at a place has no breakpoints, and the wedge has not just refused to have the page executed.
    fn may_be_executed(&mut self, place: Place) -> bool {
        let page = |address: u64| address & !(PAGE - 1);
        !self.code.is_probed(page(place.gva)) && !self.mapper.take_refused(page(place.hva))
    }

    /// User code, or the guest's kernel on the program's behalf, reads code at a GVA. From now on that code is mapped
    /// without changes, as a CPU would show it.
    fn text_is_read(&mut self, ram: &Ram, roots: Roots, gva: u64) -> Result<(), Error> {
        if self.mapper.wedge().hides_code() {
            return Ok(());
        }
        let mapped = |page: u64| self.mapper.mappings().user().contains_key(&page);
        match self.code.texts.read(ram, roots, gva & !(PAGE - 1), mapped) {
            Some(text) => self.mapper.drop_copies_within(&text),
            None => Ok(()),
        }
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
        if fetch && self.mapper.wedge().searches() {
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
    /// executed while the program reads it.
    fn map_page(
        &mut self,
        ram: &Ram,
        place: Place,
        found: &Translation,
        write: bool,
        fetch: bool,
    ) -> Result<bool, Error> {
        let Some(ram_page) = ram.page(found.gpa & !(PAGE - 1)) else { return Ok(false) };
        if write && !ram_page.writable {
            return Ok(false);
        }
        let page = code_page(place, found, ram_page.offset);
        let written = found.writable && found.dirty && ram_page.writable;
        let writable = written && !ram.is_code(page.offset);
        let Some(execute) = self.is_executed_as_mapped(ram, place, found, page, fetch) else {
            return Ok(false);
        };
        let rights = protection(place, execute, writable);
        match self.map_changed(ram, place, found, page, rights)? {
            false if fetch && execute => self.code.note_plain(ram, page.offset),
            true if !page.written => self.mapper.keep(page.hva, page.offset)?,
            _ => {}
        }
        Ok(true)
    }

    /// Maps a page with these rights and, if it may be executed, with what has to be changed for that; true if there
    /// is anything.
    fn map_changed(
        &mut self,
        ram: &Ram,
        place: Place,
        found: &Translation,
        page: CodePage,
        rights: u64,
    ) -> Result<bool, Error> {
        let patches = match rights & EXECUTE != 0 {
            true => self.code.patches(ram, page, &mut self.mapper),
            false => Vec::new(),
        };
        let data = !place.kernel && !found.executable && !found.writable;
        if data && !ram.is_code(page.offset) {
            self.code.mark_empty(ram, page.offset);
        }
        self.mapper.map_page(place, found, page.offset, rights, &patches)?;
        Ok(!patches.is_empty())
    }

    /// Whether a page is mapped to be executed; `None` if control comes to the page and is to be interpreted
    /// there. A page that has to be changed is mapped so only for a fetch: until then it is shown as it is, and not to
    /// be executed.
    fn is_executed_as_mapped(
        &mut self,
        ram: &Ram,
        place: Place,
        found: &Translation,
        page: CodePage,
        fetch: bool,
    ) -> Option<bool> {
        let executable = found.executable && !place.kernel;
        if !executable || self.mapper.wedge().searches() || self.code.is_probed(page.hva) {
            return Some(false);
        }
        let asked = !fetch || self.code.texts.has(page.hva);
        if !asked || !self.code.is_changed(ram, page, self.mapper.mappings().near()) {
            return Some(true);
        }
        let interpreted = fetch && self.code.texts.is_interpreted(page.hva);
        (!interpreted).then_some(fetch)
    }

    /// Maps the neighbours whose page-table entries the guest has used already: a fault each
    /// would bring the same.
    fn map_around(&mut self, ram: &Ram, roots: Roots, place: Place) -> Result<(), Error> {
        for gva in around(place.gva) {
            let Some(found) = leaf(ram, roots, gva, !place.kernel) else { continue };
            let hva = gva.wrapping_add(place.hva.wrapping_sub(place.gva));
            let plain = ram.page(found.gpa).is_some_and(|page| !ram.is_code(page.offset));
            if plain && regions::is_mappable(self.mapper.base(), hva) {
                self.map_page(ram, Place { gva, hva, ..place }, &found, false, false)?;
            }
        }
        Ok(())
    }

    /// Maps the page that user code fetches from, and those around it that somebody has executed before.
    fn map_code(
        &mut self,
        ram: &Ram,
        roots: Roots,
        place: Place,
        found: &Translation,
    ) -> Result<Answer, Error> {
        if !self.map_closed(ram, place, found)? {
            return Ok(Answer::Interpret);
        }
        for gva in around(place.gva) {
            if self.mapper.mappings().executed(gva).is_some() {
                continue;
            }
            let found = leaf(ram, roots, gva, true).filter(|found| found.executable);
            let Some(found) = found else { continue };
            if ram.page(found.gpa).is_some_and(|page| ram.is_code(page.offset)) {
                self.map_closed(ram, Place { gva, hva: gva, ..place }, &found)?;
            }
        }
        Ok(Answer::Mapped)
    }

    /// Maps a copy of one page to be executed; false if it is not RAM or has what opens keys.
    fn map_closed(&mut self, ram: &Ram, place: Place, found: &Translation) -> Result<bool, Error> {
        let Some(page) = ram.page(found.gpa & !(PAGE - 1)) else { return Ok(false) };
        let page = code_page(place, found, page.offset);
        let Some(copy) = self.code.closed_copy(ram, page, &mut self.mapper) else {
            return Ok(false);
        };
        self.mapper.map_closed(place, found, page.offset, &copy)?;
        Ok(true)
    }
}

/// What the page tables allow at a place, if they allow such an access.
fn allowed(ram: &Ram, roots: Roots, place: Place, access: Access) -> Option<Translation> {
    let found = paging::walk(&mut &*ram, roots, place.gva, access).ok()?;
    let refused = access.write && !found.writable || !place.kernel && !found.user;
    (!refused).then_some(found)
}

fn code_page(place: Place, found: &Translation, offset: u64) -> CodePage {
    let written = found.writable || found.seems_written;
    CodePage { hva: place.hva & !(PAGE - 1), offset, written }
}

/// The pages around that of a GVA.
fn around(gva: u64) -> impl Iterator<Item = u64> {
    let start = gva & !(AROUND * PAGE - 1);
    let pages = (0..AROUND).map(move |n| start + n * PAGE);
    pages.filter(move |page| *page != gva & !(PAGE - 1))
}
