//! Whether a server runs on the vCPU's own host CPU.
//!
//! Waking a process on another CPU and being woken by it takes some 50 us, and on the same CPU 5. A program of the guest that waits for one small answer
//! after the other gains nothing from a second CPU. One that has much read or written at once does: then the server works while the guest does.
//!
//! How long a server takes to answer tells the two apart. If it is soon, again and again, the server and the thread that passes its interrupts on are bound
//! to the vCPU's CPU. Answers that take long have both go wherever there is room again. A guest that goes on computing
//! keeps a server on its own CPU waiting, so such a server is let go as well.
//!
//! While a server is on its CPU, the vCPU waits for the answer where it rings, for a moment: on that CPU it can do nothing meanwhile but keep the
//! server from answering. The interrupt is then there when the guest goes on, for which it need not be stopped again, and the thread that passes
//! interrupts on is not woken.

use std::{
    sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use rustix::{
    process::Pid,
    thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity},
};

/// An answer that came soon, and one that took long.
const SOON: Duration = Duration::from_micros(150);
const LONG: Duration = Duration::from_micros(500);
/// How long the vCPU waits where it rings: longer than most answers take that need no disk. While a server waits for a disk the guest can do something.
pub(crate) const MOMENT: Duration = Duration::from_micros(60);
/// Points for the first, and off for the second; how many there can be, and how many bind.
const GAIN: u32 = 1;
const LOSS: u32 = 2;
const MOST: u32 = 64;
const ENOUGH: u32 = 32;

/// Where no server is.
const NOWHERE: usize = usize::MAX;

/// What the vCPU and the thread that passes interrupts on tell each other.
pub(crate) struct Near {
    /// Where both may be otherwise.
    allowed: CpuSet,
    start: Instant,
    points: AtomicU32,
    /// The CPU that the server is bound to.
    bound: AtomicUsize,
    /// Where the vCPU rang from.
    cpu: AtomicUsize,
    /// When it rang first since the last answer, in ns from the start; 0 if it has not.
    rung: AtomicU64,
}

impl Near {
    /// `None` where there is no choice: one CPU, or a host that does not say.
    pub(crate) fn new() -> Option<Self> {
        let allowed = sched_getaffinity(None).ok().filter(|cpus| cpus.count() > 1)?;
        let (cpu, rung) = (AtomicUsize::new(0), AtomicU64::new(0));
        let (points, bound) = (AtomicU32::new(0), AtomicUsize::new(NOWHERE));
        Some(Self { allowed, start: Instant::now(), points, bound, cpu, rung })
    }

    /// The vCPU is about to ring; whether it should wait for the answer, which is for a [`MOMENT`] at the most.
    pub(crate) fn ring(&self) -> bool {
        let cpu = sched_getcpu();
        self.cpu.store(cpu, Ordering::Relaxed);
        // Rung already, it has waited for longer.
        let _ = self.rung.compare_exchange(0, self.now(), Ordering::Relaxed, Ordering::Relaxed);
        self.bound.load(Ordering::Relaxed) == cpu
    }

    /// The answer has come to the vCPU itself.
    pub(crate) fn answered_at_once(&self) {
        if let Some(took) = self.took() {
            self.count(took);
        }
    }

    fn count(&self, took: Duration) {
        let points = self.points();
        let points = match took {
            _ if took <= SOON => (points + GAIN).min(MOST),
            _ if took > LONG => points.saturating_sub(LOSS),
            _ => points,
        };
        // A point that another thread counts meanwhile matters little.
        self.points.store(points, Ordering::Relaxed);
    }

    fn points(&self) -> u32 {
        self.points.load(Ordering::Relaxed)
    }

    fn now(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    /// How long the answer took that has come, if somebody rang for it.
    fn took(&self) -> Option<Duration> {
        match self.rung.swap(0, Ordering::Relaxed) {
            0 => None,
            rung => Some(Duration::from_nanos(self.now().saturating_sub(rung))),
        }
    }
}

/// Where the server and this thread are bound to.
#[derive(Default)]
pub(crate) struct Binding {
    at: Option<usize>,
}

impl Binding {
    /// The server has answered.
    pub(crate) fn answered(&mut self, near: &Near, server: Option<Pid>) {
        let Some(took) = near.took() else { return };
        near.count(took);
        let cpu = near.cpu.load(Ordering::Relaxed);
        if near.points() == 0 && self.at.is_some() {
            self.leave(near, server);
        } else if near.points() >= ENOUGH && self.at != Some(cpu) {
            self.at = Some(cpu);
            let mut one = CpuSet::new();
            one.set(cpu);
            settle(&one, server);
            near.bound.store(cpu, Ordering::Relaxed);
        }
    }

    /// Lets both go.
    pub(crate) fn leave(&mut self, near: &Near, server: Option<Pid>) {
        if self.at.take().is_some() {
            near.bound.store(NOWHERE, Ordering::Relaxed);
            settle(&near.allowed, server);
        }
        near.points.store(0, Ordering::Relaxed);
    }
}

/// Puts this thread and the server on some of these CPUs. Where the host refuses they stay, which is slower and not wrong.
fn settle(cpus: &CpuSet, server: Option<Pid>) {
    if let Some(server) = server {
        // It may have ended.
        let _ = sched_setaffinity(Some(server), cpus);
        let _ = sched_setaffinity(None, cpus);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{process::Command, thread};

    fn cpus(pid: Option<Pid>) -> u32 {
        sched_getaffinity(pid).expect("it is there").count()
    }

    /// Of this thread, by a host that has more than one CPU.
    #[test]
    fn a_server_that_answers_soon_comes_and_one_that_does_not_goes() {
        let all = cpus(None);
        let Some(near) = Near::new() else {
            assert_eq!(all, 1, "there is a choice");
            return;
        };
        let mut child = Command::new("sleep").arg("60").spawn().expect("a process");
        let pid = Pid::from_child(&child);
        let mut place = Binding::default();
        for _ in 0..ENOUGH {
            assert_eq!(cpus(Some(pid)), all, "not enough has been seen");
            assert!(!near.ring(), "the vCPU does not wait for a server that is elsewhere");
            place.answered(&near, Some(pid));
        }
        assert_eq!((cpus(Some(pid)), cpus(None)), (1, 1));
        place.answered(&near, Some(pid));
        assert_eq!(near.points(), ENOUGH, "nobody rang");
        assert!(near.ring(), "it is worth waiting");
        near.answered_at_once();
        assert_eq!(near.points(), ENOUGH + GAIN);
        for _ in 0..MOST / LOSS {
            near.ring();
            thread::sleep(LONG * 2);
            place.answered(&near, Some(pid));
        }
        assert_eq!((cpus(Some(pid)), cpus(None)), (all, all));
        assert!(!near.ring());
        child.kill().and_then(|()| child.wait()).expect("ended");
    }
}
