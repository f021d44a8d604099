//! Page-table formats and the walk (SDM chapter 4): 32-bit, PAE and 4-level paging.
//!
//! The walk is a pure law over physical memory. It sets accessed and dirty bits the way the CPU
//! does (atomically, dirty only when the access is a permitted write), and its result carries
//! everything a TLB entry may cache. Whoever caches a result for writes must have walked with
//! `write`, so that the dirty bit is set before the first store.

use crate::{
    Vcpu, control::cr0, control::cr4, control::efer, exception::Fault, exception::pf, flags,
};

/// Present.
pub const P: u64 = 1 << 0;
/// Writable.
pub const RW: u64 = 1 << 1;
/// User accessible.
pub const US: u64 = 1 << 2;
/// Accessed.
pub const A: u64 = 1 << 5;
/// Dirty.
pub const D: u64 = 1 << 6;
/// Page size: this entry maps a large page.
pub const PS: u64 = 1 << 7;
/// Global.
pub const G: u64 = 1 << 8;
/// Linux moves [`D`] here when it takes [`RW`] from a page (64-bit, since 6.6; `_PAGE_SAVED_DIRTY`), because [`D`] without [`RW`]
/// means a shadow stack. CPUs ignore this bit. In PAE's entries it is reserved.
pub const SAVED_DIRTY: u64 = 1 << 58;
/// No execute.
pub const NX: u64 = 1 << 63;
/// Physical address width of the CPU model, in bits; higher address bits are reserved.
pub const PHYS_BITS: u32 = 46;
/// Address bits of an entry.
pub const ADDRESS: u64 = ((1 << PHYS_BITS) - 1) & !0xfff;

/// Physical memory as the page walker sees it: naturally aligned words at GPAs. Where there is no
/// RAM, reads give all ones and writes are lost, as on a real bus.
pub trait WalkMemory {
    /// Reads 8 bytes.
    fn read_u64(&mut self, gpa: u64) -> u64;
    /// Reads 4 bytes.
    fn read_u32(&mut self, gpa: u64) -> u32;
    /// Atomically replaces `old` by `new`; false if the word had changed.
    fn cas_u64(&mut self, gpa: u64, old: u64, new: u64) -> bool;
    /// Atomically replaces `old` by `new`; false if the word had changed.
    fn cas_u32(&mut self, gpa: u64, old: u32, new: u32) -> bool;
}

/// The kind of access being translated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// A store.
    pub write: bool,
    /// An instruction fetch.
    pub fetch: bool,
    /// From CPL 3 (and not an implicit supervisor access such as a descriptor-table read).
    pub user: bool,
    /// Supervisor access to user pages is permitted although SMAP is on (RFLAGS.AC, and the access
    /// is explicit).
    pub smap_override: bool,
}

/// The registers that decide a walk, taken out of a [`Vcpu`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Roots {
    /// CR0.
    pub cr0: u64,
    /// CR3.
    pub cr3: u64,
    /// CR4.
    pub cr4: u64,
    /// EFER.
    pub efer: u64,
}

impl Roots {
    /// Page tables have four levels.
    pub const fn long_mode(&self) -> bool {
        self.efer & efer::LMA != 0
    }

    /// GPA of the top page table. With PAE paging the table has 32 bytes, and several may lie in a page (SDM 4.4.1).
    pub const fn top(&self) -> u64 {
        match self.has_narrow_top() {
            true => self.cr3 & 0xffff_ffe0,
            false => self.cr3 & ADDRESS,
        }
    }

    /// Entries of the top page table, from the first on, for the memory of programs, as kernels have it: for the lower half, or all
    /// but the last GiB.
    pub const fn entries_of_programs(&self) -> usize {
        if self.has_narrow_top() { 3 } else { 256 }
    }

    /// The page tables are PAE's.
    const fn has_narrow_top(&self) -> bool {
        self.cr4 & cr4::PAE != 0 && !self.long_mode()
    }
}

impl From<&Vcpu> for Roots {
    fn from(v: &Vcpu) -> Self {
        Self { cr0: v.cr0, cr3: v.cr3, cr4: v.cr4, efer: v.efer }
    }
}

