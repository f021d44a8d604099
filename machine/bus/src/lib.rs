//! Ports and MMIO: who answers at which address; and the lines and messages devices interrupt by.
//!
//! Devices know no process, no engine and no bus position: they see offsets into a window they were
//! given. Nothing at an address behaves as a real bus does: reads give all ones, writes are lost.
//!
//! Locking: the map itself is immutable once the machine is built. Each device sits behind
//! its own mutex, taken for one access; a device may raise interrupts and touch guest RAM while
//! holding it, and must not access the bus.

use std::sync::{Arc, Mutex};

/// A device with a window of ports or MMIO.
pub trait Device: Send {
    /// Reads `data.len()` (1, 2, 4 or 8) bytes at `offset` into the window, little-endian. The
    /// access lies wholly inside the window but may be of a size or alignment the device does not
    /// know: it must then give what hardware would, usually all ones.
    fn read(&mut self, offset: u64, data: &mut [u8]);
    /// Writes `data.len()` (1, 2, 4 or 8) bytes at `offset` into the window.
    fn write(&mut self, offset: u64, data: &[u8]);
    /// What the doorbell at `offset` does, if somebody else may ring it.
    fn bell(&mut self, offset: u64) -> Option<Bell> {
        let _ = offset;
        None
    }
}

/// What a doorbell does, if the device's server sees requests without it. Whoever rings then only waits for the answer and interrupts
/// the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bell {
    /// Offset in RAM's memory object of the page of words that the device's server has.
    pub words: u64,
    /// The queue.
    pub queue: usize,
    /// GPA of the 16 bits that count the requests offered.
    pub offered: u64,
    /// GPA of the 16 bits that count those given back.
    pub used: u64,
    /// The message-signalled interrupt of answers: the GPA that the device would write to, and the data.
    pub message: (u64, u32),
}

/// A level-triggered or edge-triggered wire into the interrupt controller (a GSI).
pub trait InterruptLine: Send + Sync {
    /// Drives the wire. An edge is `set(true)` then `set(false)`.
    fn set(&self, level: bool);
    /// So many ticks of a clock are due: one now, and the others as the guest takes them, if the
    /// wire remembers. A guest that counts ticks, on a host that was away, gets the right number.
    fn tick(&self, count: u64) {
        if count != 0 {
            self.set(true);
            self.set(false);
        }
    }
    /// The clock was set anew: ticks not taken yet mean nothing any more.
    fn forget_ticks(&self) {}
}

/// Where message-signalled interrupts go: the local APICs.
pub trait MsiSink: Send + Sync {
    /// Delivers the message a device wrote (`address` is a GPA in 0xfee0_0000..0xfef0_0000).
    fn send(&self, address: u64, data: u32);
}

/// Makes a vCPU look at its pending interrupts soon. Sticky, and callable from any thread.
pub trait Kicker: Send + Sync {
    /// Kicks.
    fn kick(&self);
}

/// Tells whoever sleeps for the devices' timers that a deadline changed.
pub trait Rearm: Send + Sync {
    /// The next deadline may have moved.
    fn rearm(&self);
}

/// A device whose state changes with time.
pub trait Timed: Send {
    /// When it next wants [`Timed::expire`], in nanoseconds of the machine's monotonic clock.
    fn deadline(&self) -> Option<u64>;
    /// Acts on everything due at `now`, in nanoseconds of the same clock.
    fn expire(&mut self, now: u64);
}

/// A device behind its lock.
pub type Shared<D> = Arc<Mutex<D>>;

/// Half-open range of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct AddressRange {
    base: u64,
    len: u64,
}

/// Two devices want the same addresses.
#[derive(Debug, thiserror::Error)]
#[error("bus range {base:#x}+{len:#x} overlaps another device")]
pub struct Overlap {
    base: u64,
    len: u64,
}

