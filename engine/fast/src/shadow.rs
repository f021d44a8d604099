//! Host mappings for a guest address space: filled on faults, dropped on flushes.
//!
//! Each kind of state has one owner, and only the owner changes it:
//!
//! - [`Space`] answers faults (`answer`), is parked and comes back (`compare`: which mappings survive a
//!   flush), and keeps the number of its mappings down (`budget`). `Space` decides what is mapped.
//! - `mapper` has the wedge and its mappings. It maps and unmaps, writes down what it does, and asks nobody
//!   why. `hidden` keeps the kernel from reading the changed copies of code.
//! - `mappings` has the books of what is mapped, and no wedge: what is written down can be read and counted by
//!   itself. `local` knows the kernel's pages that are not global, `near` what lies near the table of patched
//!   system calls, `places` where RAM pages are mapped.
//! - `code_pages` knows what is in pages of user code, and maps nothing. `closed` says what may be executed
//!   where there are protection keys, `texts` which programs read their own code.
//!
//! `revalidation` owns nothing: it compares mappings with page tables and returns what is stale, so the walk
//! over them changes none of them. `seen` has what it found the last time. `pressure` tells which spaces have
//! more pages than there can be mappings, `walk` reads the guest's page tables.

mod answer;
pub(crate) mod budget;
mod closed;
mod code_pages;
mod compare;
mod hidden;
mod local;
mod mapper;
mod mappings;
mod near;
mod places;
pub(crate) mod pressure;
mod revalidation;
mod seen;
mod texts;
mod walk;
mod youth;

use crate::{Scattered, process::Process, scan_cache::Search};
use code_pages::{CodePage, CodePages, OfAllSpaces, bytes_of};
use mapper::Mapper;
use pressure::Pressure;
use ram::Ram;
use std::time::{Duration, Instant};
use wedge::{Error, MapReport, Wedge};
use wedge_abi::{Base, SpaceVersion, TextPage};
use x86::paging::Roots;
pub use youth::Role;
use youth::{PageUse, Youth};

const READ: u64 = 1;
const WRITE: u64 = 2;
const EXECUTE: u64 = 4;
/// Beside the rights of a page: the kernel's.
const KERNEL_PAGE: u64 = 1 << 16;
/// Beside the rights of a page: memory without content stands for the page of RAM, which is empty.
const EMPTY: u64 = 1 << 17;
const PAGE: u64 = 4096;
const LARGE: u64 = 1 << 21;
/// Pages looked at around a fault.
const AROUND: u64 = 16;

/// log2 of the bytes of a large page.
const LARGE_BITS: u32 = 21;
/// log2 of the bytes of a page.
const PAGE_BITS: u32 = 12;
/// The sizes of the guest's large pages, in the same way.
const LARGE_PAGES: [u32; 3] = [LARGE_BITS, 22, 30];

const _: () = assert!(wedge_abi::EMPTY_PAGE == ram::EMPTY_PAGE);
const _: () = assert!(wedge_abi::CODE_MARKS == ram::MADE);
const _: () = assert!(wedge_abi::COPIED_PAGE == ram::COPIED_PAGE);

/// How long a comparison with page tables is relied on. Linux clears accessed bits without counting, and a comparison sets them again.
const COUNTS: Duration = Duration::from_secs(1);

/// What a page fault came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The page is mapped now: go on.
    Mapped,
    /// The page is the kernel's, at an HVA in a region that has not been given to it.
    NeedsRegion(u64),
    /// Not the host's to answer: interpret the instruction.
    Interpret,
}

/// Where a page goes.
#[derive(Clone, Copy, Debug)]
struct Place {
    gva: u64,
    hva: u64,
    kernel: bool,
}

/// A wedge and what is mapped in it.
pub struct Space<W = Wedge> {
    /// The wedge, and what is mapped in it.
    mapper: Mapper<W>,
    /// Process-context identifier, zero if the guest uses none; `None` while the slot is parked: nothing may run
    /// here then before it has been compared with page tables.
    pub pcid: Option<u64>,
    /// GPA of the top page table that guest code ran with here last.
    pub root: u64,
    /// How many of its entries are for programs.
    entries_of_programs: usize,
    /// The user's pages behind this HVA are given up next, if there are too many.
    given_up: u64,
    /// Pages (GVA) whose translations the wedge has dropped by itself, until [`Space::take_invalidated`] takes them out.
    invalidated: Vec<u64>,
    /// What is known of pages of user code.
    code: CodePages,
    /// There was a flush of everything while nothing ran here.
    stale: bool,
    /// The version of the page tables up to which this space is right, and when the space was last compared with page tables.
    compared: Option<(SpaceVersion, Instant)>,
    /// When a check first found that page tables of the same version say something else ([`Space::check`]).
    doubted: Option<Instant>,
    /// Whether mappings suffice.
    pressure: Pressure,
    /// Whether the process has just begun.
    youth: Youth,
}