/// A translation, with what a TLB may remember.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Translation {
    /// The translated address (GPA).
    pub gpa: u64,
    /// log2 of the page size in bytes: 12, 21, 22 or 30.
    pub page_bits: u32,
    /// Combined writable permission of all levels.
    pub writable: bool,
    /// Combined user permission.
    pub user: bool,
    /// Combined execute permission.
    pub executable: bool,
    /// Survives CR3 writes.
    pub global: bool,
    /// The leaf's dirty bit is set.
    pub dirty: bool,
    /// The leaf's dirty bit is set, or the bit in which Linux keeps that ([`SAVED_DIRTY`]). This is a hint: other systems may use
    /// the second bit for something else.
    pub seems_written: bool,
}

/// RFLAGS.AC lets an explicit supervisor access through SMAP.
pub const fn smap_override(rflags: u64) -> bool {
    rflags & flags::AC != 0
}

/// Whether the linear address is canonical for 4-level paging.
#[inline]
pub const fn canonical(gva: u64) -> bool {
    ((gva << 16) as i64 >> 16) as u64 == gva
}

/// Translates `gva`, setting accessed and dirty bits.
///
/// # Errors
/// #PF with the error code and address of SDM 4.7. Canonical checks are the caller's.
pub fn walk<M: WalkMemory>(
    memory: &mut M,
    roots: Roots,
    gva: u64,
    access: Access,
) -> Result<Translation, Fault> {
    if roots.cr0 & cr0::PG == 0 {
        return Ok(identity(gva));
    }
    loop {
        let attempt = match Format::of(roots) {
            Format::Legacy => walk_legacy(memory, roots, gva, access),
            format => walk_wide(memory, roots, gva, access, format),
        };
        match attempt {
            Ok(Some(translation)) => return Ok(translation),
            Ok(None) => continue,
            Err(code) => return Err(Fault::page(gva, code | access_bits(roots, access))),
        }
    }
}

