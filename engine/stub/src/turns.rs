//! Taking turns with the monitor and the other wedges.
//!
//! A wedge gives its turn away and waits until it gets one. As a rule that goes to the monitor and comes
//! from it; when the guest selects an address space whose wedge has nothing to do first, it goes there.

use crate::{
    frame,
    host::{self, call, load_vectors, store_vectors},
    mmu,
    orders::obey,
    run, shared, whose_turn,
};
use core::sync::atomic::{AtomicU32, Ordering};
use frame::{MONITOR, Reason, Shared, go, mode};

const WAIT: u64 = 0;
const WAKE: u64 = 1;

/// Tells the monitor why guest code stopped, and goes on when and as it says.
pub fn exit(reason: Reason) -> ! {
    frame().exit.reason = reason as u64;
    hand_over_and_run()
}

pub fn hand_over_and_run() -> ! {
    // The monitor looks at everything a kick can be about.
    frame().run.kicked = 0;
    wait_after(MONITOR)
}

/// The wedge that can go on in the space with a PCID at once.
pub fn holder(pcid: u64) -> Option<usize> {
    let holds = |space: &AtomicU32| u64::from(space.load(Ordering::Relaxed)) == pcid + 1;
    whose_turn().spaces.iter().position(holds)
}

/// Has another wedge go on as the frame says.
pub fn pass_on(to: usize) -> ! {
    let turns = whose_turn();
    turns.current.store(to as u32, Ordering::SeqCst);
    // A kick for this wedge has arrived once a host call is over, and the other one sees it in the frame.
    wake(&turns.spaces[0]);
    wait_after(to)
}

/// Gives somebody the turn, and goes on when and as the frame says.
fn wait_after(to: usize) -> ! {
    let f = frame();
    f.run.mode = mode::WEDGE;
    mmu::finish_deferred(f);
    store_vectors(f.vectors.0.as_mut_ptr());
    hand_over(shared(), to);
    load_vectors(f.vectors.0.as_ptr());
    run::restart(run::run)
}

/// Gives somebody the turn, and obeys the monitor's orders when it is ours again.
fn hand_over(s: &mut Shared, mut to: usize) {
    let Some(own) = whose_turn().words.get(s.setup.number as usize) else { crate::die() };
    loop {
        if let Some(word) = whose_turn().words.get(to) {
            word.store(1, Ordering::SeqCst);
            wake(word);
        }
        while own.swap(0, Ordering::SeqCst) == 0 {
            call(host::FUTEX, own.as_ptr() as u64, WAIT, 0, 0, 0);
        }
        // The next turn may come from another wedge.
        let orders_only = core::mem::take(&mut s.orders.only) != 0;
        obey(s);
        if s.orders.failed == 0 && !orders_only && frame().run.go != go::NOTHING {
            return;
        }
        to = MONITOR;
    }
}

fn wake(word: &AtomicU32) {
    call(host::FUTEX, word.as_ptr() as u64, WAKE, 1, 0, 0);
}
