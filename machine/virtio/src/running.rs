//! A device between reset and reset: its body, status, negotiated features and queues.
//!
//! This is the part of a transport that is the same for PCI or anything else: the rules of virtio
//! 1.2 chapters 2 and 3. Queues are served only while the driver is ready, the function may access
//! memory, and nothing is broken.

use crate::interrupts::DeviceInterrupts;
use crate::queue::Shape;
use crate::{Queue, RequestLog, RingError, VirtioDevice};
use bus::Bell;
use ram::Ram;
use std::sync::Arc;
use virtio_bindings::virtio_config as config;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

/// Device status bits (virtio 1.2 section 2.1).
pub(crate) mod status {
    use virtio_bindings::virtio_config as config;

    pub(crate) const DRIVER_OK: u8 = config::VIRTIO_CONFIG_S_DRIVER_OK as u8;
    pub(crate) const FEATURES_OK: u8 = config::VIRTIO_CONFIG_S_FEATURES_OK as u8;
    pub(crate) const NEEDS_RESET: u8 = config::VIRTIO_CONFIG_S_NEEDS_RESET as u8;
    /// Bits the driver may set.
    pub(crate) const DRIVER: u8 = config::VIRTIO_CONFIG_S_ACKNOWLEDGE as u8
        | config::VIRTIO_CONFIG_S_DRIVER as u8
        | DRIVER_OK
        | FEATURES_OK
        | config::VIRTIO_CONFIG_S_FAILED as u8;
}

const VERSION_1: u64 = 1 << config::VIRTIO_F_VERSION_1;
const EVENT_IDX: u64 = 1 << VIRTIO_RING_F_EVENT_IDX;
const RING_RESET: u64 = 1 << config::VIRTIO_F_RING_RESET;
/// What every device offers.
const TRANSPORT_FEATURES: u64 =
    VERSION_1 | EVENT_IDX | RING_RESET | 1 << VIRTIO_RING_F_INDIRECT_DESC;

/// A queue: what the driver wrote, and the ring once it is enabled.
pub(crate) struct QueueSlot {
    pub(crate) max_size: u16,
    pub(crate) shape: Shape,
    pub(crate) queue: Option<Queue>,
}

impl QueueSlot {
    fn new(max_size: u16) -> Self {
        Self { max_size, shape: Shape { size: max_size, ..Shape::default() }, queue: None }
    }
}

/// A device and everything its driver told it.
pub(crate) struct Running {
    pub(crate) device: Box<dyn VirtioDevice>,
    pub(crate) queues: Vec<QueueSlot>,
    log: Arc<RequestLog>,
    generation: u8,
    memory: Ram,
    interrupts: Arc<DeviceInterrupts>,
    status: u8,
    driver_features: u64,
    bus_master: bool,
}

impl Running {
    /// A device in reset.
    pub(crate) fn new(
        mut device: Box<dyn VirtioDevice>,
        memory: Ram,
        interrupts: Arc<DeviceInterrupts>,
        log: Arc<RequestLog>,
    ) -> Self {
        device.log_to(&log);
        let queues = device.queue_sizes().iter().map(|&size| QueueSlot::new(size)).collect();
        Self {
            device,
            queues,
            log,
            generation: 0,
            memory,
            interrupts,
            status: 0,
            driver_features: 0,
            bus_master: false,
        }
    }

    /// Everything the device offers.
    pub(crate) fn offered(&self) -> u64 {
        self.device.features() | TRANSPORT_FEATURES
    }

    /// What the driver accepted so far.
    pub(crate) fn driver_features(&self) -> u64 {
        self.driver_features
    }

    /// The driver accepts features; too late once FEATURES_OK is set.
    pub(crate) fn set_driver_features(&mut self, features: u64) {
        if self.status & status::FEATURES_OK == 0 {
            self.driver_features = features;
        }
    }

    /// Device status.
    pub(crate) fn status(&self) -> u8 {
        self.status
    }

    /// The driver wrote the status register with something other than 0: it can only add bits.
    /// FEATURES_OK sticks only if the device can live with the features, DRIVER_OK only after that.
    /// Says whether the driver became ready.
    pub(crate) fn advance_status(&mut self, written: u8) -> bool {
        let mut new = written & status::DRIVER & !self.status;
        if new & status::FEATURES_OK != 0 && !self.features_acceptable() {
            new &= !status::FEATURES_OK;
        }
        if (self.status | new) & status::FEATURES_OK == 0 {
            new &= !status::DRIVER_OK;
        }
        self.status |= new;
        if new & status::FEATURES_OK != 0 {
            self.device.negotiated(self.driver_features);
        }
        new & status::DRIVER_OK != 0
    }

