//! A vCPU's record of the time that it has waited for a CPU of the host, and of whether it waits now.
//!
//! The record lies in guest memory. Another vCPU that sees this one wait leaves it a note to flush its TLB, and
//! need not interrupt it; so the note is taken in the same moment in which the vCPU ceases to wait.

use std::sync::atomic::{AtomicU64, Ordering};

use contract::GuestRam;
use ram::Ram;
use x86::{
    Fault,
    paravirt::{
        ENABLED, STEAL_TIME_RESERVED,
        record::{FLUSH, PREEMPTED, STANDING, STEAL, VERSION},
    },
};

/// The record of one vCPU.
pub struct StealTime {
    ram: Ram,
    /// What the guest has written to the MSR.
    place: AtomicU64,
    stolen_ns: AtomicU64,
}

impl StealTime {
    /// A record that is nowhere yet.
    pub fn new(ram: Ram) -> Self {
        Self { ram, place: AtomicU64::new(0), stolen_ns: AtomicU64::new(0) }
    }

    /// RDMSR.
    pub fn msr_read(&self) -> u64 {
        self.place.load(Ordering::Relaxed)
    }

    /// WRMSR. A place outside of RAM is lost, as any write there is.
    ///
    /// # Errors
    /// #GP for reserved bits.
    pub fn msr_write(&self, value: u64) -> Result<(), Fault> {
        if value & STEAL_TIME_RESERVED != 0 {
            return Err(Fault::gp(0));
        }
        self.place.store(value, Ordering::Relaxed);
        self.tell();
        Ok(())
    }

    /// The guest has a record.
    pub fn is_kept(&self) -> bool {
        self.place.load(Ordering::Relaxed) & ENABLED != 0
    }

    fn gpa(&self) -> Option<u64> {
        self.is_kept().then(|| self.place.load(Ordering::Relaxed) & !ENABLED)
    }

    /// The vCPU waits from now on.
    pub fn set_preempted(&self) {
        self.exchange_standing(PREEMPTED);
    }

    /// It does not wait any more; true if it is to flush its TLB.
    pub fn set_running(&self) -> bool {
        self.exchange_standing(0) & FLUSH != 0
    }

    /// Puts another standing into the record; what was there.
    fn exchange_standing(&self, new: u8) -> u8 {
        let offset = self.gpa().and_then(|gpa| self.ram.offset(gpa + STANDING, 1).ok());
        let Some(offset) = offset else { return 0 };
        let mut old = self.ram.load8(offset);
        // Nothing is written where nothing changes: that is the rule.
        while old != new {
            let found = self.ram.cas(offset, 1, old.into(), new.into()) as u8;
            if found == old {
                self.ram.note_write(offset, 1);
                break;
            }
            old = found;
        }
        old
    }

    /// It has waited so long.
    pub fn add(&self, ns: u64) {
        self.stolen_ns.fetch_add(ns, Ordering::Relaxed);
        self.tell();
    }

    fn tell(&self) {
        let Some(gpa) = self.gpa() else { return };
        let mut version = [0; 4];
        // A place that is not RAM takes nothing.
        let _ = self.ram.read_gpa(gpa + VERSION, &mut version);
        let busy = u32::from_le_bytes(version) | 1;
        let _ = self.ram.write_gpa(gpa + VERSION, &busy.to_le_bytes());
        let stolen = self.stolen_ns.load(Ordering::Relaxed);
        let _ = self.ram.write_gpa(gpa + STEAL, &stolen.to_le_bytes());
        let _ = self.ram.write_gpa(gpa + VERSION, &busy.wrapping_add(1).to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACE: u64 = 0x5040;

    fn record(ram: &Ram) -> (u64, u32, u8) {
        let (mut steal, mut version, mut standing) = ([0; 8], [0; 4], [0]);
        ram.read_gpa(PLACE + STEAL, &mut steal).expect("RAM");
        ram.read_gpa(PLACE + VERSION, &mut version).expect("RAM");
        ram.read_gpa(PLACE + STANDING, &mut standing).expect("RAM");
        (u64::from_le_bytes(steal), u32::from_le_bytes(version), standing[0])
    }

    #[test]
    fn the_record_says_how_long_and_whether_the_vcpu_waits() {
        let ram = Ram::new(2 << 20).expect("RAM");
        let steal = StealTime::new(ram.clone());
        steal.set_preempted();
        steal.add(5);
        assert_eq!(record(&ram), (0, 0, 0), "nobody has asked for it");
        steal.msr_write(PLACE | ENABLED).expect("a place");
        assert_eq!((steal.msr_read(), record(&ram)), (PLACE | ENABLED, (5, 2, 0)));
        steal.set_preempted();
        steal.add(7);
        assert_eq!(record(&ram), (12, 4, PREEMPTED));
        assert!(!steal.set_running());
        assert_eq!(record(&ram).2, 0);
    }

    #[test]
    fn a_note_left_while_it_waits_is_taken_once() {
        let ram = Ram::new(2 << 20).expect("RAM");
        let steal = StealTime::new(ram.clone());
        steal.msr_write(PLACE | ENABLED).expect("a place");
        steal.set_preempted();
        ram.write_gpa(PLACE + STANDING, &[PREEMPTED | FLUSH]).expect("RAM");
        assert!(steal.set_running());
        assert!(!steal.set_running());
    }

    #[test]
    fn places_that_are_none() {
        let steal = StealTime::new(Ram::new(2 << 20).expect("RAM"));
        assert!(steal.msr_write(PLACE | 2).is_err());
        for wrong in [!STEAL_TIME_RESERVED, 1 << 40 | ENABLED] {
            steal.msr_write(wrong).expect("lost");
            steal.set_preempted();
            steal.add(1);
            assert!(!steal.set_running());
        }
    }
}
