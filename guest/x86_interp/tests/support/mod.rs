//! A small fake machine: RAM in a vector, no devices, no vector unit.
#![allow(dead_code, missing_docs)]

use iced_x86::Instruction;
use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
};
use x86::{
    Fault, Vcpu,
    cpuid::{Model, Settings},
    fpu::FpuState,
    seg,
    segment::attr,
};
use x86_interp::{
    CodeNews, CpuidResult, GuestRam, RamPage, System, UnitCode, VectorOperands, VectorUnit,
};

host::choose!(host_linux::Linux);

pub struct FakeRam {
    bytes: RefCell<Vec<u8>>,
    code: RefCell<Vec<bool>>,
    stale: RefCell<Vec<u64>>,
    /// The GPA of a page that is ROM.
    pub rom: Cell<Option<u64>>,
}

impl FakeRam {
    pub fn new(size: usize) -> Self {
        Self {
            bytes: RefCell::new(vec![0; size]),
            code: RefCell::new(vec![false; size / 4096]),
            stale: RefCell::default(),
            rom: Cell::default(),
        }
    }
    fn get<const N: usize>(&self, offset: u64) -> [u8; N] {
        let at = offset as usize;
        self.bytes.borrow()[at..at + N].try_into().unwrap()
    }
    fn put(&self, offset: u64, data: &[u8]) {
        let at = offset as usize;
        self.bytes.borrow_mut()[at..at + data.len()].copy_from_slice(data);
    }
}

impl GuestRam for FakeRam {
    fn page(&self, gpa: u64) -> Option<RamPage> {
        let (inside, offset) = ((gpa as usize) < self.bytes.borrow().len(), gpa & !0xfff);
        inside.then_some(RamPage { offset, writable: self.rom.get() != Some(offset) })
    }
    fn load8(&self, offset: u64) -> u8 {
        u8::from_le_bytes(self.get(offset))
    }
    fn load16(&self, offset: u64) -> u16 {
        u16::from_le_bytes(self.get(offset))
    }
    fn load32(&self, offset: u64) -> u32 {
        u32::from_le_bytes(self.get(offset))
    }
    fn load64(&self, offset: u64) -> u64 {
        u64::from_le_bytes(self.get(offset))
    }
    fn store8(&self, offset: u64, value: u8) {
        self.put(offset, &value.to_le_bytes());
    }
    fn store16(&self, offset: u64, value: u16) {
        self.put(offset, &value.to_le_bytes());
    }
    fn store32(&self, offset: u64, value: u32) {
        self.put(offset, &value.to_le_bytes());
    }
    fn store64(&self, offset: u64, value: u64) {
        self.put(offset, &value.to_le_bytes());
    }
    fn read(&self, offset: u64, data: &mut [u8]) {
        let at = offset as usize;
        data.copy_from_slice(&self.bytes.borrow()[at..at + data.len()]);
    }
    fn write(&self, offset: u64, data: &[u8]) {
        self.put(offset, data);
    }
    fn cas(&self, offset: u64, size: usize, old: u64, new: u64) -> u64 {
        let mut found = [0; 8];
        self.read(offset, &mut found[..size]);
        let found = u64::from_le_bytes(found);
        if found == old {
            self.put(offset, &new.to_le_bytes()[..size]);
        }
        found
    }
    fn cas_split(&self, offset: u64, second: u64, size: usize, old: u64, new: u64) -> u64 {
        let here = (4096 - offset % 4096) as usize;
        let mut found = [0; 8];
        self.read(offset, &mut found[..here]);
        self.read(second, &mut found[here..size]);
        let found = u64::from_le_bytes(found);
        if found == old {
            self.put(offset, &new.to_le_bytes()[..here]);
            self.put(second, &new.to_le_bytes()[here..size]);
        }
        found
    }
    fn cas128(&self, offset: u64, old: u128, new: u128) -> u128 {
        let found = u128::from_le_bytes(self.get(offset));
        if found == old {
            self.put(offset, &new.to_le_bytes());
        }
        found
    }
    fn mark_code(&self, offset: u64) -> bool {
        !std::mem::replace(&mut self.code.borrow_mut()[offset as usize / 4096], true)
    }
    fn is_code(&self, offset: u64) -> bool {
        self.code.borrow()[offset as usize / 4096]
    }
    fn note_write(&self, offset: u64, len: u64) {
        for page in offset / 4096..=(offset + len - 1) / 4096 {
            if std::mem::take(&mut self.code.borrow_mut()[page as usize]) {
                self.stale.borrow_mut().push(page * 4096);
            }
        }
    }
    fn has_stale_code(&self) -> bool {
        !self.stale.borrow().is_empty()
    }
    fn take_code_news(&self) -> CodeNews {
        CodeNews { stale: self.stale.take(), ..CodeNews::default() }
    }
}

