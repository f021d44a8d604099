//! A machine with one PCI device, and a guest that does anything to it.
//!
//! The guest's actions are mostly well-formed (its rings are where the device expects them, its
//! accesses hit registers), because noise alone would never get past negotiation.

use arbitrary::Arbitrary;
use bus::{Device, InterruptLine, MsiSink};
use pci::{Ecam, MmioWindow, PciHost};
use ram::Ram;
use std::sync::Arc;
use virtio::{Doorbell, Execution, VirtioDevice, VirtioPci};

/// Bytes of guest RAM.
pub(crate) const RAM: u64 = 1 << 20;
/// Entries of the queues the guest sets up.
const QUEUE_SIZE: u16 = 8;
const DESCRIPTORS: u64 = 0;
const AVAILABLE: u64 = 0x400;
const USED: u64 = 0x800;
/// Guest memory a queue's structures are in.
const QUEUE_MEMORY: u64 = 0x1000;

struct Nowhere;
impl InterruptLine for Nowhere {
    fn set(&self, _: bool) {}
}
impl MsiSink for Nowhere {
    fn send(&self, address: u64, _: u32) {
        assert!((0xfee0_0000..0xfef0_0000).contains(&address));
    }
}

/// An empty bus.
pub(crate) fn empty_bus() -> PciHost {
    let lines: [Arc<dyn InterruptLine>; 8] = std::array::from_fn(|_| Arc::new(Nowhere) as _);
    PciHost::new(lines, Arc::new(Nowhere))
}

/// Adds a device to a bus.
pub(crate) fn plug(host: &PciHost, device: impl VirtioDevice + 'static, ram: &Ram) -> Doorbell {
    let slot = host.reserve().expect("a free slot");
    let (msi, line) = (slot.msi(), slot.line());
    let function = VirtioPci::new(Box::new(device), ram.clone(), msi, line, Execution::Inline)
        .expect("a well-formed device");
    let doorbell = function.doorbell();
    host.add(slot, function).expect("room for its BAR");
    doorbell
}

/// What a guest may do.
#[derive(Arbitrary, Debug)]
pub(crate) enum Action {
    /// Writes guest memory.
    Memory { gpa: u16, bytes: Vec<u8> },
    /// Writes a descriptor of a queue.
    Describe { queue: u8, index: u8, gpa: u32, len: u16, flags: u8, next: u8 },
    /// Writes a descriptor with any 64-bit address and 32-bit length.
    DescribeWild { queue: u8, index: u8, gpa: u64, len: u32, flags: u16, next: u16 },
    /// Makes a chain available.
    Offer { queue: u8, head: u8 },
    /// Writes an available index.
    Jump { queue: u8, index: u16 },
    /// Writes a block request's header.
    Header { gpa: u16, kind: u8, sector: u8 },
    /// Rings a doorbell.
    Notify { queue: u8 },
    /// Negotiates and enables queues the way a good driver does.
    Start { features: u64 },
    /// Accesses the BAR.
    Bar { offset: u16, size: u8, write: Option<u64> },
    /// Accesses configuration space.
    Config { offset: u8, size: u8, write: Option<u32> },
    /// Something happens outside: event 0 to 255 of the target's choice.
    Outside(u8),
}

/// A device at slot 1 and the guest's hands on it.
pub(crate) struct Guest {
    ram: Ram,
    host: PciHost,
    ecam: Ecam,
    window: MmioWindow,
    available: [u16; 64],
    /// The device's doorbell.
    pub(crate) doorbell: Doorbell,
}

impl Guest {
    /// A machine with `device`, memory decoding and bus mastering on.
    pub(crate) fn new(device: impl VirtioDevice + 'static) -> Self {
        let ram = Ram::new(RAM).expect("a little memory");
        let host = empty_bus();
        let doorbell = plug(&host, device, &ram);
        let (ecam, window) = (host.ecam(), host.window());
        let mut guest = Self { ram, host, ecam, window, available: [0; 64], doorbell };
        guest.config_write(4, &[6, 0]);
        guest
    }

    fn config_write(&mut self, offset: u64, data: &[u8]) {
        self.ecam.write((1 << 15) + offset, data);
    }

    fn write_memory(&self, gpa: u64, data: &[u8]) {
        let _ = self.ram.write_gpa(gpa, data); // outside RAM nothing happens
    }

    /// Writes a register of the common configuration.
    fn common(&mut self, offset: u64, data: &[u8]) {
        self.window.write(offset, data);
    }

    /// Device status.
    pub(crate) fn status(&mut self) -> u8 {
        let mut status = [0];
        self.window.read(20, &mut status);
        status[0]
    }

