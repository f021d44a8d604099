//! Walks of the guest's page tables that leave no trace, and what they say of mappings made before.

use super::{EXECUTE, KERNEL_PAGE, LARGE_BITS, PAGE_BITS, WRITE, part};
use ram::Ram;
use rustc_hash::FxHashSet;
use wedge_abi::Base;
use x86::paging::{self, Descent, Roots, Translation};
use x86_interp::GuestRam;

/// Set in the entry of a page, or table, that the guest has used.
const USED: u64 = paging::P | paging::A;

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
    let gva = if protection & KERNEL_PAGE != 0 { hva.wrapping_sub(base.bias()) } else { hva };
    let found = walker.find(gva);
    compared(walker.ram, found, hva, (offset, protection), parts, global)
}

/// Compares a page's mapping with the translation that the page has now, as [`still_good`] does.
pub(super) fn compared(
    ram: &Ram,
    found: Option<Translation>,
    hva: u64,
    (offset, protection): (u64, u64),
    parts: &FxHashSet<(u64, u64)>,
    global: bool,
) -> Standing {
    let kernel = protection & KERNEL_PAGE != 0;
    // Of a large page only what is known to be a part of it: a flush of any part drops all.
    let small = |bits: u32| bits == 12 || parts.contains(&part(hva, bits));
    let right = |found: &Translation| {
        found.user != kernel && (found.global || !global) && small(found.page_bits)
    };
    let Some(found) = found.filter(right) else { return Standing::Gone };
    let same = ram.page(found.gpa).is_some_and(|page| page.offset == offset);
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
    Walker::new(ram, roots).find(gva).filter(|found| found.page_bits >= LARGE_BITS)
}

/// The small translation of a GVA, if the guest has used it already.
pub(super) fn leaf(ram: &Ram, roots: Roots, gva: u64, user: bool) -> Option<Translation> {
    let small = |found: &Translation| found.page_bits == PAGE_BITS && found.user == user;
    Walker::new(ram, roots).find(gva).filter(small)
}

/// Looks up GVAs without setting any bit of the page tables, through entries that are present and accessed. GVAs in ascending
/// order cost least: the upper levels are read once for each 2 MiB.
pub(super) struct Walker<'a> {
    ram: &'a Ram,
    roots: Roots,
    /// The 2 MiB last asked for, and the entry for them.
    upper: Option<(u64, Option<Descent>)>,
    /// What a page's entry must have.
    wanted: u64,
}

impl<'a> Walker<'a> {
    pub(super) fn new(ram: &'a Ram, roots: Roots) -> Self {
        Self { ram, roots, upper: None, wanted: USED }
    }

    /// Finds pages that have not been accessed, too.
    pub(super) fn with_unused(self) -> Self {
        Self { wanted: paging::P, ..self }
    }

    /// The way to the entry for the 2 MiB around a GVA, or for a larger page, if the guest has used it already.
    pub(super) fn upper(&mut self, gva: u64) -> Option<Descent> {
        let upper = match self.upper {
            Some((known, upper)) if known == gva >> LARGE_BITS => upper,
            _ => Descent::look_from_top(&mut self.ram, self.roots, gva, (LARGE_BITS, USED)),
        };
        self.upper = Some((gva >> LARGE_BITS, upper));
        upper
    }

    /// The translation of a GVA, if the guest has used that page already. `entry` is the page's entry, read from the table that
    /// `upper` leads to.
    pub(super) fn through(&self, upper: Descent, entry: u64, gva: u64) -> Option<Translation> {
        let page = (entry & self.wanted == self.wanted).then(|| upper.through(self.roots, entry));
        Some(page?.ok()?.translation(self.roots, gva))
    }

    /// The translation of a GVA, if the guest has used it already.
    pub(super) fn find(&mut self, gva: u64) -> Option<Translation> {
        let page =
            self.upper(gva)?.look(&mut self.ram, self.roots, gva, (PAGE_BITS, self.wanted))?;
        Some(page.translation(self.roots, gva))
    }
}

/// There is a table of small pages for a GVA, or a large page.
pub(super) fn has_table(mut ram: &Ram, roots: Roots, gva: u64) -> bool {
    Descent::look_from_top(&mut ram, roots, gva, (LARGE_BITS, paging::P)).is_some()
}
