//! Keeping a vCPU's processes together on one host CPU.
//!
//! The monitor's thread and the wedges take turns, so they never gain from a second CPU, and handing
//! over costs several times as much between two. They stay where they are as long as they get the
//! CPU when they want it; when they have to wait too much, they move on together.
//!
//! The vCPUs of a machine keep out of each other's way: one that has to wait moves only to a CPU with fewer of those
//! that do not halt ([`Placement`]).

use host::Delays;
use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

/// How often the time spent waiting is looked at.
const PERIOD: Duration = Duration::from_millis(100);
/// The share of it, in percent, that is too much.
const TOO_MUCH: u64 = 15;

/// How long a vCPU stays at least on the CPU that [`Affinity::move_to`] names.
const STAY: Duration = Duration::from_millis(500);

/// Where the vCPUs of a machine are that run: how many on each of the host's CPUs.
#[derive(Clone, Debug)]
pub struct Placement(Arc<Cpus>);

#[derive(Debug)]
struct Cpus {
    /// The host's numbers of those this process may use.
    numbers: Vec<usize>,
    running: Vec<AtomicUsize>,
    /// vCPUs that have been placed.
    placed: AtomicUsize,
    /// Index of the first one's CPU.
    first: OnceLock<usize>,
}

impl Default for Placement {
    fn default() -> Self {
        let numbers = host::current().allowed();
        let running = numbers.iter().map(|_| AtomicUsize::new(0)).collect();
        Self(Arc::new(Cpus {
            numbers,
            running,
            placed: AtomicUsize::new(0),
            first: OnceLock::new(),
        }))
    }
}

impl Placement {
    /// Numbers of the host CPUs that the machine may use. An index of a CPU is an index into this list.
    pub fn cpus(&self) -> &[usize] {
        &self.0.numbers
    }

    /// So many vCPUs run on the CPU at an index.
    fn running(&self, at: usize) -> usize {
        self.0.running.get(at).map_or(0, |count| count.load(Ordering::Relaxed))
    }

    /// A vCPU begins to run on the CPU at an index.
    fn begin(&self, at: usize) {
        self.0.running.get(at).into_iter().for_each(|count| {
            count.fetch_add(1, Ordering::Relaxed);
        });
    }

    /// It does not run there any more.
    fn end(&self, at: usize) {
        self.0.running.get(at).into_iter().for_each(|count| {
            count.fetch_sub(1, Ordering::Relaxed);
        });
    }

    /// A CPU that none of them is on, if one is on that at an index.
    fn free(&self, at: usize) -> Option<usize> {
        if self.running(at) == 0 {
            return None;
        }
        let count = self.0.numbers.len();
        (1..count).map(|n| (at + n) % count).find(|other| self.running(*other) == 0)
    }

    /// The next CPU with fewer of them than that at an index, of which the one that asks is one.
    fn better(&self, at: usize) -> Option<usize> {
        let count = self.0.numbers.len();
        let others = (1..count).map(|n| (at + n) % count);
        others
            .min_by_key(|other| self.running(*other))
            .filter(|to| self.running(*to) < self.running(at))
    }
}

/// Where the processes are.
pub struct Affinity {
    placement: Placement,
    at: usize,
    looked: Instant,
    waited_ns: u64,
    delays: Box<dyn Delays>,
    runs: bool,
    /// The vCPU runs only on the CPU that [`Affinity::settle_on`] has named last.
    led: bool,
    /// Until then the vCPU stays on the CPU that [`Affinity::move_to`] has named last.
    stays: Instant,
}

impl Affinity {
    /// The first vCPU stays on the CPU the thread runs on now, each further one goes to the next. Processes started
    /// later are born there.
    pub fn new(placement: &Placement) -> Self {
        let cpus = &placement.0.numbers;
        let now = host::current().current();
        let here = || cpus.iter().position(|cpu| *cpu == now).unwrap_or(0);
        let placed = placement.0.placed.fetch_add(1, Ordering::Relaxed);
        let at = (placement.0.first.get_or_init(here) + placed) % cpus.len().max(1);
        let (placement, looked, stays) = (placement.clone(), Instant::now(), Instant::now());
        let delays = host::current().delays();
        let waited_ns = delays.waited_ns();
        let affinity =
            Self { placement, at, looked, waited_ns, delays, runs: false, led: false, stays };
        affinity.settle(&[]);
        affinity
    }

