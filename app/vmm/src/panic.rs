//! The device by which a guest's kernel says that it has crashed: QEMU's pvpanic as a PCI function, which stock kernels have drivers for
//! (Linux: `pvpanic-pci`).

use pci::{Bar, ConfigSpace, Function, Identity, PciError};

/// Its only register: which events it takes when read, which have happened when written.
const PANICKED: u8 = 1 << 0;
/// The kernel has crashed and starts another, which saves what is left.
const CRASH_LOADED: u8 = 1 << 1;
/// Bytes of its window: the least that PCI knows.
const WINDOW: u64 = 16;

/// The device.
pub(crate) struct PanicDevice {
    config: ConfigSpace,
    tell: Box<dyn Fn() + Send>,
}

impl PanicDevice {
    /// One that calls `tell` when the guest's kernel has crashed for good.
    pub(crate) fn new(tell: Box<dyn Fn() + Send>) -> Result<Self, PciError> {
        let mut config = ConfigSpace::new(Identity {
            vendor: 0x1b36,
            device: 0x0011,
            class: 0x08_80_00,
            revision: 1,
            subsystem_vendor: 0x1af4,
            subsystem: 0x1100,
        });
        config.add_bar(0, Bar::memory32(WINDOW))?;
        Ok(Self { config, tell })
    }
}

impl Function for PanicDevice {
    fn config(&self) -> &ConfigSpace {
        &self.config
    }

    fn config_mut(&mut self) -> &mut ConfigSpace {
        &mut self.config
    }

    fn bar_read(&mut self, _: u8, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if offset == 0 {
            data[0] = PANICKED | CRASH_LOADED;
        }
    }

    fn bar_write(&mut self, _: u8, offset: u64, data: &[u8]) {
        if offset == 0 && data[0] & PANICKED != 0 {
            (self.tell)();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn a_crash_is_told_of_and_a_crash_kernel_is_not() {
        let (sender, told) = channel();
        let tell = Box::new(move || sender.send(()).expect("listened to"));
        let mut device = PanicDevice::new(tell).expect("it fits");
        let mut known = [0xff; 2];
        device.bar_read(0, 0, &mut known);
        assert_eq!(known, [PANICKED | CRASH_LOADED, 0]);
        device.bar_write(0, 0, &[CRASH_LOADED]);
        device.bar_write(0, 1, &[PANICKED]);
        assert!(told.try_recv().is_err());
        device.bar_write(0, 0, &[PANICKED]);
        told.try_recv().expect("told");
    }
}
