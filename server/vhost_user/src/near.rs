//! On which host CPU a server runs, and how a vCPU waits for its answers.
//!
//! Waking a process on another CPU and being woken by it takes some 50 us, on the same CPU 5, and between two that look at a word 0.1. A program of
//! the guest that waits for one small answer after the other gains nothing from a second CPU but that. One that has much read or written at once does:
//! then the server works while the guest does.
//!
//! How long a server takes to answer tells the two apart. If it is soon, again and again, there are two places:
//!
//! - *beside* the vCPU: on other CPUs than its, the server looks at its queues for a moment after each request, and the vCPU looks for the answer where it
//!   rings. Somebody else may want those CPUs; answers that are not there in time say so.
//! - *on* the vCPU's CPU otherwise, where both sleep for each other. A while later it is tried beside again.
//!
//! Either way the interrupt is there when the guest goes on, for which it need not be stopped again, and the thread that passes interrupts on is not
//! woken. Answers that take long have the server go wherever there is room. A guest that goes on computing keeps a server on its own CPU waiting, so
//! such a server is let go as well.

use std::{
    sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use rustix::{
    process::Pid,
    thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity},
};

use crate::words::{Waiting, Words};

/// An answer that came soon, and one that took long.
const SOON: Duration = Duration::from_micros(150);
const LONG: Duration = Duration::from_micros(500);
/// How long the vCPU waits where it rings: longer than most answers take that need no disk. While a server waits for a disk the guest can do something.
const MOMENT: Duration = Duration::from_micros(60);
/// The same for a server beside it, which may have to be woken first.
const LONGER_MOMENT: Duration = Duration::from_micros(120);
/// The same if the server has only to say that it has answered.
const SHORT_MOMENT: Duration = Duration::from_micros(5);
/// Points for the first, and off for the second; how many there can be, and how many bind.
const GAIN: u32 = 1;
const LOSS: u32 = 2;
const MOST: u32 = 64;
const ENOUGH: u32 = 32;

/// How long a server beside the vCPU looks at its queues after a request: a program of the guest does something between two.
const WATCH: Duration = Duration::from_micros(200);
/// Answers that come in time from beside the vCPU win a point; those that do not lose so many, of so many at the most. A server that did not look
/// any more has to be woken, which says little of whether its CPU is wanted.
const LATE: u32 = 8;
const LATE_ASLEEP: u32 = 2;
const TRUST: u32 = 32;
/// How long a server that was late is kept from there: twice as long each time, until it was in time so often.
const PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_millis(3200);
const IN_TIME: u32 = 4000;

/// Where a device's server may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nearness {
    /// Beside the vCPU or on its CPU, while that is faster.
    Near,
    /// On the vCPU's CPU, while that is faster.
    SameCpu,
    /// Wherever there is room.
    Apart,
}

/// Where a server is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Place {
    /// Wherever there is room.
    #[default]
    Anywhere,
    /// On this CPU.
    On(usize),
    /// On any other.
    Beside(usize),
}

impl Place {
    fn word(self) -> usize {
        match self {
            Self::Anywhere => 0,
            Self::On(cpu) => cpu << 2 | 1,
            Self::Beside(cpu) => cpu << 2 | 2,
        }
    }

    fn of(word: usize) -> Self {
        match word & 3 {
            1 => Self::On(word >> 2),
            2 => Self::Beside(word >> 2),
            _ => Self::Anywhere,
        }
    }
}

/// What the vCPU and the thread that passes interrupts on tell each other.
pub(crate) struct Near {
    /// Where both may be otherwise.
    allowed: CpuSet,
    start: Instant,
    points: AtomicU32,
    /// The server's place ([`Place::word`]).
    place: AtomicUsize,
    beside: Beside,
    /// Where the vCPU rang from.
    cpu: AtomicUsize,
    /// When it rang first since the last answer, in ns from the start; 0 if it has not.
    rung: AtomicU64,
}

/// How servers beside the vCPU have done so far. Only the vCPU that rings changes it; that another one does so at the same time matters little.
struct Beside {
    /// Not before this, in ns from the start; never, if it is not wanted.
    after: AtomicU64,
    trust: AtomicU32,
    in_time: AtomicU32,
    /// In ns.
    pause: AtomicU64,
}

impl Beside {
    fn new(is_wanted: bool) -> Self {
        let after = AtomicU64::new(if is_wanted { 0 } else { u64::MAX });
        let (trust, in_time) = (AtomicU32::new(TRUST), AtomicU32::new(0));
        Self { after, trust, in_time, pause: AtomicU64::new(ns(PAUSE)) }
    }

    fn is_due(&self, now: u64) -> bool {
        now >= self.after.load(Ordering::Relaxed)
    }

    fn was_in_time(&self) {
        let trust = self.trust.load(Ordering::Relaxed);
        self.trust.store((trust + 1).min(TRUST), Ordering::Relaxed);
        if self.in_time.fetch_add(1, Ordering::Relaxed) >= IN_TIME {
            self.pause.store(ns(PAUSE), Ordering::Relaxed);
        }
    }