/// A host with every feature.
fn everything(_: u32, _: u32) -> CpuidResult {
    CpuidResult { eax: u32::MAX, ebx: u32::MAX, ecx: u32::MAX, edx: u32::MAX }
}

pub struct NoVectors;
impl VectorUnit for NoVectors {
    fn prepare(&mut self, _: &Instruction, _: &[u8]) -> Result<UnitCode, Fault> {
        Err(Fault::ud())
    }
    fn run(
        &mut self,
        _: UnitCode,
        _: &Instruction,
        _: &mut FpuState,
        _: &mut VectorOperands,
    ) -> Result<(), Fault> {
        Err(Fault::ud())
    }
}

pub struct FakeSystem {
    pub ram: FakeRam,
    pub vectors: NoVectors,
    pub pending: u32,
    pub ports: Vec<(u16, u32)>,
    pub cr8: u8,
    pub tsc: u64,
    pub model: Model,
    pub msrs: BTreeMap<u32, u64>,
    pub mmio_writes: Vec<(u64, Vec<u8>)>,
    /// There are hypercalls: the answer of each, and what they were asked.
    pub answer: Option<u64>,
    pub hypercalls: Vec<(bool, u64, [u64; 4])>,
}

impl FakeSystem {
    pub fn new(size: usize) -> Self {
        Self {
            ram: FakeRam::new(size),
            vectors: NoVectors,
            pending: 0,
            ports: Vec::new(),
            cr8: 0,
            tsc: 0,
            model: Model::new(
                everything,
                Settings { tsc_hz: 1_000_000_000, cpus: 1, kvm_features: 0 },
            ),
            msrs: BTreeMap::new(),
            mmio_writes: Vec::new(),
            answer: None,
            hypercalls: Vec::new(),
        }
    }
}

impl System for FakeSystem {
    type Ram = FakeRam;
    fn ram(&self) -> &FakeRam {
        &self.ram
    }
    fn pending(&self) -> u32 {
        self.pending
    }
    fn mmio_read(&mut self, _: u64, data: &mut [u8]) {
        data.fill(0xff);
    }
    fn mmio_write(&mut self, gpa: u64, data: &[u8]) {
        self.mmio_writes.push((gpa, data.to_vec()));
    }
    fn port_read(&mut self, _: u16, size: u8) -> u32 {
        u32::MAX >> (32 - u32::from(size) * 8)
    }
    fn port_write(&mut self, port: u16, _: u8, value: u32) {
        self.ports.push((port, value));
    }
    fn msr_read(&mut self, index: u32) -> Result<u64, Fault> {
        self.msrs.get(&index).copied().ok_or(Fault::gp(0))
    }
    fn msr_write(&mut self, index: u32, value: u64) -> Result<(), Fault> {
        let slot = self.msrs.get_mut(&index).ok_or(Fault::gp(0))?;
        *slot = value;
        Ok(())
    }
    fn cpuid(&self, leaf: u32, subleaf: u32) -> CpuidResult {
        self.model.query(leaf, subleaf, 0)
    }
    fn tsc(&mut self) -> u64 {
        self.tsc += 1;
        self.tsc
    }
    fn hypercall(&mut self, kernel: bool, number: u64, arguments: [u64; 4]) -> Option<u64> {
        self.hypercalls.push((kernel, number, arguments));
        self.answer
    }
    fn random(&mut self) -> Option<u64> {
        Some(4)
    }
    fn cr8(&mut self) -> u8 {
        self.cr8
    }
    fn set_cr8(&mut self, value: u8) {
        self.cr8 = value;
    }
    fn vector_unit(&mut self) -> &mut dyn VectorUnit {
        &mut self.vectors
    }
}

/// 64-bit ring 0 with one identity-mapped gigabyte (tables at 0x1000..0x3000), running at `rip`.
pub fn long_mode(sys: &FakeSystem, rip: u64) -> Vcpu {
    use x86::control::{cr0, cr4, efer};
    sys.ram.store64(0x1000, 0x2000 | 7);
    sys.ram.store64(0x2000, 0x3000 | 7);
    for i in 0..512 {
        sys.ram.store64(0x3000 + i * 8, i << 21 | 0x87);
    }
    let mut v = Vcpu { rip, cr3: 0x1000, ..Vcpu::default() };
    v.cr0 |= cr0::PE | cr0::PG | cr0::WP | cr0::NE;
    v.cr4 |= cr4::PAE;
    v.efer = efer::LME | efer::LMA | efer::SCE | efer::NXE;
    v.seg[seg::CS].attr |= attr::L;
    v
}
