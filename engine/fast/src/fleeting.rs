//! Instructions of a 32-bit kernel that access pages which are mapped only for a moment.
//!
//! Such a kernel has no addresses for most of RAM. It maps a page, accesses the page and drops the translation again (Linux's
//! `kmap_local_page`), some 200 times for each program that starts. A fault, a mapping of the host's and its end would cost 10 us each time.
//! So an instruction that has faulted there is translated with a look-up (`jit/src/emit/lookup.rs`), as young processes' instructions are. The
//! wedge finds the page in the guest's page tables, and forgets the page at the INVLPG.

use crate::fault_counts::FaultCounts;

/// Faults, as far as wedges tell of them, before an instruction is translated so.
const OFTEN: u32 = 2;

/// How often instructions have faulted so.
#[derive(Default)]
pub struct Fleeting(FaultCounts);

impl Fleeting {
    /// Translated code has faulted so; true if what the instruction accesses is looked up from now on.
    pub fn note_fault(&mut self, guest: u64) -> bool {
        self.0.note(guest, OFTEN)
    }

    /// Which of the instructions in so many bytes from a GVA on are looked up ([`jit::Request::sought`]).
    pub fn within(&self, guest: u64, len: usize) -> u64 {
        let sought = self.0.within(guest, len).filter(|(_, faults)| *faults >= OFTEN);
        sought.fold(0, |bits, (far, _)| bits | 1 << (far % 64))
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
}
