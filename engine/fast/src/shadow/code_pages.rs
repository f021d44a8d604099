//! What is in pages of user code: what has to be changed before they are executed, and what is told of them.
//!
//! Nothing is mapped here. Whoever maps a page asks what is to be changed in it, and hands in the books if the answer
//! depends on them.

use super::{PAGE, mapper::Mapper, near::NearSites, texts::Texts};
use crate::{
    plausible::Page,
    probes::Probed,
    process::Process,
    scan::Patch,
    scan_cache::{ScanCache, Search},
    sites::Sites,
};
use ram::Ram;
use x86_interp::GuestRam;

/// What is known of code in all spaces: patched system calls, what was found in pages, and which have breakpoints.
pub(crate) type OfAllSpaces = (Sites, ScanCache, Probed);

/// A page of user code.
#[derive(Clone, Copy, Debug)]
pub(super) struct CodePage {
    /// Where the page is to be mapped.
    pub(super) hva: u64,
    /// Where the page lies in RAM.
    pub(super) offset: u64,
    /// The program has written the page, or may.
    pub(super) written: bool,
}

/// What is known of pages of user code.
pub(super) struct CodePages {
    /// Patched system calls, of all spaces.
    sites: Sites,
    /// What was found in pages of code, of all spaces.
    scans: ScanCache,
    /// Pages of user code with breakpoints, of all spaces.
    probed: Probed,
    /// Code that the program has read.
    pub(super) texts: Texts,
    /// What is executed next is 32-bit code.
    is_narrow: bool,
    /// Prints of pages of code that have been searched, and nothing found.
    plain: Vec<u64>,
    /// RAM pages (by offset) that have been marked.
    marked: Vec<u64>,
}

impl CodePages {
    pub(super) fn new((sites, scans, probed): OfAllSpaces) -> Self {
        let texts = Texts::default();
        let (plain, marked) = (Vec::new(), Vec::new());
        Self { sites, scans, probed, texts, is_narrow: false, plain, marked }
    }

    /// What is executed next is 32-bit code, or is not.
    pub(super) fn set_narrow(&mut self, is_narrow: bool) {
        self.is_narrow = is_narrow;
    }

    /// The page at this GVA has breakpoints, and must not be executed.
    pub(super) fn is_probed(&self, page: u64) -> bool {
        self.probed.has(page)
    }

    /// Counts a search for what opens protection keys.
    pub(super) fn count(&self, search: Search) {
        self.scans.count(search);
    }

    /// What has to be changed in a page of code before user code executes it, and what makes it
    /// faster. Such a page is marked.
    pub(super) fn patches<W: Process>(
        &mut self,
        ram: &Ram,
        page: CodePage,
        mapper: &mut Mapper<W>,
    ) -> Vec<Patch> {
        let settled = ram.is_settled(page.offset);
        let bytes = bytes_of(ram, page.offset);
        let mut found = self.scans.patches(page.offset, self.code(&bytes), page.written);
        if self.has_sites(page.hva, mapper.mappings().near()) {
            let (calls, displaced) = self.sites.patches(page.hva, &bytes);
            found.extend(calls);
            displaced.into_iter().for_each(|rip| mapper.wedge_mut().displaced(rip));
        }
        if found.is_empty() || settled {
            return found;
        }
        // Writes come to light only from here on: what was read before may be stale.
        self.mark(ram, page.offset);
        self.patches(ram, page, mapper)
    }

    /// Something has to be changed in a page of code before user code executes it.
    pub(super) fn is_changed(&self, ram: &Ram, page: CodePage, near: &NearSites) -> bool {
        let bytes = bytes_of(ram, page.offset);
        !self.scans.patches(page.offset, self.code(&bytes), page.written).is_empty()
            || self.has_sites(page.hva, near) && !self.sites.patches(page.hva, &bytes).0.is_empty()
    }

    /// System calls in a page may be patched.
    fn has_sites(&self, hva: u64, near: &NearSites) -> bool {
        near.may_be_patched() && !self.texts.has(hva)
    }

    fn code<'a>(&self, bytes: &'a [u8]) -> Page<'a> {
        Page { bytes, bits: if self.is_narrow { 32 } else { 64 } }
    }

    /// Nothing was found in a page of code that is to be executed: the wedge, which looks less closely, need
    /// not ask about these bytes again.
    pub(super) fn note_plain(&mut self, ram: &Ram, offset: u64) {
        let bytes = bytes_of(ram, offset);
        if self.is_plain(offset, &bytes) {
            self.plain.push(wedge_abi::print(&bytes));
        }
    }

    /// Nothing has to be changed in the bytes of a page, whether or not a program has written them.
    fn is_plain(&self, offset: u64, bytes: &[u8]) -> bool {
        let plain =
            |written: bool| self.scans.patches(offset, self.code(bytes), written).is_empty();
        // What is plain in 64-bit code need not be so in 32-bit code, which is rare.
        !self.is_narrow && plain(false) && plain(true)
    }

    /// One copy of a page will do for all programs, as far as its bytes need no changes.
    pub(super) fn may_be_shared(&self, page: CodePage, bytes: &[u8]) -> bool {
        !page.written && !self.scans.are_copies_apart() && self.is_plain(page.offset, bytes)
    }

    /// Prints of pages that have been searched since, and nothing found.
    pub(super) fn take_plain(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.plain)
    }

    /// A page is code from now on: a write to it comes to light.
    pub(super) fn mark(&mut self, ram: &Ram, offset: u64) {
        if ram.mark_code(offset) {
            self.marked.push(offset);
        }
    }

    /// A page that is empty is marked, so that the wedge need not map it page by page.
    pub(super) fn mark_empty(&mut self, ram: &Ram, offset: u64) {
        if ram.mark_empty(offset) {
            self.marked.push(offset);
        }
    }

    /// RAM pages (by offset) that have been marked since: no space may write them without a fault any more.
    pub(super) fn take_marked(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.marked)
    }
}

/// The bytes of a RAM page, as the guest has them.
pub(super) fn bytes_of(ram: &Ram, offset: u64) -> [u8; PAGE as usize] {
    let mut bytes = [0; PAGE as usize];
    ram.read(offset, &mut bytes);
    bytes
}
