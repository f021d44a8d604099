//! System calls of user code that are patched to come to the wedge without a signal.
//!
//! The bytes `mov eax, nr; syscall` become `jmp [SITES + index * 8]`, whose last two bytes are no instruction
//! (see [`wedge_abi::SITES`]): a jump to the SYSCALL itself traps, and is found (`patched::call_at` in the wedge).
//! The bytes `syscall; cmp rax, imm32` become the same; there the compare is displaced, and whoever goes on
//! behind the call is sent to a copy of it (`patched::resume_at` in the wedge). Only a site that has trapped often, at exactly that SYSCALL,
//! is patched, so the bytes are known to be instructions; the page is a copy of this process's,
//! and a write to the page drops it. INT 0x80 becomes another interrupt, which faults ([`STAND_IN`]).

use crate::scan::Patch;
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use wedge::{Pages, SiteCall};
use wedge_abi::{MAX_SITES, SITE_LEN, SITES, STAND_IN};

const INT_80: [u8; 2] = [0xcd, 0x80];

/// A site.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Site {
    call: SiteCall,
    index: usize,
}

impl Site {
    /// First byte of the patch, for a call that ends at `back`.
    fn start(&self, back: u64) -> u64 {
        match self.call {
            SiteCall::Number(_) => back - SITE_LEN,
            SiteCall::Compared(_) => back - 2,
        }
    }
}

/// The sites of all spaces of a machine whose wedges have the same base, by the GVA behind the call. An index belongs to an address and a call.
#[derive(Clone, Debug, Default)]
pub struct Sites(Arc<Mutex<Inner>>);

#[derive(Debug, Default)]
struct Inner {
    by_address: BTreeMap<u64, Vec<Site>>,
    indices: HashMap<(u64, SiteCall), usize>,
    /// GVAs behind INT 0x80.
    interrupts: BTreeSet<u64>,
}

/// What is patched in a page, and behind which calls an instruction is displaced (GVA).
pub type Patches = (Vec<Patch>, Vec<u64>);

impl Sites {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that the system call that ends at `back` is worth patching; makes its stub, which goes on
    /// at `entry`. False if there is no room, or must be no such stub.
    pub fn add(&self, pages: &Pages, back: u64, call: SiteCall, entry: u64) -> bool {
        let mut inner = self.lock();
        let index = inner.indices.len();
        let room = index < MAX_SITES && !inner.indices.contains_key(&(back, call));
        if !room || !pages.sites().make(index, call, back, entry) {
            return false;
        }
        pages.kernel().note_site(back - 2);
        inner.indices.insert((back, call), index);
        inner.by_address.entry(back).or_default().push(Site { call, index });
        true
    }

    /// Notes that the INT 0x80 that ends at `back` is worth patching.
    pub fn add_interrupt(&self, pages: &Pages, back: u64) {
        let mut inner = self.lock();
        if inner.interrupts.len() < MAX_SITES && inner.interrupts.insert(back) {
            pages.kernel().note_site(back - 2);
        }
    }

    /// The patches for the page at `hva` with these bytes.
    pub fn patches(&self, hva: u64, bytes: &[u8]) -> Patches {
        let inner = self.lock();
        let mut found = Patches::default();
        for (back, sites) in inner.by_address.range(hva + 2..hva + bytes.len() as u64) {
            for site in sites {
                let at = site.start(*back).wrapping_sub(hva) as usize;
                if bytes.get(at..).is_some_and(|bytes| holds(bytes, site.call)) {
                    found.0.push(patch(at, site));
                    found.1.extend(matches!(site.call, SiteCall::Compared(_)).then_some(*back));
                }
            }
        }
        for back in inner.interrupts.range(hva + 2..=hva + bytes.len() as u64) {
            if is_interrupt(hva, bytes, *back) {
                let at = (back - hva) as usize - 1;
                found.0.push(Patch { at, len: 1, bytes: STAND_IN.into() });
            }
        }
        found
    }
}

/// In the page at `page` (GVA) with these bytes, INT 0x80 ends at `back`.
pub fn is_interrupt(page: u64, bytes: &[u8], back: u64) -> bool {
    let at = back.checked_sub(page + 2).map(|at| at as usize);
    at.and_then(|at| bytes.get(at..at + 2)) == Some(&INT_80)
}

/// The bytes are the call's.
fn holds(bytes: &[u8], call: SiteCall) -> bool {
    let expected = match call {
        SiteCall::Number(n) => [&[0xb8], &n.to_le_bytes()[..], &[0x0f, 0x05]].concat(),
        SiteCall::Compared(n) => [&[0x0f, 0x05, 0x48, 0x3d], &n.to_le_bytes()[..]].concat(),
    };
    bytes.starts_with(&expected)
}

