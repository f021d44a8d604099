//! The walk of the guest's page tables, for the ordinary cases: 4-level paging, tables in plain RAM.

use crate::here;
use core::sync::atomic::{AtomicU64, Ordering};
use frame::{MARKS, RAM, Shared, VcpuPage};
use x86::paging::{A, ADDRESS, D, G, NX, P, PHYS_BITS, PS, RW, US};

/// Reserved in every entry.
pub(crate) const RESERVED: u64 = ((1 << 52) - 1) & !((1 << PHYS_BITS) - 1);
const PAGE: u64 = 4096;
const LARGE: u64 = 1 << 21;
/// GPA at which the rest of RAM begins.
const HIGH_BASE: u64 = 1 << 32;

/// The access to be translated.
#[derive(Clone, Copy)]
pub struct Access {
    /// A store.
    pub write: bool,
    /// An instruction fetch.
    pub fetch: bool,
    /// From user code; else from the kernel, with SMAP lifted as far as the address is the user's.
    pub user: bool,
}

/// What a walk found.
pub enum Walk {
    /// The access is allowed.
    Found(Leaf),
    /// The guest takes a page fault with this P bit.
    Fault(u64),
    /// Not an ordinary case.
    Unknown,
}

/// What the guest's page tables say about a page.
#[derive(Clone, Copy)]
pub struct Leaf {
    /// Of the page of 4 KiB, in RAM.
    pub offset: u64,
    /// It is part of a page of 2 MiB.
    pub large: bool,
    /// It may be written, and the guest knows that it may have been.
    pub writable: bool,
    pub(crate) user: bool,
    /// It may be mapped to be executed: where pages are searched for what opens keys that is the monitor's to
    /// do.
    pub(crate) executable: bool,
    pub(crate) global: bool,
}

/// Offset in RAM of a page at a GPA.
pub(crate) fn ram_offset(s: &Shared, gpa: u64) -> Option<u64> {
    if gpa < s.setup.ram_low {
        return Some(gpa);
    }
    let above = gpa.checked_sub(HIGH_BASE)?;
    (above < s.setup.ram_len - s.setup.ram_low).then(|| s.setup.ram_low + above)
}

/// The mark of the page of RAM at an offset: not zero if the monitor decides what becomes of it.
pub fn mark(offset: u64) -> u8 {
    // SAFETY: there is a mark for every page of RAM.
    unsafe { core::ptr::read_volatile((here(MARKS) as u64 + offset / PAGE) as *const u8) }
}

/// An entry of a page table that is ordinary RAM.
pub(crate) fn entry(s: &Shared, table: u64, index: u64) -> Option<&'static AtomicU64> {
    let offset = ram_offset(s, table & ADDRESS).filter(|offset| mark(*offset) == 0)?;
    // SAFETY: inside RAM, aligned; others write it atomically.
    Some(unsafe { &*((here(RAM) as u64 + offset + index * 8) as *const AtomicU64) })
}

/// HVA of the page table that CR3 or an entry leads to, if it is in RAM.
pub fn table(s: &Shared, address: u64) -> Option<u64> {
    ram_offset(s, address & ADDRESS).map(|offset| here(RAM) as u64 + offset)
}

/// An entry of a table that [`table`] has found.
pub fn table_entry(table: u64, index: u64) -> u64 {
    // SAFETY: inside RAM, aligned; others write it atomically.
    unsafe { &*((table + (index & 0x1ff) * 8) as *const AtomicU64) }.load(Ordering::Relaxed)
}

/// Walks the guest's page tables for an access, setting accessed and dirty bits.
pub fn walk(f: &VcpuPage, s: &Shared, gva: u64, access: Access) -> Walk {
    let (mut table, mut rights, mut no_execute) = (f.regs.cr3, RW | US, 0);
    for shift in [39, 30, 21, 12] {
        let Some(slot) = entry(s, table, gva >> shift & 0x1ff) else { return Walk::Unknown };
        let value = slot.load(Ordering::Relaxed);
        if value & P == 0 {
            return Walk::Fault(0);
        }
        let leaf = shift == 12 || value & PS != 0;
        let odd = leaf && (shift > 21 || shift == 21 && value & 0x1f_e000 != 0);
        if value & RESERVED != 0 || odd {
            return Walk::Unknown;
        }
        rights &= value;
        no_execute |= value & NX;
        if leaf {
            return finish(s, slot, value, rights | no_execute, gva, access, shift == 21);
        }
        // Another vCPU may just have taken the entry away.
        let accessed =
            || slot.compare_exchange(value, value | A, Ordering::SeqCst, Ordering::Relaxed);
        if value & A == 0 && accessed().is_err() {
            return Walk::Unknown;
        }
        table = value;
    }
    Walk::Unknown
}

fn finish(
    s: &Shared,
    slot: &AtomicU64,
    value: u64,
    rights: u64,
    gva: u64,
    access: Access,
    large: bool,
) -> Walk {
    let denied = access.user && rights & US == 0
        || access.write && rights & RW == 0
        || access.fetch && rights & NX != 0;
    if denied {
        return Walk::Fault(P);
    }
    let wanted = value | A | if access.write { D } else { 0 };
    if wanted != value
        && slot.compare_exchange(value, wanted, Ordering::SeqCst, Ordering::Relaxed).is_err()
    {
        return Walk::Unknown;
    }
    let inside = if large { gva & (LARGE - PAGE) } else { 0 };
    match ram_offset(s, (value & ADDRESS & !if large { LARGE - 1 } else { 0 }) + inside) {
        Some(offset) => Walk::Found(Leaf {
            offset,
            large,
            writable: rights & RW != 0 && wanted & D != 0,
            user: rights & US != 0,
            executable: rights & NX == 0 && s.setup.searched == 0,
            global: value & G != 0,
        }),
        None => Walk::Unknown,
    }
}

/// Address of the last-level table for `gva`, with RW and US set only if all levels above allow writing and
/// the user's accesses, and NX if one of them forbids execution.
pub(crate) fn last_table(f: &VcpuPage, s: &Shared, gva: u64) -> Option<u64> {
    let (mut table, mut rights, mut no_execute) = (f.regs.cr3, RW | US, 0);
    for shift in [39, 30, 21] {
        let value = entry(s, table, gva >> shift & 0x1ff)?.load(Ordering::Relaxed);
        if value & (P | A) != P | A || value & PS != 0 {
            return None;
        }
        rights &= value;
        no_execute |= value & NX;
        table = value;
    }
    Some(table & ADDRESS | rights | no_execute)
}
