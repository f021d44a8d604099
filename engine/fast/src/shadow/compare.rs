//! What is left of a space's mappings after a flush: what the page tables still say.
//!
//! A TLB may load a translation again as soon as it has been flushed, so a mapping that would be made again
//! now may as well stay; after a fork, and after the flushes of everything with which Linux changes its own
//! memory, most would. What is compared is all that went into the mapping: the page, the rights, the dirty
//! bit before writing, whose it is, whether it is global; and, of large pages, that flushes of their parts
//! still find them.
//!
//! What the page tables do not say is *closed*, if it shows a page of RAM: the mapping stays, without rights.
//! A child that has been forked has none of its program's text in its page tables at first, and will have the
//! same there, at the same addresses, as soon as it runs it; to give rights back costs a third of a mapping,
//! and little more for sixteen pages than for one. What is closed and not shown again by the next comparison
//! is unmapped.
//!
//! A child's page tables say of no page that it has been accessed. A CPU may load such translations as soon
//! as they are there, and sets the bit then; so is done once, when a child first runs, with those pages that
//! are mapped here already. If none of them are in the page tables it is another program that has come, and
//! nothing of what is mapped will be of use.

use super::{
    EXECUTE, KERNEL_PAGE, LARGE_BITS, PAGE, Pressure, READ, Space, WRITE,
    mapper::is_still_large,
    mappings::Large,
    part,
    walk::{Standing, Walker, still_good},
};
use crate::process::Process;
use ram::Ram;
use wedge::Error;
use x86::{
    control::{cr0, efer},
    paging::{self, Access, Roots, Translation},
};
use x86_interp::{GuestRam, RamPage};

/// Pages looked at to tell whether a space fits a process, and how many of them its page tables must have.
const SAMPLE: (usize, usize) = (24, 3);

/// Who the page tables belong to that a space is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    /// The process it was of, or another of the same program.
    Same,
    /// One that has just been forked from such a process, and has not run: none of its pages has been used.
    Newborn,
    /// Another, or nobody knows.
    Other,
}

impl<W: Process> Space<W> {
    /// Parks it: nothing runs here until its page table is loaded again, and then what is mapped is compared
    /// with that. With `all` there was a flush of everything: the global mappings, too.
    pub fn park(&mut self, all: bool) {
        self.pcid = None;
        self.mapper.wedge.publish(None);
        self.stale |= all;
    }

    /// Drops what is not what the page tables say now, after all flushes while it was parked.
    pub fn come_back(&mut self, ram: &Ram, roots: Roots) -> Result<(), Error> {
        let owner = match self.sample(ram, roots) {
            (present, 0) if present >= SAMPLE.1 => Owner::Newborn,
            // Another of the same program shares its text with this one, and may share more.
            (present, _) if present >= SAMPLE.1 => Owner::Same,
            // The page of the top table may have come to be another's.
            (present, _) if present != 0 && self.root == roots.cr3 & paging::ADDRESS => Owner::Same,
            _ => Owner::Other,
        };
        if owner != Owner::Same {
            self.pressure = Pressure::default();
        }
        let owner = if self.mapper.wedge.keeps() { owner } else { Owner::Same };
        if std::mem::take(&mut self.stale) {
            return self.compare_all(ram, roots, owner);
        }
        self.compare(ram, roots, owner)
    }

    /// How many pages of a sample of the user's these page tables have, and how many of those have been used. It ends
    /// as soon as more pages would change nothing.
    fn sample(&self, ram: &Ram, roots: Roots) -> (usize, usize) {
        let mut all = Walker::new(ram, roots).with_unused();
        let mut used = Walker::new(ram, roots);
        let mut counts = (0, 0);
        for hva in self.mapper.mappings.user().keys().rev().take(SAMPLE.0) {
            counts.0 += usize::from(all.find(*hva).is_some());
            counts.1 += usize::from(used.find(*hva).is_some());
            if counts.0 >= SAMPLE.1 && counts.1 != 0 {
                break;
            }
        }
        counts
    }

