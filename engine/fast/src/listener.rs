//! A process for tests of what is told to processes.

use crate::process::Process;
use std::cell::Cell;
use wedge::{Error, MapCommand, MapReport, Move, Pages, WedgeRam};
use wedge_abi::{SpaceVersion, TextPage};

/// A process that only remembers what it was told.
#[derive(Default)]
pub struct Listener {
    /// What it was told.
    pub told: Vec<MapCommand>,
    /// What it says it has mapped, when it is asked next.
    pub made: Vec<MapReport>,
    /// The version at which the monitor lets guest code go on here.
    pub version: Cell<Option<SpaceVersion>>,
    /// The version at which guest code has left this process's space, as wedges tell.
    pub left: Cell<Option<SpaceVersion>>,
    /// Whether wedges say that something is new in `left` or in `its_move`.
    pub moved: Cell<bool>,
    /// What wedges have done with the identifier of this process's space, if anything.
    pub its_move: Cell<Option<Move>>,
}

impl Process for Listener {
    const FEW: usize = 0;

    fn max_mappings() -> usize {
        100
    }
    fn start(_: WedgeRam<'_>, _: &Pages, _: usize) -> Result<Self, Error> {
        Ok(Self::default())
    }
    fn order(&mut self, order: MapCommand) -> Result<(), Error> {
        self.told.push(order);
        Ok(())
    }
    fn run(&mut self) -> Result<bool, Error> {
        Ok(true)
    }
    fn take_failure(&mut self) -> bool {
        false
    }
    fn publish(&self, _: Option<u64>) {}
    fn publish_version(&self, version: Option<SpaceVersion>) {
        self.version.set(version);
    }
    fn left(&self) -> Option<SpaceVersion> {
        self.left.get()
    }
    fn take_moved(&self) -> bool {
        self.moved.take()
    }
    fn take_move(&self) -> Option<Move> {
        self.its_move.take()
    }
    fn take_made(&mut self) -> Vec<MapReport> {
        std::mem::take(&mut self.made)
    }
    fn allow(&mut self, _: usize, _: bool) {}
    fn look_up(&mut self, _: bool) {}
    fn hide(&mut self, _: u64) {}
    fn show_all(&mut self) {}
    fn forget_lookups(&mut self, _: u64, _: u64) {}
    fn watch_forks(&mut self) {}
    fn take_fork(&mut self) -> bool {
        false
    }
    fn has_verified_code(&self) -> bool {
        false
    }
    fn verify_code(&mut self, _: TextPage, _: u64, _: u64) -> bool {
        true
    }
    fn resolve(&self, place: u64) -> u64 {
        place
    }
    fn clear_lookups(&mut self) {}
    fn protect_lookups(&mut self, _: u64) {}
    fn displaced(&mut self, _: u64) {}
    fn patched_entry(&self) -> u64 {
        0
    }
    fn keeps(&self) -> bool {
        true
    }
    fn processes(&self) -> Vec<i32> {
        Vec::new()
    }
    fn searches(&self) -> bool {
        false
    }
    fn hides_code(&self) -> bool {
        false
    }
}
