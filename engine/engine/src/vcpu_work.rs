//! Work that other threads hand to a vCPU's thread: debuggers, tracers and profilers use it to read and change registers.
//!
//! A [`VcpuWork`] closure runs on the vCPU's own thread between two instructions. The state is complete then and may be changed.
//! A debugger that sets probes leaves a [`ProbeHandler`]. The handler is called on the vCPU's thread when the guest reaches a probe, and
//! decides whether the vCPU resumes or stops. While any handler keeps the vCPU stopped the guest executes nothing; work is still
//! done.

use std::sync::{
    Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, Ordering},
};

use contract::{Engine, Probes, Reached, VcpuEvent};

use crate::Statistics;

/// A closure for the vCPU's thread.
pub type VcpuWork = Box<dyn FnOnce(&mut VcpuAccess<'_>) + Send>;

/// What a probe handler decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The guest goes on.
    Resume,
    /// The vCPU stops until somebody resumes it ([`VcpuAccess::set_stopped`]).
    Stop,
}

/// Called when the guest reaches a probe.
pub trait ProbeHandler: Send {
    /// The guest has reached one of this handler's probes. The handler may change `probes`.
    fn reached(
        &mut self,
        engine: &mut dyn Engine,
        probes: &mut Probes,
        reached: Reached,
    ) -> Verdict;

    /// Something may have changed what the handler wants of this vCPU. The handler may change `probes`.
    fn refresh(&mut self, _probes: &mut Probes) {}
}

/// Work that waits for a vCPU.
#[derive(Default)]
pub(crate) struct WorkQueue {
    any: AtomicBool,
    queue: Mutex<Queue>,
}

#[derive(Default)]
struct Queue {
    work: Vec<VcpuWork>,
    closed: bool,
}

impl WorkQueue {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds `work`; false if the vCPU has ended, which drops it.
    pub fn add(&self, work: VcpuWork) -> bool {
        let mut queue = self.lock();
        if !queue.closed {
            queue.work.push(work);
            self.any.store(true, Ordering::SeqCst);
        }
        !queue.closed
    }

    /// Takes all work that waits.
    pub fn take(&self) -> Vec<VcpuWork> {
        if !self.any.swap(false, Ordering::SeqCst) {
            return Vec::new();
        }
        std::mem::take(&mut self.lock().work)
    }

    /// Drops all work and refuses more: the vCPU has ended.
    pub fn close(&self) {
        let mut queue = self.lock();
        queue.closed = true;
        queue.work.clear();
    }
}

/// A probe handler, its number and its probes.
struct Entry {
    number: u64,
    probes: Probes,
    stopped: bool,
    handler: Box<dyn ProbeHandler>,
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

/// A vCPU's probe handlers.
#[derive(Default)]
pub(crate) struct ProbeHandlers {
    entries: Vec<Entry>,
    /// The number of the handler added last.
    last: u64,
}

impl ProbeHandlers {
    /// A handler keeps the vCPU stopped.
    pub fn is_stopped(&self) -> bool {
        self.entries.iter().any(|entry| entry.stopped)
    }

    /// Calls the handlers whose probe was reached. If all of them resume the guest, the instruction at the breakpoint has been executed.
    pub fn reach(&mut self, engine: &mut dyn Engine, mut reached: Reached) {
        loop {
            self.tell(engine, reached);
            if self.is_stopped() || reached != Reached::Breakpoint {
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
        let is_meant = |entry: &Entry| entry.is_meant(reached, rip);
        self.visit(engine, is_meant, |entry, engine| {
            let verdict = entry.handler.reached(engine, &mut entry.probes, reached);
            entry.stopped |= verdict == Verdict::Stop;
        });
    }

    fn refresh(&mut self, engine: &mut dyn Engine) {
        self.visit(engine, |_| true, |entry, _| entry.handler.refresh(&mut entry.probes));
    }

    /// Visits the entries that are meant, and sets the engine's probes if one of them has changed its own.
    fn visit(
        &mut self,
        engine: &mut dyn Engine,
        is_meant: impl Fn(&Entry) -> bool,
        mut visit: impl FnMut(&mut Entry, &mut dyn Engine),
    ) {
        let mut changed = false;
        for entry in self.entries.iter_mut().filter(|entry| is_meant(entry)) {
            let before = entry.probes.clone();
            visit(entry, engine);
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

    /// Tells the watchers of an event that does not come from the engine.
    pub fn tell_of(&self, event: VcpuEvent) {
        let watchers = self.entries.iter().flat_map(|entry| &entry.probes.watchers);
        watchers.for_each(|watcher| watcher(event));
    }

    fn entry(&mut self, number: u64) -> Option<&mut Entry> {
        self.entries.iter_mut().find(|entry| entry.number == number)
    }

    /// Drops all handlers: the vCPU has ended.
    pub fn clear(&mut self) {
        self.entries.clear();
    }
}

/// Access to a vCPU between two instructions, for [`VcpuWork`].
pub struct VcpuAccess<'a> {
    /// The engine that executes the vCPU.
    pub engine: &'a mut dyn Engine,
    handlers: &'a mut ProbeHandlers,
    /// What the vCPU loop has counted.
    counted: &'a Statistics,
}

impl<'a> VcpuAccess<'a> {
    pub(crate) fn new(
        engine: &'a mut dyn Engine,
        handlers: &'a mut ProbeHandlers,
        counted: &'a Statistics,
    ) -> Self {
        Self { engine, handlers, counted }
    }

    /// What the vCPU has done so far.
    pub fn statistics(&mut self) -> Statistics {
        Statistics::of(self.counted, self.engine)
    }

    /// Adds a handler with its probes; returns its number. With `stopped`, the vCPU stops now.
    pub fn add_handler(
        &mut self,
        handler: Box<dyn ProbeHandler>,
        probes: Probes,
        stopped: bool,
    ) -> u64 {
        self.handlers.last += 1;
        let number = self.handlers.last;
        self.handlers.entries.push(Entry { number, probes, stopped, handler });
        self.handlers.arm(self.engine);
        number
    }

    /// Replaces a handler's probes.
    pub fn set_probes(&mut self, number: u64, probes: Probes) {
        if let Some(entry) = self.handlers.entry(number) {
            entry.probes = probes;
            self.handlers.arm(self.engine);
        }
    }

    /// Changes a handler's probes.
    pub fn change_probes(&mut self, number: u64, change: impl FnOnce(&mut Probes)) {
        if let Some(entry) = self.handlers.entry(number) {
            change(&mut entry.probes);
            self.handlers.arm(self.engine);
        }
    }

    /// Has all handlers look whether they want other probes.
    pub fn refresh_handlers(&mut self) {
        self.handlers.refresh(self.engine);
    }

    /// Stops the vCPU for a handler, or resumes it. The vCPU runs when no handler keeps it stopped.
    pub fn set_stopped(&mut self, number: u64, stopped: bool) {
        if let Some(entry) = self.handlers.entry(number) {
            entry.stopped = stopped;
        }
    }

    /// Removes a handler and its probes.
    pub fn remove_handler(&mut self, number: u64) {
        let entries = std::mem::take(&mut self.handlers.entries);
        let (gone, stay): (Vec<_>, Vec<_>) =
            entries.into_iter().partition(|entry| entry.number == number);
        self.handlers.entries = stay;
        // Records of its taps that are still on their way come with this.
        self.handlers.arm(self.engine);
        drop(gone);
    }
}