    /// Does it.
    pub(crate) fn perform(&mut self, action: &Action) {
        match *action {
            Action::Memory { gpa, ref bytes } => self.write_memory(gpa.into(), bytes),
            Action::Describe { queue, index, gpa, len, flags, next } => {
                let (index, next) = (index % QUEUE_SIZE as u8, next % (QUEUE_SIZE as u8 + 1));
                let gpa = u64::from(gpa) % RAM;
                let flags = u16::from(flags % 8);
                self.describe(queue, index.into(), gpa, len.into(), flags, next.into());
            }
            Action::DescribeWild { queue, index, gpa, len, flags, next } => {
                self.describe(queue, index.into(), gpa, len, flags, next);
            }
            Action::Offer { queue, head } => self.offer(queue, head.into()),
            Action::Jump { queue, index } => {
                self.write_memory(ring(queue) + AVAILABLE + 2, &index.to_le_bytes());
            }
            Action::Header { gpa, kind, sector } => self.header(gpa.into(), kind, sector),
            Action::Notify { queue } => self.notify(queue),
            Action::Start { features } => self.start(features),
            Action::Bar { offset, size, write } => self.bar(offset, size, write),
            Action::Config { offset, size, write } => self.config(offset, size, write),
            Action::Outside(_) => {}
        }
    }

    /// Writes descriptor `index` of a queue.
    pub(crate) fn describe(
        &self,
        queue: u8,
        index: u16,
        gpa: u64,
        len: u32,
        flags: u16,
        next: u16,
    ) {
        let mut bytes = gpa.to_le_bytes().to_vec();
        bytes.extend(len.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(next.to_le_bytes());
        self.write_memory(ring(queue) + DESCRIPTORS + 16 * u64::from(index), &bytes);
    }

    /// Makes the chain at `head` available.
    pub(crate) fn offer(&mut self, queue: u8, head: u16) {
        let next = &mut self.available[usize::from(queue % 64)];
        let slot = u64::from(*next % QUEUE_SIZE);
        *next = next.wrapping_add(1);
        let index = *next;
        self.write_memory(ring(queue) + AVAILABLE + 4 + 2 * slot, &head.to_le_bytes());
        self.write_memory(ring(queue) + AVAILABLE + 2, &index.to_le_bytes());
    }

    /// The used index of a queue.
    pub(crate) fn used_index(&self, queue: u8) -> u16 {
        let mut index = [0; 2];
        self.ram.read_gpa(ring(queue) + USED + 2, &mut index).expect("in RAM");
        u16::from_le_bytes(index)
    }

    /// Writes a block request's header.
    pub(crate) fn header(&self, gpa: u64, kind: u8, sector: u8) {
        let mut header = u32::from(kind).to_le_bytes().to_vec();
        header.extend([0; 4]);
        header.extend(u64::from(sector).to_le_bytes());
        self.write_memory(gpa, &header);
    }

    /// Rings a doorbell.
    pub(crate) fn notify(&mut self, queue: u8) {
        self.window.write(0x3000 + 4 * u64::from(queue), &[queue, 0]);
    }

    /// Negotiates what is offered of `features`, and enables the first queues on fresh rings.
    pub(crate) fn start(&mut self, features: u64) {
        self.common(20, &[0]);
        self.common(20, &[3]);
        for select in 0..2_u32 {
            self.common(0, &select.to_le_bytes());
            let mut offered = [0; 4];
            self.window.read(4, &mut offered);
            let wanted = (features | 1 << 32) >> (32 * select);
            let accepted = u32::from_le_bytes(offered) & wanted as u32;
            self.common(8, &select.to_le_bytes());
            self.common(12, &accepted.to_le_bytes());
        }
        self.common(20, &[11]);
        for queue in 0..2_u8 {
            self.available[usize::from(queue)] = 0;
            self.write_memory(ring(queue), &[0; QUEUE_MEMORY as usize]);
            self.common(22, &[queue, 0]);
            self.common(24, &QUEUE_SIZE.to_le_bytes());
            self.common(32, &(ring(queue) + DESCRIPTORS).to_le_bytes());
            self.common(40, &(ring(queue) + AVAILABLE).to_le_bytes());
            self.common(48, &(ring(queue) + USED).to_le_bytes());
            self.common(28, &[1, 0]);
        }
        self.common(20, &[15]);
    }

    fn bar(&mut self, offset: u16, size: u8, write: Option<u64>) {
        let size = 1 << (size % 4);
        match write {
            Some(value) => self.window.write(offset.into(), &value.to_le_bytes()[..size]),
            None => self.window.read(offset.into(), &mut [0; 8][..size]),
        }
    }

    fn config(&mut self, offset: u8, size: u8, write: Option<u32>) {
        let size = 1 << (size % 3);
        let offset = (1 << 15) + u64::from(offset);
        match write {
            Some(value) => self.ecam.write(offset, &value.to_le_bytes()[..size]),
            None => self.ecam.read(offset, &mut [0; 4][..size]),
        }
    }

    /// Presses the machine's reset button and turns the device on again.
    pub(crate) fn reset(&mut self) {
        self.host.reset();
        self.config_write(4, &[6, 0]);
    }

    /// Reads guest memory.
    pub(crate) fn memory<const N: usize>(&self, gpa: u64) -> [u8; N] {
        let mut data = [0; N];
        self.ram.read_gpa(gpa, &mut data).expect("in RAM");
        data
    }

    /// Writes guest memory inside RAM.
    pub(crate) fn set_memory(&self, gpa: u64, data: &[u8]) {
        self.ram.write_gpa(gpa, data).expect("in RAM");
    }
}

/// GPA of a queue's structures: only the first two queues have their own.
fn ring(queue: u8) -> u64 {
    0x8000 + QUEUE_MEMORY * u64::from(queue % 2)
}
