//! The block device, driven as a guest does, on a fake disk.

mod driver;

use driver::{EVENT_IDX, INDIRECT_DESC, NEEDS_RESET, Ring, TestMachine, VERSION_1};
use std::io;
use std::sync::{Arc, Mutex};
use virtio::{Block, BlockBackend, Execution};

const FLUSH: u64 = 1 << 9;
const CONFIG_WCE: u64 = 1 << 11;
const DISCARD: u64 = 1 << 13;
const WRITE_ZEROES: u64 = 1 << 14;
const RO: u64 = 1 << 5;

const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH_REQUEST: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD_REQUEST: u32 = 11;
const ZEROES_REQUEST: u32 = 13;

const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPP: u8 = 2;

const HEADER: u64 = 0x20_0000;
const DATA: u64 = 0x20_1000;
const STATUS: u64 = 0x20_0800;

/// A disk in memory that counts flushes and fails where told.
#[derive(Default)]
struct Disk {
    bytes: Vec<u8>,
    flushes: usize,
    bad_offset: Option<u64>,
    flush_fails: bool,
    read_only: bool,
}

#[derive(Clone, Default)]
struct FakeDisk(Arc<Mutex<Disk>>);

impl FakeDisk {
    fn new(sectors: usize) -> Self {
        let bytes = (0..sectors * 512).map(|i| (i / 512) as u8).collect();
        Self(Arc::new(Mutex::new(Disk { bytes, ..Disk::default() })))
    }

    fn with<T>(&self, f: impl FnOnce(&mut Disk) -> T) -> T {
        f(&mut self.0.lock().unwrap())
    }
}

impl Disk {
    fn range(&self, offset: u64, len: usize) -> io::Result<std::ops::Range<usize>> {
        let range = offset as usize..offset as usize + len;
        match self.bad_offset {
            Some(bad) if range.contains(&(bad as usize)) => Err(io::Error::other("bad sector")),
            _ => Ok(range),
        }
    }
}

impl BlockBackend for FakeDisk {
    fn len(&self) -> u64 {
        self.with(|disk| disk.bytes.len() as u64)
    }
    fn is_read_only(&self) -> bool {
        self.with(|disk| disk.read_only)
    }
    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.with(|disk| {
            let range = disk.range(offset, data.len())?;
            data.copy_from_slice(&disk.bytes[range]);
            Ok(())
        })
    }
    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.with(|disk| {
            let range = disk.range(offset, data.len())?;
            disk.bytes[range].copy_from_slice(data);
            Ok(())
        })
    }
    fn flush(&mut self) -> io::Result<()> {
        self.with(|disk| {
            disk.flushes += 1;
            if disk.flush_fails { Err(io::Error::other("no flush")) } else { Ok(()) }
        })
    }
    fn discard(&mut self, offset: u64, len: u64) -> io::Result<()> {
        self.write_zeroes(offset, len, true)
    }
    fn write_zeroes(&mut self, offset: u64, len: u64, _: bool) -> io::Result<()> {
        self.with(|disk| {
            let range = disk.range(offset, len as usize)?;
            disk.bytes[range].fill(0);
            Ok(())
        })
    }
}

/// A started block device.
struct Driver {
    machine: TestMachine,
    ring: Ring,
}

impl Driver {
    fn new(disk: &FakeDisk, features: u64) -> Self {
        let mut machine = TestMachine::new(Block::new(Box::new(disk.clone()), "serial-42"));
        let ring = machine.start(features | VERSION_1).remove(0);
        Self { machine, ring }
    }

    fn header(&self, kind: u32, sector: u64) {
        let mut header = kind.to_le_bytes().to_vec();
        header.extend([0; 4]);
        header.extend(sector.to_le_bytes());
        self.machine.ram.write_gpa(HEADER, &header).unwrap();
        self.machine.ram.write_gpa(STATUS, &[0xee]).unwrap();
    }

    /// Sends a request with `len` data bytes at [`DATA`]; returns status and used length.
    fn request(&mut self, kind: u32, sector: u64, len: u32) -> (u8, u32) {
        self.header(kind, sector);
        let device_writes = matches!(kind, IN | GET_ID);
        let mut chain = vec![(HEADER, 16, false), (DATA, len, device_writes), (STATUS, 1, true)];
        if len == 0 {
            chain.remove(1);
        }
        self.ring.offer_chain(&chain);
        self.machine.notify(0);
        let (head, written) = self.ring.take_used().expect("request was answered");
        assert_eq!(head, 0);
        (self.status(), written)
    }

