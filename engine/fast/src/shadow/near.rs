//! Keeps the table of patched system calls out of the program's way.
//!
//! The table lies among the user's pages ([`wedge_abi::SITES`]), and user code can load from it. It is open only as
//! long as the program has no memory near it. The wedge closes it before it maps any there; what is known here
//! ends with every flush, because another program may have come, whose pages are anywhere but in the host's
//! mappings. So the guest's page tables are asked then: whether one leads there, not whether it has pages, since
//! those come and go.

use super::walk::has_table;
use ram::Ram;
use wedge_abi::{SITES, near_sites};
use x86::paging::Roots;

/// What a program has near the table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Near {
    /// The program may be another than the one that was looked at.
    #[default]
    Unknown,
    Nothing,
    Something,
}

/// What has become of the table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum SitesTable {
    #[default]
    Open,
    /// The wedge may have closed it, and patched calls still lead there.
    Between,
    /// Nothing leads there any more.
    Closed,
}

/// The program's memory near the table, and the table.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct NearSites {
    program: Near,
    table: SitesTable,
}

impl NearSites {
    /// Calls of this program may lead to the table.
    pub(super) fn may_be_patched(&self) -> bool {
        self.program == Near::Nothing
    }

    /// The program that is here was looked at.
    pub(super) fn is_known(&self) -> bool {
        self.program != Near::Unknown
    }

    /// Another program may have come.
    pub(super) fn forget(&mut self) {
        self.program = Near::Unknown;
    }

    /// The wedge may not have done what it was told.
    pub(super) fn doubt(&mut self) {
        self.table = SitesTable::Between;
    }

    /// Memory of the user's is mapped at an HVA.
    pub(super) fn note(&mut self, hva: u64) {
        if near_sites(hva) {
            self.program = Near::Something;
            if self.table == SitesTable::Open {
                self.table = SitesTable::Between;
            }
        }
    }

    /// Looks at the program that is about to run. Returns what the table has to become for the program, if that is
    /// not what the table is. What comes near the table is not always mapped first, so the page tables are asked
    /// even if nothing was there.
    pub(super) fn look(&mut self, ram: &Ram, roots: Roots, low: bool) -> Option<SitesTable> {
        let something =
            low || self.program == Near::Something || has_table(ram, roots, SITES as u64);
        let (program, table) = match something {
            true => (Near::Something, SitesTable::Closed),
            false => (Near::Nothing, SitesTable::Open),
        };
        self.program = program;
        let before = std::mem::replace(&mut self.table, table);
        (before != table).then_some(table)
    }
}
