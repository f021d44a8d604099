//! What page tables still say of what is mapped.
//!
//! Nothing is changed here: mappings are compared with page tables, and what has to happen to them is returned.

use super::{
    EXECUTE, KERNEL_PAGE, LARGE, LARGE_BITS, PAGE, READ, WRITE,
    mapper::{Mapper, is_still_large},
    mappings::{Large, Mappings},
    part,
    seen::{PageBlock, SeenTables},
    walk::{Standing, Walker, compared, still_good},
    youth::FEW,
};
use crate::process::Process;
use ram::Ram;
use wedge_abi::Base;
use x86::paging::{self, Access, Roots, Translation};
use x86_interp::{GuestRam, RamPage};

/// Pages looked at to tell whether a space fits a process, and how many of them its page tables must have.
pub(super) const SAMPLE: (usize, usize) = (24, 3);

/// What has to happen to the user's pages: HVAs, ascending.
#[derive(Default)]
pub(super) struct Changes {
    /// They are to be unmapped.
    pub(super) gone: Vec<u64>,
    /// They must not be written any more.
    pub(super) read_only: Vec<u64>,
    /// They are to be closed.
    pub(super) closed: Vec<u64>,
    /// Other RAM is to be mapped there: its offset, and the protection.
    pub(super) moved: Vec<(u64, u64, u64)>,
}

/// Mappings, and the page tables that they are compared with.
pub(super) struct Revalidation<'a> {
    ram: &'a Ram,
    roots: Roots,
    base: Base,
    mappings: &'a Mappings,
    /// See [`Process::FEW`].
    few: usize,
    /// What the page tables do not say any more may be closed.
    keeps: bool,
}

impl<'a> Revalidation<'a> {
    pub(super) fn new<W: Process>(mapper: &'a Mapper<W>, ram: &'a Ram, roots: Roots) -> Self {
        let keeps = mapper.wedge().keeps();
        let (base, mappings) = (mapper.base(), mapper.mappings());
        Self { ram, roots, base, mappings, few: W::FEW, keeps }
    }

    /// The same comparison, in which pages that the page tables lack are unmapped and never closed.
    pub(super) fn dropping(self) -> Self {
        Self { keeps: false, ..self }
    }

    /// How many pages of a sample of the user's these page tables have, and how many of those have been used. The count ends
    /// as soon as more than [`FEW`] have been used: nobody asks for more.
    pub(super) fn sample(&self) -> (usize, usize) {
        let mut all = Walker::new(self.ram, self.roots).with_unused();
        let mut used = Walker::new(self.ram, self.roots);
        let mut counts = (0, 0);
        for hva in self.mappings.user().keys().rev().take(SAMPLE.0) {
            let is_used = used.find(*hva).is_some();
            counts.0 += usize::from(is_used || all.find(*hva).is_some());
            counts.1 += usize::from(is_used);
            if counts.1 > FEW {
                break;
            }
        }
        counts
    }

    /// Large pages, the kernel's global ones or the user's, that are not what the page tables say now: first HVA and bytes.
    pub(super) fn stale_large(&self, kernel: bool) -> Vec<(u64, u64)> {
        let stale = |(hva, large): (&u64, &Large)| {
            let asked = (large.protection & KERNEL_PAGE != 0) == kernel
                && !self.mappings.local().has(*hva, large.len);
            (asked && !self.is_still_large(*hva, large, kernel)).then_some((*hva, large.len))
        };
        self.mappings.large().iter().filter_map(stale).collect()
    }

    fn is_still_large(&self, hva: u64, large: &Large, global: bool) -> bool {
        is_still_large(self.base, self.ram, self.roots, hva, large, global)
    }

    /// The kernel's mappings that are not global, and not what the page tables say now: first HVA and bytes.
    pub(super) fn stale_local(&self) -> Vec<(u64, u64)> {
        let mut walker = Walker::new(self.ram, self.roots);
        let stale = |(hva, len): &(u64, u64)| !self.is_still_said(&mut walker, *hva, *len);
        self.mappings.local().iter().filter(stale).collect()
    }

