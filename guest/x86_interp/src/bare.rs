//! A machine for tests and measurements of the CPU alone.

use x86::Fault;

use crate::{CpuidResult, GuestRam, System, VectorUnit};

/// A machine that is memory, a vector unit and nothing else. Where a device would answer there is an open bus.
#[derive(Debug)]
pub struct BareMachine<R, U> {
    /// Guest memory.
    pub ram: R,
    /// What executes vector instructions.
    pub unit: U,
    /// What CPUID answers to everything.
    pub cpuid: CpuidResult,
}

impl<R, U> BareMachine<R, U> {
    /// A machine whose CPUID answers zeroes.
    pub fn new(ram: R, unit: U) -> Self {
        Self { ram, unit, cpuid: CpuidResult::default() }
    }
}

impl<R: GuestRam, U: VectorUnit> System for BareMachine<R, U> {
    type Ram = R;
    fn ram(&self) -> &R {
        &self.ram
    }
    fn pending(&self) -> u32 {
        0
    }
    fn mmio_read(&mut self, _: u64, data: &mut [u8]) {
        data.fill(0xff);
    }
    fn mmio_write(&mut self, _: u64, _: &[u8]) {}
    fn port_read(&mut self, _: u16, _: u8) -> u32 {
        u32::MAX
    }
    fn port_write(&mut self, _: u16, _: u8, _: u32) {}
    fn msr_read(&mut self, _: u32) -> Result<u64, Fault> {
        Err(Fault::gp(0))
    }
    fn msr_write(&mut self, _: u32, _: u64) -> Result<(), Fault> {
        Err(Fault::gp(0))
    }
    fn cpuid(&self, _: u32, _: u32) -> CpuidResult {
        self.cpuid
    }
    fn tsc(&mut self) -> u64 {
        0
    }
    fn random(&mut self) -> Option<u64> {
        None
    }
    fn cr8(&mut self) -> u8 {
        0
    }
    fn set_cr8(&mut self, _: u8) {}
    fn vector_unit(&mut self) -> &mut dyn VectorUnit {
        &mut self.unit
    }
}