    fn features_acceptable(&self) -> bool {
        let unknown = self.driver_features & !self.offered();
        unknown == 0 && self.driver_features & VERSION_1 != 0
    }

    /// The driver enabled a queue.
    pub(crate) fn enable_queue(&mut self, index: usize) -> Result<(), RingError> {
        let event_idx = self.driver_features & EVENT_IDX != 0;
        let Some(slot) = self.queues.get_mut(index).filter(|slot| slot.queue.is_none()) else {
            return Ok(());
        };
        if self.status & status::FEATURES_OK == 0 {
            return Err(RingError::NotNegotiated);
        }
        let (memory, interrupts) = (self.memory.clone(), self.interrupts.clone());
        let interrupt = Arc::new(move || interrupts.queue(index));
        let mut queue = Queue::new(slot.shape, slot.max_size, event_idx, memory, interrupt)?;
        queue.log_to(Arc::clone(&self.log), index as u16);
        slot.queue = Some(queue);
        Ok(())
    }

    /// The driver reset one queue, if it negotiated that it may.
    pub(crate) fn reset_queue(&mut self, index: usize) {
        let allowed = self.driver_features & RING_RESET != 0;
        if let Some(slot) = self.queues.get_mut(index).filter(|_| allowed) {
            self.device.stop(index);
            self.device.forget(index);
            *slot = QueueSlot::new(slot.max_size);
        }
    }

    /// Whether the function may access memory.
    pub(crate) fn set_bus_master(&mut self, on: bool) {
        if self.bus_master && !on {
            (0..self.queues.len()).for_each(|index| self.device.stop(index));
        }
        self.bus_master = on;
    }

    /// Serves a queue if it may run, and those for which something comes meanwhile.
    pub(crate) fn run(&mut self, index: usize) {
        self.run_one(index);
        while let Some(due) = self.device.take_due() {
            self.run_one(due);
        }
    }

    /// What the doorbell of a queue does, if somebody else may ring it.
    pub(crate) fn bell(&self, index: usize) -> Option<Bell> {
        let slot = self.queues.get(index).filter(|slot| self.is_ready() && slot.queue.is_some())?;
        let (words, message) = (self.device.words(index)?, self.interrupts.message(index)?);
        // The counters are the second words of the rings (virtio 1.2 sections 2.7.6 and 2.7.8).
        let [offered, used] = [slot.shape.available, slot.shape.used].map(|ring| ring + 2);
        Some(Bell { words, queue: index, offered, used, message })
    }

    /// Queues may be served.
    fn is_ready(&self) -> bool {
        let served = self.status & (status::DRIVER_OK | status::NEEDS_RESET) == status::DRIVER_OK;
        served && self.bus_master
    }

    fn run_one(&mut self, index: usize) {
        let ready = self.is_ready();
        let Some(queue) = self.queues.get_mut(index).and_then(|slot| slot.queue.as_mut()) else {
            return;
        };
        if !ready {
            return;
        }
        let served = self.device.process(index, queue);
        if let Err(error) = served.and(queue.tell_driver()) {
            self.fail(&error);
        }
    }

    /// The driver broke the device: it needs a reset.
    pub(crate) fn fail(&mut self, error: &RingError) {
        tracing::warn!(device = self.device.device_type(), %error, "virtio driver error");
        self.status |= status::NEEDS_RESET;
        self.memory.change_bells();
        self.tell_driver();
    }

    /// DeviceInterrupts a driver that is ready because of a change of configuration or status.
    fn tell_driver(&self) {
        if self.status & status::DRIVER_OK != 0 {
            self.interrupts.config();
        }
    }

    /// The host changed the device's configuration.
    pub(crate) fn config_changed(&mut self) {
        self.generation = self.generation.wrapping_add(1);
        self.tell_driver();
    }

    /// The configuration generation (section 4.1.4.3.1).
    pub(crate) fn generation(&self) -> u8 {
        self.generation
    }

    /// Device reset.
    pub(crate) fn reset(&mut self) {
        self.device.reset();
        self.status = 0;
        self.driver_features = 0;
        for slot in &mut self.queues {
            *slot = QueueSlot::new(slot.max_size);
        }
        self.interrupts.reset();
    }
}
