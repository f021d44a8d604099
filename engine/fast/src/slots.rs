//! A slot per guest address space, so that a context switch changes processes, not mappings.
//!
//! An operating system has more processes than identifiers for them and gives one's to another, with a flush. The
//! slot of the first is *parked* then: nothing runs in it, and when its page table is loaded again, under whatever
//! identifier, what it holds is compared with what that says now, which costs less than filling another, and makes
//! one comparison of all the flushes until then.
//!
//! If the guest's kernel counts what it takes back of a process's memory, a slot that was compared at the same count needs
//! no comparison ([`SpaceVersion`]). Wedges then go on in parked slots by themselves, and give them identifiers; the monitor follows
//! when it has its turn again.
//!
//! A slot that was another process's is of use to a child that has just been forked, whose page tables say at first
//! what that other's said. For any other process it is not: each of a server's workers has the same pages at the same
//! addresses, and whoever took a worker's slot would leave that one with none. A child that took its parent's slot would
//! leave the parent with none. A child therefore takes the slot of a process that has ended, while slots may be added.

use crate::{
    evicted::{Evicted, FEW_SLOTS},
    flush_counts::FlushCounts,
    low::LowPrograms,
    probes::Probed,
    process::Process,
    regions::{self, Regions},
    scan_cache::ScanCache,
    shadow::{Answer, Space, budget::most_entries},
    sites::{self, Sites},
};
use ram::Ram;
use rustc_hash::FxHashSet;
use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};
use wedge::{Error, Move, Pages, Wedge};
use wedge_abi::{Base, Claim, SITES, SITES_LEN, SpaceVersion};
use x86::{
    narrow::wide,
    paging::{Access, Roots},
};
use x86_interp::{Flush, Record};

/// Address spaces kept at the most; Linux uses seven PCIDs a CPU.
pub(crate) const MAX_SLOTS: usize = wedge_abi::MAX_WEDGES;
/// So many claims of wedges are believed before it is looked at what they take.
pub(crate) const CLAIMS: usize = 1024;
/// One slot of so many is taken from any process, where there are as many as there will ever be.
const SELDOM: usize = 8;
/// A multiple of this, modulo any number, is seldom near the one before: 2^64 divided by the golden ratio.
const SPREAD: usize = 0x9e37_79b9_7f4a_7c15;
/// The first GVA of the upper half.
const UPPER_HALF: u64 = 1 << 63;
/// Bytes of a page.
const PAGE: u64 = 4096;

/// So old may get what is published of parked slots, while nothing changes in them.
const REFRESH: Duration = Duration::from_millis(100);

/// What CR3 selects.
#[derive(Clone, Copy, Debug)]
pub struct Selection {
    /// The process-context identifier, zero if the guest uses none.
    pub pcid: u64,
    /// The page tables.
    pub roots: Roots,
    /// Their version, if the guest's kernel counts.
    pub version: Option<SpaceVersion>,
}

impl Selection {
    /// Of page tables whose version is not known.
    #[must_use]
    pub const fn uncounted(pcid: u64, roots: Roots) -> Self {
        Self { pcid, roots, version: None }
    }
}

/// The slots.
pub struct Slots<W = Wedge> {
    base: Base,
    ram: Ram,
    /// Kernel code runs in the slots, too.
    kernel: bool,
    /// New processes are run with look-ups.
    youths: bool,
    /// Those in which guest code may run, least recently used first.
    spaces: Vec<Box<Space<W>>>,
    /// Those that are parked, in the order in which they were.
    parked: Vec<Box<Space<W>>>,
    evicted: Evicted,
    /// How many slots have been taken from processes at the ceiling.
    taken: usize,
    /// Programs that have been given memory near the table of patched system calls.
    low: LowPrograms,
    /// The page tables of programs that wedges must not go on with by themselves.
    held_back: FxHashSet<u64>,
    /// The regions that are the kernel's, in all slots.
    kernel_regions: Regions,
    /// Patched system calls, in all slots.
    sites: Sites,
    /// What is known of pages of code, in all slots.
    scans: ScanCache,
    /// Pages of user code with breakpoints, in all slots.
    probed: Probed,
    /// What wedges have said they have mapped since it was looked at what that takes.
    claims: usize,
    /// Where the guest's kernel counts its flushes; switches that took a comparison are noted there.
    counts: Arc<FlushCounts>,
    /// Slots that are right by the kernel's count are compared with page tables all the same.
    checks: bool,
    /// When wedges were last told in which parked slots they can go on; `None` if something may have changed since.
    published: Option<Instant>,
}

