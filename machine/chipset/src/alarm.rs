//! A device's next deadline, and when the sleeper must hear of it.
//!
//! Waking the thread that sleeps for timers costs more than most device accesses, and guests move
//! deadlines all the time, mostly to later. So the alarm remembers what the sleeper last read from
//! [`Alarm::deadline`]: it sleeps at most until then, and will read again when it wakes. Only a
//! deadline before that one needs a [`Rearm`].

use std::cell::Cell;
use std::sync::Arc;

use bus::Rearm;

pub(crate) struct Alarm {
    rearm: Arc<dyn Rearm>,
    /// Nanoseconds, monotonic.
    at: Option<u64>,
    /// The sleeper wakes no later than this.
    announced: Cell<Option<u64>>,
}

impl Alarm {
    pub(crate) fn new(rearm: Arc<dyn Rearm>) -> Self {
        Self { rearm, at: None, announced: Cell::new(None) }
    }

    /// Wants to be called at `at`, or not at all.
    pub(crate) fn set(&mut self, at: Option<u64>) {
        self.at = at;
        let announced = self.announced.get().unwrap_or(u64::MAX);
        if at.is_some_and(|at| at < announced) {
            self.announced.set(at);
            self.rearm.rearm();
        }
    }

    /// When it wants to be called; only the sleeper asks.
    pub(crate) fn deadline(&self) -> Option<u64> {
        self.announced.set(self.at);
        self.at
    }

    pub(crate) fn at(&self) -> Option<u64> {
        self.at
    }

    /// Whether it is time; if so the alarm is no longer set.
    pub(crate) fn take_due(&mut self, now: u64) -> Option<u64> {
        self.at.take_if(|at| *at <= now)
    }
}