    /// The page tables would have the same mapping made, global or not.
    fn is_still_said(&self, walker: &mut Walker<'_>, hva: u64, len: u64) -> bool {
        if len >= LARGE {
            let large = self.mappings.large().get(&hva).filter(|large| large.len == len);
            return large.is_some_and(|large| self.is_still_large(hva, large, false));
        }
        let page = self.mappings.kernel().get(&hva);
        page.is_some_and(|page| self.is_good(walker, hva, *page, false))
    }

    fn is_good(&self, walker: &mut Walker<'_>, hva: u64, page: (u64, u64), global: bool) -> bool {
        matches!(self.standing(walker, hva, page, global), Standing::Good)
    }

    fn standing(
        &self,
        walker: &mut Walker<'_>,
        hva: u64,
        page: (u64, u64),
        global: bool,
    ) -> Standing {
        still_good(walker, self.base, hva, page, self.mappings.parts(), global)
    }

    /// The kernel's global pages that are not what the page tables say now: HVAs, ascending.
    pub(super) fn stale_kernel(&self) -> Vec<u64> {
        let mut walker = Walker::new(self.ram, self.roots);
        let stale = |(hva, page): &(&u64, &(u64, u64))| {
            let local = self.mappings.local().has(**hva, PAGE);
            !local && !self.is_good(&mut walker, **hva, **page, true)
        };
        self.mappings.kernel().iter().filter(stale).map(|(hva, _)| *hva).collect()
    }

    /// A page of the user's (HVA) that is open, and that the page tables do not have so, accessed or not.
    pub(super) fn first_stale(&self) -> Option<u64> {
        let mut walker = Walker::new(self.ram, self.roots).with_unused();
        let stale = |(hva, page): &(&u64, &(u64, u64))| {
            page.1 != 0 && !self.is_good(&mut walker, **hva, **page, false)
        };
        self.mappings.user().iter().find(stale).map(|(hva, _)| *hva)
    }

    /// What has to happen to the user's pages, of a process that has run before; `seen` has what the page tables said at
    /// the last comparison.
    pub(super) fn user(&self, seen: &mut SeenTables) -> Changes {
        let mut changes = Changes::default();
        let mut walker = Walker::new(self.ram, self.roots);
        seen.begin(self.roots);
        for block in self.mappings.user_blocks() {
            if self.changed(block, seen, &mut walker, &mut changes).is_none() {
                for (hva, page) in self.mappings.user().range(block.start..block.start + LARGE) {
                    let standing = self.standing(&mut walker, *hva, *page, false);
                    self.decide(&mut walker, (*hva, *page), standing, false, &mut changes);
                }
            }
        }
        seen.end();
        changes
    }

    /// What has to happen to the pages of 2 MiB, of which only those are looked at that may be others now. `None` if all have
    /// to be looked at; a copy of their table is made only if the pages are not few.
    fn changed(
        &self,
        block: PageBlock,
        seen: &mut SeenTables,
        walker: &mut Walker<'_>,
        changes: &mut Changes,
    ) -> Option<()> {
        let upper = walker.upper(block.start)?;
        for (hva, entry) in seen.changed(self.ram, upper, block, block.pages > self.few)? {
            let Some(page) = self.mappings.user().get(&hva) else { continue };
            let found = walker.through(upper, entry, hva);
            let standing = compared(self.ram, found, hva, *page, self.mappings.parts(), false);
            self.decide(walker, (hva, *page), standing, false, changes);
        }
        Some(())
    }

    /// What has to happen to a page of the user's.
    fn decide(
        &self,
        walker: &mut Walker<'_>,
        (hva, page): (u64, (u64, u64)),
        standing: Standing,
        newborn: bool,
        changes: &mut Changes,
    ) {
        match standing {
            Standing::Good => {}
            Standing::ReadOnly => changes.read_only.push(hva),
            Standing::Gone => self.replace(walker, hva, page, newborn, changes),
        }
    }