impl<W: Process> Space<W> {
    pub(crate) fn new(wedge: W, base: Base, pcid: u64, shared: OfAllSpaces) -> Self {
        Self {
            mapper: Mapper::new(wedge, base),
            pcid: Some(pcid),
            root: 0,
            entries_of_programs: 0,
            given_up: 0,
            invalidated: Vec::new(),
            code: CodePages::new(shared),
            stale: false,
            compared: None,
            doubted: None,
            pressure: Pressure::default(),
            youth: Youth::default(),
        }
    }

    /// The process.
    pub fn wedge(&self) -> &W {
        self.mapper.wedge()
    }

    /// Whether orders have failed here since the last call, in a turn that came from another process.
    pub(crate) fn take_failure(&mut self) -> bool {
        self.mapper.wedge_mut().take_failure()
    }

    /// The process, for tests to give orders past the books.
    #[cfg(test)]
    pub(crate) fn wedge_mut(&mut self) -> &mut W {
        self.mapper.wedge_mut()
    }

    /// Has guest code run, or orders carried out; false if they could not be.
    pub fn run(&mut self) -> Result<bool, Error> {
        self.look_for_fork();
        let young = self.youth.is_on().then(Instant::now);
        let look_ups = self.pressure.is_on() || young.is_some();
        let mappings = self.mapper.mappings();
        let room = W::max_mappings().saturating_sub(mappings.made());
        let large = mappings.has_user_large();
        let wedge = self.mapper.wedge_mut();
        wedge.allow(room, large);
        wedge.look_up(look_ups);
        let done = wedge.run();
        if let Some(begin) = young {
            self.youth.note(begin.elapsed());
        }
        done
    }

    /// Begins a short youth if the process has forked.
    fn look_for_fork(&mut self) {
        if self.mapper.wedge_mut().take_fork() {
            self.youth.begin_again();
        }
    }

    /// Has the wedge note when the process forks.
    pub(crate) fn watch_forks(&mut self) {
        self.mapper.wedge_mut().watch_forks();
    }

    /// The process with these page tables runs here from now on: begins its youth if the process is new.
    pub(crate) fn look_for_youth(&mut self, ram: &Ram, roots: Roots) {
        let is_new = self.look_for_successor(ram, roots);
        if !is_new && self.root != roots.top() {
            self.youth.end();
        }
    }

    /// Begins the youth of the process with these page tables if the process is new, and says whether it is. A new process can have
    /// the page table and the identifier of one that has ended, and so the slot.
    pub(crate) fn look_for_successor(&mut self, ram: &Ram, roots: Roots) -> bool {
        // Most processes are known. A few pages that are mapped here tell so sooner than all page tables do.
        if !roots.long_mode() || self.root == roots.top() && self.has_run(ram, roots) {
            return false;
        }
        let pages = PageUse::of(ram, roots);
        let child = pages.are_newborn();
        let is_new = child || pages.are_few();
        if is_new {
            self.youth.begin(child);
        }
        is_new
    }

    /// Guest code is about to run here with these page tables.
    pub(crate) fn set_root(&mut self, roots: Roots) {
        self.root = roots.top();
        self.entries_of_programs = roots.entries_of_programs();
    }

    /// Guest code may go on here whenever a wedge selects this space.
    pub(crate) fn publish(&self, passing: bool) {
        let may = passing && self.mapper.mappings().near().is_known();
        self.mapper.wedge().publish(self.pcid.filter(|_| may));
    }

    /// Tells wedges at which version of the page tables guest code may go on here, or, without `passing`, that it may not.
    pub(crate) fn publish_version(&self, passing: bool) {
        let may = passing && self.mapper.mappings().near().is_known();
        self.mapper.wedge().publish_version(self.version().filter(|_| may));
    }

