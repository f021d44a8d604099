//! What has to be changed in pages of user code.

use super::{EXECUTE, PAGE, Space, WRITE};
use crate::{plausible::Page, process::Process, scan::Patch};
use ram::Ram;
use wedge::Error;
use x86_interp::GuestRam;

impl<W: Process> Space<W> {
    /// What has to be changed in a page of code before user code executes it, and what makes it
    /// faster. Such a page is marked. The program has `written` it, or may.
    pub(super) fn patches(
        &mut self,
        ram: &Ram,
        hva: u64,
        offset: u64,
        written: bool,
    ) -> Vec<Patch> {
        let settled = ram.is_settled(offset);
        let mut bytes = [0; PAGE as usize];
        ram.read(offset, &mut bytes);
        let mut found = self.scans.patches(offset, self.code(&bytes), written);
        if self.mapper.mappings.near().may_be_patched() && !self.texts.has(hva) {
            let (calls, displaced) = self.sites.patches(hva, &bytes);
            found.extend(calls);
            for rip in displaced {
                self.mapper.wedge.displaced(rip);
            }
        }
        if found.is_empty() || settled {
            return found;
        }
        // Writes come to light only from here on: what was read before may be stale.
        if ram.mark_code(offset) {
            self.marked.push(offset);
        }
        self.patches(ram, hva, offset, written)
    }

    fn code<'a>(&self, bytes: &'a [u8]) -> Page<'a> {
        Page { bytes, bits: if self.is_narrow { 32 } else { 64 } }
    }

    /// Something has to be changed in a page of code before user code executes it.
    pub(super) fn is_changed(&self, ram: &Ram, hva: u64, offset: u64, written: bool) -> bool {
        let mut bytes = [0; PAGE as usize];
        ram.read(offset, &mut bytes);
        let calls = self.mapper.mappings.near().may_be_patched() && !self.texts.has(hva);
        !self.scans.patches(offset, self.code(&bytes), written).is_empty()
            || calls && !self.sites.patches(hva, &bytes).0.is_empty()
    }

    /// Nothing was found in a page of code that is to be executed: the wedge, which looks less closely, need
    /// not ask about these bytes again.
    pub(super) fn note_plain(&mut self, ram: &Ram, offset: u64) {
        let mut bytes = [0; PAGE as usize];
        ram.read(offset, &mut bytes);
        let plain =
            |written: bool| self.scans.patches(offset, self.code(&bytes), written).is_empty();
        // What is plain in 64-bit code need not be so in 32-bit code, which is rare.
        if !self.is_narrow && plain(false) && plain(true) {
            self.plain.push(frame::print(&bytes));
        }
    }

    /// Prints of pages that have been searched since, and nothing found.
    pub fn take_plain(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.plain)
    }

    /// A page that is empty is marked, so that the wedge need not map it page by page.
    pub(super) fn mark_empty(&mut self, ram: &Ram, offset: u64) {
        if ram.mark_empty(offset) {
            self.marked.push(offset);
        }
    }

    /// RAM pages (by offset) that have become code: no space may write them without a fault any more.
    pub fn take_marked(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.marked)
    }

    /// The page of user code at `gva` that is mapped: its GVA and the guest's bytes.
    pub fn code_page(&self, ram: &Ram, gva: u64) -> Option<(u64, Vec<u8>)> {
        let page = gva & !(PAGE - 1);
        let offset = self.mapper.mappings.executed(page)?;
        let mut bytes = vec![0; PAGE as usize];
        ram.read(offset, &mut bytes);
        Some((page, bytes))
    }

    /// Maps the page of a system call that has become worth patching anew, if it is mapped.
    pub fn patch_page(&mut self, ram: &Ram, gva: u64) -> Result<(), Error> {
        let hva = gva & !(PAGE - 1);
        let Some((offset, protection)) = self.mapper.mappings.user().get(&hva).copied() else {
            return Ok(());
        };
        if protection & (EXECUTE | WRITE) != EXECUTE || self.texts.has(hva) {
            return Ok(());
        }
        let patches = self.patches(ram, hva, offset, false);
        if !patches.is_empty() {
            self.mapper.map_patched(hva, offset, &patches)?;
        }
        Ok(())
    }
}
