//! The end of an interrupt, told by a bit in guest memory in place of a write to the local APIC, which costs an exit.
//!
//! The bit is set when an interrupt is taken that nothing else waits for. The guest clears it instead of writing the register. The local APIC
//! does not know of that: for it the interrupt is still being served. So whatever depends on it, which is the next interrupt and any access to
//! the local APIC, has the bit looked at first. If it is still set then, it is taken back, and the guest writes the register.

use std::{
    ops::RangeInclusive,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
};

use ram::Ram;
use x86::{
    Fault, msr,
    paravirt::{ENABLED, EOI_RESERVED},
};

use crate::CpuInterrupts;

/// The registers of what is in service.
const IN_SERVICE: RangeInclusive<u32> = msr::X2APIC + 0x10..=msr::X2APIC + 0x17;

/// The bit of one vCPU. Only the vCPU's own thread uses this, while no guest code runs.
pub struct PutOffEoi {
    ram: Ram,
    /// What the guest has written to the MSR.
    place: AtomicU64,
    is_put_off: AtomicBool,
}

impl PutOffEoi {
    /// A bit that is nowhere yet.
    pub fn new(ram: Ram) -> Self {
        Self { ram, place: AtomicU64::new(0), is_put_off: AtomicBool::new(false) }
    }

    /// RDMSR.
    pub fn msr_read(&self) -> u64 {
        self.place.load(Ordering::Relaxed)
    }

    /// WRMSR. Before this, what was put off must have been settled.
    ///
    /// # Errors
    /// #GP for reserved bits.
    pub fn msr_write(&self, value: u64) -> Result<(), Fault> {
        if value & EOI_RESERVED != 0 {
            return Err(Fault::gp(0));
        }
        self.place.store(value, Ordering::Relaxed);
        Ok(())
    }

    /// The vCPU has been reset, and its local APIC with it.
    pub fn reset(&self) {
        self.place.store(0, Ordering::Relaxed);
        self.is_put_off.store(false, Ordering::Relaxed);
    }

    /// Where the bit is, if the guest has one in RAM.
    fn gpa(&self) -> Option<u64> {
        let place = self.place.load(Ordering::Relaxed);
        (place & ENABLED != 0).then_some(place & !ENABLED)
    }

    /// An interrupt has been taken.
    pub fn taken(&self, interrupts: &CpuInterrupts) {
        let Some(gpa) = self.gpa() else { return };
        if !interrupts.put_off_eoi() {
            return;
        }
        match self.ram.write_gpa(gpa, &[1]) {
            Ok(()) => self.is_put_off.store(true, Ordering::Relaxed),
            // No RAM: the guest will write the register.
            Err(_) => interrupts.settle_eoi(false),
        }
    }

    /// Which interrupts the vCPU may take by itself: the GPA of the byte that tells ends, and a class. While the byte is zero the vCPU may
    /// take vectors of higher classes, and sets the byte with each. `None` means that the vCPU may take no interrupt by itself.
    pub fn direct(&self, interrupts: &CpuInterrupts) -> Option<(u64, u8)> {
        Some((self.gpa()?, interrupts.open_above()?))
    }

    /// The vCPU has taken an interrupt by itself, and has set the byte.
    pub fn took(&self, interrupts: &CpuInterrupts, vector: u8) {
        interrupts.took(vector);
        self.is_put_off.store(true, Ordering::Relaxed);
    }

    /// Brings the local APIC up to date for a read of one of its MSRs. The end of an interrupt only clears bits of the in-service registers, so
    /// one that is zero reads the same before and after: then the end stays put off. This matters because an engine may read such a register
    /// at each entry into guest code, right after an interrupt was taken.
    pub fn settle_for_read(&self, interrupts: &CpuInterrupts, index: u32) {
        if !IN_SERVICE.contains(&index) || interrupts.msr_read(index) != Ok(0) {
            self.settle(interrupts);
        }
    }

    /// Brings the local APIC up to date.
    pub fn settle(&self, interrupts: &CpuInterrupts) {
        if !self.is_put_off.swap(false, Ordering::Relaxed) {
            return;
        }
        let mut word = [0];
        let told = self.gpa().is_some_and(|gpa| {
            // It was RAM when the bit was set, and RAM stays.
            self.ram.read_gpa(gpa, &mut word).is_ok() && word[0] & 1 == 0
        });
        if let Some(gpa) = self.gpa().filter(|_| !told) {
            let _ = self.ram.write_gpa(gpa, &[0]);
        }
        interrupts.settle_eoi(told);
    }
}