    /// The version of the page tables at which this space is right; `None` if nobody knows, or if the last comparison is too old.
    pub(crate) fn version(&self) -> Option<SpaceVersion> {
        let (version, then) = self.compared?;
        (self.is_of(version) && then.elapsed() < COUNTS).then_some(version)
    }

    /// Whether this space is right at this version of the page tables, however old the last comparison is.
    pub(crate) fn is_of(&self, version: SpaceVersion) -> bool {
        let same = self.compared.is_some_and(|(known, _)| known == version);
        same && !self.stale && version.root == self.root
    }

    /// Follows guest code that has left this space at a later version of the same page tables. By then it had flushed here all that was
    /// taken back.
    pub(crate) fn follow_version(&mut self) {
        let (Some((known, _)), Some(left)) = (&mut self.compared, self.mapper.wedge().left())
        else {
            return;
        };
        if (known.root, known.owner) == (left.root, left.owner) && known.flushes < left.flushes {
            *known = left;
        }
    }

    /// The space has just been compared with page tables of this version.
    pub(crate) fn note_version(&mut self, version: Option<SpaceVersion>) {
        self.compared = version.map(|version| (version, Instant::now()));
        self.doubted = None;
    }

    /// Opens or closes the table of patched system calls for the program with these page tables, which is about to run;
    /// `low` if it has been given memory near the table, touched or not.
    pub(crate) fn attend_to_sites(
        &mut self,
        ram: &Ram,
        roots: Roots,
        low: bool,
    ) -> Result<(), Error> {
        self.mapper.attend_to_sites(ram, roots, low)
    }

    /// Kernel code has read what is hidden, or what has its place in the table.
    pub(crate) fn note_hidden_read(&mut self) {
        self.mapper.note_hidden_read();
    }

    /// User code here is to be run translated, with look-ups, as `scattered` says, or because the process is young. `is_known` says
    /// whether the code that comes next has often been seen. A process that has run translated code here goes on so.
    pub fn looks_up(
        &mut self,
        scattered: Scattered,
        filled: u64,
        is_known: impl FnOnce(Role) -> Option<bool>,
    ) -> bool {
        self.look_for_fork();
        let runs = self.mapper.wedge().has_verified_code();
        let young = self.youth.look(filled, |role| if runs { Some(true) } else { is_known(role) });
        self.pressure.look(scattered) || young
    }

    /// User code here is to be run directly, whatever is known of the process.
    pub fn looks_nothing_up(&mut self) {
        self.youth.end();
        self.pressure.look(Scattered::Map);
    }

    /// A page of translated user code may be executed at a GVA. False if its text lies elsewhere here.
    #[must_use]
    pub fn verify_code(&mut self, page: TextPage, gva: u64, generation: u64) -> bool {
        self.mapper.wedge_mut().verify_code(page, gva, generation)
    }

    /// The GVA of a place of user code; what is no place stays.
    pub fn resolve(&self, place: u64) -> u64 {
        self.mapper.wedge().resolve(place)
    }

    /// Drops every mapping.
    pub fn clear_all(&mut self) -> Result<(), Error> {
        self.mapper.clear_all()?;
        self.code.texts.clear();
        Ok(())
    }

    /// Makes room for the kernel in the region of an HVA, and drops what lies right before it.
    pub fn give_to_kernel(&mut self, hva: u64) -> Result<(), Error> {
        self.mapper.give_to_kernel(hva)
    }

    /// After orders have failed: starts over with nothing mapped.
    pub fn forget(&mut self) {
        self.mapper.doubt();
        // A failure here shows again at the next run.
        let _ = self.clear_all();
    }

    /// Drops the mapping of one page.
    pub fn drop_page(&mut self, gva: u64) -> Result<(), Error> {
        self.mapper.drop_page(gva)
    }

    /// Drops a page of the kernel's (GVA) that has been dropped in another space, if anything is mapped there.
    pub fn drop_if_shown(&mut self, gva: u64) -> Result<(), Error> {
        self.mapper.drop_if_shown(gva)
    }

    /// Drops the changed copies of a RAM page (by offset) that has been written, and what stands for it
    /// while it is empty.
    pub fn drop_copies(&mut self, offset: u64) -> Result<(), Error> {
        self.mapper.drop_copies(offset)
    }