    fn status(&self) -> u8 {
        let mut status = [0];
        self.machine.ram.read_gpa(STATUS, &mut status).unwrap();
        status[0]
    }

    fn data(&self, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        self.machine.ram.read_gpa(DATA, &mut data).unwrap();
        data
    }

    fn set_data(&self, data: &[u8]) {
        self.machine.ram.write_gpa(DATA, data).unwrap();
    }

    fn set_range(&self, sector: u64, sectors: u32, flags: u32) {
        let mut range = sector.to_le_bytes().to_vec();
        range.extend(sectors.to_le_bytes());
        range.extend(flags.to_le_bytes());
        self.set_data(&range);
    }
}

#[test]
fn reads_and_writes_sectors() {
    let disk = FakeDisk::new(1024);
    let mut driver = Driver::new(&disk, FLUSH);
    assert_eq!(driver.machine.device_config::<8>(0), 1024_u64.to_le_bytes());
    assert_eq!(driver.request(IN, 3, 1024), (OK, 1025));
    assert_eq!(driver.data(1024), [[3; 512], [4; 512]].concat());
    driver.set_data(&[0xab; 512]);
    assert_eq!(driver.request(OUT, 1023, 512), (OK, 1));
    assert_eq!(disk.with(|disk| disk.bytes[1023 * 512..].to_vec()), [0xab; 512]);
    assert_eq!(disk.with(|disk| disk.flushes), 0, "the driver flushes");
    assert_eq!(driver.request(FLUSH_REQUEST, 0, 0), (OK, 1));
    assert_eq!(disk.with(|disk| disk.flushes), 1);
}

#[test]
fn large_requests_cross_pieces() {
    let disk = FakeDisk::new(4096);
    let mut driver = Driver::new(&disk, FLUSH);
    let len = 1 << 20;
    assert_eq!(driver.request(IN, 100, len), (OK, len + 1));
    let expected = disk.with(|disk| disk.bytes[100 * 512..][..len as usize].to_vec());
    assert!(driver.data(len as usize) == expected);
    assert_eq!(driver.request(OUT, 1, len), (OK, 1));
    assert!(disk.with(|disk| disk.bytes[512..][..len as usize].to_vec()) == expected);
}

#[test]
fn framing_is_arbitrary() {
    let disk = FakeDisk::new(16);
    let mut driver = Driver::new(&disk, FLUSH);
    driver.header(IN, 5);
    // A header in three pieces, and status in one buffer with the end of the data.
    let chain = [
        (HEADER, 3, false),
        (HEADER + 3, 12, false),
        (HEADER + 15, 1, false),
        (DATA, 1, true),
        (DATA + 1, 512, true),
    ];
    driver.ring.offer_chain(&chain);
    driver.machine.notify(0);
    assert_eq!(driver.ring.take_used(), Some((0, 513)));
    assert_eq!(driver.data(513), [vec![5; 512], vec![OK]].concat());
}

#[test]
fn indirect_chains() {
    let disk = FakeDisk::new(16);
    let mut driver = Driver::new(&disk, FLUSH | INDIRECT_DESC);
    driver.header(IN, 7);
    let table = 0x30_0000;
    let ring = &mut driver.ring;
    ring.describe_in(table, 0, driver::Desc(HEADER, 16, driver::NEXT, 1));
    ring.describe_in(table, 1, driver::Desc(DATA, 512, driver::NEXT | driver::WRITE, 2));
    ring.describe_in(table, 2, driver::Desc(STATUS, 1, driver::WRITE, 0));
    ring.describe(4, driver::Desc(table, 48, driver::INDIRECT, 0));
    ring.offer(4);
    driver.machine.notify(0);
    assert_eq!(driver.ring.take_used(), Some((4, 513)));
    assert_eq!((driver.status(), driver.data(512)), (OK, vec![7; 512]));
}