    /// Pages of a process with these page tables are probably where they were mapped here: it is the same
    /// program at the same addresses, as a child is that has been forked.
    pub fn fits(&self, ram: &Ram, roots: Roots) -> bool {
        self.mapper.wedge.keeps() && self.sample(ram, roots).0 >= SAMPLE.1
    }

    /// So of a process that has not run since it was forked. `None` if it has run: that is so of each space then.
    pub fn fits_newborn(&self, ram: &Ram, roots: Roots) -> Option<bool> {
        match self.sample(ram, roots) {
            (_, 1..) => None,
            (present, _) => Some(self.mapper.wedge.keeps() && present >= SAMPLE.1),
        }
    }

    /// Drops every mapping that is not global and not what the page tables say now.
    pub fn revalidate(&mut self, ram: &Ram, roots: Roots) -> Result<(), Error> {
        self.compare(ram, roots, Owner::Same)
    }

    fn compare(&mut self, ram: &Ram, roots: Roots, owner: Owner) -> Result<(), Error> {
        // To fill one again costs less than to compare it.
        self.mapper.wedge.clear_lookups();
        self.mapper.mappings.near_mut().forget();
        self.revalidate_local_kernel(ram, roots)?;
        // While there are large pages that the wedge does not know of, each INVLPG is the monitor's to do.
        if self.mapper.mappings.has_user_large() || owner == Owner::Other {
            return self.mapper.clear_user();
        }
        self.revalidate_large(ram, roots, false)?;
        self.revalidate_user(ram, roots, owner)
    }

    /// Drops every mapping that is not what the page tables say now, the global ones included.
    pub fn revalidate_all(&mut self, ram: &Ram, roots: Roots) -> Result<(), Error> {
        self.compare_all(ram, roots, Owner::Same)
    }

    fn compare_all(&mut self, ram: &Ram, roots: Roots, owner: Owner) -> Result<(), Error> {
        let modes = efer::LMA | efer::NXE;
        if roots.cr0 & cr0::PG == 0 || roots.efer & modes != modes {
            return self.clear_all(); // what is compared means something else there
        }
        self.revalidate_large(ram, roots, true)?;
        self.revalidate_kernel(ram, roots)?;
        self.compare(ram, roots, owner)
    }

    /// Drops large pages, the kernel's global ones or the user's, that are not what the page tables say now.
    fn revalidate_large(&mut self, ram: &Ram, roots: Roots, kernel: bool) -> Result<(), Error> {
        let mappings = &self.mapper.mappings;
        let stale = |(hva, large): (&u64, &Large)| {
            let asked = (large.protection & KERNEL_PAGE != 0) == kernel
                && !mappings.local().has(*hva, large.len);
            let gone = asked && !is_still_large(self.mapper.base, ram, roots, *hva, large, kernel);
            gone.then_some((*hva, large.len))
        };
        let gone: Vec<_> = mappings.large().iter().filter_map(stale).collect();
        self.mapper.drop_ranges(&gone)
    }

    fn revalidate_kernel(&mut self, ram: &Ram, roots: Roots) -> Result<(), Error> {
        let mut walker = Walker::new(ram, roots);
        let mut gone = Vec::new();
        for (hva, page) in self.mapper.mappings.kernel() {
            let local = self.mapper.mappings.local().has(*hva, PAGE);
            let mut standing = || {
                still_good(
                    &mut walker,
                    self.mapper.base,
                    *hva,
                    *page,
                    self.mapper.mappings.parts(),
                    true,
                )
            };
            if !local && !matches!(standing(), Standing::Good) {
                gone.push(*hva);
            }
        }
        self.mapper.unmap_kernel_pages(&gone)
    }

