//! Devices for tests only: the debug exit port, and what kvm-unit-tests expect of "pc-testdev".

use std::sync::Arc;

use bus::{Device, InterruptLine};

use crate::events::{MachineEvent, MachineEvents};

/// Bytes of ports of the debug exit device.
pub const EXIT_LEN: u64 = 4;
/// Echo ports: word, then flush, then bytes, four each.
pub const ECHO: u64 = 0xe0;
/// Bytes of echo and flush ports.
pub const ECHO_LEN: u64 = 12;
/// Interrupt line ports: one a GSI.
pub const LINES: u64 = 0x2000;
/// Memory that is a device, a GPA.
pub const MEMORY: u64 = 0xff00_0000;
/// Its bytes.
pub const MEMORY_LEN: u64 = 0x1_0000;

/// Writing a value leaves the monitor.
pub(crate) struct DebugExit(pub(crate) Arc<dyn MachineEvents>);

impl Device for DebugExit {
    fn read(&mut self, _: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&mut self, _: u64, data: &[u8]) {
        if let Some(value) = data.first() {
            self.0.raise(MachineEvent::DebugExit(*value));
        }
    }
}

/// A 32-bit register at ports 0xe0 and again at 0xe8. Port 0xe4 takes the GPA of a page to drop
/// from the host's page tables, which no guest can tell from doing nothing.
#[derive(Default)]
pub(crate) struct Echo([u8; 4]);

/// Where the flush port begins and ends.
const FLUSH: std::ops::Range<u64> = 4..8;

impl Device for Echo {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        if !FLUSH.contains(&offset) {
            let bytes = self.0.iter().skip((offset & 3) as usize);
            data.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        if !FLUSH.contains(&offset) {
            let bytes = self.0.iter_mut().skip((offset & 3) as usize);
            bytes.zip(data).for_each(|(to, from)| *to = *from);
        }
    }
}

/// Port n drives GSI n.
pub(crate) struct TestLines(pub(crate) Vec<Arc<dyn InterruptLine>>);

impl Device for TestLines {
    fn read(&mut self, _: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        if let (Some(line), Some(value)) = (self.0.get(offset as usize), data.first()) {
            line.set(*value != 0);
        }
    }
}

/// Memory behind device accesses.
pub(crate) struct TestMemory(pub(crate) Box<[u8]>);

impl TestMemory {
    pub(crate) fn new() -> Self {
        Self(vec![0; MEMORY_LEN as usize].into())
    }
}

impl Device for TestMemory {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        let bytes = self.0.iter().skip(offset as usize);
        data.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        let bytes = self.0.iter_mut().skip(offset as usize);
        bytes.zip(data).for_each(|(to, from)| *to = *from);
    }
}
