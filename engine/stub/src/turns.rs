//! Taking turns with the monitor and the other wedges.
//!
//! A wedge gives its turn away and waits until it gets one. As a rule that goes to the monitor and comes
//! from it; when the guest selects an address space whose wedge has nothing to do first, it goes there.

use crate::{
    assist::kernel_word,
    context::{Context, Next},
    here,
    host::{self, Secret, load_vectors, store_vectors},
    invlpg,
    orders::obey,
};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use wedge_abi::{LEFT, MONITOR, SpaceVersion, TURNS, TurnsPage, VcpuPage, go, mode};

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

/// The version that the guest's kernel has written down for a PCID, of the space with this top page table (GPA).
fn version(vcpu: &mut VcpuPage, root: u64, pcid: u64) -> Option<SpaceVersion> {
    let counts = whose_turn().counts.load(Ordering::Relaxed);
    let bases = [vcpu.regs.gs_base, vcpu.regs.kernel_gs_base];
    let info = vcpu.exit.info;
    let version = SpaceVersion::read((pcid, root), counts, bases, |at| kernel_word(vcpu, at));
    // A word that could not be read has left its address there.
    vcpu.exit.info = info;
    version
}

/// Guest code leaves the space of a wedge, which has this top page table (GPA) and PCID. Guest code has flushed there all that its
/// kernel has counted so far.
pub fn leave_space(vcpu: &mut VcpuPage, number: u64, root: u64, pcid: u64) {
    if let Some(version) = version(vcpu, root, pcid) {
        note_left(whose_turn(), number as usize, version);
    }
}

fn note_left(turns: &TurnsPage, number: usize, version: SpaceVersion) {
    let (Some(left), Some(known)) = (turns.left.get(number), turns.versions.get(number)) else {
        return;
    };
    if is(left, version) {
        return;
    }
    store(left, version);
    turns.moved.store(1, Ordering::Relaxed);
    let may_go_on =
        is(known, SpaceVersion { flushes: known[2].load(Ordering::Relaxed), ..version });
    if may_go_on {
        store(known, version);
    }
}

fn is(words: &[AtomicU64; SpaceVersion::WORDS], version: SpaceVersion) -> bool {
    words.iter().zip(version.words()).all(|(word, wanted)| word.load(Ordering::Relaxed) == wanted)
}

fn store(words: &[AtomicU64; SpaceVersion::WORDS], version: SpaceVersion) {
    words.iter().zip(version.words()).for_each(|(word, to)| word.store(to, Ordering::Relaxed));
}

/// The wedge that holds the space of a top page table (GPA), if what it has mapped is up to date by the kernel's own count, which
/// was written before this PCID is to be loaded. The wedge has the PCID from now on.
pub fn take_over(vcpu: &mut VcpuPage, root: u64, pcid: u64) -> Option<usize> {
    let version = version(vcpu, root, pcid)?;
    give_pcid(whose_turn(), version, pcid)
}

/// The wedge whose space has this version, if there is one, has this PCID from now on.
fn give_pcid(turns: &TurnsPage, version: SpaceVersion, pcid: u64) -> Option<usize> {
    let to = turns.versions.iter().position(|words| is(words, version))?;
    move_pcid(turns, pcid, to)?;
    Some(to)
}

/// A wedge's space has this PCID from now on, and no other one has it.
fn move_pcid(turns: &TurnsPage, pcid: u64, to: usize) -> Option<()> {
    let mark = pcid as u32 + 1;
    let (spaces, moves) = (&turns.spaces, &turns.moves);
    for (space, left) in spaces.iter().zip(moves) {
        if space.load(Ordering::Relaxed) == mark {
            space.store(0, Ordering::Relaxed);
            left.store(LEFT, Ordering::Relaxed);
        }
    }
    spaces.get(to)?.store(mark, Ordering::Relaxed);
    moves.get(to)?.store(mark, Ordering::Relaxed);
    turns.moved.store(1, Ordering::Relaxed);
    Some(())
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
    invlpg::finish_deferred(cx);
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

#[cfg(test)]
mod tests {
    use super::*;

    fn page() -> TurnsPage {
        // SAFETY: all of it is atomic integers, which may be zero.
        unsafe { core::mem::zeroed() }
    }

    #[test]
    fn who_has_the_space_at_this_version_gets_the_pcid() {
        let (turns, version) = (page(), SpaceVersion { root: 0x1000, owner: 7, flushes: 9 });
        store(&turns.versions[3], version);
        turns.spaces[5].store(2 + 1, Ordering::Relaxed);
        turns.spaces[6].store(4 + 1, Ordering::Relaxed);
        for other in [
            SpaceVersion { root: 0x2000, ..version },
            SpaceVersion { owner: 8, ..version },
            SpaceVersion { flushes: 10, ..version },
        ] {
            assert_eq!(give_pcid(&turns, other, 2), None);
        }
        assert_eq!(turns.moved.load(Ordering::Relaxed), 0);
        assert_eq!(give_pcid(&turns, version, 2), Some(3));
        let all = |words: &[AtomicU32]| {
            core::array::from_fn::<_, 4, _>(|at| words[3 + at].load(Ordering::Relaxed))
        };
        assert_eq!(all(&turns.spaces), [3, 0, 0, 5]);
        assert_eq!(all(&turns.moves), [3, 0, LEFT, 0]);
        assert_eq!(turns.moved.load(Ordering::Relaxed), 1);
        assert_eq!(give_pcid(&turns, version, 4), Some(3));
        assert_eq!(all(&turns.spaces), [5, 0, 0, 0], "it has one PCID");
        assert_eq!(all(&turns.moves), [5, 0, LEFT, LEFT]);
    }

    /// What was taken back while guest code ran there has been flushed there: only what is taken back later makes a difference.
    #[test]
    fn a_space_is_of_the_version_at_which_it_was_left() {
        let (turns, version) = (page(), SpaceVersion { root: 0x1000, owner: 7, flushes: 9 });
        store(&turns.versions[3], version);
        let later = SpaceVersion { flushes: 12, ..version };
        note_left(&turns, 3, later);
        assert_eq!(turns.moved.swap(0, Ordering::Relaxed), 1);
        assert!(is(&turns.left[3], later));
        assert_eq!(give_pcid(&turns, version, 2), None);
        assert_eq!(give_pcid(&turns, later, 2), Some(3));
        // The monitor lets nobody go on in the first, and in the second only with other page tables.
        for (number, published) in [(4, [0; 3]), (5, [0x2000, 7, 9])] {
            let words = turns.versions[number].iter().zip(published);
            words.for_each(|(word, to)| word.store(to, Ordering::Relaxed));
            note_left(&turns, number, SpaceVersion { flushes: 13, ..version });
        }
        assert_eq!(give_pcid(&turns, SpaceVersion { flushes: 13, ..version }, 2), None);
        turns.moved.store(0, Ordering::Relaxed);
        note_left(&turns, 3, later);
        assert_eq!(turns.moved.load(Ordering::Relaxed), 0, "nothing new");
    }
}
