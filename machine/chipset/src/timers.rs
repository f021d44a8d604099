//! All devices that keep time, for whoever sleeps on their behalf.

use bus::{Shared, Timed};

use crate::lock;

/// Every timed device of the machine, seen as one. It has no thread: the machine's timer thread
/// sleeps until [`TimerWheel::deadline`] or a [`bus::Rearm`], calls [`TimerWheel::expire`], and
/// asks again.
#[derive(Clone, Default)]
pub struct TimerWheel {
    devices: Vec<Shared<dyn Timed>>,
}

impl TimerWheel {
    /// No devices yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a device.
    pub fn insert(&mut self, device: Shared<dyn Timed>) {
        self.devices.push(device);
    }

    /// The earliest deadline, in nanoseconds of the monotonic clock.
    pub fn deadline(&self) -> Option<u64> {
        self.devices.iter().filter_map(|device| lock(device).deadline()).min()
    }

    /// Lets every device act on what is due at `now`, nanoseconds of the same clock.
    pub fn expire(&self, now: u64) {
        for device in &self.devices {
            let mut device = lock(device);
            if device.deadline().is_some_and(|at| at <= now) {
                device.expire(now);
            }
        }
    }
}
