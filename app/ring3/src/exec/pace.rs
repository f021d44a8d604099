//! The guest's clock by the host's: set before the command starts and when the machine goes on after a pause, followed in between.
//!
//! What the agent is told is a moment of both the time-stamp counter, which the guest shares, and the host's clock. So how long a message is under way
//! makes no difference.

use std::time::{Duration, Instant};

use guest_agent::protocol::Time;
use host::Clock;
use host_linux::LinuxClock;

/// How often the agent is told. A clock that goes wrong by 0.1 per mille is 2 ms off by then.
const PERIOD: Duration = Duration::from_secs(20);

/// When the agent is told, and what.
pub struct Pace {
    clock: LinuxClock,
    /// When next.
    pub due: Instant,
}

impl Pace {
    /// Due at once.
    pub fn new(clock: LinuxClock) -> Self {
        Self { clock, due: Instant::now() }
    }

    /// What the agent is told now.
    pub fn message(&mut self) -> Vec<u8> {
        self.due = Instant::now() + PERIOD;
        let (tsc, wall_ns) = self.clock.moment();
        let khz = u32::try_from(self.clock.tsc_hz() / 1000).unwrap_or(u32::MAX);
        Time { khz, tsc, wall_ns }.encode()
    }
}
