//! Points where a debugger or a tracer stands.
//!
//! Probes are no part of the guest: they are not in its memory, its debug registers or its page tables, and it
//! cannot find them. They are addresses (GVAs) and hold in every address space. An engine without probes
//! does nothing for them.

use std::collections::BTreeSet;

/// log2 of the bytes of a page.
const PAGE_BITS: u32 = 12;

/// Memory that is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Watch {
    /// First byte (GVA).
    pub gva: u64,
    /// Bytes, at least one.
    pub len: u64,
    /// Reads count.
    pub read: bool,
    /// Writes count.
    pub write: bool,
}

impl Watch {
    /// It has something of the `len` bytes at `gva`.
    pub fn covers(&self, gva: u64, len: u64) -> bool {
        let last = |from: u64, len: u64| from.saturating_add(len.saturating_sub(1));
        gva <= last(self.gva, self.len) && last(gva, len) >= self.gva
    }

    /// Such an access counts.
    pub fn counts(&self, gva: u64, len: u64, write: bool) -> bool {
        (if write { self.write } else { self.read }) && self.covers(gva, len)
    }
}

/// Why [`crate::Exit::Probe`] was returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reached {
    /// The instruction at RIP has a breakpoint. It has not been executed.
    Breakpoint,
    /// The last instruction has accessed watched memory: the access's first byte (GVA), and whether it was a write.
    Watch {
        /// First byte (GVA).
        gva: u64,
        /// Bytes.
        len: u64,
        /// A write.
        write: bool,
    },
}

/// Breakpoints and watched memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Probes {
    /// Breakpoints (GVA).
    pub breakpoints: BTreeSet<u64>,
    /// Watched memory.
    pub watches: Vec<Watch>,
}

impl Probes {
    /// There are none.
    pub fn is_empty(&self) -> bool {
        self.breakpoints.is_empty() && self.watches.is_empty()
    }

    /// There is a breakpoint at `gva`.
    pub fn has(&self, gva: u64) -> bool {
        self.breakpoints.contains(&gva)
    }

    /// There is a breakpoint in the page of `gva`.
    pub fn has_page(&self, gva: u64) -> bool {
        let first = gva >> PAGE_BITS << PAGE_BITS;
        self.breakpoints.range(first..=first | ((1 << PAGE_BITS) - 1)).next().is_some()
    }

    /// The first breakpoint in `gva..=last`.
    pub fn first_in(&self, gva: u64, last: u64) -> Option<u64> {
        self.breakpoints.range(gva..=last).next().copied()
    }

    /// The pages (GVA) that have breakpoints.
    pub fn pages(&self) -> BTreeSet<u64> {
        self.breakpoints.iter().map(|gva| gva >> PAGE_BITS << PAGE_BITS).collect()
    }

    /// Adds another's.
    pub fn add(&mut self, other: &Self) {
        self.breakpoints.extend(&other.breakpoints);
        self.watches.extend(&other.watches);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_with_breakpoints_are_found_at_both_ends() {
        let probes = Probes { breakpoints: [0x1fff, 0x3000, u64::MAX].into(), watches: Vec::new() };
        assert!(
            probes.has_page(0x1000) && probes.has_page(0x3fff) && probes.has_page(u64::MAX - 1)
        );
        assert!(!probes.has_page(0x2000) && !probes.has_page(0x4000) && !probes.has_page(0));
        assert_eq!(probes.first_in(0x1000, 0x1ffe), None);
        assert_eq!(probes.first_in(0x1000, 0x1fff), Some(0x1fff));
    }

    #[test]
    fn an_access_counts_if_it_meets_what_is_watched() {
        let watch = Watch { gva: 0x1008, len: 8, read: false, write: true };
        assert!(watch.counts(0x1000, 9, true) && watch.counts(0x100f, 1, true));
        assert!(!watch.counts(0x1000, 8, true) && !watch.counts(0x1010, 4, true));
        assert!(!watch.counts(0x1008, 8, false), "only writes count");
    }
}
