//! What the shadow MMU asks of a wedge. There is a second one in `tests/shadow`, whose host mappings are
//! a table, and which counts what they grant.

use wedge::{Error, MapCommand, MapReport, Move, Pages, Wedge, WedgeRam};
use wedge_abi::{SpaceVersion, TextPage};

/// A process that holds host mappings.
pub trait Process: Sized {
    /// If so many of the user's pages in 2 MiB are mapped, or fewer, each is compared with page tables. Of more their table is
    /// compared with a copy. To compare a table takes as long as some pages.
    const FEW: usize = 4;

    /// So many mappings may be made before it is looked at how many are left.
    fn max_mappings() -> usize;

    /// Starts it; see [`Wedge::start`], as for the others.
    ///
    /// # Errors
    /// As there.
    fn start(ram: WedgeRam<'_>, pages: &Pages, number: usize) -> Result<Self, Error>;
    /// Changes its mappings before guest code runs the next time.
    ///
    /// # Errors
    /// As there.
    fn order(&mut self, order: MapCommand) -> Result<(), Error>;
    /// Has it run; false if orders could not be carried out.
    ///
    /// # Errors
    /// As there.
    fn run(&mut self) -> Result<bool, Error>;
    /// Whether orders have failed here since the last call, in a turn that came from another process.
    fn take_failure(&mut self) -> bool;
    /// Guest code may go on here, in the space of a PCID, without the monitor, or may not.
    fn publish(&self, pcid: Option<u64>);
    /// Guest code may go on here, in the space of this version, without the monitor, or may not.
    fn publish_version(&self, _: Option<SpaceVersion>) {}
    /// See [`Wedge::left`].
    fn left(&self) -> Option<SpaceVersion> {
        None
    }
    /// See [`Wedge::take_moved`].
    fn take_moved(&self) -> bool {
        false
    }
    /// See [`Wedge::take_move`].
    fn take_move(&self) -> Option<Move> {
        None
    }
    /// What it has mapped and unmapped by itself.
    fn take_made(&mut self) -> Vec<MapReport>;
    /// How much it may.
    fn allow(&mut self, mappings: usize, large: bool);
    /// User code is to be run translated, with look-ups, or not.
    fn look_up(&mut self, on: bool);
    /// Kernel code must not read the page at this GVA as it is mapped.
    fn hide(&mut self, page: u64);
    /// Kernel code may read all pages as they are mapped.
    fn show_all(&mut self);
    /// The user's pages in a range (GVA) have no look-ups any more.
    fn forget_lookups(&mut self, start: u64, len: u64);
    /// See [`Wedge::watch_forks`].
    fn watch_forks(&mut self);
    /// See [`Wedge::take_fork`].
    fn take_fork(&mut self) -> bool;
    /// See [`Wedge::has_verified_code`].
    fn has_verified_code(&self) -> bool;
    /// See [`Wedge::verify_code`].
    fn verify_code(&mut self, page: TextPage, gva: u64, generation: u64) -> bool;
    /// See [`Wedge::resolve`].
    fn resolve(&self, place: u64) -> u64;
    /// There are no look-ups any more.
    fn clear_lookups(&mut self);
    /// No look-up lets the RAM page at this offset be written any more.
    fn protect_lookups(&mut self, offset: u64);
    /// The instruction at a GVA has been displaced by a patch.
    fn displaced(&mut self, rip: u64);
    /// HVA where stubs of patched system calls go on.
    fn patched_entry(&self) -> u64;
    /// What the page tables do not say any more is closed, not unmapped.
    fn keeps(&self) -> bool;
    /// Its number, and that of the process of its user code, if it has one.
    fn processes(&self) -> Vec<i32>;
    /// User code executes copies of pages only, in which it looks for what opens protection keys.
    fn searches(&self) -> bool;
    /// What user code executes can be closed to its own loads, by a protection key.
    fn hides_code(&self) -> bool;
}

impl Process for Wedge {
    fn max_mappings() -> usize {
        wedge::max_mappings()
    }
    fn start(ram: WedgeRam<'_>, pages: &Pages, number: usize) -> Result<Self, Error> {
        Self::start(ram, pages, number)
    }
    fn order(&mut self, order: MapCommand) -> Result<(), Error> {
        self.order(order)
    }
    fn run(&mut self) -> Result<bool, Error> {
        self.run()
    }
    fn take_failure(&mut self) -> bool {
        self.take_failure()
    }
    fn publish(&self, pcid: Option<u64>) {
        self.publish(pcid);
    }
    fn publish_version(&self, version: Option<SpaceVersion>) {
        self.publish_version(version);
    }
    fn left(&self) -> Option<SpaceVersion> {
        self.left()
    }
    fn take_moved(&self) -> bool {
        self.take_moved()
    }
    fn take_move(&self) -> Option<Move> {
        self.take_move()
    }
    fn take_made(&mut self) -> Vec<MapReport> {
        self.take_made()
    }
    fn allow(&mut self, mappings: usize, large: bool) {
        self.allow(mappings, large);
    }
    fn look_up(&mut self, on: bool) {
        self.look_up(on);
    }
    fn hide(&mut self, page: u64) {
        self.hide(page);
    }
    fn show_all(&mut self) {
        self.show_all();
    }
    fn forget_lookups(&mut self, start: u64, len: u64) {
        self.forget_lookups(start, len);
    }
    fn watch_forks(&mut self) {
        self.watch_forks();
    }
    fn take_fork(&mut self) -> bool {
        self.take_fork()
    }
    fn has_verified_code(&self) -> bool {
        self.has_verified_code()
    }
    fn verify_code(&mut self, page: TextPage, gva: u64, generation: u64) -> bool {
        self.verify_code(page, gva, generation)
    }
    fn resolve(&self, place: u64) -> u64 {
        self.resolve(place)
    }
    fn clear_lookups(&mut self) {
        self.clear_lookups();
    }
    fn protect_lookups(&mut self, offset: u64) {
        self.protect_lookups(offset);
    }
    fn displaced(&mut self, rip: u64) {
        self.displaced(rip);
    }
    fn patched_entry(&self) -> u64 {
        self.patched_entry()
    }
    fn keeps(&self) -> bool {
        self.keeps()
    }
    fn processes(&self) -> Vec<i32> {
        self.processes().collect()
    }
    fn searches(&self) -> bool {
        self.searches()
    }
    fn hides_code(&self) -> bool {
        self.has_keys()
    }
}
