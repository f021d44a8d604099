//! Changed copies of code are hidden from the guest's kernel, which runs in the same process as the program.
//!
//! What it reads there faults, and is interpreted: the interpreter reads RAM. Which pages these are says a table of the wedge's,
//! by a part of the address (`wedge_abi::Lookups`). Translated kernel code consults it where it may read the user's memory. A
//! page that is in it for no reason any more costs time, nothing else; the table is made anew when there are many.

use super::{PAGE, mappings::Mappings};
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

impl Hidden {
    /// A copy of a page is about to be mapped, with these changes.
    pub(super) fn hide(
        &mut self,
        wedge: &mut impl Process,
        mappings: &mut Mappings,
        hva: u64,
        patches: &[Patch],
    ) {
        let last = PAGE as usize - WIDEST;
        match patches.iter().any(|patch| patch.at + patch.len as usize > last) {
            true => self.ends.insert(hva),
            false => self.ends.remove(&hva),
        };
        self.count += 1;
        if self.count > self.least + STALE {
            self.hide_anew(wedge, mappings);
        }
        self.hide_page(wedge, hva);
    }

    /// Kernel code has read what is hidden, or what has its place in the table.
    pub(super) fn note_read(&mut self, wedge: &mut impl Process, mappings: &mut Mappings) {
        self.reads += 1;
        if self.reads.is_multiple_of(READS) {
            self.hide_anew(wedge, mappings);
        }
    }

    /// Nothing is changed any more.
    pub(super) fn show_all(&mut self, wedge: &mut impl Process) {
        wedge.show_all();
        *self = Self::default();
    }

    fn hide_page(&self, wedge: &mut impl Process, hva: u64) {
        wedge.hide(hva);
        if self.ends.contains(&hva) {
            wedge.hide(hva + PAGE);
        }
    }

    /// Makes the table of what is mapped as a copy now.
    fn hide_anew(&mut self, wedge: &mut impl Process, mappings: &mut Mappings) {
        let copies = mappings.keep_copies();
        wedge.show_all();
        copies.iter().for_each(|hva| self.hide_page(wedge, *hva));
        self.ends.retain(|hva| copies.contains(hva));
        (self.count, self.least) = (copies.len(), copies.len());
    }
}

#[cfg(test)]
mod tests {
    use super::{super::mapper::Mapper, *};
    use crate::listener::Listener;
    use wedge::{MapCommand, MapReport, Owner, Rights};

    /// The wedge may show a closed copy again without asking, so the copy must go when its page is written.
    #[test]
    fn a_closed_copy_goes_when_its_page_is_written() {
        let (hva, offset) = (0x40_0000, 0x7000);
        let mut mapper = Mapper::new(Listener::default(), Default::default());
        let (rights, owner, piece) = (Rights::READ_EXECUTE, Owner::User, false);
        mapper.absorb(MapReport::Mapped { start: hva, len: PAGE, offset, rights, owner, piece });
        mapper.map_patched(hva, offset, &[]).expect("listens");
        mapper.close(&[hva]).expect("listens");
        (0..READS).for_each(|_| mapper.note_hidden_read());
        mapper.wedge_mut().told.clear();
        mapper.drop_copies(offset).expect("listens");
        assert_eq!(mapper.wedge().told, [MapCommand::Unmap { start: hva, len: PAGE }]);
    }
}
