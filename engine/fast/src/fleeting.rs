//! Instructions of a 32-bit kernel that access pages which are mapped only for a moment.
//!
//! Such a kernel has no addresses for most of RAM. It maps a page, accesses the page and drops the translation again (Linux's
//! `kmap_local_page`), some 200 times for each program that starts. A fault, a mapping of the host's and its end would cost 10 us each time.
//! So an instruction that has faulted there is translated with a look-up (`jit/src/emit/lookup.rs`), as young processes' are: the wedge finds
//! the page in the guest's page tables, and INVLPG forgets it.

use std::collections::BTreeMap;

/// Faults, as far as wedges tell of them, before an instruction is translated so.
const OFTEN: u32 = 2;
/// Instructions known at the most.
const MOST: usize = 256;

/// How often instructions have faulted so, by GVA. In order, as each new block asks for those within it.
#[derive(Default)]
pub struct Fleeting(BTreeMap<u64, u32>);

impl Fleeting {
    /// Translated code has faulted so; true if what the instruction accesses is looked up from now on.
    pub fn note_fault(&mut self, guest: u64) -> bool {
        if self.0.len() >= MOST && !self.0.contains_key(&guest) {
            return false;
        }
        let faults = self.0.entry(guest).or_default();
        *faults = faults.saturating_add(1);
        *faults == OFTEN
    }

    /// Which of the instructions in so many bytes from a GVA on are looked up ([`jit::Request::sought`]).
    pub fn within(&self, guest: u64, len: usize) -> u64 {
        let sites = self.0.range(guest..guest.saturating_add(len as u64));
        let sought = sites.filter(|(_, faults)| **faults >= OFTEN);
        sought.fold(0, |bits, (site, _)| bits | 1 << ((site - guest) % 64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_faulted_often_is_looked_up() {
        let mut fleeting = Fleeting::default();
        let says = |fleeting: &mut Fleeting, guest| [(); 3].map(|()| fleeting.note_fault(guest));
        assert_eq!(says(&mut fleeting, 0xc100_0041), [false, true, false], "it is said once");
        assert!(!fleeting.note_fault(0xc100_0050), "one fault is not often");
        assert_eq!(fleeting.within(0xc100_0000, 0x42), 1 << 1);
        assert_eq!(fleeting.within(0xc100_0040, 0x42), 1 << 1);
        assert_eq!([fleeting.within(0xc100_0000, 0x41), fleeting.within(0xc100_0042, 99)], [0, 0]);
    }

    #[test]
    fn a_guest_makes_it_remember_no_more_than_so_many() {
        let mut fleeting = Fleeting::default();
        for guest in 0..2 * MOST as u64 {
            fleeting.note_fault(guest);
        }
        assert_eq!(fleeting.0.len(), MOST);
        assert!(fleeting.note_fault(0) && !fleeting.note_fault(MOST as u64));
    }
}
