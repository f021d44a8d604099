//! The user's large pages of which the wedge has mapped something: a flush of any part of one drops all of it.
//!
//! Programs with much memory have hundreds of large pages, and each INVLPG asks whether its page is a part of one. So a large
//! page's address tells in which set the page is noted. Neighbours are noted in neighbouring sets.

use crate::mmu::LARGE;
use wedge_abi::{LARGE_SETS, LARGE_WAYS, Larges};

/// Whether something of the large page at `base` (HVA) is mapped.
pub fn has(larges: &Larges, base: u64) -> bool {
    let is_there = |set: &[u64; LARGE_WAYS]| base != 0 && set.contains(&base);
    larges.noted != 0 && larges.sets.get(set(base)).is_some_and(is_there)
}

/// Which other large page (HVA) has to go before the large page at `base` can be noted; `None` if none has. Each page of a full set
/// is named in its turn.
pub fn in_the_way(larges: &mut Larges, base: u64) -> Option<u64> {
    let set = larges.sets.get(set(base))?;
    if set.iter().any(|at| *at == base || *at == 0) {
        return None;
    }
    larges.evicted = larges.evicted.wrapping_add(1);
    set.get(larges.evicted as usize % LARGE_WAYS).copied()
}

/// Something of the large page at `base` (HVA) is mapped from now on. False if something is in the way.
pub fn add(larges: &mut Larges, base: u64) -> bool {
    if has(larges, base) {
        return true;
    }
    let set = larges.sets.get_mut(set(base));
    let free = set.and_then(|set| set.iter_mut().find(|at| **at == 0));
    let added = free.map(|at| *at = base).is_some();
    larges.noted += u64::from(added);
    added
}

/// Forgets the large pages that lie in a range of HVAs as a whole.
pub fn forget(larges: &mut Larges, from: u64, to: u64) {
    if larges.noted == 0 {
        return;
    }
    if to - from >= LARGE_SETS as u64 * LARGE {
        let all = larges.sets.as_flattened_mut();
        larges.noted -= take_out(all, |at| at != 0 && at >= from && at + LARGE <= to);
        return;
    }
    for base in (from.next_multiple_of(LARGE)..to).step_by(LARGE as usize) {
        if base + LARGE <= to
            && let Some(set) = larges.sets.get_mut(set(base))
        {
            larges.noted -= take_out(set, |at| at != 0 && at == base);
        }
    }
}

/// Empties the places whose large page `goes`; how many they were.
fn take_out(places: &mut [u64], goes: impl Fn(u64) -> bool) -> u64 {
    let mut gone = 0;
    for at in places.iter_mut().filter(|at| goes(**at)) {
        (*at, gone) = (0, gone + 1);
    }
    gone
}

fn set(base: u64) -> usize {
    (base / LARGE) as usize % LARGE_SETS
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: u64 = 0x7f12_3440_0000;
    /// The next large page with a place in the same set.
    const NEXT: u64 = LARGE_SETS as u64 * LARGE;

    #[test]
    fn one_makes_room_for_another() {
        let mut larges = Larges::NONE;
        for way in 0..LARGE_WAYS as u64 {
            let base = FIRST + way * NEXT;
            assert!(!has(&larges, base) && in_the_way(&mut larges, base).is_none());
            assert!(add(&mut larges, base) && has(&larges, base));
        }
        assert_eq!(in_the_way(&mut larges, FIRST), None, "what is there has its place");
        assert_eq!(in_the_way(&mut larges, FIRST + LARGE), None, "another set");
        // Two that come in turns do not put each other out.
        let more = [0, 1].map(|way| FIRST + (LARGE_WAYS as u64 + way) * NEXT);
        for base in more {
            let other = in_the_way(&mut larges, base).expect("the set is full");
            assert!(has(&larges, other) && !add(&mut larges, base));
            forget(&mut larges, other, other + LARGE);
            assert!(add(&mut larges, base));
        }
        assert!(more.into_iter().all(|base| has(&larges, base)));
    }

    #[test]
    fn what_lies_in_a_range_as_a_whole_is_forgotten() {
        let bases: [u64; 4] = core::array::from_fn(|at| FIRST + at as u64 * LARGE);
        // A short range and a long one take different ways.
        for end in [bases[3] + LARGE - 1, FIRST + 3 * NEXT] {
            let mut larges = Larges::NONE;
            assert!(bases.into_iter().all(|base| add(&mut larges, base)));
            forget(&mut larges, FIRST + 1, end);
            let left = bases.map(|base| has(&larges, base));
            assert_eq!(left, [true, false, false, end < bases[3] + LARGE]);
            assert_eq!(larges.noted, left.iter().filter(|left| **left).count() as u64);
        }
    }
}
