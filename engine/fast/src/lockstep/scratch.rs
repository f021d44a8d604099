//! A machine whose memory is the guest's, but whose writes go nowhere.
//!
//! What is written is kept in copies of the pages; what is read and written is noted. There are
//! no devices: whoever asks for one has left what can be compared.

use native::HostVectorUnit;
use ram::Ram;
use std::{cell::RefCell, collections::HashMap, io};
use x86::Fault;
use x86_interp::{CodeNews, CpuidResult, GuestRam, RamPage, System, VectorUnit};

const PAGE: u64 = 4096;
/// Accessed and dirty, the bits of a page-table entry that a walk sets.
pub const WALKED: u8 = 0x60;

/// Bytes of guest RAM that were read or written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bytes {
    /// Offset in guest RAM.
    pub offset: u64,
    /// What was read, or what is there now.
    pub data: Vec<u8>,
    /// Bits of the first byte that may be otherwise.
    pub open: u8,
}

/// What has happened to memory, in order.
#[derive(Default)]
pub struct Accesses {
    pub reads: Vec<Bytes>,
    pub writes: Vec<Bytes>,
}

/// The machine.
pub struct Scratch {
    ram: Copies,
    unit: HostVectorUnit,
    left: bool,
}

impl Scratch {
    pub fn new(ram: Ram) -> io::Result<Self> {
        let ram = Copies { below: ram, inner: RefCell::default() };
        Ok(Self { ram, unit: HostVectorUnit::new()?, left: false })
    }

    /// Forgets everything that was written. The pages at these offsets have been written by others.
    pub fn start_over(&mut self, stale: &[u64]) {
        self.left = false;
        let inner = self.ram.inner.get_mut();
        inner.pages.clear();
        inner.accesses = Accesses::default();
        inner.wrote_code = false;
        inner.stale.extend(stale);
    }

    /// Something was asked of a device, or code was written.
    pub fn has_left(&self) -> bool {
        self.left || self.ram.inner.borrow().wrote_code
    }

    /// How many reads and writes there have been.
    pub fn progress(&self) -> [usize; 2] {
        let inner = self.ram.inner.borrow();
        [inner.accesses.reads.len(), inner.accesses.writes.len()]
    }

    pub fn take_accesses(&mut self) -> Accesses {
        std::mem::take(&mut self.ram.inner.get_mut().accesses)
    }

    /// Pages that code has been decoded from and nobody has been told of yet.
    pub fn take_marked(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.ram.inner.get_mut().marked)
    }
}

/// Guest RAM with copies of the pages that were written.
pub struct Copies {
    below: Ram,
    inner: RefCell<Inner>,
}

#[derive(Default)]
struct Inner {
    pages: HashMap<u64, Box<[u8; PAGE as usize]>>,
    accesses: Accesses,
    wrote_code: bool,
    stale: Vec<u64>,
    marked: Vec<u64>,
}

impl Inner {
    fn look(&self, below: &Ram, offset: u64, data: &mut [u8]) {
        match self.pages.get(&(offset & !(PAGE - 1))) {
            Some(page) => data.copy_from_slice(&page[within(offset, data.len())]),
            None => below.read(offset, data),
        }
    }

    fn put(&mut self, below: &Ram, offset: u64, data: &[u8]) {
        let page = self.pages.entry(offset & !(PAGE - 1)).or_insert_with_key(|at| {
            let mut copy = Box::new([0; PAGE as usize]);
            below.read(*at, &mut copy[..]);
            copy
        });
        page[within(offset, data.len())].copy_from_slice(data);
    }
}

fn within(offset: u64, len: usize) -> std::ops::Range<usize> {
    let start = (offset % PAGE) as usize;
    start..start + len
}

impl Copies {
    fn load<const N: usize>(&self, offset: u64) -> [u8; N] {
        let mut data = [0; N];
        self.read(offset, &mut data);
        data
    }

    /// Swaps if it finds what it expects.
    fn swap<const N: usize>(&self, offset: u64, old: [u8; N], new: [u8; N], open: u8) -> [u8; N] {
        let found = self.load(offset);
        if found == old {
            self.write_open(offset, &new, open);
        }
        found
    }

    fn write_open(&self, offset: u64, data: &[u8], open: u8) {
        let mut inner = self.inner.borrow_mut();
        inner.put(&self.below, offset, data);
        inner.accesses.writes.push(Bytes { offset, data: data.to_vec(), open });
    }
}

/// Bits of the first byte that a swap may set or not: a walk of the page tables sets some that
/// one with another TLB need not set.
fn open_bits(size: usize, old: u64, new: u64) -> u8 {
    let walk = size == 8 && old | new == new && (old ^ new) & !u64::from(WALKED) == 0;
    if walk { WALKED } else { 0 }
}

