//! Whether two vCPUs have the same memory where code was translated.
//!
//! Translated blocks lead to each other without a look at page tables, so what one vCPU has made another one may execute
//! only if both have the same pages there. Kernels have all of theirs in tables that every address space shares: the
//! entries of the uppermost table that lead to code are then the same, and all below them is.

use ram::Ram;
use x86::paging::{self, Roots};
use x86_interp::GuestRam;

/// What counts in an entry: where it leads, and who may execute what is there.
const COUNTS: u64 = paging::ADDRESS | paging::P | paging::US | paging::NX;

/// The entries of the uppermost page table that lead to code: index and entry.
#[derive(Default)]
pub struct Tops(Vec<(u64, u64)>);

fn index(gva: u64) -> u64 {
    gva >> 39 & 0x1ff
}

/// The entry of an index, as far as it counts.
fn entry(ram: &Ram, roots: Roots, index: u64) -> u64 {
    let page = ram.page(roots.top());
    page.map_or(0, |page| ram.load64(page.offset + index * 8) & COUNTS)
}

impl Tops {
    /// Code has been made of what lies at a GVA.
    pub fn note(&mut self, ram: &Ram, roots: Roots, gva: u64) {
        let index = index(gva);
        if self.0.iter().all(|(known, _)| *known != index) {
            self.0.push((index, entry(ram, roots, index)));
        }
    }

    /// These page tables have the same entries.
    pub fn are_those_of(&self, ram: &Ram, roots: Roots) -> bool {
        self.0.iter().all(|(index, known)| entry(ram, roots, *index) == *known)
    }

    /// No code is left.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}
