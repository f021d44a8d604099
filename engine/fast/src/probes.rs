//! Probes in an engine that does not execute code one instruction after another.
//!
//! Kernel code: no translated block has a breakpoint in it or begins at one, so that what leads there comes to the interpreter,
//! which stops. Taps are breakpoints that translated code passes by itself: the block there begins with an exit to the wedge, which
//! makes a record and goes on (`stub::taps`). The monitor takes records whenever it has the turn. User code: a page with a
//! breakpoint cannot be executed in any wedge, and is interpreted as a whole. All else goes on at full speed. With watched memory
//! the interpreter runs everything (`x86_interp::Cpu::leaves_to_observer`).

use contract::Taps;
use engine::Board;
use std::{cell::RefCell, collections::BTreeSet, rc::Rc, sync::Arc};
use wedge::Pages;
use wedge_abi::{BlockExit, VcpuPage, WedgeExit, go};
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

/// The taps that a vCPU has; hands on what they have recorded to whoever has set them.
#[derive(Default)]
pub struct TapRecorder(Option<Arc<Taps>>);

impl TapRecorder {
    /// There are taps.
    pub fn has_taps(&self) -> bool {
        self.0.is_some()
    }

    /// The vCPU has these probes from now on. Their taps stay taps where the vCPU `translates` and the interpreter does
    /// not run everything, as it does for watched memory; otherwise they become breakpoints. Returns what the probes are then.
    pub fn replace(&mut self, probes: &Probes, translates: bool, pages: &mut Pages) -> Probes {
        let taps = probes.taps.as_ref().filter(|_| translates && probes.watches.is_empty());
        let points = taps.iter().flat_map(|taps| &taps.points);
        let points = points.filter(|(gva, _)| probes.tap(**gva).is_some());
        let points = points.map(|(gva, step)| (*gva, u64::from(*step)));
        let set = pages.set_taps(points, taps.map_or(&[], |taps| &taps.steps));
        self.0 = taps.filter(|_| set).cloned();
        if self.has_taps() { probes.clone() } else { probes.without_taps() }
    }

    /// A wedge has had the turn: hands on its records. One that will be made again is left out.
    pub fn hand_on_turn(&self, pages: &mut Pages, board: &mut Board) {
        if self.has_taps() {
            let undone = has_undone_tap(pages.vcpu_page());
            self.hand_on(undone, pages, board);
        }
    }

    /// Hands on the records, but for the last one if it is `undone`.
    pub fn hand_on(&self, undone: bool, pages: &mut Pages, board: &mut Board) {
        let Some(taps) = &self.0 else { return };
        let records = pages.take_records(undone);
        if !records.is_empty() {
            (taps.sink)(records, board.tsc());
        }
    }
}

/// A point has been recorded, and a kick has come before its instruction. The point is recorded again when the
/// vCPU comes back to it.
fn has_undone_tap(page: &VcpuPage) -> bool {
    let kicked = WedgeExit::from(&page.exit) == WedgeExit::Kicked && page.run.go == go::BLOCK;
    kicked && page.exit.kind == BlockExit::Tap as u64 && page.block.jump == page.exit.operand
}