impl<W: Process> Slots<W> {
    /// Memory of the user's may be mapped in the region of a GVA of its own, if not at every page.
    pub fn may_show_region(&self, gva: u64) -> bool {
        let low = gva < SITES as u64 + SITES_LEN as u64;
        (low || regions::is_mappable(self.base, gva)) && !self.kernel_regions.has(gva)
    }

    /// No slots yet. With `kernel`, kernel code is to run in them, too. All pages that it is given have this base.
    pub fn new(ram: Ram, base: Base, kernel: bool) -> Self {
        let (low, held_back, kernel_regions, sites, scans) = Default::default();
        let (spaces, parked, evicted, taken, probed) = Default::default();
        Self {
            base,
            ram,
            kernel,
            youths: false,
            spaces,
            parked,
            evicted,
            taken,
            low,
            held_back,
            kernel_regions,
            sites,
            scans,
            probed,
            claims: 0,
            counts: Arc::default(),
            checks: false,
            published: None,
        }
    }

    /// The guest's kernel counts its flushes there. With `checks`, slots that are right by that count are compared all the same.
    pub(crate) fn count_by(&mut self, counts: Arc<FlushCounts>, checks: bool) {
        (self.counts, self.checks) = (counts, checks);
    }

    /// From now on new processes are run with look-ups for a while.
    pub(crate) fn look_for_youths(&mut self) {
        self.youths = true;
    }

    /// Has patched system calls, and what is known of pages of code, in common with others from now on. There must be no slots.
    pub(crate) fn share(&mut self, sites: Sites, scans: ScanCache, low: LowPrograms) {
        (self.sites, self.scans, self.low) = (sites, scans, low);
    }

    /// Makes the slot for what CR3 selects the current one. As in a TLB, it is
    /// the identifier that tells spaces apart: who loads another page table under the same one flushes.
    pub fn select(&mut self, selection: Selection, pages: &Pages) -> Result<(), Error> {
        let has_it = |space: &Space<W>| space.pcid == Some(selection.pcid);
        if self.spaces.last().is_some_and(|space| has_it(space)) {
            return Ok(());
        }
        let space = match self.spaces.iter().rposition(|space| has_it(space)) {
            Some(at) => self.spaces.remove(at),
            None => self.take(selection, pages)?,
        };
        self.spaces.push(space);
        Ok(())
    }

    /// Whether guest code may run in a slot that has this process-context identifier.
    pub(crate) fn has(&self, pcid: u64) -> bool {
        self.spaces.iter().any(|space| space.pcid == Some(pcid))
    }

    /// The system call of the current slot that ends at `back` (GVA) is worth patching.
    pub fn patch(&mut self, pages: &Pages, back: u64) -> Result<(), Error> {
        let space = self.spaces.last_mut().ok_or(Error::NoSpace)?;
        let Some((page, bytes)) = space.code_page(&self.ram, back) else { return Ok(()) };
        if sites::is_interrupt(page, &bytes, back) {
            self.sites.add_interrupt(pages, back);
            return space.patch_page(&self.ram, page);
        }
        if let Some(call) = sites::call_at(page, &bytes, back) {
            self.sites.add(pages, back, call, space.wedge().patched_entry());
            space.patch_page(&self.ram, page)?;
        }
        Ok(())
    }