/// An address space of devices: ports or MMIO.
#[derive(Clone, Default)]
pub struct Bus {
    /// Sorted by base.
    devices: Vec<(AddressRange, Shared<dyn Device>)>,
}

impl Bus {
    /// An empty bus.
    pub fn new() -> Self {
        Self::default()
    }

    /// Gives `device` the `len` addresses from `base`.
    ///
    /// # Errors
    /// The range overlaps one already given, or is empty or wraps.
    pub fn insert(
        &mut self,
        base: u64,
        len: u64,
        device: Shared<dyn Device>,
    ) -> Result<(), Overlap> {
        let overlap = Overlap { base, len };
        let end = base.checked_add(len).ok_or(Overlap { base, len })?;
        let at = self.devices.partition_point(|(range, _)| range.base < base);
        let before = at.checked_sub(1).map(|i| self.devices[i].0);
        let collides_before = before.is_some_and(|r| r.base + r.len > base);
        let collides_after = self.devices.get(at).is_some_and(|(r, _)| r.base < end);
        if len == 0 || collides_before || collides_after {
            return Err(overlap);
        }
        self.devices.insert(at, (AddressRange { base, len }, device));
        Ok(())
    }

    /// Reads; all ones where nothing answers.
    pub fn read(&self, address: u64, data: &mut [u8]) {
        match self.find(address, data.len()) {
            Some((offset, device)) => lock(device).read(offset, data),
            None => data.fill(0xff),
        }
    }

    /// Writes; lost where nothing answers.
    pub fn write(&self, address: u64, data: &[u8]) {
        if let Some((offset, device)) = self.find(address, data.len()) {
            lock(device).write(offset, data);
        }
    }

    /// What the doorbell at an address does, if somebody else may ring it.
    pub fn bell(&self, address: u64) -> Option<Bell> {
        let (offset, device) = self.find(address, 1)?;
        lock(device).bell(offset)
    }

    fn find(&self, address: u64, len: usize) -> Option<(u64, &Shared<dyn Device>)> {
        let at = self.devices.partition_point(|(range, _)| range.base <= address);
        let (range, device) = &self.devices[at.checked_sub(1)?];
        let offset = address - range.base;
        (offset.checked_add(len as u64)? <= range.len).then_some((offset, device))
    }
}

/// Locks a device. A poisoned lock means a device panicked, which is our bug: the panic has been
/// reported, and the device's state is still the best there is.
fn lock<D: ?Sized>(device: &Mutex<D>) -> std::sync::MutexGuard<'_, D> {
    device.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Byte(u8);
    impl Device for Byte {
        fn read(&mut self, offset: u64, data: &mut [u8]) {
            data.fill(self.0.wrapping_add(offset as u8));
        }
        fn write(&mut self, _: u64, data: &[u8]) {
            self.0 = data[0];
        }
    }

    #[test]
    fn floating_bus_and_dispatch() {
        let mut bus = Bus::new();
        bus.insert(0x10, 4, Arc::new(Mutex::new(Byte(7)))).unwrap();
        let mut byte = [0];
        bus.read(0xf, &mut byte);
        assert_eq!(byte, [0xff]);
        bus.read(0x12, &mut byte);
        assert_eq!(byte, [9]);
        bus.write(0x10, &[1]);
        bus.read(0x10, &mut byte);
        assert_eq!(byte, [1]);
        let mut two = [0, 0];
        bus.read(0x13, &mut two);
        assert_eq!(two, [0xff, 0xff], "an access across the end reaches nobody");
    }

    #[test]
    fn overlap_is_refused() {
        let mut bus = Bus::new();
        let device = || Arc::new(Mutex::new(Byte(0)));
        bus.insert(0x10, 4, device()).unwrap();
        assert!(bus.insert(0x13, 1, device()).is_err());
        assert!(bus.insert(0xf, 2, device()).is_err());
        assert!(bus.insert(0x20, 0, device()).is_err());
        bus.insert(0x14, 1, device()).unwrap();
    }
}