impl GuestRam for Copies {
    fn page(&self, gpa: u64) -> Option<RamPage> {
        self.below.page(gpa)
    }
    fn load8(&self, offset: u64) -> u8 {
        u8::from_le_bytes(self.load(offset))
    }
    fn load16(&self, offset: u64) -> u16 {
        u16::from_le_bytes(self.load(offset))
    }
    fn load32(&self, offset: u64) -> u32 {
        u32::from_le_bytes(self.load(offset))
    }
    fn load64(&self, offset: u64) -> u64 {
        u64::from_le_bytes(self.load(offset))
    }
    fn store8(&self, offset: u64, value: u8) {
        self.write(offset, &value.to_le_bytes());
    }
    fn store16(&self, offset: u64, value: u16) {
        self.write(offset, &value.to_le_bytes());
    }
    fn store32(&self, offset: u64, value: u32) {
        self.write(offset, &value.to_le_bytes());
    }
    fn store64(&self, offset: u64, value: u64) {
        self.write(offset, &value.to_le_bytes());
    }
    fn read(&self, offset: u64, data: &mut [u8]) {
        let mut inner = self.inner.borrow_mut();
        inner.look(&self.below, offset, data);
        inner.accesses.reads.push(Bytes { offset, data: data.to_vec(), open: 0 });
    }
    fn write(&self, offset: u64, data: &[u8]) {
        self.write_open(offset, data, 0);
    }
    fn cas(&self, offset: u64, size: usize, old: u64, new: u64) -> u64 {
        let open = open_bits(size, old, new);
        let (from, to) = (old.to_le_bytes(), new.to_le_bytes());
        macro_rules! swap {
            ($n:literal) => {{
                let part = |bytes: [u8; 8]| <[u8; $n]>::try_from(&bytes[..$n]).unwrap_or_default();
                let found = self.swap::<$n>(offset, part(from), part(to), open);
                let mut all = [0; 8];
                all[..$n].copy_from_slice(&found);
                u64::from_le_bytes(all)
            }};
        }
        match size {
            1 => swap!(1),
            2 => swap!(2),
            4 => swap!(4),
            _ => swap!(8),
        }
    }
    fn cas_split(&self, offset: u64, second: u64, size: usize, old: u64, new: u64) -> u64 {
        let here = (PAGE - offset % PAGE) as usize;
        let mut bytes = [0; 8];
        let (head, tail) = bytes[..size].split_at_mut(here);
        self.read(offset, head);
        self.read(second, tail);
        let found = u64::from_le_bytes(bytes);
        if found == old {
            let bytes = new.to_le_bytes();
            self.write(offset, &bytes[..here]);
            self.write(second, &bytes[here..size]);
        }
        found
    }
    fn cas128(&self, offset: u64, old: u128, new: u128) -> u128 {
        u128::from_le_bytes(self.swap::<16>(offset, old.to_le_bytes(), new.to_le_bytes(), 0))
    }
    fn mark_code(&self, offset: u64) -> bool {
        let new = self.below.mark_code(offset);
        if new {
            self.inner.borrow_mut().marked.push(offset);
        }
        new
    }
    fn is_code(&self, offset: u64) -> bool {
        self.below.is_code(offset)
    }
    fn note_write(&self, _: u64, _: u64) {
        self.inner.borrow_mut().wrote_code = true;
    }
    fn has_stale_code(&self) -> bool {
        !self.inner.borrow().stale.is_empty()
    }
    fn take_code_news(&self) -> CodeNews {
        let stale = std::mem::take(&mut self.inner.borrow_mut().stale);
        CodeNews { stale, ..CodeNews::default() }
    }
}

impl System for Scratch {
    type Ram = Copies;

    fn ram(&self) -> &Copies {
        &self.ram
    }
    fn pending(&self) -> u32 {
        0
    }
    fn mmio_read(&mut self, _: u64, data: &mut [u8]) {
        self.left = true;
        data.fill(0xff);
    }
    fn mmio_write(&mut self, _: u64, _: &[u8]) {
        self.left = true;
    }
    fn port_read(&mut self, _: u16, _: u8) -> u32 {
        self.left = true;
        u32::MAX
    }
    fn port_write(&mut self, _: u16, _: u8, _: u32) {
        self.left = true;
    }
    fn msr_read(&mut self, _: u32) -> Result<u64, Fault> {
        self.left = true;
        Ok(0)
    }
    fn msr_write(&mut self, _: u32, _: u64) -> Result<(), Fault> {
        self.left = true;
        Ok(())
    }
    fn cpuid(&self, _: u32, _: u32) -> CpuidResult {
        CpuidResult::default()
    }
    fn tsc(&mut self) -> u64 {
        self.left = true;
        0
    }
    fn random(&mut self) -> Option<u64> {
        self.left = true;
        None
    }
    fn cr8(&mut self) -> u8 {
        self.left = true;
        0
    }
    fn set_cr8(&mut self, _: u8) {
        self.left = true;
    }
    fn vector_unit(&mut self) -> &mut dyn VectorUnit {
        &mut self.unit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_stay_here() {
        let ram = Ram::new(1 << 20).expect("memory");
        ram.store64(0x1000, 5);
        let mut scratch = Scratch::new(ram.clone()).expect("a vector unit");
        scratch.ram().store64(0x1004, 7);
        assert_eq!(scratch.ram().load32(0x1004), 7);
        assert_eq!(ram.load64(0x1000), 5);
        assert_eq!(scratch.progress(), [1, 1]);
        scratch.start_over(&[]);
        assert_eq!(scratch.ram().load64(0x1000), 5);
    }

    #[test]
    fn a_swap_needs_what_it_expects() {
        let scratch = Scratch::new(Ram::new(1 << 20).expect("memory")).expect("a vector unit");
        let ram = scratch.ram();
        assert_eq!(ram.cas(8, 4, 1, 2), 0);
        assert_eq!(ram.cas(8, 4, 0, 2), 0);
        assert_eq!(ram.load64(8), 2);
        assert_eq!(ram.cas128(16, 0, 1 << 100), 0);
        assert_eq!(ram.cas128(16, 0, 0), 1 << 100);
        assert_eq!(scratch.progress()[1], 2);
    }

    #[test]
    fn the_marks_of_a_page_walk_are_open() {
        let mut scratch = Scratch::new(Ram::new(1 << 20).expect("memory")).expect("a vector unit");
        scratch.ram().cas(0, 8, 0, 0x60);
        scratch.ram().cas(8, 8, 0, 0x61);
        assert_eq!(scratch.ram().load64(0), 0x60);
        let open: Vec<u8> = scratch.take_accesses().writes.iter().map(|w| w.open).collect();
        assert_eq!(open, [0x60, 0]);
    }
}
