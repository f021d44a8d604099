//! How often instructions of the kernel's have faulted, by GVA.

use std::collections::BTreeMap;

/// Instructions known at the most.
pub const MOST: usize = 256;

/// Counts of faults. In order, as each new block asks for the instructions within it.
#[derive(Default)]
pub struct FaultCounts(BTreeMap<u64, u32>);

impl FaultCounts {
    /// Counts a fault of an instruction, up to so many. True if these many are reached with this fault.
    pub fn note(&mut self, guest: u64, often: u32) -> bool {
        if self.0.len() >= MOST && !self.0.contains_key(&guest) {
            return false;
        }
        let faults = self.0.entry(guest).or_default();
        let is_counted = *faults < often;
        *faults += u32::from(is_counted);
        is_counted && *faults == often
    }

    /// The count of an instruction is another from now on.
    pub fn set(&mut self, guest: u64, faults: u32) {
        self.0.insert(guest, faults);
    }

    /// The count of an instruction that has faulted.
    pub fn get(&self, guest: u64) -> Option<u32> {
        self.0.get(&guest).copied()
    }

    /// The instructions in so many bytes from a GVA on that have faulted: their distances from there, ascending, and their counts.
    pub fn within(&self, guest: u64, len: usize) -> impl Iterator<Item = (u64, u32)> {
        let sites = self.0.range(guest..).map(move |(site, faults)| (site - guest, *faults));
        sites.take_while(move |(far, _)| *far < len as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_makes_it_remember_no_more_than_so_many() {
        let mut counts = FaultCounts::default();
        for guest in 0..2 * MOST as u64 {
            counts.note(guest, 2);
        }
        assert_eq!(counts.0.len(), MOST);
        assert!(counts.note(0, 2) && !counts.note(MOST as u64, 2));
    }
}
