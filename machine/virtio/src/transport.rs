//! A virtio device as a PCI function (virtio 1.2 section 4.1, without the legacy interface).

use crate::common_config::{self, Selectors};
use crate::interrupts::DeviceInterrupts;
use crate::layout::{self, AccessWindow, Structure};
use crate::runner::{Doorbell, Execution, Runner, SharedDevice};
use crate::running::Running;
use crate::{RequestLog, VirtioDevice, chain::MAX_CHAIN, lock};
use bus::{Bell, InterruptLine, MsiSink};
use pci::{Bar, ConfigSpace, Endpoint, Function, Identity, PciError};
use ram::Ram;
use std::sync::{Arc, Mutex};

const VENDOR: u16 = 0x1af4;
/// Modern device IDs are this plus the device type.
const DEVICE_BASE: u16 = 0x1040;
const SUBSYSTEM: u16 = 0x1100;

/// Why a device cannot be put on PCI. The guest cannot cause these.
#[derive(Debug, thiserror::Error)]
pub enum VirtioError {
    /// The body asks for no queues, more than 64, or sizes that are no power of two up to 1024.
    #[error("virtio device with queue sizes {0:?}")]
    BadQueues(Vec<u16>),
    /// Its configuration structure is longer than the 4096 bytes there are.
    #[error("virtio device configuration of {0} bytes")]
    BadConfig(usize),
    /// PCI cannot express it.
    #[error(transparent)]
    Pci(#[from] PciError),
    /// The host refused a worker thread.
    #[error("cannot start a device worker: {0}")]
    Worker(#[source] std::io::Error),
    /// The host refused memory for the log of its requests.
    #[error("no memory for a log of requests: {0}")]
    Log(#[source] std::io::Error),
}

/// A virtio device on PCI.
pub struct VirtioPci {
    endpoint: Endpoint,
    access: AccessWindow,
    select: Selectors,
    shared: Arc<SharedDevice>,
    runner: Runner,
    log: Arc<RequestLog>,
    memory: Ram,
}

impl VirtioPci {
    /// Puts `device` on PCI: requests in `ram`, messages to `msi`, INTA# on `line`.
    ///
    /// # Errors
    /// See [`VirtioError`].
    pub fn new(
        device: Box<dyn VirtioDevice>,
        ram: Ram,
        msi: Arc<dyn MsiSink>,
        line: Arc<dyn InterruptLine>,
        execution: Execution,
    ) -> Result<Self, VirtioError> {
        let queues = check(&*device)?;
        let bar = Bar::memory64(layout::BAR_SIZE);
        let identity = identity(&*device);
        let mut endpoint = Endpoint::new(identity, bar, layout::MSIX, queues + 1, (msi, line))?;
        for capability in layout::capabilities(queues, device.config().len()) {
            endpoint.config_mut().add_capability(&capability)?;
        }
        let access = endpoint.config_mut().add_capability(&layout::access_capability())?;
        let (msix, intx) = (endpoint.msix().clone(), endpoint.intx().clone());
        let interrupts = Arc::new(DeviceInterrupts::new(msix, intx, queues));
        let log = Arc::new(RequestLog::new().map_err(VirtioError::Log)?);
        let running = Running::new(device, ram.clone(), interrupts.clone(), Arc::clone(&log));
        let running = Mutex::new(running);
        let shared = Arc::new(SharedDevice { running, interrupts });
        let runner = Runner::new(shared.clone(), execution).map_err(VirtioError::Worker)?;
        let access = AccessWindow(access);
        let (select, memory) = (Selectors::default(), ram);
        Ok(Self { endpoint, access, select, shared, runner, log, memory })
    }

    /// Where its requests are noted while somebody reads there.
    pub fn request_log(&self) -> &Arc<RequestLog> {
        &self.log
    }

    /// The device's doorbell, for host-side events.
    pub fn doorbell(&self) -> Doorbell {
        self.runner.doorbell().clone()
    }

    fn device_read(&self, offset: usize, data: &mut [u8]) {
        copy_from(&lock(&self.shared.running).device.config(), offset, data);
    }

    fn isr_read(&self, offset: usize, data: &mut [u8]) {
        data.fill(0);
        if let (0, [first, ..]) = (offset, data) {
            *first = self.shared.interrupts.take_isr();
        }
    }

    /// Performs the access the access capability describes, before its data is read.
    fn fetch_window(&mut self) {
        let Some((offset, len)) = self.access.target(self.endpoint.config()) else { return };
        let mut data = [0; 4];
        self.bar_read(layout::BAR, offset, &mut data[..len]);
        let at = self.access.data();
        self.endpoint.config_mut().write(at, &data[..len]);
    }

    /// Performs the access the access capability describes, after its data was written.
    fn store_window(&mut self) {
        let Some((offset, len)) = self.access.target(self.endpoint.config()) else { return };
        let data = self.endpoint.config().dword(self.access.data()).to_le_bytes();
        self.bar_write(layout::BAR, offset, &data[..len]);
    }

    /// Follows the bus master bit: a device that may not access memory serves nothing, and looks
    /// at all its queues when it may again.
    fn update_bus_master(&mut self) {
        let on = self.endpoint.config().bus_master();
        let mut running = lock(&self.shared.running);
        running.set_bus_master(on);
        let queues = running.queues.len();
        drop(running);
        if on {
            (0..queues).for_each(|index| self.runner.doorbell().ring(index));
        }
    }
}

/// Checks what a body says of itself; returns its number of queues.
fn check(device: &dyn VirtioDevice) -> Result<usize, VirtioError> {
    let sizes = device.queue_sizes();
    let bad_size = |&size: &u16| !size.is_power_of_two() || usize::from(size) > MAX_CHAIN;
    if sizes.is_empty() || sizes.len() > layout::MAX_QUEUES || sizes.iter().any(bad_size) {
        return Err(VirtioError::BadQueues(sizes.to_vec()));
    }
    match device.config().len() {
        0..=4096 => Ok(sizes.len()),
        long => Err(VirtioError::BadConfig(long)),
    }
}

fn identity(device: &dyn VirtioDevice) -> Identity {
    Identity {
        vendor: VENDOR,
        device: DEVICE_BASE + device.device_type(),
        revision: 1,
        class: device.class(),
        subsystem_vendor: VENDOR,
        subsystem: SUBSYSTEM,
    }
}

/// Copies from a structure; all ones beyond it.
fn copy_from(structure: &[u8], offset: usize, data: &mut [u8]) {
    for (i, byte) in data.iter_mut().enumerate() {
        *byte = structure.get(offset + i).copied().unwrap_or(0xff);
    }
}

impl Function for VirtioPci {
    fn config(&self) -> &ConfigSpace {
        self.endpoint.config()
    }

    fn config_mut(&mut self) -> &mut ConfigSpace {
        self.endpoint.config_mut()
    }

    fn config_read(&mut self, offset: usize, data: &mut [u8]) {
        if self.access.touches(offset, data.len()) {
            self.fetch_window();
        }
        self.endpoint.config_read(offset, data);
    }

    fn config_write(&mut self, offset: usize, data: &[u8]) {
        let was_master = self.endpoint.config().bus_master();
        self.memory.change_bells();
        self.endpoint.config_write(offset, data);
        if self.access.touches(offset, data.len()) {
            self.store_window();
        }
        if self.endpoint.config().bus_master() != was_master {
            self.update_bus_master();
        }
    }

    fn bar_read(&mut self, bar: u8, offset: u64, data: &mut [u8]) {
        if self.endpoint.msix_read(bar, offset, data) {
            return;
        }
        match Structure::at(offset) {
            Structure::Common(at) => {
                copy_from(&common_config::image(&self.shared, self.select), at, data);
            }
            Structure::Isr(at) => self.isr_read(at, data),
            Structure::Device(at) => self.device_read(at, data),
            Structure::Notify(_) | Structure::Other => data.fill(0xff),
        }
    }

    fn bar_write(&mut self, bar: u8, offset: u64, data: &[u8]) {
        if !matches!(Structure::at(offset), Structure::Notify(_)) {
            self.memory.change_bells();
        }
        if self.endpoint.msix_write(bar, offset, data) {
            return;
        }
        let doorbell = self.runner.doorbell();
        match Structure::at(offset) {
            Structure::Common(at) => {
                common_config::write(&self.shared, &mut self.select, doorbell, at, data);
            }
            Structure::Device(at) => lock(&self.shared.running).device.config_write(at, data),
            Structure::Notify(queue) => doorbell.ring(queue),
            Structure::Isr(_) | Structure::Other => {}
        }
    }

    fn bell(&mut self, bar: u8, offset: u64) -> Option<Bell> {
        match Structure::at(offset) {
            Structure::Notify(queue) if bar == layout::BAR => {
                lock(&self.shared.running).bell(queue)
            }
            _ => None,
        }
    }

    fn reset(&mut self) {
        self.memory.change_bells();
        self.endpoint.reset();
        let mut running = lock(&self.shared.running);
        running.reset();
        running.set_bus_master(false);
        self.select = Selectors::default();
    }
}