    /// What has to happen to the user's pages, of a process that has not run since it was forked.
    pub(super) fn newborn(&self) -> Changes {
        let mut changes = Changes::default();
        let mut walker = Walker::new(self.ram, self.roots).with_unused();
        for (hva, page) in self.mappings.user() {
            match self.standing(&mut walker, *hva, *page, false) {
                Standing::Good | Standing::ReadOnly if !self.is_used(*hva) => {
                    changes.gone.push(*hva);
                }
                standing => {
                    self.decide(&mut walker, (*hva, *page), standing, true, &mut changes);
                }
            }
        }
        changes
    }

    /// What becomes of a page of the user's that the page tables do not have any more.
    fn replace(
        &self,
        walker: &mut Walker<'_>,
        hva: u64,
        page: (u64, u64),
        newborn: bool,
        changes: &mut Changes,
    ) {
        let data = match newborn {
            true => self.newborn_data(walker, hva),
            false => self.data_elsewhere(walker, hva, page),
        };
        match data {
            Some((found, page)) => {
                let writable = found.writable && found.dirty && page.writable;
                let rights = READ | if writable { WRITE } else { 0 };
                changes.moved.push((hva, page.offset, rights));
            }
            None if self.may_be_closed(hva, page) => changes.closed.push(hva),
            None => changes.gone.push(hva),
        }
    }

    /// What the page tables have of the user's at an address, if it is data in a page of 4 KiB that can be mapped by
    /// itself.
    fn data(&self, walker: &mut Walker<'_>, hva: u64) -> Option<(Translation, RamPage)> {
        let found = walker.find(hva).filter(|found| found.user && found.page_bits == 12)?;
        let page = self.ram.page(found.gpa).filter(|page| !self.ram.is_code(page.offset))?;
        let alone = !found.executable && !self.is_part(hva);
        alone.then_some((found, page))
    }

    /// Data that a newborn process only reads, elsewhere in RAM than what is mapped: what its brother had, it will
    /// need.
    fn newborn_data(&self, walker: &mut Walker<'_>, hva: u64) -> Option<(Translation, RamPage)> {
        let data = self.data(walker, hva).filter(|(found, _)| !found.writable)?;
        self.is_used(hva).then_some(data)
    }

    /// Data that a process has used, elsewhere in RAM than what is mapped: it has taken the slot of another of the
    /// same program, and has what that one had in pages of its own.
    fn data_elsewhere(
        &self,
        walker: &mut Walker<'_>,
        hva: u64,
        (offset, protection): (u64, u64),
    ) -> Option<(Translation, RamPage)> {
        if protection & EXECUTE != 0 || self.mappings.has_copy(offset, hva) {
            return None;
        }
        self.data(walker, hva).filter(|(_, page)| page.offset != offset)
    }

    /// What is mapped there may be shown again: it is a page of RAM as it is, or a copy that goes when that
    /// page is written, and was open since the last comparison.
    fn may_be_closed(&self, hva: u64, (offset, protection): (u64, u64)) -> bool {
        let plain = protection & !(READ | WRITE | EXECUTE) == 0 && protection != 0;
        let kept = protection & EXECUTE != 0;
        plain && self.keeps && !self.is_part(hva) && (kept || !self.mappings.has_copy(offset, hva))
    }

    /// The page is a piece of a large page of the guest's.
    fn is_part(&self, hva: u64) -> bool {
        self.mappings.parts().contains(&part(hva, LARGE_BITS))
    }

    /// The CPU loads a newborn process's translation before it is asked for, as it may: the page counts as
    /// accessed from then on.
    fn is_used(&self, gva: u64) -> bool {
        let access = Access { user: true, ..Access::default() };
        paging::walk(&mut &*self.ram, self.roots, gva, access).is_ok()
    }
}