    fn revalidate_user(&mut self, ram: &Ram, roots: Roots, owner: Owner) -> Result<(), Error> {
        let newborn = owner == Owner::Newborn;
        let (mut gone, mut read_only) = (Vec::new(), Vec::new());
        let (mut closed, mut moved) = (Vec::new(), Vec::new());
        let mut walker = Walker::new(ram, roots);
        if newborn {
            walker = walker.with_unused();
        }
        for (hva, page) in self.mapper.mappings.user() {
            match still_good(
                &mut walker,
                self.mapper.base,
                *hva,
                *page,
                self.mapper.mappings.parts(),
                false,
            ) {
                Standing::Good | Standing::ReadOnly if newborn && !is_used(ram, roots, *hva) => {
                    gone.push(*hva);
                }
                Standing::Good => {}
                Standing::ReadOnly => read_only.push(*hva),
                _ if newborn && self.has_data(ram, roots, &mut walker, *hva) => moved.push(*hva),
                _ if !newborn && self.is_elsewhere(ram, &mut walker, *hva, *page) => {
                    moved.push(*hva);
                }
                _ if self.may_be_closed(*hva, *page) => closed.push(*hva),
                _ => gone.push(*hva),
            }
        }
        self.mapper.close_to_writes(&read_only)?;
        self.mapper.close(&closed)?;
        self.mapper.unmap_pages(&gone)?;
        moved.into_iter().try_for_each(|hva| self.map_data(ram, &mut walker, hva))
    }

    /// What the page tables have of the user's at an address, if it is data in a page of 4 KiB that can be mapped by
    /// itself.
    fn data(&self, ram: &Ram, walker: &mut Walker<'_>, hva: u64) -> Option<(Translation, RamPage)> {
        let found = walker.find(hva).filter(|found| found.user && found.page_bits == 12)?;
        let page = ram.page(found.gpa).filter(|page| !ram.is_code(page.offset))?;
        let alone =
            !found.executable && !self.mapper.mappings.parts().contains(&part(hva, LARGE_BITS));
        alone.then_some((found, page))
    }

    /// A newborn process has data there that it only reads, elsewhere in RAM than what is mapped: what its brother
    /// had, it will need.
    fn has_data(&self, ram: &Ram, roots: Roots, walker: &mut Walker<'_>, hva: u64) -> bool {
        let data = self.data(ram, walker, hva);
        data.is_some_and(|(found, _)| !found.writable) && is_used(ram, roots, hva)
    }

    /// A process has data there that it has used, elsewhere in RAM than what is mapped: it has taken the slot of
    /// another of the same program, and has what that one had in pages of its own.
    fn is_elsewhere(
        &self,
        ram: &Ram,
        walker: &mut Walker<'_>,
        hva: u64,
        (offset, protection): (u64, u64),
    ) -> bool {
        let was_data = protection & EXECUTE == 0 && !self.mapper.mappings.has_copy(offset, hva);
        was_data && self.data(ram, walker, hva).is_some_and(|(_, page)| page.offset != offset)
    }

    fn map_data(&mut self, ram: &Ram, walker: &mut Walker<'_>, hva: u64) -> Result<(), Error> {
        let Some((found, page)) = self.data(ram, walker, hva) else {
            return Ok(());
        };
        let writable = found.writable && found.dirty && page.writable;
        let rights = READ | if writable { WRITE } else { 0 };
        self.mapper.remap(hva, page.offset, rights)
    }

    /// What is mapped there may be shown again: it is a page of RAM as it is, or a copy that goes when that
    /// page is written, and was open since the last comparison.
    fn may_be_closed(&self, hva: u64, (offset, protection): (u64, u64)) -> bool {
        let plain = protection & !(READ | WRITE | EXECUTE) == 0 && protection != 0;
        let kept = protection & EXECUTE != 0 && !self.mapper.wedge.searches();
        plain
            && self.mapper.wedge.keeps()
            && !self.mapper.mappings.parts().contains(&part(hva, LARGE_BITS))
            && (kept || !self.mapper.mappings.has_copy(offset, hva))
    }
}

/// The CPU loads a newborn process's translation before it is asked for, as it may: the page counts as
/// accessed from then on.
fn is_used(mut ram: &Ram, roots: Roots, gva: u64) -> bool {
    let access = Access { user: true, ..Access::default() };
    paging::walk(&mut ram, roots, gva, access).is_ok()
}
