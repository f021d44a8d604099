//! Keeps the table of patched system calls out of the program's way.
//!
//! The table lies among the user's pages ([`frame::SITES`]), and user code can load from it. It is open only as
//! long as the program has no memory near it. The wedge closes it before it maps any there; what is known here
//! ends with every flush, because another program may have come, whose pages are anywhere but in the host's
//! mappings. So the guest's page tables are asked then: whether one leads there, not whether it has pages, since
//! those come and go.

use super::{Space, walk::has_table};
use crate::process::Process;
use frame::{SITES, near_sites};
use ram::Ram;
use wedge::{Error, MapCommand};
use x86::paging::Roots;

/// What a program has near the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Near {
    /// The program may be another than the one that was looked at.
    Unknown,
    Nothing,
    Something,
}

/// What has become of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SitesTable {
    Open,
    /// The wedge may have closed it, and patched calls still lead there.
    Between,
    /// Nothing leads there any more.
    Closed,
}

impl<W: Process> Space<W> {
    /// Guest code may go on here whenever a wedge selects this space.
    pub(crate) fn publish(&self, passing: bool) {
        self.wedge.publish(self.pcid.filter(|_| passing && self.near != Near::Unknown));
    }

    /// Calls of this program may lead to the table.
    pub(super) fn may_be_patched(&self) -> bool {
        self.near == Near::Nothing
    }

    /// Memory of the user's is mapped there.
    pub(super) fn note_near(&mut self, hva: u64) {
        if near_sites(hva) {
            self.near = Near::Something;
            if self.table == SitesTable::Open {
                self.table = SitesTable::Between;
            }
        }
    }

    /// Opens or closes the table for the program with these page tables, which is about to run; `low` if it has been given
    /// memory near the table, touched or not.
    pub(crate) fn attend_to_sites(
        &mut self,
        ram: &Ram,
        roots: Roots,
        low: bool,
    ) -> Result<(), Error> {
        self.near = if low { Near::Something } else { self.look(ram, roots) };
        match self.near {
            Near::Something if self.table != SitesTable::Closed => {
                self.table = SitesTable::Closed;
                let copies = self.copies.take_all();
                self.unmap_pages(&copies)?;
                self.wedge.order(MapCommand::CloseSites)
            }
            Near::Nothing if self.table != SitesTable::Open => {
                self.table = SitesTable::Open;
                self.wedge.order(MapCommand::OpenSites)
            }
            _ => Ok(()),
        }
    }

    /// What comes there is not always mapped first, so the page tables are asked even if nothing was there.
    fn look(&self, ram: &Ram, roots: Roots) -> Near {
        let something = self.near == Near::Something || has_table(ram, roots, SITES as u64);
        if something { Near::Something } else { Near::Nothing }
    }
}
