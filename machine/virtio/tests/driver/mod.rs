//! A small virtio driver that finds and drives a device the way a guest does: through configuration
//! space, BARs and rings in guest memory.

#![allow(dead_code)] // each test program uses a part

use bus::{Device, InterruptLine, MsiSink};
use pci::{ECAM_BASE, Ecam, MmioWindow, PciHost, WINDOW_BASE};
use ram::Ram;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use virtio::{Doorbell, Execution, RequestLog, VirtioDevice, VirtioPci};

host::choose!(host_linux::Linux);

pub const INDIRECT_DESC: u64 = 1 << 28;
pub const EVENT_IDX: u64 = 1 << 29;
pub const VERSION_1: u64 = 1 << 32;
pub const RING_RESET: u64 = 1 << 40;

pub const ACKNOWLEDGE: u8 = 1;
pub const DRIVER: u8 = 2;
pub const DRIVER_OK: u8 = 4;
pub const FEATURES_OK: u8 = 8;
pub const NEEDS_RESET: u8 = 64;

pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
pub const INDIRECT: u16 = 4;

/// Bytes of test RAM.
pub const RAM: u64 = 16 << 20;
/// Entries of every test queue.
pub const SIZE: u16 = 16;

#[derive(Default)]
pub struct Messages(pub Mutex<Vec<(u64, u32)>>);
impl MsiSink for Messages {
    fn send(&self, address: u64, data: u32) {
        self.0.lock().unwrap().push((address, data));
    }
}

#[derive(Default)]
pub struct Level(pub AtomicBool);
impl InterruptLine for Level {
    fn set(&self, level: bool) {
        self.0.store(level, Ordering::SeqCst);
    }
}

/// A machine with one device, and what the driver found out about it.
pub struct TestMachine {
    pub ram: Ram,
    pub messages: Arc<Messages>,
    pub lines: [Arc<Level>; 8],
    pub host: PciHost,
    pub doorbell: Doorbell,
    pub log: Arc<RequestLog>,
    ecam: Ecam,
    window: MmioWindow,
    /// GPAs of the structures by cfg_type.
    structures: [u64; 5],
    notify_multiplier: u64,
}

impl TestMachine {
    pub fn new(device: impl VirtioDevice + 'static) -> Self {
        Self::with_execution(device, Execution::Inline)
    }

    pub fn with_execution(device: impl VirtioDevice + 'static, execution: Execution) -> Self {
        let ram = Ram::new(RAM).unwrap();
        let messages = Arc::new(Messages::default());
        let lines: [Arc<Level>; 8] = std::array::from_fn(|_| Arc::new(Level::default()));
        let host = PciHost::new(lines.clone().map(|line| line as _), messages.clone());
        let slot = host.reserve().unwrap();
        let (msi, line) = (slot.msi(), slot.line());
        let function = VirtioPci::new(Box::new(device), ram.clone(), msi, line, execution).unwrap();
        let (doorbell, log) = (function.doorbell(), function.request_log().clone());
        host.add(slot, function).unwrap();
        let (ecam, window) = (host.ecam(), host.window());
        let mut machine = Self {
            ram,
            messages,
            lines,
            host,
            doorbell,
            log,
            ecam,
            window,
            structures: [0; 5],
            notify_multiplier: 0,
        };
        machine.probe();
        machine
    }

    /// Enables memory and bus mastering, and walks the capabilities.
    fn probe(&mut self) {
        assert_eq!(self.config(0) & 0xffff, 0x1af4);
        self.set_config(4, 0x0006);
        for (at, id) in self.capabilities() {
            let cfg_type = (self.config(at) >> 24) as usize;
            if id == 9 && cfg_type < 5 {
                let index = self.config(at + 4) as u8;
                self.structures[cfg_type] = self.bar(index) + u64::from(self.config(at + 8));
                if cfg_type == 2 {
                    self.notify_multiplier = u64::from(self.config(at + 16));
                }
            }
        }
    }

    /// Offsets and IDs of the capabilities.
    pub fn capabilities(&mut self) -> Vec<(u64, u8)> {
        let mut list = Vec::new();
        let mut at = u64::from(self.config(0x34) & 0xff);
        while at != 0 {
            let header = self.config(at);
            list.push((at, header as u8));
            at = u64::from(header >> 8 & 0xff);
        }
        list
    }

    pub fn bar(&mut self, index: u8) -> u64 {
        let at = 0x10 + 4 * u64::from(index);
        u64::from(self.config(at) & !0xf) | u64::from(self.config(at + 4)) << 32
    }

