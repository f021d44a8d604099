//! Keeping a vCPU's processes together on one host CPU.
//!
//! The monitor's thread and the wedges take turns, so they never gain from a second CPU, and handing
//! over costs several times as much between two. They stay where they are as long as they get the
//! CPU when they want it; when they have to wait too much, they move on together.

use std::{
    fs,
    time::{Duration, Instant},
};

/// How often the time spent waiting is looked at.
const PERIOD: Duration = Duration::from_millis(100);
/// The share of it, in percent, that is too much.
const TOO_MUCH: u64 = 15;

/// Where the processes are.
pub struct Home {
    cpus: Vec<usize>,
    at: usize,
    looked: Instant,
    waited_ns: u64,
}

impl Home {
    /// Stays on the CPU the thread runs on now. Processes started later are born there.
    pub fn new() -> Self {
        let cpus = wedge::affinity::allowed();
        let now = wedge::affinity::current();
        let at = cpus.iter().position(|cpu| *cpu == now).unwrap_or(0);
        let home = Self { cpus, at, looked: Instant::now(), waited_ns: waited_ns() };
        home.settle(&[]);
        home
    }

    /// Moves on if the CPU is too busy.
    pub fn look(&mut self, wedges: &[i32]) {
        let elapsed = self.looked.elapsed();
        if elapsed < PERIOD || self.cpus.len() < 2 {
            return;
        }
        let waited = waited_ns();
        let share = waited.saturating_sub(self.waited_ns) * 100 / elapsed.as_nanos().max(1) as u64;
        if share > TOO_MUCH {
            self.at = (self.at + 1) % self.cpus.len();
            self.settle(wedges);
        }
        (self.looked, self.waited_ns) = (Instant::now(), waited);
    }

    fn settle(&self, wedges: &[i32]) {
        let Some(cpu) = self.cpus.get(self.at) else { return };
        // Zero is the calling thread.
        for pid in wedges.iter().copied().chain([0]) {
            wedge::affinity::pin(pid, *cpu);
        }
    }
}

/// Time this thread has been ready but not running, ns.
fn waited_ns() -> u64 {
    let text = fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split_whitespace().nth(1).and_then(|word| word.parse().ok()).unwrap_or(0)
}
