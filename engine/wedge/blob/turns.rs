//! Taking turns with the monitor.

use crate::{
    frame,
    host::{self, call, load_vectors, store_vectors},
    layout::{ExitKind, MONITOR, Shared, WEDGE, go, mode},
    mmu,
    orders::obey,
    run, shared,
};
use core::sync::atomic::Ordering;

/// Tells the monitor why guest code stopped, and goes on when and as it says.
pub fn exit(kind: ExitKind) -> ! {
    frame().reason = kind as u64;
    hand_over_and_run()
}

pub fn hand_over_and_run() -> ! {
    let f = frame();
    f.mode = mode::WEDGE;
    mmu::finish_deferred(f);
    // The monitor looks at everything a kick can be about.
    f.kicked = 0;
    store_vectors(f.vectors.0.as_mut_ptr());
    hand_over(shared());
    load_vectors(f.vectors.0.as_ptr());
    run::restart(run::run)
}

/// Gives the monitor its turn, and obeys its orders when it is ours again.
fn hand_over(s: &mut Shared) {
    loop {
        s.turn.store(MONITOR, Ordering::SeqCst);
        call(host::FUTEX, &raw const s.turn as u64, 1, 1, 0, 0);
        while s.turn.load(Ordering::SeqCst) != WEDGE {
            call(host::FUTEX, &raw const s.turn as u64, 0, MONITOR as u64, 0, 0);
        }
        obey(s);
        if s.failed == 0 && frame().go != go::NOTHING {
            return;
        }
    }
}
