//! Pages that are mapped as changed copies, and what stands for pages that are empty.
//!
//! A page counts as code from the moment a copy of it is made, so that a write to it comes to light and the
//! copy goes. What stands for an empty page goes in the same way.

use super::{
    super::{EXECUTE, closed::Closed},
    Mapper, PAGE, Place,
};
use crate::{process::Process, scan::Patch};
use std::ops::Range;
use wedge::{Error, MapCommand, Rights};
use x86::paging::Translation;

impl<W: Process> Mapper<W> {
    /// Maps a copy of a page that was searched for what opens protection keys.
    pub(in super::super) fn map_closed(
        &mut self,
        place: Place,
        found: &Translation,
        offset: u64,
        copy: &Closed,
    ) -> Result<(), Error> {
        let hva = place.hva & !(PAGE - 1);
        self.mappings.note(place, found);
        match copy {
            Closed::Shared(copy) => self.map_shared(hva, offset, *copy),
            Closed::Private(patches) => {
                self.mappings.add_closed(hva, offset);
                self.map_patched(hva, offset, patches)
            }
        }?;
        self.tell_of_large(place, found)
    }

    /// Maps the shared copy of a page, which lies at an offset `copy` in the memory object.
    fn map_shared(&mut self, hva: u64, offset: u64, copy: u64) -> Result<(), Error> {
        self.mappings.add_code(hva, offset);
        self.mappings.count(hva, EXECUTE);
        self.wedge.order(MapCommand::Code { page: hva, offset: copy })
    }

    /// Maps a changed copy of a page of code. The page counts as code from now on, so that a write
    /// to it comes to light ([`Mapper::drop_copies`]).
    pub(in super::super) fn map_patched(
        &mut self,
        hva: u64,
        offset: u64,
        patches: &[Patch],
    ) -> Result<(), Error> {
        self.mappings.add_copy(offset, hva);
        self.hidden.hide(&mut self.wedge, &mut self.mappings, hva, patches);
        self.mappings.count(hva, EXECUTE);
        self.wedge.order(MapCommand::Copy { page: hva, offset })?;
        for patch in patches {
            let address = hva + patch.at as u64;
            self.wedge.order(MapCommand::Poke { address, len: patch.len, bytes: patch.bytes })?;
        }
        let hidden = self.wedge.hides_code() && !patches.is_empty();
        let rights = if hidden { Rights::EXECUTE } else { Rights::READ_EXECUTE };
        self.wedge.order(MapCommand::Protect { start: hva, len: PAGE, rights })
    }

    /// The changed copy at an HVA may be shown again after it was closed, since it goes when the RAM page is written.
    pub(in super::super) fn keep(&mut self, hva: u64, offset: u64) -> Result<(), Error> {
        self.wedge.order(MapCommand::Keep { page: hva, offset })
    }

    /// Drops the changed copies of a RAM page (by offset) that has been written, and what stands for it
    /// while it is empty.
    pub(in super::super) fn drop_copies(&mut self, offset: u64) -> Result<(), Error> {
        let stand_ins = self.mappings.take_stand_ins(offset);
        self.unmap_pages(&stand_ins)?;
        for hva in self.mappings.take_copies(offset) {
            self.unmap(hva, PAGE)?;
        }
        Ok(())
    }

    /// Drops the changed copies in a range of HVAs.
    pub(in super::super) fn drop_copies_within(&mut self, text: &Range<u64>) -> Result<(), Error> {
        let copies = self.mappings.take_copies_within(text);
        self.unmap_pages(&copies)
    }
}