/// The call whose bytes end (with a compare: go on) at `back` in a page of code at `page` (GVA).
pub fn call_at(page: u64, bytes: &[u8], back: u64) -> Option<SiteCall> {
    let at = back.checked_sub(page)? as usize;
    let word = |from: usize| bytes.get(from..from + 4)?.try_into().ok().map(u32::from_le_bytes);
    let calls = [
        at.checked_sub(6).and_then(word).map(SiteCall::Number),
        word(at + 2).map(SiteCall::Compared),
    ];
    let here = |call: &SiteCall| {
        let start = Site { call: *call, index: 0 }.start(back).wrapping_sub(page) as usize;
        bytes.get(start..).is_some_and(|bytes| holds(bytes, *call))
    };
    calls.into_iter().flatten().find(here)
}

/// `jmp [SITES + index * 8]`
fn patch(at: usize, site: &Site) -> Patch {
    let slot = (SITES + site.index * 8) as u64;
    Patch { at, len: SITE_LEN, bytes: 0x25_24ff | slot << 24 }
}

const _: () = assert!(SITES & 0xffff == 0 && SITES >> 16 == 0x0016 && MAX_SITES * 8 <= 0x1_0000);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interrupt_is_patched_where_it_is_one() {
        const PAGE: u64 = 0x804_9000;
        let (sites, pages) = (Sites::default(), Pages::new().expect("memory"));
        let mut bytes = vec![0x90; 4096];
        for at in [0x20, 0xffe] {
            bytes[at..at + 2].copy_from_slice(&INT_80);
            assert!(is_interrupt(PAGE, &bytes, PAGE + at as u64 + 2));
            sites.add_interrupt(&pages, PAGE + at as u64 + 2);
        }
        assert!(
            !is_interrupt(PAGE, &bytes, PAGE + 0x21) && !is_interrupt(PAGE, &bytes, PAGE + 0x1001)
        );
        let found = |bytes: &[u8]| sites.patches(PAGE, bytes).0;
        let patch = |at| Patch { at, len: 1, bytes: 0x81 };
        assert_eq!(found(&bytes), [patch(0x21), patch(0xfff)]);
        bytes[0x20] = 0x90;
        assert_eq!(found(&bytes), [patch(0xfff)]);
        assert_eq!(sites.patches(PAGE + 4096, &bytes).0, []);
    }

    fn patched(page: &mut [u8], at: usize, bytes: &[u8], back: u64) -> iced_x86::Instruction {
        page[at..at + bytes.len()].copy_from_slice(bytes);
        let call = call_at(0x40_1000, page, back).expect("it can be patched");
        let sites = Sites::default();
        let site = Site { call, index: 3 };
        sites.lock().by_address.insert(back, vec![site]);
        let (patches, displaced) = sites.patches(0x40_1000, page);
        assert_eq!(displaced.is_empty(), matches!(call, SiteCall::Number(_)));
        let Patch { at, len, bytes } = patches[0];
        page[at..at + len as usize].copy_from_slice(&bytes.to_le_bytes()[..len as usize]);
        iced_x86::Decoder::new(64, &page[at..], 0).decode()
    }

    #[test]
    fn a_numbered_call_has_no_instruction_in_its_middle() {
        let mut page = vec![0x90; 4096];
        let call = [0xb8, 39, 0, 0, 0, 0x0f, 0x05];
        let insn = patched(&mut page, 0x20, &call, 0x40_1027);
        assert_eq!((insn.len(), insn.memory_displacement64()), (7, SITES as u64 + 24));
        assert_eq!(insn.mnemonic(), iced_x86::Mnemonic::Jmp);
        let middle = iced_x86::Decoder::new(64, &page[0x25..], 0).decode();
        assert!(middle.is_invalid(), "{middle}");
    }

    #[test]
    fn a_compared_call_keeps_what_follows() {
        let mut page = vec![0x90; 4096];
        let call = [0x0f, 0x05, 0x48, 0x3d, 0x01, 0xf0, 0xff, 0xff];
        let insn = patched(&mut page, 0x20, &call, 0x40_1022);
        assert_eq!((insn.len(), insn.memory_displacement64()), (7, SITES as u64 + 24));
        assert_eq!(page[0x28], 0x90);
    }

    #[test]
    fn other_bytes_are_left_alone() {
        let page = vec![0x90; 4096];
        assert_eq!(call_at(0x40_1000, &page, 0x40_1027), None);
        assert_eq!(call_at(0x40_1000, &page, 0x40_1001), None);
        assert_eq!(call_at(0x40_1000, &page, 0x40_1fff), None);
    }
}
