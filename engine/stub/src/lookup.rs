//! Look-ups: user code that is run translated, and some instructions of a 32-bit kernel's, find pages in a software TLB, not in mappings
//! of the host's.
//!
//! An entry is as good as a mapping: made from a successful walk of the guest's page tables with the access's
//! own rights, writable only while the page's dirty bit is set and nothing is decoded from it, and gone where
//! mappings go.

use crate::{
    Context, here,
    mmu::{self, Access, Leaf, Walk},
    reach,
};
use wedge_abi::{LOOKUPS, Lookups, RAM};
use x86::narrow::{KERNEL_START, wide};

const PAGE: u64 = 4096;

/// The table.
pub fn table() -> &'static Lookups {
    // SAFETY: mapped for good, and all of it is atomic.
    unsafe { &*(reach(LOOKUPS) as *const Lookups) }
}

/// What became of a look-up that missed.
pub enum LookupOutcome {
    /// It has an entry now.
    Filled,
    /// The guest takes a page fault with this P bit.
    Fault(u64),
    /// That is the monitor's to decide.
    Unknown,
}

/// Fills the entry for an access of user code to a GVA.
pub fn fill(cx: &mut Context<'_>, gva: u64, access: Access) -> LookupOutcome {
    let leaf = match mmu::walk(cx, gva, access) {
        Walk::Found(leaf) => leaf,
        Walk::Fault(present) => return LookupOutcome::Fault(present),
        Walk::Unknown => return LookupOutcome::Unknown,
    };
    if enter(cx, gva, leaf, access) { LookupOutcome::Filled } else { LookupOutcome::Unknown }
}

/// Enters what a walk has found; false if that is the monitor's to decide.
pub fn enter(cx: &mut Context<'_>, gva: u64, leaf: Leaf, access: Access) -> bool {
    let page = gva & !(PAGE - 1);
    let Some(hva) = target(cx, leaf, access).filter(|_| page != 0 && gva >> 47 == 0) else {
        return false;
    };
    table().set(page, hva, is_writable(cx, leaf), leaf.large);
    cx.vcpu.counters.lookups += 1;
    true
}

/// Where in the wedge's view of guest RAM (HVA) the page lies that a walk has found; `None` if the access is the monitor's to decide.
pub fn target(cx: &Context<'_>, leaf: Leaf, access: Access) -> Option<u64> {
    let may = !access.write || is_writable(cx, leaf);
    may.then(|| here(RAM) as u64 + leaf.offset)
}

fn is_writable(cx: &Context<'_>, leaf: Leaf) -> bool {
    leaf.writable && mmu::mark(cx.shared, leaf.offset) == 0
}

/// Fills the entry for a 32-bit kernel's access to a page of the kernel's (GVA). Its faults are the monitor's.
pub fn fill_of_narrow_kernel(cx: &mut Context<'_>, gva: u64, access: Access) -> LookupOutcome {
    if !(KERNEL_START..1 << 32).contains(&gva) {
        return LookupOutcome::Unknown;
    }
    match mmu::walk(cx, wide(gva), access) {
        Walk::Found(leaf) if leaf.is_of_every_space() && enter(cx, gva, leaf, access) => {
            LookupOutcome::Filled
        }
        _ => LookupOutcome::Unknown,
    }
}

/// The translation of a page of the user's, or of a 32-bit kernel's, is dropped.
pub fn forget(gva: u64) {
    table().forget(gva & !(PAGE - 1), PAGE);
    if table().may_be_code(gva) {
        table().forget_code();
    }
}
