//! Changed copies of code are hidden from the guest's kernel, which runs in the same process as the program.
//!
//! What it reads there faults, and is interpreted: the interpreter reads RAM. Which pages these are says a table of the wedge's,
//! by a part of the address (`frame::Lookups`). Translated kernel code consults it where it may read the user's memory. A
//! page that is in it for no reason any more costs time, nothing else; the table is made anew when there are many.

use super::{PAGE, Space};
use crate::{process::Process, scan::Patch};
use rustc_hash::FxHashSet;

/// Pages hidden for nothing, at the most.
const STALE: usize = 64;
/// Reads of hidden pages until it is looked at whether they have to be.
const READS: usize = 16;
/// No operand that begins so far before a change reaches it.
const WIDEST: usize = 64;

/// What is hidden.
#[derive(Default)]
pub(super) struct Hidden {
    /// Copies hidden since the table was made.
    count: usize,
    /// How many there were then.
    least: usize,
    /// Reads that met any.
    reads: usize,
    /// Copies (HVAs) with changes that can be reached by an operand whose last byte is in the next page: that is the
    /// byte whose page is looked up.
    ends: FxHashSet<u64>,
}

impl<W: Process> Space<W> {
    /// A copy of a page is about to be mapped, with these changes.
    pub(super) fn hide(&mut self, hva: u64, patches: &[Patch]) {
        let last = PAGE as usize - WIDEST;
        match patches.iter().any(|patch| patch.at + patch.len as usize > last) {
            true => self.hidden.ends.insert(hva),
            false => self.hidden.ends.remove(&hva),
        };
        self.hidden.count += 1;
        if self.hidden.count > self.hidden.least + STALE {
            self.hide_anew();
        }
        self.hide_page(hva);
    }

    /// Kernel code has read what is hidden, or what has its place in the table.
    pub(crate) fn note_hidden_read(&mut self) {
        self.hidden.reads += 1;
        if self.hidden.reads.is_multiple_of(READS) {
            self.hide_anew();
        }
    }

    /// Nothing is changed any more.
    pub(super) fn show_all(&mut self) {
        self.wedge.show_all();
        self.hidden = Hidden::default();
    }

    fn hide_page(&mut self, hva: u64) {
        self.wedge.hide(hva);
        if self.hidden.ends.contains(&hva) {
            self.wedge.hide(hva + PAGE);
        }
    }

    /// Makes the table of what is mapped as a copy now.
    fn hide_anew(&mut self) {
        let copies = self.mappings.keep_copies();
        self.wedge.show_all();
        copies.iter().for_each(|hva| self.hide_page(*hva));
        self.hidden.ends.retain(|hva| copies.contains(hva));
        (self.hidden.count, self.hidden.least) = (copies.len(), copies.len());
    }
}

#[cfg(test)]
mod tests {
    use super::{super::EXECUTE, *};
    use crate::listener::Listener;
    use wedge::MapCommand;

    /// The wedge may show a closed copy again without asking, so the copy must go when its page is written.
    #[test]
    fn a_closed_copy_goes_when_its_page_is_written() {
        let (hva, offset) = (0x40_0000, 0x7000);
        let mut space = Space::new(Listener::default(), Default::default(), 1, Default::default());
        space.mappings.add_page(hva, offset, EXECUTE | 1, false);
        space.map_patched(hva, offset, &[]).expect("listens");
        space.mappings.close(&[hva]);
        space.hide_anew();
        space.wedge.told.clear();
        space.drop_copies(offset).expect("listens");
        assert_eq!(space.wedge.told, [MapCommand::Unmap { start: hva, len: PAGE }]);
    }
}
