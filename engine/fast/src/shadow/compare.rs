//! What is left of a space's mappings after a flush: what the page tables still say.
//!
//! A TLB may load a translation again as soon as it has been flushed, so a mapping that would be made again now may as
//! well stay; after a fork, and after the flushes of everything with which Linux changes its own memory, most
//! would. What is compared is all that went into the mapping: the page, the rights, the dirty bit before
//! writing, whose it is, whether it is global; and, of large pages, that flushes of their parts still find them.

use super::{
    KERNEL_PAGE, Near, PAGE, PROTECT, READ, Space, WRITE, runs,
    walk::{Standing, Walker, still_good},
};
use crate::process::Process;
use ram::Ram;
use std::collections::BTreeMap;
use wedge::{Error, Order};
use x86::{
    control::{cr0, efer},
    paging::Roots,
};

impl<W: Process> Space<W> {
    /// Parks it: nothing runs here until its page table is loaded again, and then what is mapped is compared
    /// with that. With `all` there was a flush of everything: the global mappings, too.
    pub fn park(&mut self, all: bool) {
        self.pcid = None;
        self.stale |= all;
    }

    /// Drops what is not what the page tables say now, after all flushes while it was parked.
    pub fn come_back(&mut self, ram: &Ram, roots: Roots) -> Result<(), Error> {
        if std::mem::take(&mut self.stale) {
            return self.revalidate_all(ram, roots);
        }
        self.revalidate(ram, roots)
    }

    /// Drops every mapping that is not global and not what the page tables say now.
    pub fn revalidate(&mut self, ram: &Ram, roots: Roots) -> Result<(), Error> {
        self.near = Near::Unknown;
        self.revalidate_local_kernel(ram, roots)?;
        if self.user_large {
            // While there are large pages that the wedge does not know of, each INVLPG is the monitor's to do.
            return self.clear_user();
        }
        self.revalidate_large(ram, roots, false)?;
        self.revalidate_pages(ram, roots, false)
    }

    /// Drops every mapping that is not what the page tables say now, the global ones included.
    pub fn revalidate_all(&mut self, ram: &Ram, roots: Roots) -> Result<(), Error> {
        let modes = efer::LMA | efer::NXE;
        if roots.cr0 & cr0::PG == 0 || roots.efer & modes != modes {
            return self.clear_all(); // what is compared means something else there
        }
        self.revalidate_large(ram, roots, true)?;
        self.revalidate_pages(ram, roots, true)?;
        self.revalidate(ram, roots)
    }

    fn revalidate_pages(&mut self, ram: &Ram, roots: Roots, kernel: bool) -> Result<(), Error> {
        let (mut gone, mut read_only) = (Vec::new(), Vec::new());
        let mut walker = Walker::new(ram, roots);
        for (hva, page) in if kernel { &self.kernel } else { &self.pages } {
            if kernel && self.local_kernel.has(*hva, PAGE) {
                continue;
            }
            match still_good(&mut walker, self.base, *hva, *page, &self.parts, kernel) {
                Standing::Good => {}
                Standing::ReadOnly if !kernel => read_only.push(*hva),
                _ => gone.push(*hva),
            }
        }
        if kernel {
            self.others += runs(&gone).len(); // what is cut in two
        }
        self.protect_pages(&read_only)?;
        self.unmap_pages(&gone)
    }

    /// Makes pages of the user's read-only, given in ascending order.
    fn protect_pages(&mut self, pages: &[u64]) -> Result<(), Error> {
        for (start, end) in runs(pages) {
            let protection = PROTECT | READ;
            self.wedge.order(Order { address: start, len: end - start, offset: 0, protection })?;
        }
        for hva in pages {
            self.pages.entry(*hva).and_modify(|(_, protection)| *protection &= !WRITE);
        }
        Ok(())
    }

    /// Drops pages, given in ascending order.
    pub(super) fn unmap_pages(&mut self, gone: &[u64]) -> Result<(), Error> {
        for (start, end) in runs(gone) {
            self.unmap(start, end - start)?;
        }
        for hva in gone {
            self.pages.remove(hva);
            self.kernel.remove(hva);
        }
        Ok(())
    }

    /// The table that has a page.
    pub(super) fn pages_of(&mut self, protection: u64) -> &mut BTreeMap<u64, (u64, u64)> {
        if protection & KERNEL_PAGE == 0 { &mut self.pages } else { &mut self.kernel }
    }
}