    /// From now on these pages of user code (GVA) have breakpoints; returns those that had none.
    pub fn set_probed(&mut self, pages: BTreeSet<u64>) -> Vec<u64> {
        let new = self.probed.replace(pages);
        for page in &new {
            for space in self.all() {
                // A slot whose process fails shows it when it runs.
                let _ = space.drop_page(*page);
            }
        }
        new
    }

    /// What came of the search for what opens protection keys: name and count of each.
    pub fn searches(&self) -> [(&'static str, u64); 3] {
        self.scans.searches()
    }

    /// The slots' processes.
    pub fn processes(&self) -> Vec<i32> {
        self.each().flat_map(|space| space.wedge().processes()).collect()
    }

    fn each(&self) -> impl Iterator<Item = &Space<W>> {
        self.parked.iter().chain(&self.spaces).map(Box::as_ref)
    }

    fn all(&mut self) -> impl Iterator<Item = &mut Space<W>> {
        self.published = None;
        self.parked.iter_mut().chain(&mut self.spaces).map(Box::as_mut)
    }

    /// The current slot.
    pub fn current(&mut self) -> Result<&mut Space<W>, Error> {
        self.spaces.last_mut().map(Box::as_mut).ok_or(Error::NoSpace)
    }

    /// The GVA of a place of user code in the current slot; what is no place stays.
    pub fn resolve(&self, place: u64) -> u64 {
        self.spaces.last().map_or(place, |space| space.resolve(place))
    }

    /// Has guest code run in the current slot, which has these page tables, and with `passing` in those that it
    /// selects by itself and that have no orders. False if orders could not be carried out: what has failed starts
    /// over with nothing mapped.
    pub fn run(&mut self, passing: bool, roots: Roots) -> Result<bool, Error> {
        let current = self.spaces.last_mut().ok_or(Error::NoSpace)?;
        current.set_root(roots);
        current.attend_to_sites(&self.ram, roots, self.low.has(roots.top()))?;
        self.publish(passing);
        let done = self.current()?.run()?;
        let moved = passing && self.current()?.wedge().take_moved();
        let mut passed_on_done = true;
        // Others may have got the turn from the current one, and failed.
        let parked = if moved { &mut *self.parked } else { &mut [] };
        for space in self.spaces.iter_mut().chain(parked) {
            self.claims += space.catch_up()?;
            if space.take_failure() {
                space.forget();
                passed_on_done = false;
            }
        }
        if !done {
            self.current()?.forget();
        }
        if moved {
            self.follow_moves();
        }
        if self.claims >= CLAIMS {
            self.keep_bounds()?;
        }
        Ok(done && passed_on_done)
    }

    /// Says in which slots wedges can go on by themselves: in those that have an identifier by that, and, if the guest's kernel
    /// counts, in any by its version.
    fn publish(&mut self, passing: bool) {
        let may_pass = |space: &Space<W>| passing && !self.held_back.contains(&space.root);
        let counting = self.counts.offset() != 0 && !self.checks;
        for space in &self.spaces {
            let passing = may_pass(space);
            space.publish(passing);
            if counting {
                space.publish_version(passing);
            }
        }
        if counting && self.published.is_none_or(|then| then.elapsed() > REFRESH) {
            self.parked.iter().for_each(|space| space.publish_version(may_pass(space)));
            self.published = Some(Instant::now());
        }
    }

    /// Follows what wedges have done: they have given identifiers to parked slots, and taken them from other slots.
    fn follow_moves(&mut self) {
        let mut all: Vec<_> = self.parked.drain(..).chain(self.spaces.drain(..)).collect();
        all.iter_mut().for_each(|space| space.follow_version());
        for at in 0..all.len() {
            let Some(made) = all[at].wedge().take_move() else { continue };
            all[at].pcid = None;
            if let Move::Got(pcid) = made {
                all.iter_mut()
                    .filter(|space| space.pcid == Some(pcid))
                    .for_each(|space| space.pcid = None);
                all[at].pcid = Some(pcid);
            }
        }
        (self.spaces, self.parked) = all.into_iter().partition(|space| space.pcid.is_some());
        self.published = None;
    }

    /// Starts the largest spaces over as long as all together take more than they may.
    fn keep_bounds(&mut self) -> Result<(), Error> {
        self.claims = 0;
        while self.entries() > most_entries(self.ram.len() / PAGE) {
            let largest = self.all().max_by_key(|space| space.entries());
            largest.ok_or(Error::NoSpace)?.clear_all()?;
        }
        Ok(())
    }

    /// What is kept of all spaces.
    pub(crate) fn entries(&self) -> usize {
        self.each().map(Space::entries).sum()
    }

    /// The GVA behind the last large page of a 32-bit kernel that has been mapped in pieces in the current slot.
    pub fn end_of_parts(&self) -> u64 {
        self.spaces.last().map_or(0, |space| space.end_of_parts())
    }

    /// Pages (GVA) whose translations the wedges have dropped by themselves. The other slots drop those that are the kernel's, too.
    pub fn take_invalidated(&mut self) -> Vec<u64> {
        let all: Vec<_> =
            self.spaces.iter_mut().flat_map(|space| space.take_invalidated()).collect();
        for gva in all.iter().filter(|gva| **gva >= UPPER_HALF) {
            self.drop_elsewhere(*gva);
        }
        all
    }

    /// Drops a page (GVA) in all slots but the current one.
    fn drop_elsewhere(&mut self, gva: u64) {
        let current = self.spaces.len().saturating_sub(1);
        for space in self.parked.iter_mut().chain(self.spaces.iter_mut().take(current)) {
            // What cannot be unmapped has failed for good, which shows when it runs next.
            let _ = space.drop_if_shown(gva);
        }
    }

    /// Answers a page fault in the current slot.
    pub fn answer(&mut self, roots: Roots, gva: u64, access: Access) -> Result<Answer, Error> {
        let space = self.spaces.last_mut().ok_or(Error::NoSpace)?;
        space.answer(&self.ram, roots, &self.kernel_regions, gva, access)
    }

    /// A slot for a space that has none: one that is parked for it, a fresh one, or another's, with what is right in it.
    fn take(&mut self, selection: Selection, pages: &Pages) -> Result<Box<Space<W>>, Error> {
        let Selection { pcid, roots, version } = selection;
        self.published = None;
        if let Some(at) = version.and_then(|version| self.unchanged(version)) {
            let mut space = self.parked.remove(at);
            space.pcid = Some(pcid);
            if self.checks {
                space.check(&self.ram, roots)?;
            }
            return Ok(space);
        }
        let mut space = match self.parked_for(roots).or_else(|| self.left_behind()) {
            Some(at) => self.parked.remove(at),
            None => match self.add(pcid, roots, pages)? {
                Some(mut space) => {
                    if self.youths {
                        space.watch_forks();
                    }
                    self.look_for_youth(&mut space, roots);
                    // Nothing is mapped in it that the page tables do not say.
                    space.note_version(version);
                    return Ok(space);
                }
                None => self.evict(roots),
            },
        };
        if pcid != 0 && space.root == roots.top() {
            self.counts.note_switch();
        }
        space.pcid = Some(pcid);
        // Before the comparison, which marks pages as used.
        self.look_for_youth(&mut space, roots);
        space.come_back(&self.ram, roots)?;
        space.note_version(version);
        Ok(space)
    }

    /// The index of a parked slot that has been compared with page tables of this version, not long ago.
    fn unchanged(&self, version: SpaceVersion) -> Option<usize> {
        let counts = |space: &Space<W>| match self.checks {
            true => space.is_of(version),
            false => space.version() == Some(version),
        };
        self.parked.iter().position(|space| counts(space))
    }

    fn look_for_youth(&self, space: &mut Space<W>, roots: Roots) {
        if self.youths {
            space.look_for_youth(&self.ram, roots);
        }
    }

    /// Takes a slot from another process, and remembers that process if it has not ended.
    fn evict(&mut self, roots: Roots) -> Box<Space<W>> {
        let space = self.take_from_another(roots);
        if space.root != roots.top() && !space.is_left_behind(&self.ram) {
            self.evicted.note(space.root);
        }
        space
    }

    /// A new child gets a slot in which its program is mapped, any other process the slot unused for longest. At the highest
    /// number of slots the process of that slot would run next, if more processes than slots take turns, and no process would
    /// find its own slot. The slot parked last is taken there, and every [`SELDOM`]th time any other.
    fn take_from_another(&mut self, roots: Roots) -> Box<Space<W>> {
        let Some(last) = self.parked.len().checked_sub(1) else { return self.spaces.remove(0) };
        if let Some(at) = self.parked_for_newborn(roots, |_| true) {
            return self.parked.remove(at);
        }
        if !self.evicted.is_at_ceiling() {
            return self.parked.remove(0);
        }
        self.taken = self.taken.wrapping_add(1);
        let any = self.taken.wrapping_mul(SPREAD) % (last + 1);
        self.parked.remove(if self.taken.is_multiple_of(SELDOM) { any } else { last })
    }

    /// The index of a parked slot that is of use to a process, and that no other process will miss. First choice is the slot
    /// with this page table and its pages. Second, for a new child, is a slot of the same program whose process has ended.
    /// Last is the slot with this page table, even if another process has the table by now.
    fn parked_for(&self, roots: Roots) -> Option<usize> {
        let own = self.parked.iter().position(|space| space.root == roots.top());
        own.filter(|at| self.parked[*at].fits(&self.ram, roots))
            .or_else(|| self.parked_for_newborn(roots, |space| space.is_left_behind(&self.ram)))
            .or(own)
    }

    /// The index of a parked slot in which a new child's program is mapped, and that `may` accepts. Only the slots parked last
    /// are tried: the parent and its other children have run a moment ago.
    fn parked_for_newborn(&self, roots: Roots, may: impl Fn(&Space<W>) -> bool) -> Option<usize> {
        let late = self.parked.iter().enumerate().rev().take(FEW_SLOTS);
        late.map_while(|(at, space)| Some((at, space, space.fits_newborn(&self.ram, roots)?)))
            .find_map(|(at, space, fits)| (fits && may(space)).then_some(at))
    }

    /// The index of a parked slot whose process has ended; `None` while there are fewer than [`FEW_SLOTS`] slots.
    fn left_behind(&self) -> Option<usize> {
        let few = self.spaces.len() + self.parked.len() < FEW_SLOTS;
        let of_nobody = || self.parked.iter().position(|space| space.is_left_behind(&self.ram));
        if few { None } else { of_nobody() }
    }

    /// A fresh slot, if there may be one more and the host has a process for it.
    fn add(
        &mut self,
        pcid: u64,
        roots: Roots,
        pages: &Pages,
    ) -> Result<Option<Box<Space<W>>>, Error> {
        self.evicted.come_back(roots.top());
        let there = self.spaces.len() + self.parked.len();
        if there >= self.evicted.most() {
            return Ok(None);
        }
        match self.start(pcid, pages) {
            Err(Error::Start(_)) if there >= FEW_SLOTS => {
                self.evicted.stay_at(there);
                Ok(None)
            }
            started => started.map(|space| Some(Box::new(space))),
        }
    }

    fn start(&self, pcid: u64, pages: &Pages) -> Result<Space<W>, Error> {
        let ram = wedge::WedgeRam {
            memory: self.ram.object(),
            len: self.ram.len(),
            low: self.ram.low_len(),
            marks: self.ram.marks(),
            words: self.ram.words_start(),
            walked: self.kernel,
        };
        let wedge = W::start(ram, pages, self.spaces.len() + self.parked.len() + 1)?;
        let shared = (self.sites.clone(), self.scans.clone(), self.probed.clone());
        Ok(Space::new(wedge, self.base, pcid, shared))
    }

    /// Does what the interpreter has reported; `roots` are the current space's. A slot whose process
    /// fails shows it when it runs.
    pub fn apply(&mut self, record: &Record, roots: Roots, current: u64) {
        for flush in &record.flushes {
            self.flush(*flush, roots, current);
        }
        for page in &record.code_pages {
            self.protect(*page);
        }
        for page in &record.stale_pages {
            for space in self.all() {
                let _ = space.drop_copies(*page);
            }
        }
    }

    fn flush(&mut self, flush: Flush, roots: Roots, current: u64) {
        let goes_on = |space: &Space<W>| space.pcid == Some(current) && space.root == roots.top();
        self.published = None;
        let flush = match flush {
            Flush::Page { pcid, linear } if !roots.long_mode() => {
                Flush::Page { pcid, linear: wide(linear) }
            }
            flush => flush,
        };
        for space in self.parked.iter_mut().chain(&mut self.spaces) {
            // What cannot be unmapped has failed for good, which shows when it runs next.
            let _ = match flush {
                Flush::All if goes_on(space) => {
                    if self.youths {
                        space.look_for_successor(&self.ram, roots);
                    }
                    space.revalidate_all(&self.ram, roots)
                }
                Flush::All => {
                    space.park(true);
                    Ok(())
                }
                Flush::Space { pcid } if space.pcid != Some(pcid.into()) => Ok(()),
                Flush::Space { .. } if goes_on(space) => {
                    if self.youths {
                        space.look_for_successor(&self.ram, roots);
                    }
                    space.revalidate(&self.ram, roots)
                }
                Flush::Space { .. } => {
                    space.park(false);
                    Ok(())
                }
                Flush::Page { pcid, linear }
                    if space.pcid == Some(pcid.into()) || linear >= UPPER_HALF =>
                {
                    space.drop_page(linear)
                }
                Flush::Page { .. } => Ok(()),
            };
        }
        self.parked.extend(self.spaces.extract_if(.., |space| space.pcid.is_none()));
    }

    /// No slot may write the RAM page at this offset any more without a fault.
    pub fn protect(&mut self, page: u64) {
        for space in self.all() {
            let _ = space.protect(page);
        }
    }

    /// Where programs must have no pages for their code to run in a slot.
    pub fn claims(&self) -> Vec<Claim> {
        self.kernel_regions.claims(self.base)
    }

    /// Ends all wedges; those that are started from now on have this base, and no region is the kernel's.
    pub fn move_to(&mut self, base: Base) {
        let (youths, counts, checks) = (self.youths, Arc::clone(&self.counts), self.checks);
        *self = Self { youths, counts, checks, ..Self::new(self.ram.clone(), base, self.kernel) };
    }

    /// Wedges do not go on by themselves with the programs that have these page tables.
    pub fn hold_back(&mut self, roots: FxHashSet<u64>) {
        (self.held_back, self.published) = (roots, None);
    }

    /// The program with this page table has been given memory near the table of patched system calls.
    pub fn note_low(&self, root: u64) {
        self.low.note(root);
    }

    /// The regions that are the kernel's: HVAs.
    pub fn kernel_regions(&self) -> Vec<u64> {
        self.kernel_regions.starts().collect()
    }

    /// The uppermost page tables of the programs that are known: GPAs.
    pub fn roots(&self) -> impl Iterator<Item = u64> {
        self.each().map(|space| space.root)
    }

    /// Kernel memory is to be mapped in the region of an HVA: it becomes the kernel's.
    pub fn give_to_kernel(&mut self, hva: u64) {
        if self.kernel_regions.add(hva) {
            for space in self.all() {
                let _ = space.give_to_kernel(hva);
            }
        }
    }
}

#[cfg(test)]
mod tests;
