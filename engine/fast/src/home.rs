//! Keeping a vCPU's processes together on one host CPU.
//!
//! The monitor's thread and the wedges take turns, so they never gain from a second CPU, and handing
//! over costs several times as much between two. They stay where they are as long as they get the
//! CPU when they want it; when they have to wait too much, they move on together.

use std::{
    fs::File,
    os::unix::fs::FileExt,
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
    delays: Delays,
}

impl Home {
    /// Stays on the CPU the thread runs on now. Processes started later are born there.
    pub fn new() -> Self {
        let cpus = wedge::affinity::allowed();
        let now = wedge::affinity::current();
        let at = cpus.iter().position(|cpu| *cpu == now).unwrap_or(0);
        let delays = Delays::of_this_thread();
        let waited_ns = delays.waited_ns();
        let home = Self { cpus, at, looked: Instant::now(), waited_ns, delays };
        home.settle(&[]);
        home
    }

    /// Moves on if the CPU is too busy.
    pub fn look(&mut self, wedges: &[i32]) {
        let elapsed = self.looked.elapsed();
        if elapsed < PERIOD || self.cpus.len() < 2 {
            return;
        }
        let waited = self.delays.waited_ns();
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

/// What the host says of a thread's delays. It stays open: a monitor that has shut itself in opens nothing.
struct Delays(Option<File>);

impl Delays {
    fn of_this_thread() -> Self {
        Self(File::open("/proc/thread-self/schedstat").ok())
    }

    /// Time the thread has been ready but not running, ns; zero where the host does not say.
    fn waited_ns(&self) -> u64 {
        let mut text = [0; 64];
        let read = self.0.as_ref().and_then(|file| file.read_at(&mut text, 0).ok());
        let text = str::from_utf8(&text[..read.unwrap_or(0)]).unwrap_or_default();
        text.split_whitespace().nth(1).and_then(|word| word.parse().ok()).unwrap_or(0)
    }
}
