//! Probes in an engine that does not execute code one instruction after another.
//!
//! Kernel code: no translated block has a breakpoint in it or begins at one, so that what leads there comes to the interpreter,
//! which stops. User code: a page with a breakpoint cannot be executed in any wedge, and is interpreted as a whole. All
//! else goes on at full speed. With watched memory the interpreter runs everything (`x86_interp::Cpu::leaves_to_observer`).

use crate::Fast;
use std::{cell::RefCell, collections::BTreeSet, rc::Rc};
use x86_interp::Probes;

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
        self.cpu.set_probes(probes);
        self.codes.set_probes(probes);
        let user = probes.pages().into_iter().filter(|page| page >> 63 == 0).collect();
        for page in self.slots.set_probed(user) {
            // The wedge asks before it has the page executed.
            self.pages.kernel().note_site(page);
        }
    }
}