    /// Reads a dword of slot 1's configuration space.
    pub fn config(&mut self, offset: u64) -> u32 {
        let mut data = [0; 4];
        self.ecam.read((1 << 15) + offset, &mut data);
        u32::from_le_bytes(data)
    }

    pub fn set_config(&mut self, offset: u64, value: u32) {
        self.ecam.write((1 << 15) + offset, &value.to_le_bytes());
    }

    pub fn mmio_read<const N: usize>(&mut self, gpa: u64) -> [u8; N] {
        let mut data = [0; N];
        self.window.read(gpa - WINDOW_BASE, &mut data);
        data
    }

    pub fn mmio_write(&mut self, gpa: u64, data: &[u8]) {
        assert!(gpa < ECAM_BASE);
        self.window.write(gpa - WINDOW_BASE, data);
    }

    /// GPA of the structure of a cfg_type: 1 common, 2 notify, 3 ISR, 4 device.
    pub fn structure(&self, cfg_type: usize) -> u64 {
        self.structures[cfg_type]
    }

    pub fn common<const N: usize>(&mut self, offset: u64) -> [u8; N] {
        self.mmio_read(self.structures[1] + offset)
    }

    pub fn set_common(&mut self, offset: u64, data: &[u8]) {
        self.mmio_write(self.structures[1] + offset, data);
    }

    pub fn status(&mut self) -> u8 {
        self.common::<1>(20)[0]
    }

    pub fn set_status(&mut self, status: u8) {
        self.set_common(20, &[status]);
    }

    pub fn isr(&mut self) -> u8 {
        self.mmio_read::<1>(self.structures[3])[0]
    }

    pub fn device_config<const N: usize>(&mut self, offset: u64) -> [u8; N] {
        self.mmio_read(self.structures[4] + offset)
    }

    pub fn offered(&mut self) -> u64 {
        (0..2).fold(0, |features, select: u32| {
            self.set_common(0, &select.to_le_bytes());
            features | u64::from(u32::from_le_bytes(self.common(4))) << (32 * select)
        })
    }

    pub fn accept(&mut self, features: u64) {
        for select in 0..2_u32 {
            self.set_common(8, &select.to_le_bytes());
            self.set_common(12, &((features >> (32 * select)) as u32).to_le_bytes());
        }
    }

