//! What a TLB may hold: every translation that the guest's tables have allowed since it was flushed.
//!
//! An x86 CPU may fill its TLB at any time from the tables it is told to use, and keeps what it has until
//! the guest flushes (SDM 4.10). So the model reads the tables after every change, with a walker of its
//! own, and forgets by flushes only.

use crate::tables;
use ram::Ram;
use std::collections::HashMap;
use x86::paging::{A, ADDRESS, D, G, NX, P, PHYS_BITS, PS, RW, US};
use x86_interp::GuestRam;

/// A translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// GPA of the first byte.
    pub gpa: u64,
    /// Writable, and dirty.
    pub write: bool,
    /// Writable, dirty or not.
    pub writable: bool,
    pub user: bool,
    pub execute: bool,
    global: bool,
}

/// PCID, GVA and log2 of the bytes.
type Page = (u64, u64, u32);

/// The TLB.
#[derive(Debug, Default)]
pub struct Tlb(HashMap<Page, Vec<Entry>>);

impl Tlb {
    /// The CPU may have read any of the tables of the current space.
    pub fn fill(&mut self, ram: &Ram, root: u64, pcid: u64) {
        for gva in tables::user_pages().chain(tables::kernel_pages()) {
            let Some((entry, shift)) = walk(ram, root, gva, true) else { continue };
            let known = self.0.entry((pcid, gva >> shift << shift, shift)).or_default();
            if !known.contains(&entry) {
                known.push(entry);
            }
        }
    }

    /// The translations of a page that may be used under a PCID.
    pub fn of(&self, pcid: u64, gva: u64) -> impl Iterator<Item = Entry> {
        let own = |shift: u32| self.0.get(&(pcid, gva >> shift << shift, shift));
        let mut found = Vec::new();
        for shift in [12, 21] {
            let inside = gva & ((1 << shift) - 1);
            let others = (0..tables::PCIDS).filter(|other| *other != pcid);
            let global = others
                .filter_map(|other| self.0.get(&(other, gva >> shift << shift, shift)))
                .flatten()
                .filter(|entry| entry.global);
            let all = own(shift).into_iter().flatten().chain(global);
            found.extend(all.map(|entry| Entry { gpa: entry.gpa + inside, ..*entry }));
        }
        found.into_iter()
    }

    /// INVLPG: the page's translations, whatever their size, and the global ones of all PCIDs.
    pub fn flush_page(&mut self, pcid: u64, gva: u64) {
        self.drop(|(of, start, shift), entry| {
            gva >> shift << shift == start && (of == pcid || entry.global)
        });
    }

    /// All but the global translations of a PCID.
    pub fn flush_space(&mut self, pcid: u64) {
        self.drop(|(of, ..), entry| of == pcid && !entry.global);
    }

    /// Everything.
    pub fn flush_all(&mut self) {
        self.0.clear();
    }

    fn drop(&mut self, gone: impl Fn(Page, &Entry) -> bool) {
        self.0.retain(|page, entries| {
            entries.retain(|entry| !gone(*page, entry));
            !entries.is_empty()
        });
    }
}

/// What the tables say about a GVA, and log2 of the page's bytes. `filled`: as far as it can be in a TLB,
/// for which every level must have been accessed.
pub fn walk(ram: &Ram, root: u64, gva: u64, filled: bool) -> Option<(Entry, u32)> {
    const RESERVED: u64 = (1 << 52) - (1 << PHYS_BITS);
    let (mut table, mut all, mut any) = (root, RW | US | A, 0);
    for shift in [39, 30, 21, 12] {
        let value = ram.page(table).map_or(0, |_| ram.load64(table + (gva >> shift & 0x1ff) * 8));
        let large = shift == 21 && value & PS != 0;
        if value & P == 0 || value & RESERVED != 0 || large && value & 0x1f_e000 != 0 {
            return None;
        }
        (all, any) = (all & value, any | value);
        if large || shift == 12 {
            let entry = entry(value, all, any, shift);
            return (!filled || all & A != 0).then_some((entry, shift));
        }
        table = value & ADDRESS;
    }
    None
}

/// There is a table of small pages for a GVA, or a large page.
pub fn has_table(ram: &Ram, root: u64, gva: u64) -> bool {
    let entry = |table: u64, shift: u32| {
        let value = ram.page(table).map_or(0, |_| ram.load64(table + (gva >> shift & 0x1ff) * 8));
        Some(value).filter(|value| value & P != 0)
    };
    let second = entry(root, 39).and_then(|top| entry(top & ADDRESS, 30));
    second.is_some_and(|second| second & PS != 0 || entry(second & ADDRESS, 21).is_some())
}

fn entry(leaf: u64, all: u64, any: u64, shift: u32) -> Entry {
    Entry {
        gpa: leaf & ADDRESS >> shift << shift,
        write: all & RW != 0 && leaf & D != 0,
        writable: all & RW != 0,
        user: all & US != 0,
        execute: any & NX == 0,
        global: leaf & G != 0,
    }
}
