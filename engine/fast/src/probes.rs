//! Probes in an engine that does not execute code one instruction after another.
//!
//! Kernel code: no translated block has a breakpoint in it or begins at one, so that what leads there comes to the interpreter,
//! which stops. Taps are breakpoints that translated code passes by itself: the block there begins with an exit to the wedge, which
//! makes a record and goes on (`stub::taps`). The monitor takes records whenever it has the turn. User code: a page with a
//! breakpoint cannot be executed in any wedge, and is interpreted as a whole. All else goes on at full speed. With watched memory
//! the interpreter runs everything (`x86_interp::Cpu::leaves_to_observer`).

use crate::Fast;
use contract::Reached;
use frame::{BlockExit, TAP_ODD, WedgeExit, go};
use std::{cell::RefCell, collections::BTreeSet, rc::Rc};
use x86_interp::{Probes, System};

/// The pages of user code (GVA) that have breakpoints, for all spaces.
#[derive(Clone, Debug, Default)]
pub struct Probed(Rc<RefCell<BTreeSet<u64>>>);

impl Probed {
    /// The page must not be executed.
    pub fn has(&self, page: u64) -> bool {
        let pages = self.0.borrow();
        !pages.is_empty() && pages.contains(&page)
    }

    /// Other pages from now on; returns those that are new.
    pub fn replace(&self, pages: BTreeSet<u64>) -> Vec<u64> {
        let mut known = self.0.borrow_mut();
        let new = pages.difference(&known).copied().collect();
        *known = pages;
        new
    }
}

impl Fast {
    pub(crate) fn take_probes(&mut self, probes: &Probes) {
        self.take_records(false);
        let probes = &if self.set_taps(probes) { probes.clone() } else { probes.without_taps() };
        self.board.set_watchers(&probes.watchers);
        self.cpu.set_probes(&probes.but_taps());
        self.code.set_probes(probes);
        self.taps.clone_from(&probes.taps);
        let user = probes.pages().into_iter().filter(|page| page >> 63 == 0).collect();
        for page in self.slots.set_probed(user) {
            // The wedge asks before it has the page executed.
            self.pages.kernel().note_site(page);
        }
    }

    /// Translated code makes records by itself. Not where it is compared with the interpreter, or where that runs everything.
    fn set_taps(&mut self, probes: &Probes) -> bool {
        let translates = self.modes.kernel_translated && self.checker.is_none();
        let taps = probes.taps.as_ref().filter(|_| translates && probes.watches.is_empty());
        let points = taps.iter().flat_map(|taps| &taps.points);
        let points = points.filter(|(gva, _)| probes.tap(**gva).is_some());
        let points = points.map(|(gva, step)| (*gva, u64::from(*step)));
        self.pages.set_taps(points, taps.map_or(&[], |taps| &taps.steps)) && taps.is_some()
    }

    /// Hands on what taps have recorded, but for the last record if it is `undone`.
    pub(crate) fn take_records(&mut self, undone: bool) {
        let Some(taps) = &self.taps else { return };
        let records = self.pages.take_records(undone);
        if !records.is_empty() {
            (taps.sink)(records, self.board.tsc());
        }
    }

    /// A point has been recorded, and a kick has come before its instruction: it will be recorded when it comes again.
    pub(crate) fn has_undone_tap(&mut self) -> bool {
        let f = self.pages.frame();
        let kicked = WedgeExit::from(&f.exit) == WedgeExit::Kicked && f.run.go == go::BLOCK;
        kicked && f.exit.kind == BlockExit::Tap as u64 && f.block.jump == f.exit.operand
    }

    /// The wedge has left the point at RIP to the monitor. If only its records had no room, there is room now.
    pub(crate) fn leave_at_tap(&mut self) {
        let odd = self.pages.frame().exit.info == TAP_ODD;
        self.take_state();
        if odd && self.code.has_tap(self.cpu.vcpu.rip) {
            self.cpu.reach(Reached::Breakpoint);
        }
    }

    /// There is no block at a tap, so the point is as any breakpoint.
    pub(crate) fn stops_at_tap(&mut self) -> bool {
        let stops = self.taps.is_some() && self.code.has_tap(self.cpu.vcpu.rip);
        if stops {
            self.cpu.reach(Reached::Breakpoint);
        }
        stops
    }
}
