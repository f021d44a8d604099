//! System calls of user code that are patched to come to the wedge without a signal.
//!
//! The bytes `mov eax, nr; syscall` become `jmp [SITES + index * 8]`, whose last two bytes are those of
//! the SYSCALL (see [`frame::SITES`]). Only a site that has trapped often, at exactly that SYSCALL,
//! is patched, so the bytes are known to be instructions; the page is a copy that only execution
//! sees, and a write to the page drops it.

use crate::scan::Patch;
use frame::{MAX_SITES, SITE_LEN, SITES};
use std::{
    cell::RefCell,
    collections::{BTreeMap, HashMap},
    rc::Rc,
};
use wedge::Pages;

/// A site.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Site {
    number: u32,
    index: usize,
}

/// The sites of all spaces, by the GVA behind the call. An index belongs to an address and a number.
#[derive(Clone, Debug, Default)]
pub struct Sites(Rc<RefCell<Inner>>);

#[derive(Debug, Default)]
struct Inner {
    by_address: BTreeMap<u64, Vec<Site>>,
    indices: HashMap<(u64, u32), usize>,
}

impl Sites {
    /// Notes that the system call that ends at `back`, with this number, is worth patching; makes its
    /// stub, which goes on at `entry`. False if there is no room.
    pub fn add(&self, pages: &mut Pages, back: u64, number: u32, entry: u64) -> bool {
        let mut inner = self.0.borrow_mut();
        let index = inner.indices.len();
        if index >= MAX_SITES || inner.indices.contains_key(&(back, number)) {
            return false;
        }
        pages.make_stub(index, number, back, entry);
        inner.indices.insert((back, number), index);
        inner.by_address.entry(back).or_default().push(Site { number, index });
        true
    }

    /// The patches for the page at `hva` with these bytes.
    pub fn patches(&self, hva: u64, bytes: &[u8]) -> Vec<Patch> {
        let inner = self.0.borrow();
        let page = hva + SITE_LEN..=hva + bytes.len() as u64;
        let sites = inner.by_address.range(page).flat_map(|(back, sites)| {
            let at = (back - hva - SITE_LEN) as usize;
            sites.iter().map(move |site| (at, *site))
        });
        sites.filter(|(at, site)| holds(&bytes[*at..], site.number)).map(patch).collect()
    }
}

/// `mov eax, number; syscall`
fn holds(bytes: &[u8], number: u32) -> bool {
    bytes[0] == 0xb8 && bytes[1..5] == number.to_le_bytes() && bytes[5..7] == [0x0f, 0x05]
}

/// `jmp [SITES + index * 8]`, without the last two bytes.
fn patch((at, site): (usize, Site)) -> Patch {
    let slot = (SITES + site.index * 8) as u64;
    Patch { at, len: 5, bytes: 0x25_24ff | (slot & 0xffff) << 24 }
}

const _: () = assert!(SITES & 0xffff == 0 && SITES >> 16 == 0x050f && MAX_SITES * 8 <= 0x1_0000);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_site_keeps_its_syscall() {
        let sites = Sites::default();
        let inner = Inner {
            by_address: [(0x40_1027, vec![Site { number: 39, index: 3 }])].into(),
            indices: [((0x40_1027, 39), 3)].into(),
        };
        *sites.0.borrow_mut() = inner;
        let mut page = vec![0x90; 4096];
        assert_eq!(sites.patches(0x40_1000, &page), []);
        page[0x20..0x27].copy_from_slice(&[0xb8, 39, 0, 0, 0, 0x0f, 0x05]);
        let patch = sites.patches(0x40_1000, &page)[0];
        page[0x20..0x25].copy_from_slice(&patch.bytes.to_le_bytes()[..5]);
        let insn = iced_x86::Decoder::new(64, &page[0x20..], 0).decode();
        assert_eq!((insn.len(), insn.memory_displacement64()), (7, SITES as u64 + 24));
        assert_eq!(insn.mnemonic(), iced_x86::Mnemonic::Jmp);
    }
}