#[test]
fn bad_requests_get_an_error_status() {
    let disk = FakeDisk::new(16);
    let before = disk.with(|disk| disk.bytes.clone());
    let mut driver = Driver::new(&disk, FLUSH);
    assert_eq!(driver.request(IN, 16, 512), (IOERR, 0), "beyond the end");
    assert_eq!(driver.request(IN, 15, 1024), (IOERR, 0), "across the end");
    assert_eq!(driver.request(IN, u64::MAX, 512), (IOERR, 0), "sector overflows");
    assert_eq!(driver.request(IN, u64::MAX >> 9, 512), (IOERR, 0), "end overflows");
    assert_eq!(driver.request(IN, 0, 100), (IOERR, 0), "part of a sector");
    assert_eq!(driver.request(OUT, 0, 511), (IOERR, 1), "part of a sector");
    assert_eq!(driver.request(OUT, 16, 512), (IOERR, 1));
    assert_eq!(driver.request(0x55, 0, 512), (UNSUPP, 1));
    assert_eq!(driver.request(DISCARD_REQUEST, 0, 16), (UNSUPP, 1), "not negotiated");
    assert_eq!(disk.with(|disk| disk.bytes.clone()), before);

    driver.ring.offer_chain(&[(HEADER, 15, false), (STATUS, 1, true)]);
    driver.machine.notify(0);
    assert_eq!((driver.ring.take_used(), driver.status()), (Some((0, 1)), IOERR), "short header");
    driver.ring.offer_chain(&[(STATUS, 1, true)]);
    driver.machine.notify(0);
    assert_eq!((driver.ring.take_used(), driver.status()), (Some((0, 1)), IOERR), "no header");
    assert_eq!(driver.machine.status() & NEEDS_RESET, 0);
    assert_eq!(driver.request(IN, 2, 512), (OK, 513), "still works");
}

#[test]
fn no_room_for_a_status_needs_reset() {
    let mut driver = Driver::new(&FakeDisk::new(16), FLUSH);
    driver.header(FLUSH_REQUEST, 0);
    driver.ring.offer_chain(&[(HEADER, 16, false)]);
    driver.machine.notify(0);
    assert_eq!(driver.ring.take_used(), None);
    assert_eq!(driver.machine.status() & NEEDS_RESET, NEEDS_RESET);
}

#[test]
fn host_errors_are_reported() {
    let disk = FakeDisk::new(1024);
    let mut driver = Driver::new(&disk, FLUSH);
    disk.with(|disk| disk.bad_offset = Some(300 * 512));
    assert_eq!(driver.request(IN, 0, 400 * 512), (IOERR, 0), "no partial success");
    assert_eq!(driver.request(OUT, 300, 512), (IOERR, 1));
    disk.with(|disk| disk.flush_fails = true);
    assert_eq!(driver.request(FLUSH_REQUEST, 0, 0).0, IOERR);
}

#[test]
fn without_a_cache_every_write_is_flushed() {
    let disk = FakeDisk::new(16);
    let mut driver = Driver::new(&disk, 0);
    assert_eq!(driver.request(OUT, 0, 512), (OK, 1));
    assert_eq!(disk.with(|disk| disk.flushes), 1, "the driver cannot flush");

    let mut driver = Driver::new(&disk, FLUSH | CONFIG_WCE);
    let writeback = driver.machine.structure(4) + 32;
    assert_eq!(driver.machine.mmio_read::<1>(writeback), [1]);
    assert_eq!(driver.request(OUT, 0, 512), (OK, 1));
    assert_eq!(disk.with(|disk| disk.flushes), 1);
    driver.machine.mmio_write(writeback, &[0]);
    assert_eq!(driver.machine.mmio_read::<1>(writeback), [0]);
    assert_eq!(driver.request(OUT, 0, 512), (OK, 1));
    assert_eq!(disk.with(|disk| disk.flushes), 2);
    disk.with(|disk| disk.flush_fails = true);
    assert_eq!(driver.request(OUT, 0, 512).0, IOERR, "not stable, so not done");
}

#[test]
fn read_only_disks_refuse_writes() {
    let disk = FakeDisk::new(16);
    disk.with(|disk| disk.read_only = true);
    let before = disk.with(|disk| disk.bytes.clone());
    let mut driver = Driver::new(&disk, FLUSH | RO);
    let offered = driver.machine.offered();
    assert_eq!(offered & (RO | DISCARD | WRITE_ZEROES), RO);
    assert_eq!(driver.request(OUT, 0, 512).0, IOERR);
    assert_eq!(driver.request(ZEROES_REQUEST, 0, 16).0, UNSUPP);
    assert_eq!(driver.request(IN, 1, 512), (OK, 513));
    assert_eq!(disk.with(|disk| disk.bytes.clone()), before);
}

