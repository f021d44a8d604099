//! A host in memory: time that moves only when told to, randomness that repeats.
//!
//! Tests that run a machine on it are deterministic: the same steps give the same guest.

mod fake;
mod memory;

pub use fake::Fake;

use host::{Clock, Entropy};
use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicU64, Ordering},
};

/// Ticks of the time-stamp counter in a nanosecond.
const TICKS_PER_NS: u64 = 2;

/// A clock that stands still until it is told to move.
#[derive(Debug, Default)]
pub struct FakeClock {
    now_ns: AtomicU64,
    /// Nanoseconds since 1970 at the clock's start.
    epoch_ns: u64,
}

impl FakeClock {
    /// A clock at zero whose wall clock shows `epoch_ns`, nanoseconds since 1970.
    pub fn new(epoch_ns: u64) -> Self {
        Self { now_ns: AtomicU64::new(0), epoch_ns }
    }

    /// Moves time forward.
    pub fn advance(&self, ns: u64) {
        self.now_ns.fetch_add(ns, Ordering::SeqCst);
    }
}

impl Clock for FakeClock {
    fn monotonic_ns(&self) -> u64 {
        self.now_ns.load(Ordering::SeqCst)
    }
    fn wall_clock_ns(&self) -> u64 {
        self.epoch_ns + self.monotonic_ns()
    }
    fn tsc(&self) -> u64 {
        self.monotonic_ns() * TICKS_PER_NS
    }
    fn tsc_hz(&self) -> u64 {
        TICKS_PER_NS * 1_000_000_000
    }
}

/// The same bytes for the same seed (splitmix64).
#[derive(Debug)]
pub struct FakeEntropy(Mutex<u64>);

impl FakeEntropy {
    /// From a seed.
    pub fn new(seed: u64) -> Self {
        Self(Mutex::new(seed))
    }
}

impl Entropy for FakeEntropy {
    fn fill(&self, bytes: &mut [u8]) -> bool {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for chunk in bytes.chunks_mut(8) {
            *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut word = *state;
            word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            chunk.copy_from_slice(&(word ^ (word >> 31)).to_le_bytes()[..chunk.len()]);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_moves_only_when_told() {
        let clock = FakeClock::new(1_000);
        assert_eq!((clock.monotonic_ns(), clock.wall_clock_ns(), clock.tsc()), (0, 1_000, 0));
        clock.advance(500);
        assert_eq!((clock.monotonic_ns(), clock.wall_clock_ns(), clock.tsc()), (500, 1_500, 1_000));
        assert_eq!(clock.tsc_hz(), 2_000_000_000);
    }

    #[test]
    fn randomness_repeats() {
        let (mut a, mut b) = ([0; 13], [0; 13]);
        FakeEntropy::new(7).fill(&mut a);
        FakeEntropy::new(7).fill(&mut b);
        assert_eq!(a, b);
        FakeEntropy::new(8).fill(&mut b);
        assert_ne!(a, b);
    }
}
