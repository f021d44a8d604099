//! The walk of the guest's page tables, for the ordinary cases: 4-level paging, tables in plain RAM.
//!
//! It is the walk of the interpreter and the monitor, [`x86::paging::walk`], over the memory that a wedge has.

use crate::{Context, reach};
use core::sync::atomic::{AtomicU64, Ordering};
use wedge_abi::{MARKS, RAM, Shared, walks};
use x86::{
    Fault,
    control::{cr0, cr4, efer},
    exception::pf,
    paging::{self, A, ADDRESS, Descent, P, PHYS_BITS, Roots, Translation, WalkMemory},
};

/// Reserved in every entry.
pub(crate) const RESERVED: u64 = ((1 << 52) - 1) & !((1 << PHYS_BITS) - 1);
const PAGE: u64 = 4096;
/// log2 of the bytes of a page, and of a large one.
const PAGE_BITS: u32 = 12;
const LARGE_BITS: u32 = 21;
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
    /// User code may execute the page and not write it, where what is executed are copies that have been searched.
    pub(crate) code: bool,
    pub(crate) global: bool,
}

impl Leaf {
    /// The kernel has it in all address spaces, so that only INVLPG and a flush of all translations drop it.
    pub(crate) fn is_of_every_space(&self) -> bool {
        self.global && !self.user
    }
}

/// Offset in RAM of a page at a GPA.
pub(crate) fn ram_offset(s: &Shared, gpa: u64) -> Option<u64> {
    if gpa < s.setup.ram_low {
        return Some(gpa);
    }
    let above = gpa.checked_sub(HIGH_BASE)?;
    (above < s.setup.ram_len - s.setup.ram_low).then(|| s.setup.ram_low + above)
}

/// The mark of a page that is not RAM: nobody has given it one.
const NOT_RAM: u8 = u8::MAX;

/// The mark of the page of RAM at an offset: not zero if the monitor decides what becomes of it.
pub fn mark(s: &Shared, offset: u64) -> u8 {
    if offset >= s.setup.ram_len {
        return NOT_RAM;
    }
    // SAFETY: there is a mark for every page of RAM.
    unsafe { core::ptr::read_volatile((reach(MARKS) as u64 + offset / PAGE) as *const u8) }
}

/// An entry of a page table that is ordinary RAM.
pub(crate) fn entry(s: &Shared, table: u64, index: u64) -> Option<&'static AtomicU64> {
    let offset = ram_offset(s, table & ADDRESS).filter(|offset| mark(s, *offset) == 0)?;
    Some(PageTable(reach(RAM) as u64 + offset).slot(index))
}

/// A page table of the guest's, by its HVA.
#[derive(Clone, Copy)]
pub(crate) struct PageTable(u64);

impl PageTable {
    /// The table that CR3 or an entry leads to, if it is in RAM.
    pub(crate) fn at(s: &Shared, address: u64) -> Option<Self> {
        ram_offset(s, address & ADDRESS).map(|offset| Self(reach(RAM) as u64 + offset))
    }

    /// An entry, by its index (of 512).
    pub(crate) fn entry(self, index: u64) -> u64 {
        self.slot(index).load(Ordering::Relaxed)
    }

    fn slot(self, index: u64) -> &'static AtomicU64 {
        // SAFETY: a page of RAM, which is mapped for good; others write it atomically.
        unsafe { &*((self.0 + (index & 0x1ff) * 8) as *const AtomicU64) }
    }
}

/// Guest memory as the walk sees it: page tables in RAM that the monitor has no plans with.
struct Tables<'a> {
    shared: &'a Shared,
    /// A table lies elsewhere: what the walk finds means nothing.
    odd: bool,
}

impl Tables<'_> {
    #[inline(always)]
    fn slot(&mut self, gpa: u64) -> Option<&'static AtomicU64> {
        let slot = entry(self.shared, gpa, gpa >> 3 & 0x1ff);
        self.odd |= slot.is_none();
        slot
    }
}

impl WalkMemory for Tables<'_> {
    #[inline(always)]
    fn read_u64(&mut self, gpa: u64) -> u64 {
        self.slot(gpa).map_or(0, |slot| slot.load(Ordering::Relaxed))
    }

    /// Tables of 4-byte entries are not walked here.
    fn read_u32(&mut self, _: u64) -> u32 {
        self.odd = true;
        0
    }

    #[inline(always)]
    fn cas_u64(&mut self, gpa: u64, old: u64, new: u64) -> bool {
        let exchange =
            |slot: &AtomicU64| slot.compare_exchange(old, new, Ordering::SeqCst, Ordering::Relaxed);
        self.slot(gpa).is_none_or(|slot| exchange(slot).is_ok())
    }

    fn cas_u32(&mut self, _: u64, _: u32, _: u32) -> bool {
        self.odd = true;
        true
    }
}

