//! Taking turns with the monitor and the other wedges.
//!
//! A wedge gives its turn away and waits until it gets one. As a rule that goes to the monitor and comes
//! from it; when the guest selects an address space whose wedge has nothing to do first, it goes there.

use crate::{
    here,
    host::{self, call, load_vectors, store_vectors},
    mmu,
    orders::obey,
    run, whose_turn,
};
use core::sync::atomic::{AtomicU32, Ordering};
use frame::{FRAME, MONITOR, Reason, RunControl, SHARED, Setup, Shared, VcpuPage, go, mode};

const WAIT: u64 = 0;
const WAKE: u64 = 1;

/// The right to use the pages that this process shares with others: the vCPU page, and the one with orders and results. Who has the turn
/// is alone with them.
///
/// It is taken up where control comes into this code, and handed down from there. What it lends is given back before guest code runs and
/// before another process has the turn: both change these pages.
pub struct Turn(());

impl Turn {
    /// # Safety
    /// This process has the turn, and control has just come into this code: nothing on a stack goes on that has a turn.
    #[inline(always)]
    pub unsafe fn take_up() -> Self {
        Self(())
    }

    /// The vCPU page, and the one that is shared with the monitor.
    #[inline(always)]
    pub fn pages(&mut self) -> (&mut VcpuPage, &mut Shared) {
        // SAFETY: the monitor mapped both before this code began. They are lent for no longer than the turn.
        unsafe { (&mut *(here(FRAME) as *mut VcpuPage), &mut *(here(SHARED) as *mut Shared)) }
    }

    /// The vCPU page.
    #[inline(always)]
    pub fn vcpu(&mut self) -> &mut VcpuPage {
        self.pages().0
    }

    /// The page that is shared with the monitor.
    #[inline(always)]
    pub fn shared(&mut self) -> &mut Shared {
        self.pages().1
    }
}

/// What a signal may look at and change: it may have interrupted code here that has the turn, and goes on.
pub mod interrupted {
    use super::*;
    use core::ptr::{read_volatile, write_volatile};

    fn run() -> *mut RunControl {
        // SAFETY: an address in a page that is mapped for good.
        unsafe { &raw mut (*(here(FRAME) as *mut VcpuPage)).run }
    }

    fn setup() -> *const Setup {
        // SAFETY: as for `run`.
        unsafe { &raw const (*(here(SHARED) as *const Shared)).setup }
    }

    /// What runs, one of [`mode`].
    pub fn mode() -> u64 {
        // SAFETY: a word of that page.
        unsafe { read_volatile(&raw const (*run()).mode) }
    }

    /// A kick has come since the monitor has looked.
    pub fn is_kicked() -> bool {
        // SAFETY: as for `mode`.
        unsafe { read_volatile(&raw const (*run()).kicked) != 0 }
    }

    /// A kick has come.
    pub fn note_kick() {
        // SAFETY: as for `mode`. Whoever is interrupted reads it as [`is_kicked`] does, or in a gate.
        unsafe { write_volatile(&raw mut (*run()).kicked, 1) }
    }

    /// What host calls need. It does not change.
    pub fn secret() -> u64 {
        // SAFETY: a word of that page.
        unsafe { read_volatile(&raw const (*setup()).secret) }
    }

    /// One past the blob's last byte (HVA). It does not change.
    pub fn blob_end() -> u64 {
        // SAFETY: as for `secret`.
        unsafe { read_volatile(&raw const (*setup()).blob_end) }
    }
}

/// Tells the monitor why guest code stopped, and goes on when and as it says.
pub fn exit(turn: &mut Turn, reason: Reason) -> ! {
    turn.vcpu().exit.reason = reason as u64;
    hand_over_and_run(turn)
}

pub fn hand_over_and_run(turn: &mut Turn) -> ! {
    // The monitor looks at everything a kick can be about.
    turn.vcpu().run.kicked = 0;
    wait_after(turn, MONITOR)
}

/// The wedge that can go on in the space with a PCID at once.
pub fn holder(pcid: u64) -> Option<usize> {
    let holds = |space: &AtomicU32| u64::from(space.load(Ordering::Relaxed)) == pcid + 1;
    whose_turn().spaces.iter().position(holds)
}

/// Has another wedge go on as the frame says.
pub fn pass_on(turn: &mut Turn, to: usize) -> ! {
    let turns = whose_turn();
    turns.current.store(to as u32, Ordering::SeqCst);
    // A kick for this wedge has arrived once a host call is over, and the other one sees it in the frame.
    wake(turn.shared().setup.secret, &turns.spaces[0]);
    wait_after(turn, to)
}

/// Gives somebody the turn, and goes on when and as the frame says.
fn wait_after(turn: &mut Turn, to: usize) -> ! {
    let (f, s) = turn.pages();
    f.run.mode = mode::WEDGE;
    mmu::finish_deferred(f, s);
    store_vectors(&mut f.vectors);
    hand_over(turn, to);
    let (f, s) = turn.pages();
    load_vectors(s.setup.secret, f.vectors.0.as_ptr());
    run::restart(run::run)
}

/// Gives somebody the turn, and obeys the monitor's orders when it is ours again.
fn hand_over(turn: &mut Turn, mut to: usize) {
    let Setup { number, secret, .. } = turn.shared().setup;
    let Some(own) = whose_turn().words.get(number as usize) else { crate::die() };
    loop {
        if let Some(word) = whose_turn().words.get(to) {
            word.store(1, Ordering::SeqCst);
            wake(secret, word);
        }
        while own.swap(0, Ordering::SeqCst) == 0 {
            // SAFETY: waits.
            unsafe { call(secret, host::FUTEX, own.as_ptr() as u64, WAIT, 0, 0) };
        }
        let (f, s) = turn.pages();
        // The next turn may come from another wedge.
        let orders_only = core::mem::take(&mut s.orders.only) != 0;
        obey(s);
        if s.orders.failed == 0 && !orders_only && f.run.go != go::NOTHING {
            return;
        }
        to = MONITOR;
    }
}

fn wake(secret: u64, word: &AtomicU32) {
    // SAFETY: wakes.
    unsafe { call(secret, host::FUTEX, word.as_ptr() as u64, WAKE, 1, 0) };
}
