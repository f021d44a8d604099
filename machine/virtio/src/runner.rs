//! Where a queue runs: on the thread that rang the doorbell, or on a worker of the device's own.

use crate::interrupts::DeviceInterrupts;
use crate::lock;
use crate::running::Running;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

/// Which thread serves a device's queues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Execution {
    /// The thread that rings: a vCPU waits for its own request.
    #[default]
    Inline,
    /// One thread of the device's own.
    Worker,
}

/// A device shared by the registers, the worker and host-side events.
pub(crate) struct SharedDevice {
    pub(crate) running: Mutex<Running>,
    pub(crate) interrupts: Arc<DeviceInterrupts>,
}

impl SharedDevice {
    fn run(&self, index: usize) {
        lock(&self.running).run(index);
    }
}

/// Makes a device look at a queue. Rung by the driver's notifications and by host-side events
/// (input arrived), from any thread that holds none of the device's locks.
#[derive(Clone)]
pub struct Doorbell {
    shared: Arc<SharedDevice>,
    worker: Option<Arc<Rung>>,
}

impl Doorbell {
    /// Has queue `index` served, now or soon. Unknown queues are ignored.
    pub fn ring(&self, index: usize) {
        match &self.worker {
            None => self.shared.run(index),
            Some(rung) if index < 64 => rung.add(1 << index),
            Some(_) => {}
        }
    }

    /// Tells the driver that the device configuration changed.
    pub fn config_changed(&self) {
        lock(&self.shared.running).config_changed();
    }
}

/// Queues rung and not yet served.
#[derive(Default)]
struct Rung {
    state: Mutex<Bells>,
    wake: Condvar,
}

#[derive(Default)]
struct Bells {
    queues: u64,
    stop: bool,
}

impl Rung {
    fn add(&self, queues: u64) {
        lock(&self.state).queues |= queues;
        self.wake.notify_one();
    }

    /// Waits for bells; `None` to stop.
    fn take(&self) -> Option<u64> {
        let state = lock(&self.state);
        let idle = |bells: &mut Bells| bells.queues == 0 && !bells.stop;
        let waited = self.wake.wait_while(state, idle);
        let mut state = waited.unwrap_or_else(std::sync::PoisonError::into_inner);
        (!state.stop).then(|| std::mem::take(&mut state.queues))
    }
}

/// Owns the worker thread, if there is one.
pub(crate) struct Runner {
    doorbell: Doorbell,
    thread: Option<JoinHandle<()>>,
}

impl Runner {
    /// Starts serving.
    pub(crate) fn new(shared: Arc<SharedDevice>, execution: Execution) -> std::io::Result<Self> {
        let mut doorbell = Doorbell { shared, worker: None };
        if execution == Execution::Inline {
            return Ok(Self { doorbell, thread: None });
        }
        let rung = Arc::new(Rung::default());
        doorbell.worker = Some(rung.clone());
        let shared = doorbell.shared.clone();
        let name = format!("virtio-{}", lock(&shared.running).device.device_type());
        let thread = std::thread::Builder::new().name(name).spawn(move || serve(&shared, &rung))?;
        Ok(Self { doorbell, thread: Some(thread) })
    }

    /// The doorbell.
    pub(crate) fn doorbell(&self) -> &Doorbell {
        &self.doorbell
    }
}

fn serve(shared: &SharedDevice, rung: &Rung) {
    while let Some(queues) = rung.take() {
        (0..64).filter(|index| queues & 1 << index != 0).for_each(|index| shared.run(index));
    }
}

impl Drop for Runner {
    fn drop(&mut self) {
        if let Some(rung) = &self.doorbell.worker {
            lock(&rung.state).stop = true;
            rung.wake.notify_one();
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a panic of the worker has been reported by itself
        }
    }
}