const fn identity(gva: u64) -> Translation {
    Translation {
        gpa: gva,
        page_bits: 12,
        writable: true,
        user: true,
        executable: true,
        global: false,
        dirty: true,
        seems_written: true,
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Format {
    Legacy,
    Pae,
    FourLevel,
}

impl Format {
    fn of(roots: Roots) -> Self {
        if roots.long_mode() {
            Self::FourLevel
        } else if roots.cr4 & cr4::PAE != 0 {
            Self::Pae
        } else {
            Self::Legacy
        }
    }
}

fn access_bits(roots: Roots, access: Access) -> u32 {
    let mut code = 0;
    if access.write {
        code |= pf::WRITE;
    }
    if access.user {
        code |= pf::USER;
    }
    let fetch_reported = roots.efer & efer::NXE != 0 || roots.cr4 & cr4::SMEP != 0;
    if access.fetch && fetch_reported {
        code |= pf::FETCH;
    }
    code
}

/// Rights gathered on the way down.
#[derive(Clone, Copy, Debug)]
struct Rights {
    writable: bool,
    user: bool,
    executable: bool,
}

impl Rights {
    const ALL: Self = Self { writable: true, user: true, executable: true };

    #[inline]
    const fn and(self, entry: u64) -> Self {
        Self {
            writable: self.writable && entry & RW != 0,
            user: self.user && entry & US != 0,
            executable: self.executable && entry & NX == 0,
        }
    }

    /// SDM 4.6.1.
    fn permits(self, roots: Roots, access: Access) -> bool {
        if access.user {
            return self.user
                && (!access.write || self.writable)
                && (!access.fetch || self.executable);
        }
        if access.fetch {
            return self.executable && !(self.user && roots.cr4 & cr4::SMEP != 0);
        }
        if self.user && roots.cr4 & cr4::SMAP != 0 && !access.smap_override {
            return false;
        }
        !access.write || self.writable || roots.cr0 & cr0::WP == 0
    }
}

/// The position of a walk in page tables of 64-bit entries: the entry read last, and the rights of all entries so far.
#[derive(Clone, Copy, Debug)]
pub struct Descent {
    entry: u64,
    bits: u32,
    rights: Rights,
}

impl Descent {
    /// The start of a walk of 4-level tables.
    #[inline]
    pub const fn top(roots: Roots) -> Self {
        Self { entry: roots.cr3 & ADDRESS, bits: 48, rights: Rights::ALL }
    }

    /// The start of a walk for a GVA; `None` if its tables have entries of 32 bits, or if the top-level entry of a PAE walk is
    /// not present. That entry has no accessed bit.
    #[inline]
    fn start(memory: &mut impl WalkMemory, roots: Roots, gva: u64) -> Option<Self> {
        match Format::of(roots) {
            Format::FourLevel => Some(Self::top(roots)),
            Format::Pae => Self::below_pdpte(memory, roots, gva),
            Format::Legacy => None,
        }
    }

    /// Walks for a GVA from the top as [`Self::look`] does from where a walk is.
    #[inline]
    pub fn look_from_top(
        memory: &mut impl WalkMemory,
        roots: Roots,
        gva: u64,
        way: (u32, u64),
    ) -> Option<Self> {
        Self::start(memory, roots, gva)?.look(memory, roots, gva, way)
    }

    /// The CPU caches these entries; re-reading them is allowed.
    fn below_pdpte(memory: &mut impl WalkMemory, roots: Roots, gva: u64) -> Option<Self> {
        let pdpte = memory.read_u64(roots.top() + ((gva >> 30) & 3) * 8);
        (pdpte & P != 0).then_some(Self::pdpte(pdpte))
    }

    /// The start of a PAE walk below one of the four top-level entries, which carry no rights.
    const fn pdpte(entry: u64) -> Self {
        Self { entry, bits: 30, rights: Rights::ALL }
    }

    /// GPA of the entry of the next lower level for a GVA.
    #[inline]
    pub const fn next(self, gva: u64) -> u64 {
        (self.entry & ADDRESS) + (gva >> (self.bits - 9) & 0x1ff) * 8
    }

    /// Whether the entry maps a page and not a table.
    #[inline]
    pub const fn is_leaf(self) -> bool {
        self.bits == 12 || self.bits < 39 && self.entry & PS != 0
    }

    /// Goes one level down, through the entry read at [`Descent::next`].
    ///
    /// # Errors
    /// The present and reserved bits of a page fault's error code (SDM 4.7).
    #[inline]
    pub const fn through(self, roots: Roots, entry: u64) -> Result<Self, u32> {
        if entry & P == 0 {
            return Err(0);
        }
        let below = Self { entry, bits: self.bits - 9, rights: self.rights.and(entry) };
        if entry & reserved_wide(roots, below) != 0 {
            return Err(pf::PRESENT | pf::RESERVED);
        }
        Ok(below)
    }

    /// Goes down to the entry for `1 << bits` bytes, or to the entry of a larger page, and writes nothing to the tables. `None`
    /// if an entry on the way is not present, has a reserved bit set, or lacks one of the bits `wanted` (for example A).
    #[inline]
    pub fn look(
        mut self,
        memory: &mut impl WalkMemory,
        roots: Roots,
        gva: u64,
        (bits, wanted): (u32, u64),
    ) -> Option<Self> {
        while self.bits > bits && !self.is_leaf() {
            let entry = memory.read_u64(self.next(gva));
            if entry & wanted != wanted {
                return None;
            }
            self = self.through(roots, entry).ok()?;
        }
        Some(self)
    }

    /// GPA of the table that the entry points to, in the form of an entry: RW and US are set only if all entries so far set
    /// them, and NX if one of them sets NX. `None` if the entry maps a page.
    #[inline]
    pub const fn table(self) -> Option<u64> {
        if self.is_leaf() {
            return None;
        }
        let rights = if self.rights.writable { RW } else { 0 }
            | if self.rights.user { US } else { 0 }
            | if self.rights.executable { 0 } else { NX };
        Some(self.entry & ADDRESS | rights)
    }

    /// The translation of a GVA by an entry that maps a page.
    #[inline]
    pub const fn translation(self, roots: Roots, gva: u64) -> Translation {
        let offset_mask = (1u64 << self.bits) - 1;
        Translation {
            gpa: (self.entry & ADDRESS & !offset_mask) | (gva & offset_mask),
            page_bits: self.bits,
            writable: self.rights.writable,
            user: self.rights.user,
            executable: self.rights.executable,
            global: self.entry & G != 0 && roots.cr4 & cr4::PGE != 0,
            dirty: self.entry & D != 0,
            seems_written: self.entry & (D | SAVED_DIRTY) != 0,
        }
    }
}

/// PAE and 4-level: 64-bit entries, nine bits a level. `Ok(None)` asks for a retry after a race.
fn walk_wide<M: WalkMemory>(
    memory: &mut M,
    roots: Roots,
    gva: u64,
    access: Access,
    format: Format,
) -> Result<Option<Translation>, u32> {
    let mut step = match format {
        Format::FourLevel => Descent::top(roots),
        _ => Descent::below_pdpte(memory, roots, gva).ok_or(0u32)?,
    };
    loop {
        let slot = step.next(gva);
        let entry = memory.read_u64(slot);
        step = step.through(roots, entry)?;
        if step.is_leaf() && !step.rights.permits(roots, access) {
            return Err(pf::PRESENT);
        }
        let dirty = if step.is_leaf() && access.write { D } else { 0 };
        step.entry = entry | A | dirty;
        if step.entry != entry && !memory.cas_u64(slot, entry, step.entry) {
            return Ok(None);
        }
        if step.is_leaf() {
            return Ok(Some(step.translation(roots, gva)));
        }
    }
}

/// Reserved bits of the entry that a descent has read last (SDM 4.4 and 4.5).
#[inline]
const fn reserved_wide(roots: Roots, step: Descent) -> u64 {
    let mut bits = ((1u64 << 52) - 1) & !((1 << PHYS_BITS) - 1);
    if roots.efer & efer::NXE == 0 {
        bits |= NX;
    }
    if !roots.long_mode() {
        bits |= 0x7ff << 52; // PAE: bits 62:52 are reserved
    }
    match (step.bits, step.is_leaf()) {
        (39, _) => bits | PS,
        (30, true) => bits | 0x3fff_e000, // 1 GB page, PAT bit 12 allowed
        (21, true) => bits | 0x1f_e000,   // 2 MB page
        _ => bits,
    }
}

/// 32-bit paging: 4-byte entries, ten bits a level, 4 MB pages with CR4.PSE.
fn walk_legacy<M: WalkMemory>(
    memory: &mut M,
    roots: Roots,
    gva: u64,
    access: Access,
) -> Result<Option<Translation>, u32> {
    let pde_slot = (roots.cr3 & 0xffff_f000) + ((gva >> 22) & 0x3ff) * 4;
    let pde = memory.read_u32(pde_slot);
    if u64::from(pde) & P == 0 {
        return Err(0);
    }
    let large = u64::from(pde) & PS != 0 && roots.cr4 & cr4::PSE != 0;
    let mut rights = Rights::ALL.and(u64::from(pde));
    let (slot, entry, bits) = if large {
        (pde_slot, pde, 22)
    } else {
        if u64::from(pde) & A == 0 && !memory.cas_u32(pde_slot, pde, pde | A as u32) {
            return Ok(None);
        }
        let slot = u64::from(pde & 0xffff_f000) + ((gva >> 12) & 0x3ff) * 4;
        let pte = memory.read_u32(slot);
        if u64::from(pte) & P == 0 {
            return Err(0);
        }
        rights = rights.and(u64::from(pte));
        (slot, pte, 12)
    };
    if !rights.permits(roots, access) {
        return Err(pf::PRESENT);
    }
    let wanted = entry | A as u32 | if access.write { D as u32 } else { 0 };
    if wanted != entry && !memory.cas_u32(slot, entry, wanted) {
        return Ok(None);
    }
    let offset_mask = (1u64 << bits) - 1;
    let high = if large { u64::from(entry >> 13 & 0xff) << 32 } else { 0 };
    Ok(Some(Translation {
        gpa: high | (u64::from(entry) & 0xffff_f000 & !offset_mask) | (gva & offset_mask),
        page_bits: bits,
        writable: rights.writable,
        user: rights.user,
        executable: true,
        global: u64::from(entry) & G != 0 && roots.cr4 & cr4::PGE != 0,
        dirty: u64::from(wanted) & D != 0,
        seems_written: u64::from(wanted) & D != 0,
    }))
}

#[cfg(test)]
mod tests;
