//! The thread that sleeps on behalf of all devices, and the clock that makes up for its lateness.
//!
//! On a host with more to do than it has CPUs the timer thread may get its turn long after a
//! deadline, while the vCPU runs on and reads times past it: a guest that waits for a tick by
//! looking at the clock then finds that none came. So the vCPU's own clock is [`Punctual`]: whoever
//! reads a time from it that a deadline precedes lets the devices act first, as the timer thread
//! would have.

use std::{
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use bus::Rearm;
use chipset::TimerWheel;
use host::Clock;

use crate::Error;

/// Wakes the timer thread when a deadline moved.
#[derive(Default)]
pub(crate) struct Alarm {
    state: Mutex<AlarmState>,
    changed: Condvar,
    /// The TSC at the earliest deadline, or before it: zero if that moved and nobody looked yet.
    due: AtomicU64,
}

#[derive(Default)]
struct AlarmState {
    moved: bool,
    over: bool,
}

impl Rearm for Alarm {
    fn rearm(&self) {
        self.due.store(0, Ordering::Relaxed);
        self.set(|state| state.moved = true);
    }
}

impl Alarm {
    /// Ends the thread.
    pub(crate) fn end(&self) {
        self.set(|state| state.over = true);
    }

    fn set(&self, change: impl FnOnce(&mut AlarmState)) {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_one();
    }

    /// Sleeps for `nap` (forever if `None`) or until a deadline moved; false when it is over.
    fn sleep(&self, nap: Option<Duration>) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let quiet = |state: &mut AlarmState| !state.moved && !state.over;
        let mut state = match nap {
            Some(nap) => {
                let woken = self.changed.wait_timeout_while(state, nap, quiet);
                woken.unwrap_or_else(PoisonError::into_inner).0
            }
            None => {
                let woken = self.changed.wait_while(state, quiet);
                woken.unwrap_or_else(PoisonError::into_inner)
            }
        };
        state.moved = false;
        !state.over
    }
}

/// The devices' timers with the clock they go by.
#[derive(Clone)]
struct Timers {
    wheel: TimerWheel,
    alarm: Arc<Alarm>,
    clock: Arc<dyn Clock>,
}

impl Timers {
    /// Lets the devices act on what is due; how long there is nothing more to do then.
    fn expire(&self) -> Option<Duration> {
        // What moves while we look is at zero again, and stays there.
        self.alarm.due.store(u64::MAX, Ordering::Relaxed);
        self.wheel.expire(self.clock.monotonic_ns());
        let at = self.wheel.deadline()?;
        // In this order the TSC is that of the deadline or less, never more.
        let tsc = self.clock.tsc();
        let nap = at.saturating_sub(self.clock.monotonic_ns());
        self.alarm.due.fetch_min(tsc.saturating_add(self.ticks(nap)), Ordering::Relaxed);
        Some(Duration::from_nanos(nap))
    }

    /// Ticks of the TSC in so many nanoseconds.
    fn ticks(&self, ns: u64) -> u64 {
        let ticks = u128::from(ns) * u128::from(self.clock.tsc_hz()) / 1_000_000_000;
        u64::try_from(ticks).unwrap_or(u64::MAX)
    }
}

/// A clock on which no deadline passes unnoticed. For the vCPU's thread, which must hold no lock of a
/// device while it reads it.
pub(crate) struct Punctual(Timers);

impl Punctual {
    /// A punctual `clock`.
    pub(crate) fn new(wheel: TimerWheel, alarm: Arc<Alarm>, clock: Arc<dyn Clock>) -> Self {
        Self(Timers { wheel, alarm, clock })
    }
}

impl Clock for Punctual {
    fn tsc(&self) -> u64 {
        let tsc = self.0.clock.tsc();
        if tsc >= self.0.alarm.due.load(Ordering::Relaxed) {
            self.0.expire();
        }
        tsc
    }
    fn monotonic_ns(&self) -> u64 {
        self.tsc();
        self.0.clock.monotonic_ns()
    }
    fn wall_clock_ns(&self) -> u64 {
        self.0.clock.wall_clock_ns()
    }
    fn tsc_hz(&self) -> u64 {
        self.0.clock.tsc_hz()
    }
}

/// Starts the thread. A deadline that moves between looking and sleeping is not lost: the alarm
/// remembers it.
pub(crate) fn start(
    wheel: TimerWheel,
    alarm: Arc<Alarm>,
    clock: Arc<dyn Clock>,
) -> Result<(), Error> {
    let timers = Timers { wheel, alarm, clock };
    let run = move || while timers.alarm.sleep(timers.expire()) {};
    thread::Builder::new().name("timer".into()).spawn(run).map_err(Error::Thread)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        sync::atomic::{AtomicU64, Ordering},
        time::Instant,
    };

    struct Real(Instant);
    impl Clock for Real {
        fn monotonic_ns(&self) -> u64 {
            self.0.elapsed().as_nanos() as u64
        }
        fn wall_clock_ns(&self) -> u64 {
            0
        }
        fn tsc(&self) -> u64 {
            self.monotonic_ns()
        }
        fn tsc_hz(&self) -> u64 {
            1_000_000_000
        }
    }

    /// Fires once.
    struct Once {
        deadline: Option<u64>,
        fired: Arc<AtomicU64>,
    }
    impl bus::Timed for Once {
        fn deadline(&self) -> Option<u64> {
            self.deadline
        }
        fn expire(&mut self, now: u64) {
            self.deadline = None;
            self.fired.store(now, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_moved_deadline_is_seen() {
        let (alarm, fired) = (Arc::new(Alarm::default()), Arc::new(AtomicU64::new(0)));
        let device = Arc::new(Mutex::new(Once { deadline: None, fired: Arc::clone(&fired) }));
        let mut wheel = TimerWheel::new();
        wheel.insert(device.clone());
        let clock = Arc::new(Real(Instant::now()));
        start(wheel, Arc::clone(&alarm), clock.clone()).expect("a thread");
        let due = clock.monotonic_ns() + 20_000_000;
        device.lock().expect("no panic").deadline = Some(due);
        alarm.rearm();
        while fired.load(Ordering::SeqCst) == 0 {
            assert!(clock.monotonic_ns() < due + 5_000_000_000, "it never fired");
            thread::sleep(Duration::from_millis(1));
        }
        assert!(fired.load(Ordering::SeqCst) >= due, "not early");
        alarm.end();
    }

    /// Nobody sleeps for the device here: it fires because somebody looks at the clock.
    #[test]
    fn a_deadline_does_not_pass_the_clock_unnoticed() {
        let (alarm, fired) = (Arc::new(Alarm::default()), Arc::new(AtomicU64::new(0)));
        let device = Arc::new(Mutex::new(Once { deadline: None, fired: Arc::clone(&fired) }));
        let mut wheel = TimerWheel::new();
        wheel.insert(device.clone());
        let clock = Punctual::new(wheel, Arc::clone(&alarm), Arc::new(Real(Instant::now())));
        let due = clock.monotonic_ns() + 10_000_000;
        device.lock().expect("no panic").deadline = Some(due);
        alarm.rearm();
        while clock.tsc() < due {
            let fired = fired.load(Ordering::SeqCst);
            assert!(fired == 0 || fired >= due, "not early");
        }
        clock.tsc();
        assert!(fired.load(Ordering::SeqCst) >= due, "not late");
    }
}
