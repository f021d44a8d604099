//! The thread that sleeps on behalf of all devices.

use std::{
    sync::{Arc, Condvar, Mutex, PoisonError},
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
}

#[derive(Default)]
struct AlarmState {
    moved: bool,
    over: bool,
}

impl Rearm for Alarm {
    fn rearm(&self) {
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

/// Starts the thread. A deadline that moves between looking and sleeping is not lost: the alarm
/// remembers it.
pub(crate) fn start(
    wheel: TimerWheel,
    alarm: Arc<Alarm>,
    clock: Arc<dyn Clock>,
) -> Result<(), Error> {
    let run = move || {
        loop {
            wheel.expire(clock.monotonic_ns());
            let nap = wheel.deadline().map(|at| at.saturating_sub(clock.monotonic_ns()));
            if !alarm.sleep(nap.map(Duration::from_nanos)) {
                return;
            }
        }
    };
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
}
