//! PCI and the devices on it.

use std::sync::{Arc, Mutex};

use bus::{Bus, InterruptLine, MsiSink};
use chipset::Platform;
use pci::{MmioWindow, PciHost};
use ram::Ram;
use virtio::{Doorbell, Execution, RequestLog, Rng, VirtioDevice, VirtioError, VirtioPci};
use x86::paging::PHYS_BITS;

use crate::{Attachment, Error, MessageFilter, machine::assembly, panic::PanicDevice};

/// The first I/O APIC input of PCI's INTx wires.
const PCI_GSI: u32 = 16;

/// What a device has done when the machine has come to rest.
pub(crate) type Release = Box<dyn FnOnce() + Send>;

/// A virtio device of the machine, for whoever watches its requests.
#[derive(Clone, Debug)]
pub struct LoggedDevice {
    /// Its number on PCI's bus.
    pub slot: u8,
    /// Device ID (virtio 1.2 chapter 5).
    pub device_type: u16,
    /// Where its requests are noted while somebody reads there.
    pub log: Arc<RequestLog>,
}

/// The devices that have been added.
#[derive(Default)]
pub(crate) struct AddedDevices {
    pub logged: Vec<LoggedDevice>,
    pub releases: Vec<Release>,
}

/// The host's side of the devices.
pub(crate) struct DeviceBackends {
    pub entropy: Arc<dyn host::Entropy>,
    pub on_panic: Option<Box<dyn Fn() + Send>>,
    pub attachments: Vec<Attachment>,
}

/// PCI's host bridge, with its wires and windows.
pub(crate) fn pci_host(
    platform: &Platform,
    messages: Option<MessageFilter>,
    ram: &Ram,
    [ports, mmio]: [&mut Bus; 2],
) -> Result<PciHost, Error> {
    let mut lines: Vec<Arc<dyn InterruptLine>> = Vec::new();
    for gsi in PCI_GSI..PCI_GSI + 8 {
        let line = platform.interrupts.pci_line(gsi, pci::wire_irq(gsi));
        lines.push(line.map_err(assembly)?);
    }
    let lines = lines.try_into().map_err(|_| assembly("eight INTx wires"))?;
    let controllers: Arc<dyn MsiSink> = Arc::new(platform.interrupts.clone());
    let messages = match messages {
        Some(filter) => filter(controllers),
        None => controllers,
    };
    let host = PciHost::new(lines, messages);
    let config = host.config_ports().with_reset_control(Arc::clone(&platform.reset_register));
    ports.insert(pci::CONFIG_PORTS, 8, Arc::new(Mutex::new(config))).map_err(assembly)?;
    let ecam = Arc::new(Mutex::new(host.ecam()));
    mmio.insert(pci::ECAM_BASE, pci::ECAM_SIZE, ecam).map_err(assembly)?;
    let window = Arc::new(Mutex::new(host.window()));
    mmio.insert(pci::WINDOW_BASE, pci::WINDOW_SIZE, window).map_err(assembly)?;
    // What is not RAM is PCI's: systems that do not know the window move BARs up there.
    let above = ram::HIGH_BASE + ram.high_len();
    let window = Arc::new(Mutex::new(MmioWindow::new(host.clone(), above)));
    mmio.insert(above, (1 << PHYS_BITS) - above, window).map_err(assembly)?;
    Ok(host)
}

/// Adds the devices: one of random numbers, one that is told of panics, and those whose other side the caller has made.
pub(crate) fn add_devices(
    pci: &PciHost,
    ram: &Ram,
    host: DeviceBackends,
) -> Result<AddedDevices, Error> {
    let mut added = AddedDevices::default();
    added.add(pci, ram, Box::new(Rng::new(host.entropy)), Execution::Inline)?;
    if let Some(tell) = host.on_panic {
        pci.add(pci.reserve()?, PanicDevice::new(tell)?)?;
    }
    for Attachment { device, execution, connect, release } in host.attachments {
        connect(added.add(pci, ram, device, execution)?);
        added.releases.push(release);
    }
    Ok(added)
}

impl AddedDevices {
    fn add(
        &mut self,
        pci: &PciHost,
        ram: &Ram,
        device: Box<dyn VirtioDevice>,
        execution: Execution,
    ) -> Result<Doorbell, Error> {
        let (slot, device_type) = (pci.reserve()?, device.device_type());
        let (msi, line) = (slot.msi(), slot.line());
        let function = VirtioPci::new(device, ram.clone(), msi, line, execution);
        let function = function.map_err(|error| match error {
            VirtioError::Worker(error) => Error::Thread(error),
            error => assembly(error),
        })?;
        let (doorbell, log) = (function.doorbell(), Arc::clone(function.request_log()));
        self.logged.push(LoggedDevice { slot: slot.number(), device_type, log });
        pci.add(slot, function)?;
        Ok(doorbell)
    }
}