    /// The RAM page at this offset may not be written without a fault any more.
    pub fn protect(&mut self, offset: u64) -> Result<(), Error> {
        self.mapper.protect(offset)
    }

    /// The GVA behind the last large page of a 32-bit kernel that has been mapped in pieces.
    pub fn end_of_parts(&self) -> u64 {
        self.mapper.end_of_parts()
    }

    /// Takes note of what the wedge has done by itself; how much that was.
    pub fn catch_up(&mut self) -> Result<usize, Error> {
        let made = self.mapper.wedge_mut().take_made();
        made.iter().for_each(|report| self.absorb(*report));
        if self.mapper.mappings().made() > W::max_mappings() + wedge_abi::MAX_MADE {
            self.clear_all()?; // more than it was allowed: it is not the wedge's own code that counts
        }
        Ok(made.len())
    }

    /// Takes note of what the wedge has done.
    fn absorb(&mut self, report: MapReport) {
        if matches!(report, MapReport::Refused { .. }) {
            self.code.count(Search::Refused);
        }
        self.invalidated.extend(self.mapper.absorb(report));
    }

    /// Takes out the pages (GVA) whose translations the wedge has dropped by itself.
    pub fn take_invalidated(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.invalidated)
    }

    /// What is executed next is 32-bit code, or is not.
    pub fn set_narrow(&mut self, is_narrow: bool) {
        self.code.set_narrow(is_narrow);
    }

    /// Prints of pages of code that have been searched since, and nothing found.
    pub fn take_plain(&mut self) -> Vec<u64> {
        self.code.take_plain()
    }

    /// RAM pages (by offset) that have been marked since: no space may write them without a fault any more.
    pub fn take_marked(&mut self) -> Vec<u64> {
        self.code.take_marked()
    }

    /// User code executes the page of this GVA, and may be unable to load from it: changed copies are closed to loads.
    pub(crate) fn is_closed_to_loads(&self, gva: u64) -> bool {
        let executed = || self.mapper.mappings().executed(gva & !(PAGE - 1));
        self.mapper.wedge().hides_code() && executed().is_some()
    }

    /// The page of user code at `gva` that is mapped: its GVA and the guest's bytes.
    pub fn code_page(&self, ram: &Ram, gva: u64) -> Option<(u64, Vec<u8>)> {
        let page = gva & !(PAGE - 1);
        let offset = self.mapper.mappings().executed(page)?;
        Some((page, bytes_of(ram, offset).into()))
    }

    /// Maps the page of a system call that has become worth patching anew, if it is mapped.
    pub fn patch_page(&mut self, ram: &Ram, gva: u64) -> Result<(), Error> {
        let hva = gva & !(PAGE - 1);
        let mapped = self.mapper.mappings().user().get(&hva);
        let executed = |(_, rights): &&(u64, u64)| rights & (EXECUTE | WRITE) == EXECUTE;
        let Some((offset, _)) = mapped.filter(executed).copied() else { return Ok(()) };
        if self.code.texts.has(hva) {
            return Ok(());
        }
        let page = CodePage { hva, offset, written: false };
        let patches = self.code.patches(ram, page, &mut self.mapper);
        match patches.is_empty() {
            true => Ok(()),
            false => self.mapper.map_patched(hva, offset, &patches),
        }
    }
}

fn protection(place: Place, execute: bool, writable: bool) -> u64 {
    let execute = if execute { EXECUTE } else { 0 };
    let kernel = if place.kernel { KERNEL_PAGE } else { 0 };
    READ | execute | kernel | if writable { WRITE } else { 0 }
}

/// The page of so many bits around an HVA: its first HVA and its bytes.
fn part(hva: u64, bits: u32) -> (u64, u64) {
    (hva >> bits << bits, 1 << bits)
}

/// Adjacent pages of this size, ascending, as ranges.
fn runs(pages: &[u64], size: u64) -> Vec<(u64, u64)> {
    runs_over(pages, size, 0)
}

/// Pages of this size, ascending, as ranges. A range goes on over a gap of so many bytes at the most.
fn runs_over(pages: &[u64], size: u64, gap: u64) -> Vec<(u64, u64)> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for page in pages {
        match runs.last_mut() {
            Some((_, end)) if page.checked_sub(*end).is_some_and(|far| far <= gap) => {
                *end = page + size;
            }
            _ => runs.push((*page, page + size)),
        }
    }
    runs
}