/// How the guest's CPU walks tables of four levels.
const ROOTS: Roots = Roots {
    cr0: cr0::PE | cr0::WP | cr0::PG,
    cr3: 0,
    cr4: cr4::PAE | cr4::PGE,
    efer: efer::LME | efer::LMA | efer::NXE,
};

/// How the guest's CPU walks while a wedge may do so ([`wedge_abi::RunControl::walks`]).
fn roots(cx: &Context<'_>) -> Roots {
    let efer = if cx.vcpu.run.walks == walks::PAE { efer::NXE } else { ROOTS.efer };
    Roots { cr3: cx.vcpu.regs.cr3, efer, ..ROOTS }
}

/// Walks the guest's page tables for an access, setting accessed and dirty bits.
pub fn walk(cx: &Context<'_>, gva: u64, access: Access) -> Walk {
    let Access { write, fetch, user } = access;
    let access = paging::Access { write, fetch, user, smap_override: true };
    match translate(cx, gva, access) {
        None => Walk::Unknown,
        Some(Ok(found)) => leaf(cx.shared, &found).map_or(Walk::Unknown, Walk::Found),
        Some(Err(fault)) => match fault.code.unwrap_or_default() {
            code if code & pf::RESERVED != 0 => Walk::Unknown,
            code => Walk::Fault((code & pf::PRESENT).into()),
        },
    }
}

/// The GPA of a store by the kernel, whatever is there, if the guest's tables allow it.
pub fn gpa_of_store(cx: &Context<'_>, gva: u64) -> Option<u64> {
    let access = paging::Access { write: true, fetch: false, user: false, smap_override: false };
    Some(translate(cx, gva, access)?.ok()?.gpa)
}

/// What the guest's tables say of an access; `None` if a table does not lie in plain RAM.
fn translate(
    cx: &Context<'_>,
    gva: u64,
    access: paging::Access,
) -> Option<Result<Translation, Fault>> {
    let mut tables = Tables { shared: cx.shared, odd: false };
    let found = paging::walk(&mut tables, roots(cx), gva, access);
    (!tables.odd).then_some(found)
}

/// Guest memory as a look sees it that leaves no trace: page tables in RAM, whatever the monitor does with them.
struct Looked<'a> {
    shared: &'a Shared,
    /// A table lies elsewhere: what the walk finds means nothing.
    odd: bool,
}

impl WalkMemory for Looked<'_> {
    fn read_u64(&mut self, gpa: u64) -> u64 {
        let table = PageTable::at(self.shared, gpa);
        self.odd |= table.is_none();
        table.map_or(0, |table| table.entry(gpa >> 3))
    }

    /// Tables of 4-byte entries are not walked here.
    fn read_u32(&mut self, _: u64) -> u32 {
        self.odd = true;
        0
    }

    fn cas_u64(&mut self, _: u64, _: u64, _: u64) -> bool {
        true
    }

    fn cas_u32(&mut self, _: u64, _: u32, _: u32) -> bool {
        true
    }
}

/// GPA of the page at `gva` for the kernel to read, by a walk that sets nothing; `Some(None)` if there is no page, `None` if a
/// table is not RAM.
pub(crate) fn look(s: &Shared, cr3: u64, gva: u64) -> Option<Option<u64>> {
    let mut tables = Looked { shared: s, odd: false };
    let access = paging::Access { smap_override: true, ..paging::Access::default() };
    let found = paging::walk(&mut tables, Roots { cr3, ..ROOTS }, gva, access);
    (!tables.odd).then(|| found.ok().map(|found| found.gpa & !(PAGE - 1)))
}

/// The page of a translation, if it is one of 4 KiB or 2 MiB in RAM.
fn leaf(s: &Shared, found: &Translation) -> Option<Leaf> {
    let offset = ram_offset(s, found.gpa & ADDRESS)?;
    matches!(found.page_bits, PAGE_BITS | LARGE_BITS).then_some(Leaf {
        offset,
        large: found.page_bits == LARGE_BITS,
        writable: found.writable && found.dirty,
        user: found.user,
        executable: found.executable && s.setup.searched == 0,
        code: s.setup.searched != 0 && found.user && found.executable && !found.writable,
        global: found.global,
    })
}

/// GPA of the last-level table for `gva`, and the rights of the levels above it in the form of [`Descent::table`].
pub(crate) fn last_table(cx: &Context<'_>, gva: u64) -> Option<u64> {
    let mut tables = Tables { shared: cx.shared, odd: false };
    Descent::look_from_top(&mut tables, roots(cx), gva, (LARGE_BITS, P | A))?.table()
}
