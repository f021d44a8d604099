//! Taking turns with the monitor and the other wedges.
//!
//! A wedge gives its turn away and waits until it gets one. As a rule that goes to the monitor and comes
//! from it; when the guest selects an address space whose wedge has nothing to do first, it goes there.

use crate::{
    context::{Context, Next},
    here,
    host::{self, Secret, load_vectors, store_vectors},
    mmu,
    orders::obey,
};
use core::sync::atomic::{AtomicU32, Ordering};
use wedge_abi::{MONITOR, TURNS, TurnsPage, go, mode};

/// Whose turn it is; all of it is atomic.
fn whose_turn() -> &'static TurnsPage {
    // SAFETY: mapped before this process began, and for good.
    unsafe { &*(here(TURNS) as *const TurnsPage) }
}

/// The wedge that can go on in the space with a PCID at once.
pub fn holder(pcid: u64) -> Option<usize> {
    let holds = |space: &AtomicU32| u64::from(space.load(Ordering::Relaxed)) == pcid + 1;
    whose_turn().spaces.iter().position(holds)
}

/// Has another wedge go on as the vCPU page says.
pub fn pass_on(cx: &Context<'_>, to: usize) -> Next {
    let turns = whose_turn();
    turns.current.store(to as u32, Ordering::SeqCst);
    // A kick for this wedge has arrived once a host call is over, and the other one sees it in the vCPU page.
    host::wake(cx.secret(), &turns.spaces[0]);
    Next::HandOver(to)
}

/// Gives somebody the turn, and obeys the monitor's orders when it is ours again.
pub fn hand_over(mut to: usize) {
    // SAFETY: the caller has the turn, and no reference to what is shared; so in each round.
    let (number, secret) = leave(&mut unsafe { Context::enter() });
    let Some(own) = whose_turn().words.get(number as usize) else { crate::die() };
    loop {
        give(secret, to);
        while own.swap(0, Ordering::SeqCst) == 0 {
            host::wait(secret, own);
        }
        // SAFETY: as above.
        if come_back(&mut unsafe { Context::enter() }) {
            return;
        }
        to = MONITOR;
    }
}

fn give(secret: Secret, to: usize) {
    if let Some(word) = whose_turn().words.get(to) {
        word.store(1, Ordering::SeqCst);
        host::wake(secret, word);
    }
}

/// What belongs to the vCPU is on its page before anybody else has the turn. Returns the wedge's number and its secret.
fn leave(cx: &mut Context<'_>) -> (u64, Secret) {
    cx.vcpu.run.mode = mode::WEDGE;
    mmu::finish_deferred(cx);
    // SAFETY: the area is made for that.
    unsafe { store_vectors(cx.vcpu.vectors.0.as_mut_ptr()) };
    (cx.shared.setup.number, cx.secret())
}

/// Obeys the monitor's orders. True if guest code is to go on; the next turn may come from another wedge.
fn come_back(cx: &mut Context<'_>) -> bool {
    let orders_only = core::mem::take(&mut cx.shared.orders.only) != 0;
    obey(cx);
    let goes_on = cx.shared.orders.failed == 0 && !orders_only && cx.vcpu.run.go != go::NOTHING;
    if goes_on {
        load_vectors(cx.secret(), cx.vcpu.vectors.0.as_ptr());
    }
    goes_on
}