    /// Whether that is enough of it.
    fn was_late(&self, loss: u32, now: u64) -> bool {
        let trust = self.trust.load(Ordering::Relaxed).saturating_sub(loss);
        self.trust.store(trust, Ordering::Relaxed);
        self.in_time.store(0, Ordering::Relaxed);
        if trust > 0 {
            return false;
        }
        let pause = self.pause.load(Ordering::Relaxed);
        self.after.store(now.saturating_add(pause), Ordering::Relaxed);
        self.pause.store((pause * 2).min(ns(LONGEST_PAUSE)), Ordering::Relaxed);
        self.trust.store(TRUST, Ordering::Relaxed);
        true
    }
}

fn ns(time: Duration) -> u64 {
    time.as_nanos() as u64
}

impl Near {
    /// `None` where there is no choice: one CPU, or a host that does not say.
    pub(crate) fn new(nearness: Nearness) -> Option<Self> {
        let allowed = sched_getaffinity(None).ok().filter(|cpus| cpus.count() > 1)?;
        let (cpu, rung) = (AtomicUsize::new(0), AtomicU64::new(0));
        let (points, place) = (AtomicU32::new(0), AtomicUsize::new(Place::Anywhere.word()));
        let beside = Beside::new(nearness == Nearness::Near);
        let start = Instant::now();
        (nearness != Nearness::Apart).then_some(Self {
            allowed,
            start,
            points,
            place,
            beside,
            cpu,
            rung,
        })
    }

    fn place(&self) -> Place {
        Place::of(self.place.load(Ordering::Relaxed))
    }

    /// The server looks at its queues beside the vCPU that rang last.
    pub(crate) fn is_beside(&self) -> bool {
        matches!(self.place(), Place::Beside(_))
    }

