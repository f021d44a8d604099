//! Walks of the guest's page tables that leave no trace, and what they say of mappings made before.

use super::{EXECUTE, KERNEL_PAGE, LARGE_BITS, RESERVED, WRITE, part};
use ram::Ram;
use rustc_hash::FxHashSet;
use wedge_abi::Base;
use x86::paging::{self, Roots, Translation, WalkMemory};
use x86_interp::GuestRam;

/// What has become of a mapping.
pub(super) enum Standing {
    Good,
    /// It may not be written any more.
    ReadOnly,
    Gone,
}

/// Compares a page's mapping, at an offset and with a protection, with what would be mapped now; with `global`, as
/// a global one.
pub(super) fn still_good(
    walker: &mut Walker<'_>,
    base: Base,
    hva: u64,
    (offset, protection): (u64, u64),
    parts: &FxHashSet<(u64, u64)>,
    global: bool,
) -> Standing {
    let kernel = protection & KERNEL_PAGE != 0;
    let gva = if kernel { hva.wrapping_sub(base.bias()) } else { hva };
    // Of a large page only what is known to be a part of it: a flush of any part drops all.
    let small = |bits: u32| bits == 12 || parts.contains(&part(hva, bits));
    let right = |found: &Translation| {
        found.user != kernel && (found.global || !global) && small(found.page_bits)
    };
    let Some(found) = walker.find(gva).filter(right) else { return Standing::Gone };
    let same = walker.ram.page(found.gpa).is_some_and(|page| page.offset == offset);
    if !same || protection & EXECUTE != 0 && !found.executable {
        return Standing::Gone;
    }
    match protection & WRITE != 0 && !(found.writable && found.dirty) {
        false => Standing::Good,
        true if protection & EXECUTE == 0 => Standing::ReadOnly,
        true => Standing::Gone,
    }
}

/// The large translation of a GVA, if the guest has used it already.
pub(super) fn large_leaf(ram: &Ram, roots: Roots, gva: u64) -> Option<Translation> {
    descend(ram, roots, gva).filter(|found| found.page_bits >= 21)
}

/// The small translation of a GVA, if the guest has used it already.
pub(super) fn leaf(ram: &Ram, roots: Roots, gva: u64, user: bool) -> Option<Translation> {
    descend(ram, roots, gva).filter(|found| found.page_bits == 12 && found.user == user)
}

/// The entries that lead to a GVA, each with log2 of the bytes it stands for, down to that of a page or the first that
/// is not present.
fn path(mut memory: &Ram, roots: Roots, gva: u64) -> impl Iterator<Item = (u32, u64)> {
    let mut table = Some(roots.cr3 & paging::ADDRESS);
    [39, 30, 21, 12].into_iter().map_while(move |shift| {
        let entry = memory.read_u64(table? + (gva >> shift & 0x1ff) * 8);
        let leads_on = entry & paging::P != 0 && !is_leaf(shift, entry);
        table = leads_on.then_some(entry & paging::ADDRESS);
        Some((shift, entry))
    })
}

fn is_leaf(shift: u32, entry: u64) -> bool {
    shift == 12 || shift != 39 && entry & paging::PS != 0
}

/// Walks without setting any bit; only through entries that are present and accessed.
fn descend(ram: &Ram, roots: Roots, gva: u64) -> Option<Translation> {
    Some(Step::top(roots).down(ram, gva, 12)?.translation(gva))
}

/// The same for many GVAs in ascending order: what the upper levels say is asked once for each 2 MiB.
pub(super) struct Walker<'a> {
    ram: &'a Ram,
    roots: Roots,
    /// The 2 MiB last asked for, and the entry for them.
    upper: Option<(u64, Option<Step>)>,
    /// What a page's entry must have.
    wanted: u64,
}

impl<'a> Walker<'a> {
    pub(super) fn new(ram: &'a Ram, roots: Roots) -> Self {
        Self { ram, roots, upper: None, wanted: paging::P | paging::A }
    }

    /// Finds pages that have not been accessed, too.
    pub(super) fn with_unused(self) -> Self {
        Self { wanted: paging::P, ..self }
    }

    /// The translation of a GVA, if the guest has used it already.
    pub(super) fn find(&mut self, gva: u64) -> Option<Translation> {
        let upper = match self.upper {
            Some((known, upper)) if known == gva >> LARGE_BITS => upper,
            _ => Step::top(self.roots).down(self.ram, gva, LARGE_BITS),
        };
        self.upper = Some((gva >> LARGE_BITS, upper));
        Some(upper?.down_to(self.ram, gva, 12, self.wanted)?.translation(gva))
    }
}

/// How far down a walk is.
#[derive(Clone, Copy)]
struct Step {
    /// log2 of the bytes that the entry stands for.
    shift: u32,
    entry: u64,
    /// What all entries so far allow.
    rights: u64,
    no_execute: u64,
}

impl Step {
    fn top(roots: Roots) -> Self {
        let rights = paging::RW | paging::US;
        Self { shift: 48, entry: roots.cr3 & paging::ADDRESS, rights, no_execute: 0 }
    }

    /// Down to the entry for so many bytes (log2), or that of a larger page.
    fn down(self, ram: &Ram, gva: u64, shift: u32) -> Option<Self> {
        self.down_to(ram, gva, shift, paging::P | paging::A)
    }

    /// The same, through entries with these bits.
    fn down_to(mut self, mut ram: &Ram, gva: u64, shift: u32, wanted: u64) -> Option<Self> {
        while self.shift > shift && !is_leaf(self.shift, self.entry) {
            let next = self.shift - 9;
            let at = (self.entry & paging::ADDRESS) + (gva >> next & 0x1ff) * 8;
            let entry = ram.read_u64(at);
            if entry & wanted != wanted || entry & RESERVED != 0 {
                return None;
            }
            (self.shift, self.entry) = (next, entry);
            self.rights &= entry;
            self.no_execute |= entry & paging::NX;
        }
        Some(self)
    }

    fn translation(self, gva: u64) -> Translation {
        let inside = (1 << self.shift) - 1;
        Translation {
            gpa: self.entry & paging::ADDRESS & !inside | gva & inside,
            page_bits: self.shift,
            writable: self.rights & paging::RW != 0,
            user: self.rights & paging::US != 0,
            executable: self.no_execute == 0,
            global: self.entry & paging::G != 0,
            dirty: self.entry & paging::D != 0,
        }
    }
}

/// There is a table of small pages for a GVA, or a large page.
pub(super) fn has_table(ram: &Ram, roots: Roots, gva: u64) -> bool {
    path(ram, roots, gva)
        .take_while(|(shift, _)| *shift > 12)
        .all(|(_, entry)| entry & paging::P != 0)
}
