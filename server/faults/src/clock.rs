//! A clock that goes wrong: ahead, too fast or slow, or not at all.
//!
//! It never goes back, because no hardware counter does. The time-stamp counter is not changed: directly executed code reads the
//! host's.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use host::Clock;

/// Parts in a million.
const MILLION: i128 = 1_000_000;

/// A clock whose monotonic and real time can be disturbed.
pub struct FaultyClock {
    below: Arc<dyn Clock>,
    course: Mutex<Course>,
}

/// Since `host` in the clock below, when this one showed `own`, it goes at `rate` millionths of that one's speed.
#[derive(Clone, Copy)]
struct Course {
    host: u64,
    own: u64,
    rate: i128,
}

impl Course {
    fn at(&self, host: u64) -> u64 {
        let passed = i128::from(host.saturating_sub(self.host)) * self.rate / MILLION;
        self.own.saturating_add(u64::try_from(passed).unwrap_or(u64::MAX))
    }
}

impl FaultyClock {
    /// `below`, undisturbed so far.
    pub fn new(below: Arc<dyn Clock>) -> Self {
        let now = below.monotonic_ns();
        Self { below, course: Mutex::new(Course { host: now, own: now, rate: MILLION }) }
    }

    fn course(&self) -> MutexGuard<'_, Course> {
        self.course.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the clock ahead by so many nanoseconds.
    pub fn step(&self, ns: u64) {
        let mut course = self.course();
        course.own = course.own.saturating_add(ns);
    }

    /// From now on it goes faster than it should by so many millionths; at -1000000 it stands still.
    pub fn drift(&self, millionths: i64) {
        let mut course = self.course();
        let host = self.below.monotonic_ns();
        let rate = (MILLION + i128::from(millionths)).max(0);
        *course = Course { host, own: course.at(host), rate };
    }
}

impl Clock for FaultyClock {
    fn monotonic_ns(&self) -> u64 {
        let course = self.course();
        course.at(self.below.monotonic_ns())
    }

    /// As much ahead as the monotonic time.
    fn wall_clock_ns(&self) -> u64 {
        let course = self.course();
        let host = self.below.monotonic_ns();
        self.below.wall_clock_ns().saturating_add_signed(course.at(host).wrapping_sub(host) as i64)
    }

    fn tsc(&self) -> u64 {
        self.below.tsc()
    }

    fn tsc_hz(&self) -> u64 {
        self.below.tsc_hz()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use host_fake::FakeClock;

    #[test]
    fn steps_drifts_and_stops() {
        let below = Arc::new(FakeClock::new(1_000_000_000));
        let clock = FaultyClock::new(below.clone());
        let mut before = clock.monotonic_ns();
        let mut passes = |ns| {
            below.advance(ns);
            let now = clock.monotonic_ns();
            let passed = now - before;
            before = now;
            passed
        };
        assert_eq!(passes(1000), 1000, "undisturbed");
        clock.step(5_000_000);
        assert_eq!(passes(1000), 5_001_000);
        clock.drift(-500_000);
        assert_eq!(passes(1000), 500);
        clock.drift(-1_000_000);
        assert_eq!(passes(1000), 0, "it stands still");
        clock.drift(0);
        assert_eq!(passes(1000), 1000, "and goes on from there");
    }
}