    /// The vCPU is about to ring; how it should wait for the answer, if it should, which is for a [`MOMENT`] at the most.
    pub(crate) fn ring(&self) -> Option<Waiting> {
        let (cpu, now) = (sched_getcpu(), self.now());
        self.cpu.store(cpu, Ordering::Relaxed);
        // Rung already, it has waited for longer.
        let _ = self.rung.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed);
        match self.place() {
            Place::Beside(avoided) if avoided == cpu => Some(Waiting::Looking),
            // The thread that passes interrupts on changes the server's place when it hears the answer.
            Place::On(own) if own == cpu && !self.beside.is_due(now) => Some(Waiting::Asleep),
            // A server may be beside another vCPU, or this vCPU has moved. Neither tells whether somebody else wants the server's CPU.
            Place::Beside(_) | Place::On(_) | Place::Anywhere => None,
        }
    }

    /// The answer has come to the vCPU itself.
    pub(crate) fn answered_at_once(&self, how: Waiting) {
        if let Some(took) = self.took() {
            self.count(took);
        }
        if how == Waiting::Looking {
            self.beside.was_in_time();
        }
    }

    /// How long it should wait, and how long if everything has been answered: then the driver has been told, or is about to be.
    pub(crate) fn moment(how: Waiting, is_awaited: bool) -> Duration {
        match how {
            _ if !is_awaited => SHORT_MOMENT,
            Waiting::Looking => LONGER_MOMENT,
            Waiting::Asleep => MOMENT,
        }
    }

    /// The vCPU has waited in vain, for a server that looked or had to be woken.
    pub(crate) fn was_late(&self, how: Waiting, looked: bool) {
        let loss = if looked { LATE } else { LATE_ASLEEP };
        if how == Waiting::Looking && self.beside.was_late(loss, self.now()) {
            self.place.store(Place::Anywhere.word(), Ordering::Relaxed);
        }
    }

    /// Where a server that answers soon should be.
    fn wish(&self, cpu: usize) -> Place {
        if self.beside.is_due(self.now()) { Place::Beside(cpu) } else { Place::On(cpu) }
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

/// Where the server and this thread are.
#[derive(Default)]
pub(crate) struct Binding {
    at: Place,
}

impl Binding {
    /// The server has answered.
    pub(crate) fn answered(&mut self, near: &Near, server: Option<Pid>, words: &Words) {
        let Some(took) = near.took() else { return };
        near.count(took);
        let wish = near.wish(near.cpu.load(Ordering::Relaxed));
        if near.points() == 0 {
            self.go(Place::Anywhere, near, server, words);
        } else if near.points() >= ENOUGH {
            self.go(wish, near, server, words);
        }
    }

    /// Lets both go.
    pub(crate) fn leave(&mut self, near: &Near, server: Option<Pid>, words: &Words) {
        self.go(Place::Anywhere, near, server, words);
        near.points.store(0, Ordering::Relaxed);
    }

    fn go(&mut self, to: Place, near: &Near, server: Option<Pid>, words: &Words) {
        if self.at != to || near.place() != to {
            self.at = to;
            let mut cpus = near.allowed;
            let mut own = near.allowed;
            match to {
                Place::Anywhere => {}
                Place::On(cpu) => {
                    cpus = CpuSet::new();
                    cpus.set(cpu);
                    own = cpus;
                }
                Place::Beside(cpu) => cpus.unset(cpu),
            }
            settle(server, &cpus, &own);
            let is_beside = matches!(to, Place::Beside(_));
            words.set_patience(if is_beside { WATCH } else { Duration::ZERO });
            near.place.store(to.word(), Ordering::Relaxed);
        }
    }
}

/// Puts the server and this thread on some CPUs. Where the host refuses they stay, which is slower and not wrong.
fn settle(server: Option<Pid>, cpus: &CpuSet, own: &CpuSet) {
    if let Some(server) = server {
        // It may have ended.
        let _ = sched_setaffinity(Some(server), cpus);
        let _ = sched_setaffinity(None, own);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        process::{Child, Command},
        thread,
    };

    fn cpus(pid: Option<Pid>) -> u32 {
        sched_getaffinity(pid).expect("it is there").count()
    }

    /// A server by its process, what it may be told, and how near it is; nothing on a host with one CPU.
    fn server(nearness: Nearness) -> Option<(Child, Pid, Words, Near)> {
        let Some(near) = Near::new(nearness) else {
            assert!(cpus(None) == 1 || nearness == Nearness::Apart, "there is a choice");
            return None;
        };
        let child = Command::new("sleep").arg("60").spawn().expect("a process");
        let pid = Pid::from_child(&child);
        Some((child, pid, Words::new().expect("a page"), near))
    }

    /// It answers soon until that has been seen often enough.
    fn answers_soon(near: &Near, place: &mut Binding, pid: Pid, words: &Words) {
        for _ in 0..ENOUGH {
            assert_eq!(near.ring(), None, "the vCPU does not wait for a server that is elsewhere");
            place.answered(near, Some(pid), words);
        }
    }

    fn ended(mut child: Child) {
        child.kill().and_then(|()| child.wait()).expect("ended");
    }

    /// Of this thread, by a host that has more than one CPU.
    #[test]
    fn a_server_that_answers_soon_comes_and_one_that_does_not_goes() {
        let all = cpus(None);
        let Some((child, pid, words, near)) = server(Nearness::SameCpu) else { return };
        let mut place = Binding::default();
        answers_soon(&near, &mut place, pid, &words);
        assert_eq!((cpus(Some(pid)), cpus(None)), (1, 1));
        place.answered(&near, Some(pid), &words);
        assert_eq!(near.points(), ENOUGH, "nobody rang");
        assert_eq!(near.ring(), Some(Waiting::Asleep), "it is worth waiting");
        assert!(words.patience().is_zero(), "it would keep the vCPU from running");
        near.answered_at_once(Waiting::Asleep);
        assert_eq!(near.points(), ENOUGH + GAIN);
        for _ in 0..MOST / LOSS {
            near.ring();
            thread::sleep(LONG * 2);
            place.answered(&near, Some(pid), &words);
        }
        assert_eq!((cpus(Some(pid)), cpus(None)), (all, all));
        assert_eq!(near.ring(), None);
        ended(child);
    }

    #[test]
    fn that_another_vcpu_rings_is_no_reason_to_leave() {
        let Some(near) = Near::new(Nearness::Near) else { return };
        let nobodys_cpu = usize::MAX >> 2;
        near.place.store(Place::Beside(nobodys_cpu).word(), Ordering::Relaxed);
        for _ in 0..10 * TRUST {
            assert_eq!(near.ring(), None);
        }
        assert!(near.is_beside() && near.beside.is_due(near.now()));
    }

    /// It is late, is taken to the vCPU's CPU, and later comes beside it again.
    #[test]
    fn a_server_is_beside_the_vcpu_for_as_long_as_it_is_in_time() {
        let all = cpus(None);
        let Some((child, pid, words, near)) = server(Nearness::Near) else { return };
        let (mut place, mut one) = (Binding::default(), CpuSet::new());
        one.set(sched_getcpu());
        let vcpu = sched_getaffinity(None).expect("known");
        sched_setaffinity(None, &one).expect("allowed");
        answers_soon(&near, &mut place, pid, &words);
        assert_eq!(cpus(Some(pid)), all - 1);
        assert_eq!(words.patience(), WATCH);
        sched_setaffinity(None, &one).expect("allowed");
        for _ in 0..TRUST / LATE {
            assert_eq!(near.ring(), Some(Waiting::Looking));
            near.was_late(Waiting::Looking, true);
        }
        assert_eq!(near.ring(), None, "it was late too often");
        place.answered(&near, Some(pid), &words);
        assert_eq!(cpus(Some(pid)), 1);
        assert!(words.patience().is_zero());
        assert_eq!(near.ring(), Some(Waiting::Asleep));
        near.answered_at_once(Waiting::Asleep);
        thread::sleep(PAUSE);
        assert_eq!(near.ring(), None, "it is tried again");
        place.answered(&near, Some(pid), &words);
        assert_eq!(cpus(Some(pid)), all - 1);
        let pauses = || near.beside.pause.load(Ordering::Relaxed);
        assert_eq!(pauses(), ns(PAUSE) * 2);
        (0..=IN_TIME).for_each(|_| near.beside.was_in_time());
        assert_eq!(pauses(), ns(PAUSE), "it does well");
        sched_setaffinity(None, &vcpu).expect("allowed");
        ended(child);
    }
}
