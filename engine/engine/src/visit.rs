//! Visitors of a vCPU: debuggers, tracers, whoever wants its registers.
//!
//! A [`Visit`] is done by the vCPU's own thread between two instructions, so it sees the state complete and may change it.
//! A visitor that wants to be told of something leaves an [`Attendant`] with probes. When the guest reaches a probe the attendant is
//! called there and then; it says whether the vCPU goes on or stands. While any attendant has it stand the guest executes nothing,
//! and visits are still done.

use std::sync::{
    Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, Ordering},
};

use contract::{Doing, Engine, Probes, Reached};

use crate::Statistics;

/// What is to be done with a vCPU.
pub type Visit = Box<dyn FnOnce(&mut Visited<'_>) + Send>;

/// What an attendant decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The guest goes on.
    GoOn,
    /// The vCPU stands until a visitor lets it go on ([`Visited::go_on`]).
    Stand,
}

/// Who is told that the guest has reached a probe.
pub trait Attendant: Send {
    /// One of this attendant's probes has been reached. Probes may be changed.
    fn reached(
        &mut self,
        engine: &mut dyn Engine,
        probes: &mut Probes,
        reached: Reached,
    ) -> Verdict;
}

/// Visits that wait for a vCPU.
#[derive(Default)]
pub(crate) struct Visits {
    any: AtomicBool,
    queue: Mutex<Queue>,
}

#[derive(Default)]
struct Queue {
    visits: Vec<Visit>,
    closed: bool,
}

impl Visits {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds one; false if none are done any more.
    pub fn add(&self, visit: Visit) -> bool {
        let mut queue = self.lock();
        if !queue.closed {
            queue.visits.push(visit);
            self.any.store(true, Ordering::SeqCst);
        }
        !queue.closed
    }

    /// Takes those that wait.
    pub fn take(&self) -> Vec<Visit> {
        if !self.any.swap(false, Ordering::SeqCst) {
            return Vec::new();
        }
        std::mem::take(&mut self.lock().visits)
    }

    /// The vCPU has ended: those that wait are dropped, and none are taken any more.
    pub fn close(&self) {
        let mut queue = self.lock();
        queue.closed = true;
        queue.visits.clear();
    }
}

/// An attendant, its number and its probes.
struct Entry {
    number: u64,
    probes: Probes,
    standing: bool,
    attendant: Box<dyn Attendant>,
}

impl Entry {
    fn is_meant(&self, reached: Reached, rip: u64) -> bool {
        match reached {
            Reached::Breakpoint => self.probes.has(rip),
            Reached::Watch { gva, len, write } => {
                self.probes.watches.iter().any(|watch| watch.counts(gva, len, write))
            }
        }
    }
}

/// A vCPU's attendants.
#[derive(Default)]
pub(crate) struct Attendants {
    entries: Vec<Entry>,
    /// Of the last one that came.
    last: u64,
}

impl Attendants {
    /// One of them has the vCPU stand.
    pub fn is_standing(&self) -> bool {
        self.entries.iter().any(|entry| entry.standing)
    }

    /// Tells those whose probe was reached. If all of them let the guest go on, the instruction at the breakpoint has been executed.
    pub fn reach(&mut self, engine: &mut dyn Engine, mut reached: Reached) {
        loop {
            self.tell(engine, reached);
            if self.is_standing() || reached != Reached::Breakpoint {
                return;
            }
            match engine.step() {
                Some(next) => reached = next,
                None => return,
            }
        }
    }

    fn tell(&mut self, engine: &mut dyn Engine, reached: Reached) {
        let rip = engine.vcpu().rip;
        let mut changed = false;
        for entry in self.entries.iter_mut().filter(|entry| entry.is_meant(reached, rip)) {
            let before = entry.probes.clone();
            let verdict = entry.attendant.reached(engine, &mut entry.probes, reached);
            entry.standing |= verdict == Verdict::Stand;
            changed |= entry.probes != before;
        }
        if changed {
            self.arm(engine);
        }
    }

    fn arm(&self, engine: &mut dyn Engine) {
        let mut all = Probes::default();
        self.entries.iter().for_each(|entry| all.add(&entry.probes));
        engine.set_probes(&all);
    }

    /// Tells those who want to know of something that engines do not do.
    pub fn tell_of(&self, doing: Doing) {
        let watchers = self.entries.iter().flat_map(|entry| &entry.probes.watchers);
        watchers.for_each(|watcher| watcher(doing));
    }

    fn entry(&mut self, number: u64) -> Option<&mut Entry> {
        self.entries.iter_mut().find(|entry| entry.number == number)
    }

    /// All of them leave: the vCPU has ended.
    pub fn leave(&mut self) {
        self.entries.clear();
    }
}

/// A vCPU that is visited.
pub struct Visited<'a> {
    /// What executes it.
    pub engine: &'a mut dyn Engine,
    attendants: &'a mut Attendants,
    /// What the loop has counted.
    counted: &'a Statistics,
}

impl<'a> Visited<'a> {
    pub(crate) fn new(
        engine: &'a mut dyn Engine,
        attendants: &'a mut Attendants,
        counted: &'a Statistics,
    ) -> Self {
        Self { engine, attendants, counted }
    }

    /// What the vCPU has done so far.
    pub fn statistics(&mut self) -> Statistics {
        Statistics::of(self.counted, self.engine)
    }

    /// Leaves an attendant; returns its number. With `standing`, the vCPU stands.
    pub fn attend(&mut self, attendant: Box<dyn Attendant>, probes: Probes, standing: bool) -> u64 {
        self.attendants.last += 1;
        let number = self.attendants.last;
        self.attendants.entries.push(Entry { number, probes, standing, attendant });
        self.attendants.arm(self.engine);
        number
    }

    /// Gives an attendant other probes.
    pub fn set_probes(&mut self, number: u64, probes: Probes) {
        if let Some(entry) = self.attendants.entry(number) {
            entry.probes = probes;
            self.attendants.arm(self.engine);
        }
    }

    /// An attendant has the vCPU stand from now on, or lets it go on.
    pub fn stand(&mut self, number: u64, standing: bool) {
        if let Some(entry) = self.attendants.entry(number) {
            entry.standing = standing;
        }
    }

    /// An attendant leaves, with its probes.
    pub fn dismiss(&mut self, number: u64) {
        let entries = std::mem::take(&mut self.attendants.entries);
        let (gone, stay): (Vec<_>, Vec<_>) =
            entries.into_iter().partition(|entry| entry.number == number);
        self.attendants.entries = stay;
        // Records of its taps that are still on their way come with this.
        self.attendants.arm(self.engine);
        drop(gone);
    }
}