    /// The vCPU runs from now on. If another one has come to its CPU while it halted, and there is one that nobody is on, it goes
    /// there: to find that out by waiting takes as long as a kernel may wait for a CPU that it starts.
    pub fn begin(&mut self, wedges: impl FnOnce() -> Vec<i32>) {
        if std::mem::replace(&mut self.runs, true) {
            return;
        }
        if !self.led
            && let Some(free) = self.placement.free(self.at)
        {
            self.at = free;
            self.settle(&wedges());
        }
        self.placement.begin(self.at);
    }

    /// It halts.
    pub fn end(&mut self) {
        if std::mem::replace(&mut self.runs, false) {
            self.placement.end(self.at);
        }
    }

    /// Moves on if the CPU is too busy.
    pub fn look(&mut self, wedges: impl FnOnce() -> Vec<i32>) {
        let elapsed = self.looked.elapsed();
        if self.led || elapsed < PERIOD || self.placement.0.numbers.len() < 2 {
            return;
        }
        let waited = self.delays.waited_ns();
        let share = waited.saturating_sub(self.waited_ns) * 100 / elapsed.as_nanos().max(1) as u64;
        if share > TOO_MUCH
            && Instant::now() >= self.stays
            && let Some(to) = self.placement.better(self.at)
        {
            self.go_to(to, wedges);
        }
        (self.looked, self.waited_ns) = (Instant::now(), waited);
    }

    /// Index of the CPU that the vCPU is bound to.
    pub fn cpu(&self) -> usize {
        self.at
    }

    /// Binds the vCPU to the CPU at an index. The vCPU does not choose another CPU by itself for the next [`STAY`].
    pub fn move_to(&mut self, to: usize, wedges: impl FnOnce() -> Vec<i32>) {
        self.stays = Instant::now() + STAY;
        self.go_to(to, wedges);
    }

    /// Binds the vCPU, with its wedges, to the CPU with index `at`.
    fn go_to(&mut self, to: usize, wedges: impl FnOnce() -> Vec<i32>) {
        if to == self.at {
            return;
        }
        if self.runs {
            self.placement.end(self.at);
            self.placement.begin(to);
        }
        self.at = to;
        self.settle(&wedges());
    }

    /// From now on it runs on the CPU at an index, and where it is told to later.
    pub fn settle_on(&mut self, at: usize, wedges: impl FnOnce() -> Vec<i32>) {
        let at = at % self.placement.0.numbers.len().max(1);
        self.led = true;
        self.go_to(at, wedges);
    }

    fn settle(&self, wedges: &[i32]) {
        let Some(cpu) = self.placement.0.numbers.get(self.at) else { return };
        // Zero is the calling thread.
        for pid in wedges.iter().copied().chain([0]) {
            host::current().pin(pid, *cpu);
        }
    }
}

impl Drop for Affinity {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_to_wait_moves_to_where_fewer_run() {
        let running = [2, 1, 0].map(AtomicUsize::new).into();
        let (numbers, placed) = (vec![4, 5, 6], AtomicUsize::new(0));
        let first = OnceLock::new();
        let placement = Placement(Arc::new(Cpus { numbers, running, placed, first }));
        assert_eq!(placement.better(0), Some(2));
        placement.end(0);
        placement.begin(2);
        assert_eq!(placement.better(0), None, "one on each");
        assert_eq!(placement.free(0), None);
        placement.end(1);
        assert_eq!(
            placement.free(0),
            Some(1),
            "for one that has halted, and comes back to where another is"
        );
        placement.end(0);
        assert_eq!(placement.free(0), None, "nobody is in its way");
    }
}
