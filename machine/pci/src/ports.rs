//! The three windows the guest reaches PCI through, as bus devices.

use crate::PciHost;
use crate::host::Target;
use bus::{Bell, Device, Shared};

/// Configuration mechanism #1 (PCI 3.0 section 3.2.2.3.2): CONFIG_ADDRESS at port 0xcf8,
/// CONFIG_DATA at 0xcfc.
pub struct ConfigPorts {
    host: PciHost,
    address: u32,
    reset_control: Option<Shared<dyn Device>>,
}

const ADDRESS_ENABLE: u32 = 1 << 31;
const ADDRESS_WRITABLE: u32 = 0x80ff_fffc;
const DATA: u64 = 4;
const RESET_CONTROL: u64 = 1;

impl ConfigPorts {
    pub(crate) fn new(host: PciHost) -> Self {
        Self { host, address: 0, reset_control: None }
    }

    /// Gives byte accesses to port 0xcf9, which lies inside CONFIG_ADDRESS, to `device` (the
    /// chipset's reset control) at its offset 0.
    pub fn with_reset_control(mut self, device: Shared<dyn Device>) -> Self {
        self.reset_control = Some(device);
        self
    }

    fn target(&self, offset: u64, len: usize) -> Option<Target> {
        let byte = offset.checked_sub(DATA)?;
        let enabled = self.address & ADDRESS_ENABLE != 0 && byte + len as u64 <= 4;
        enabled.then_some(Target {
            bus: (self.address >> 16) as u8,
            slot: (self.address >> 11 & 0x1f) as u8,
            function: (self.address >> 8 & 7) as u8,
            offset: (self.address & 0xfc) as usize + byte as usize,
        })
    }

    fn reset_control(&self, offset: u64, len: usize) -> Option<&Shared<dyn Device>> {
        self.reset_control.as_ref().filter(|_| offset == RESET_CONTROL && len == 1)
    }
}

impl Device for ConfigPorts {
    /// Only a dword access reaches CONFIG_ADDRESS; others in its place are no access to PCI.
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        if let Some(device) = self.reset_control(offset, data.len()) {
            crate::lock(device).read(0, data);
        } else if let Some(target) = self.target(offset, data.len()) {
            self.host.config_read(target, data);
        } else if offset == 0 && data.len() == 4 {
            data.copy_from_slice(&self.address.to_le_bytes());
        } else {
            data.fill(0xff);
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        if let Some(device) = self.reset_control(offset, data.len()) {
            crate::lock(device).write(0, data);
        } else if let Some(target) = self.target(offset, data.len()) {
            self.host.config_write(target, data);
        } else if let (0, Ok(address)) = (offset, data.try_into()) {
            self.address = u32::from_le_bytes(address) & ADDRESS_WRITABLE;
        }
    }
}

/// The enhanced configuration access mechanism (PCIe 5.0 section 7.2.2): 4096 bytes a function.
pub struct Ecam {
    host: PciHost,
}

impl Ecam {
    pub(crate) fn new(host: PciHost) -> Self {
        Self { host }
    }

    /// `None` for an access across two functions, which no root complex completes.
    fn target(offset: u64, len: usize) -> Option<Target> {
        let register = (offset & 0xfff) as usize;
        (register + len <= 0x1000).then_some(Target {
            bus: (offset >> 20) as u8,
            slot: (offset >> 15 & 0x1f) as u8,
            function: (offset >> 12 & 7) as u8,
            offset: register,
        })
    }
}

impl Device for Ecam {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        match Self::target(offset, data.len()) {
            Some(target) => self.host.config_read(target, data),
            None => data.fill(0xff),
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        if let Some(target) = Self::target(offset, data.len()) {
            self.host.config_write(target, data);
        }
    }
}

/// A window of GPAs in which memory BARs are decoded by their current values.
pub struct MmioWindow {
    host: PciHost,
    base: u64,
}

impl MmioWindow {
    /// A window at GPA `base`. A machine may have several, for instance one above RAM that the
    /// guest may move 64-bit BARs into.
    pub fn new(host: PciHost, base: u64) -> Self {
        Self { host, base }
    }
}

impl Device for MmioWindow {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        self.host.memory_read(self.base.wrapping_add(offset), data);
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        self.host.memory_write(self.base.wrapping_add(offset), data);
    }

    fn bell(&mut self, offset: u64) -> Option<Bell> {
        self.host.bell(self.base.wrapping_add(offset))
    }
}