    /// Negotiates, enables all queues and becomes ready.
    pub fn start(&mut self, features: u64) -> Vec<Ring> {
        let rings = self.prepare(features);
        self.set_status(ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
        assert_eq!(self.status(), ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
        rings
    }

    /// Everything before DRIVER_OK.
    pub fn prepare(&mut self, features: u64) -> Vec<Ring> {
        self.set_status(0);
        self.set_status(ACKNOWLEDGE);
        self.set_status(ACKNOWLEDGE | DRIVER);
        self.accept(features);
        self.set_status(ACKNOWLEDGE | DRIVER | FEATURES_OK);
        assert_eq!(self.status(), ACKNOWLEDGE | DRIVER | FEATURES_OK);
        let queues = u16::from_le_bytes(self.common(18));
        (0..queues).map(|index| self.enable(index)).collect()
    }

    /// Sets one queue up, with MSI-X vector `index` + 1.
    pub fn enable(&mut self, index: u16) -> Ring {
        let ring = Ring::new(&self.ram, index);
        self.place(index, &ring);
        self.set_common(28, &1_u16.to_le_bytes());
        ring
    }

    /// Writes a queue's registers, all but queue_enable.
    pub fn place(&mut self, index: u16, ring: &Ring) {
        self.set_common(22, &index.to_le_bytes());
        self.set_common(24, &SIZE.to_le_bytes());
        self.set_common(26, &(index + 1).to_le_bytes());
        self.set_common(32, &ring.descriptors.to_le_bytes());
        self.set_common(40, &ring.available.to_le_bytes());
        self.set_common(48, &ring.used.to_le_bytes());
    }

    pub fn notify(&mut self, queue: u16) {
        let multiplier = self.notify_multiplier;
        let gpa = self.structures[2] + u64::from(queue) * multiplier;
        self.mmio_write(gpa, &queue.to_le_bytes());
    }

    /// What a queue's doorbell does, as far as others may ring it.
    pub fn bell(&mut self, queue: u16) -> Option<bus::Bell> {
        let gpa = self.structures[2] + u64::from(queue) * self.notify_multiplier;
        self.window.bell(gpa - WINDOW_BASE)
    }

    /// Programs and unmasks the vectors and turns MSI-X on. Vector v sends data 0x40 + v.
    pub fn enable_msix(&mut self, vectors: u32) {
        let (at, _) = self.capabilities().into_iter().find(|&(_, id)| id == 0x11).unwrap();
        let place = self.config(at + 4);
        let table = self.bar((place & 7) as u8) + u64::from(place & !7);
        for vector in 0..vectors {
            let entry = table + 16 * u64::from(vector);
            self.mmio_write(entry, &0xfee0_0000_u64.to_le_bytes());
            self.mmio_write(entry + 8, &(0x40 + vector).to_le_bytes());
            self.mmio_write(entry + 12, &0_u32.to_le_bytes());
        }
        self.set_config(at, 1 << 31);
        self.set_common(16, &0_u16.to_le_bytes());
    }

    /// Data of the messages sent since the last call.
    pub fn take_messages(&self) -> Vec<u32> {
        self.messages.0.lock().unwrap().drain(..).map(|(_, data)| data).collect()
    }

    /// Whether the device's INTA# (slot 1, so GSI 18) is high.
    pub fn line_is_high(&self) -> bool {
        self.lines[2].0.load(Ordering::SeqCst)
    }
}

/// A split ring in guest memory, driver side.
pub struct Ring {
    pub ram: Ram,
    pub descriptors: u64,
    pub available: u64,
    pub used: u64,
    next_available: u16,
    next_used: u16,
}

/// A descriptor as the driver writes it.
#[derive(Clone, Copy)]
pub struct Desc(pub u64, pub u32, pub u16, pub u16);

impl Ring {
    fn new(ram: &Ram, index: u16) -> Self {
        let base = 0x10_0000 + 0x4000 * u64::from(index);
        ram.write_gpa(base, &[0; 0x4000]).unwrap();
        Self {
            ram: ram.clone(),
            descriptors: base,
            available: base + 0x1000,
            used: base + 0x2000,
            next_available: 0,
            next_used: 0,
        }
    }

    pub fn read16(&self, gpa: u64) -> u16 {
        let mut data = [0; 2];
        self.ram.read_gpa(gpa, &mut data).unwrap();
        u16::from_le_bytes(data)
    }

    pub fn write16(&self, gpa: u64, value: u16) {
        self.ram.write_gpa(gpa, &value.to_le_bytes()).unwrap();
    }

    /// Writes descriptor `index` of the table at `table`.
    pub fn describe_in(&self, table: u64, index: u16, Desc(address, len, flags, next): Desc) {
        let mut bytes = address.to_le_bytes().to_vec();
        bytes.extend(len.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(next.to_le_bytes());
        self.ram.write_gpa(table + 16 * u64::from(index), &bytes).unwrap();
    }

    pub fn describe(&self, index: u16, descriptor: Desc) {
        self.describe_in(self.descriptors, index, descriptor);
    }

    /// Makes the chain at `head` available.
    pub fn offer(&mut self, head: u16) {
        self.write16(self.available + 4 + 2 * u64::from(self.next_available % SIZE), head);
        self.next_available = self.next_available.wrapping_add(1);
        self.write16(self.available + 2, self.next_available);
    }

    /// Links buffers (address, bytes, device writes) into a chain from descriptor 0 and offers it.
    pub fn offer_chain(&mut self, buffers: &[(u64, u32, bool)]) {
        for (i, &(address, len, writable)) in buffers.iter().enumerate() {
            let last = i + 1 == buffers.len();
            let flags = if last { 0 } else { NEXT } | if writable { WRITE } else { 0 };
            self.describe(i as u16, Desc(address, len, flags, i as u16 + 1));
        }
        self.offer(0);
    }

    /// Takes a used element: head and bytes written.
    pub fn take_used(&mut self) -> Option<(u32, u32)> {
        if self.read16(self.used + 2) == self.next_used {
            return None;
        }
        let mut data = [0; 8];
        let slot = u64::from(self.next_used % SIZE);
        self.ram.read_gpa(self.used + 4 + 8 * slot, &mut data).unwrap();
        self.next_used = self.next_used.wrapping_add(1);
        let word = |at: usize| u32::from_le_bytes(data[at..at + 4].try_into().unwrap());
        Some((word(0), word(4)))
    }

    /// Whether the device asked for a notification at the current available index (EVENT_IDX).
    pub fn available_event(&self) -> u16 {
        self.read16(self.used + 4 + 8 * u64::from(SIZE))
    }

    /// Sets used_event (EVENT_IDX).
    pub fn set_used_event(&self, index: u16) {
        self.write16(self.available + 4 + 2 * u64::from(SIZE), index);
    }
}
