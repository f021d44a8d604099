//! Points where a debugger or a tracer stands.
//!
//! Probes are no part of the guest: they are not in its memory, its debug registers or its page tables, and it
//! cannot find them. They are addresses (GVAs) and hold in every address space. An engine without probes
//! does nothing for them.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
};

use x86::tap::STEP_WORDS;

use crate::Watcher;

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

/// Breakpoints at which there is nothing to do but to make a record ([`x86::tap`]).
///
/// An engine that can do so where the guest's code runs makes it there. Any other stops as at any breakpoint, and whoever
/// has set it makes the record.
pub struct Taps {
    /// Where the program of each begins (GVA, number of its first step).
    pub points: BTreeMap<u64, u32>,
    /// The steps of all programs.
    pub steps: Vec<[u64; STEP_WORDS]>,
    /// Takes records, one behind the other, and the time-stamp counter at the end of the last. The guest can write records, so
    /// they can be anything.
    pub sink: Sink,
}

/// What takes records.
pub type Sink = Box<dyn Fn(Vec<u8>, u64) + Send + Sync>;

impl fmt::Debug for Taps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} taps", self.points.len())
    }
}

/// Breakpoints and watched memory.
#[derive(Clone, Default)]
pub struct Probes {
    /// Breakpoints (GVA).
    pub breakpoints: BTreeSet<u64>,
    /// Watched memory.
    pub watches: Vec<Watch>,
    /// Which of the breakpoints are taps.
    pub taps: Option<Arc<Taps>>,
    /// Addresses at which two probe handlers have a breakpoint. None of them is a tap, even if [`Probes::taps`] has it.
    pub shared: BTreeSet<u64>,
    /// Who is told what the vCPU does besides.
    pub watchers: Vec<Watcher>,
}

impl fmt::Debug for Probes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (breakpoints, watches, watchers) =
            (&self.breakpoints, &self.watches, self.watchers.len());
        write!(f, "{breakpoints:x?}, {watches:x?}, {:?}, {watchers} watchers", self.taps)
    }
}

impl PartialEq for Probes {
    fn eq(&self, other: &Self) -> bool {
        let pointer = |probes: &Self| probes.taps.as_ref().map(Arc::as_ptr);
        (&self.breakpoints, &self.watches, &self.shared)
            == (&other.breakpoints, &other.watches, &other.shared)
            && pointer(self).map(<*const Taps>::addr) == pointer(other).map(<*const Taps>::addr)
            && self.watchers.len() == other.watchers.len()
            && self.watchers.iter().zip(&other.watchers).all(|(a, b)| Arc::ptr_eq(a, b))
    }
}

impl Eq for Probes {}

impl Probes {
    /// There are none that stop the guest.
    pub fn is_empty(&self) -> bool {
        self.breakpoints.is_empty() && self.watches.is_empty()
    }

    /// There is a breakpoint at `gva`.
    pub fn has(&self, gva: u64) -> bool {
        self.breakpoints.contains(&gva)
    }

    /// Where the program of the tap at `gva` begins.
    pub fn tap(&self, gva: u64) -> Option<u32> {
        let step = self.taps.as_ref()?.points.get(&gva).copied()?;
        (!self.shared.contains(&gva)).then_some(step)
    }

    /// These probes, with every tap as a breakpoint.
    pub fn without_taps(&self) -> Self {
        Self { taps: None, ..self.clone() }
    }

    /// These probes, without the breakpoints that are taps.
    pub fn but_taps(&self) -> Self {
        let stays = |gva: &&u64| self.tap(**gva).is_none();
        let breakpoints = self.breakpoints.iter().filter(stays).copied().collect();
        Self { breakpoints, taps: None, shared: BTreeSet::new(), ..self.clone() }
    }

    /// There is a breakpoint in the page of `gva`.
    pub fn has_page(&self, gva: u64) -> bool {
        let first = gva >> PAGE_BITS << PAGE_BITS;
        self.breakpoints.range(first..=first | ((1 << PAGE_BITS) - 1)).next().is_some()
    }

    /// The pages (GVA) that have breakpoints.
    pub fn pages(&self) -> BTreeSet<u64> {
        self.breakpoints.iter().map(|gva| gva >> PAGE_BITS << PAGE_BITS).collect()
    }

    /// Adds the probes of `other`. If both have taps, those of `other` become breakpoints.
    pub fn add(&mut self, other: &Self) {
        self.shared.extend(self.breakpoints.intersection(&other.breakpoints));
        self.breakpoints.extend(&other.breakpoints);
        if self.taps.is_none() {
            self.taps.clone_from(&other.taps);
        }
        self.watchers.extend(other.watchers.iter().cloned());
        self.watches.extend(&other.watches);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_with_breakpoints_are_found_at_both_ends() {
        let probes = Probes { breakpoints: [0x1fff, 0x3000, u64::MAX].into(), ..Probes::default() };
        assert!(
            probes.has_page(0x1000) && probes.has_page(0x3fff) && probes.has_page(u64::MAX - 1)
        );
        assert!(!probes.has_page(0x2000) && !probes.has_page(0x4000) && !probes.has_page(0));
    }

    /// Taps at these addresses.
    fn tapped(points: &[u64]) -> Probes {
        let taps = Taps {
            points: points.iter().map(|gva| (*gva, 7)).collect(),
            steps: Vec::new(),
            sink: Box::new(|_, _| ()),
        };
        let breakpoints = points.iter().copied().collect();
        Probes { breakpoints, taps: Some(Arc::new(taps)), ..Probes::default() }
    }

    #[test]
    fn where_two_stand_there_is_no_tap() {
        let (first, second) = (tapped(&[1, 2]), tapped(&[2, 3]));
        let mut all = Probes::default();
        all.add(&first);
        assert_eq!((all.tap(1), all.tap(2), all.but_taps().is_empty()), (Some(7), Some(7), true));
        all.add(&second);
        assert_eq!([1, 2, 3].map(|gva| all.tap(gva)), [Some(7), None, None]);
        assert!([1, 2, 3].iter().all(|gva| all.has(*gva)));
        assert_eq!(all.but_taps().breakpoints, [2, 3].into());
        assert_eq!(all.without_taps().tap(1), None);
        assert!(first == first.clone() && first != tapped(&[1, 2]), "another's sink");
    }

    #[test]
    fn an_access_counts_if_it_meets_what_is_watched() {
        let watch = Watch { gva: 0x1008, len: 8, read: false, write: true };
        assert!(watch.counts(0x1000, 9, true) && watch.counts(0x100f, 1, true));
        assert!(!watch.counts(0x1000, 8, true) && !watch.counts(0x1010, 4, true));
        assert!(!watch.counts(0x1008, 8, false), "only writes count");
    }
}
