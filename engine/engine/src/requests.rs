//! Requests to a vCPU, from any thread.
//!
//! The vCPU polls one word before every block. Whoever has news sets [`pending::EXIT`] in it, and
//! the vCPU loop then looks at everything: orders, interrupts. No news is lost, because the loop
//! clears the bit *before* it looks, and sleeps only while the bit is clear, under the lock that
//! a kick takes after setting it.

use crate::sync::{
    Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError,
    atomic::{AtomicU8, AtomicU32, Ordering},
};

use contract::pending;

use crate::vcpu_work::{VcpuWork, WorkQueue};

/// What waits for one vCPU.
#[derive(Default)]
pub struct VcpuRequests {
    waiting: AtomicU32,
    lock: Mutex<()>,
    kicked: Condvar,
    forward: OnceLock<Arc<dyn bus::Kicker>>,
    work: WorkQueue,
}

impl VcpuRequests {
    /// What waits: a set of [`pending`] bits.
    #[inline]
    pub fn waiting(&self) -> u32 {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Has kicks reach an engine that does not poll, too. Only the first call counts.
    pub fn forward(&self, kicker: Arc<dyn bus::Kicker>) {
        let _ = self.forward.set(kicker);
    }

    /// Acknowledges all kicks so far; what they were about must be looked at afterwards.
    pub fn take_kick(&self) {
        self.waiting.fetch_and(!pending::EXIT, Ordering::SeqCst);
    }

    /// Kicks the vCPU whose own thread this is.
    pub fn kick_myself(&self) {
        self.waiting.fetch_or(pending::EXIT, Ordering::SeqCst);
    }

    /// Tells the engine which interrupts wait.
    pub fn set_interrupts(&self, bits: u32) {
        self.waiting.fetch_and(pending::EXIT | bits, Ordering::SeqCst);
        self.waiting.fetch_or(bits & !pending::EXIT, Ordering::SeqCst);
    }

    /// Has the vCPU's thread run `work` between two instructions, soon; false if the vCPU has ended. Work that is
    /// not done any more is dropped.
    pub fn run_on_vcpu(&self, work: VcpuWork) -> bool {
        let taken = self.work.add(work);
        bus::Kicker::kick(self);
        taken
    }

    /// The work that waits, if there is any.
    pub(crate) fn work(&self) -> &WorkQueue {
        &self.work
    }

    /// Sleeps until the next kick. Returns at once if one came since [`VcpuRequests::take_kick`].
    pub fn sleep(&self) {
        let mut guard = self.guard();
        while self.waiting.load(Ordering::SeqCst) & pending::EXIT == 0 {
            guard = self.kicked.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn guard(&self) -> MutexGuard<'_, ()> {
        self.lock.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for VcpuRequests {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VcpuRequests").field("waiting", &self.waiting).finish_non_exhaustive()
    }
}

impl bus::Kicker for VcpuRequests {
    fn kick(&self) {
        self.waiting.fetch_or(pending::EXIT, Ordering::SeqCst);
        drop(self.guard());
        self.kicked.notify_all();
        if let Some(kicker) = self.forward.get() {
            kicker.kick();
        }
    }
}

/// What the vCPUs are to do.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunCommand {
    /// Run the guest.
    Run = 0,
    /// Stand still, ready to go on.
    Pause = 1,
    /// End. Final.
    Stop = 2,
}

/// Orders a machine's vCPUs about, from any thread.
#[derive(Clone, Debug)]
pub struct Control {
    order: Arc<AtomicU8>,
    requests: Arc<[Arc<VcpuRequests>]>,
}

impl Control {
    /// Control over the vCPU that `requests` wakes; it is to run.
    pub fn new(requests: Arc<VcpuRequests>) -> Self {
        Self::of_all([requests].into())
    }

    /// Control over the vCPUs that are woken so; they are to run.
    pub fn of_all(requests: Arc<[Arc<VcpuRequests>]>) -> Self {
        Self { order: Arc::new(AtomicU8::new(RunCommand::Run as u8)), requests }
    }

    /// Gives an order and makes the vCPUs see it soon. Nothing follows [`RunCommand::Stop`].
    pub fn order(&self, order: RunCommand) {
        let changed = |now| (now != RunCommand::Stop as u8).then_some(order as u8);
        // Refused only if the vCPU has been stopped, which stands.
        let _ = self.order.fetch_update(Ordering::SeqCst, Ordering::SeqCst, changed);
        self.requests.iter().for_each(|requests| bus::Kicker::kick(&**requests));
    }

    /// The order in force.
    pub fn current(&self) -> RunCommand {
        match self.order.load(Ordering::SeqCst) {
            0 => RunCommand::Run,
            1 => RunCommand::Pause,
            _ => RunCommand::Stop,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bus::Kicker;
    use std::time::{Duration, Instant};

    #[test]
    fn a_kick_before_sleeping_is_not_lost() {
        let requests = VcpuRequests::default();
        requests.kick();
        requests.sleep();
        assert_eq!(requests.waiting(), pending::EXIT, "and stays until taken");
        requests.take_kick();
        assert_eq!(requests.waiting(), 0);
    }

    #[test]
    fn a_kick_wakes_a_sleeper() {
        let requests = Arc::new(VcpuRequests::default());
        let kicker = Arc::clone(&requests);
        let started = Instant::now();
        let thread = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            kicker.kick();
        });
        requests.sleep();
        assert!(started.elapsed() >= Duration::from_millis(20));
        thread.join().expect("no panic");
    }

    #[test]
    fn interrupt_bits_keep_the_kick() {
        let requests = VcpuRequests::default();
        requests.set_interrupts(pending::INTERRUPT | pending::NMI);
        requests.kick();
        requests.set_interrupts(pending::NMI);
        assert_eq!(requests.waiting(), pending::NMI | pending::EXIT);
        requests.take_kick();
        requests.set_interrupts(0);
        assert_eq!(requests.waiting(), 0);
    }

    #[test]
    fn stop_is_final() {
        let control = Control::new(Arc::new(VcpuRequests::default()));
        control.order(RunCommand::Pause);
        assert_eq!(control.current(), RunCommand::Pause);
        control.order(RunCommand::Run);
        assert_eq!(control.current(), RunCommand::Run);
        control.order(RunCommand::Stop);
        control.order(RunCommand::Run);
        assert_eq!(control.current(), RunCommand::Stop);
    }
}