#[test]
fn discard_and_write_zeroes() {
    let disk = FakeDisk::new(16);
    let mut driver = Driver::new(&disk, FLUSH | DISCARD | WRITE_ZEROES);
    driver.set_range(2, 3, 1);
    assert_eq!(driver.request(ZEROES_REQUEST, 0, 16), (OK, 1));
    assert!(disk.with(|disk| disk.bytes[2 * 512..5 * 512].iter().all(|&byte| byte == 0)));
    assert_eq!(disk.with(|disk| (disk.bytes[2 * 512 - 1], disk.bytes[5 * 512])), (1, 5));
    driver.set_range(8, 8, 0);
    assert_eq!(driver.request(DISCARD_REQUEST, 0, 16), (OK, 1));
    assert_eq!(disk.with(|disk| disk.bytes[8 * 512]), 0);

    driver.set_range(8, 1, 1);
    assert_eq!(driver.request(DISCARD_REQUEST, 0, 16).0, UNSUPP, "discard knows no flag");
    driver.set_range(5, 12, 0);
    assert_eq!(driver.request(ZEROES_REQUEST, 0, 16).0, IOERR, "across the end");
    driver.set_range(0, u32::MAX, 0);
    assert_eq!(driver.request(ZEROES_REQUEST, 0, 16).0, IOERR, "more than max_sectors");
    assert_eq!(driver.request(ZEROES_REQUEST, 0, 15).0, IOERR, "part of a range");
    assert_eq!(driver.request(ZEROES_REQUEST, 0, 0).0, IOERR, "no range");
    assert_eq!(driver.request(ZEROES_REQUEST, 0, 9 * 16).0, IOERR, "too many ranges");
    assert_eq!(driver.request(DISCARD_REQUEST, 0, 33 * 16).0, IOERR, "too many ranges");
    assert_eq!(disk.with(|disk| disk.bytes[5 * 512]), 5);
}

#[test]
fn serial_number() {
    let mut driver = Driver::new(&FakeDisk::new(1), FLUSH);
    assert_eq!(driver.request(GET_ID, 0, 20), (OK, 21));
    assert_eq!(driver.data(20), b"serial-42\0\0\0\0\0\0\0\0\0\0\0");
}

#[test]
fn a_worker_serves_requests() {
    let disk = FakeDisk::new(64);
    let block = Block::new(Box::new(disk), "");
    let mut machine = TestMachine::with_execution(block, Execution::Worker);
    let ring = machine.start(VERSION_1 | EVENT_IDX | FLUSH).remove(0);
    let mut driver = Driver { machine, ring };
    for sector in 0..64 {
        driver.header(IN, sector);
        driver.ring.offer_chain(&[(HEADER, 16, false), (DATA, 512, true), (STATUS, 1, true)]);
        driver.machine.notify(0);
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while driver.ring.take_used().is_none() {
            assert!(std::time::Instant::now() < deadline, "no answer for sector {sector}");
            std::thread::yield_now();
        }
        assert_eq!(driver.data(512), [sector as u8; 512]);
    }
    drop(driver); // joins the worker
}

/// A disk whose reads take a while.
struct SlowDisk(FakeDisk);

impl BlockBackend for SlowDisk {
    fn len(&self) -> u64 {
        self.0.len()
    }
    fn is_read_only(&self) -> bool {
        true
    }
    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        std::thread::sleep(std::time::Duration::from_millis(2));
        self.0.read_at(offset, data)
    }
    fn write_at(&mut self, _: u64, _: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
    fn discard(&mut self, _: u64, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
    fn write_zeroes(&mut self, _: u64, _: u64, _: bool) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

#[test]
fn after_a_reset_the_worker_leaves_memory_alone() {
    let block = Block::new(Box::new(SlowDisk(FakeDisk::new(64))), "");
    let mut machine = TestMachine::with_execution(block, Execution::Worker);
    for round in 0..50 {
        let ring = machine.start(VERSION_1 | FLUSH).remove(0);
        let mut driver = Driver { machine, ring };
        driver.header(IN, 9);
        driver.set_data(&[0xcc; 512]);
        for _ in 0..3 {
            driver.ring.offer_chain(&[(HEADER, 16, false), (DATA, 512, true), (STATUS, 1, true)]);
        }
        driver.machine.notify(0);
        std::thread::sleep(std::time::Duration::from_micros(100 * (round % 30)));
        driver.machine.set_status(0);
        driver.set_data(&[0xdd; 512]);
        std::thread::sleep(std::time::Duration::from_millis(3));
        assert_eq!(driver.data(512), [0xdd; 512], "round {round}");
        machine = driver.machine;
    }
}
