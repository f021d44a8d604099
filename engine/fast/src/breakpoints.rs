//! The breakpoints of all vCPUs that execute the same translated code.
//!
//! Each vCPU says its own, one after the other. Code is made for all of them. Where one vCPU has a breakpoint no block begins.
//! Where vCPUs have taps only, the block begins with a tap. A vCPU that has neither goes on there: its interpreter or its
//! wedge looks among the vCPU's own breakpoints and taps, and finds none.

use jit::cache::CodeUser;
use std::collections::BTreeMap;
use x86_interp::Probes;

/// What vCPUs have at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stands {
    /// Taps only: a record is made there.
    Tap,
    /// At least one breakpoint: a vCPU stops there.
    Breakpoint,
}

/// Breakpoints by GVA.
#[derive(Debug, Default)]
pub struct Breakpoints {
    of: Vec<(CodeUser, BTreeMap<u64, Stands>)>,
    all: BTreeMap<u64, Stands>,
}

impl Breakpoints {
    /// A vCPU has these from now on. Returns the addresses whose blocks are not as they must be.
    pub fn replace(&mut self, user: CodeUser, probes: &Probes) -> Vec<u64> {
        let stands =
            |gva: &u64| if probes.tap(*gva).is_some() { Stands::Tap } else { Stands::Breakpoint };
        self.of.retain(|(one, _)| *one != user);
        if !probes.breakpoints.is_empty() {
            self.of
                .push((user, probes.breakpoints.iter().map(|gva| (*gva, stands(gva))).collect()));
        }
        let together = self.together();
        let before = std::mem::replace(&mut self.all, together);
        self.changed_since(&before)
    }

    fn together(&self) -> BTreeMap<u64, Stands> {
        let mut all = BTreeMap::new();
        for (gva, stands) in self.of.iter().flat_map(|(_, of)| of) {
            let here = all.entry(*gva).or_insert(*stands);
            *here = (*here).max(*stands);
        }
        all
    }

    /// Where a block must end that did not, or must lose a tap, or get one.
    fn changed_since(&self, before: &BTreeMap<u64, Stands>) -> Vec<u64> {
        let new = self.all.iter().filter(|(gva, stands)| before.get(gva) != Some(stands));
        let is_gone = |(gva, stands): &(&u64, &Stands)| {
            **stands == Stands::Tap && !self.all.contains_key(gva)
        };
        new.chain(before.iter().filter(is_gone)).map(|(gva, _)| *gva).collect()
    }

    /// Who stands at an address.
    pub fn at(&self, gva: u64) -> Option<Stands> {
        self.all.get(&gva).copied()
    }

    /// The first address behind `gva`, up to `last`, at which somebody stands.
    pub fn first_behind(&self, gva: u64, last: u64) -> Option<u64> {
        let behind = gva.checked_add(1).filter(|behind| *behind <= last)?;
        self.all.range(behind..=last).next().map(|(gva, _)| *gva)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::code::{Code, CodeKind};
    use contract::Taps;
    use std::sync::Arc;
    use wedge::CodeArea;
    use wedge_abi::Base;

    fn probes(breakpoints: &[u64], taps: &[u64]) -> Probes {
        let points = taps.iter().map(|gva| (*gva, 1)).collect();
        let made = Taps { points, steps: Vec::new(), sink: Box::new(|_, _| ()) };
        let breakpoints = breakpoints.iter().chain(taps).copied().collect();
        Probes { breakpoints, taps: Some(Arc::new(made)), ..Probes::default() }
    }

    /// Two of those who execute a code.
    fn users() -> [CodeUser; 2] {
        let area = CodeArea::of_kernel(Base::default()).expect("the host has memory");
        let kind = CodeKind::kernel(true);
        let mut code = Code::new(Arc::new(area), Base::default(), kind, Arc::default());
        [(); 2].map(|()| code.cache.add_user())
    }

    #[test]
    fn what_a_second_vcpu_says_again_changes_nothing() {
        let [first, second] = users();
        let mut all = Breakpoints::default();
        let mut changed = |user, probes: &Probes| all.replace(user, probes).len();
        assert_eq!(changed(first, &probes(&[3], &[1, 2])), 3);
        assert_eq!(changed(second, &probes(&[3], &[1, 2])), 0);
        assert_eq!(changed(first, &Probes::default()), 0, "the second still has them");
        assert_eq!(changed(second, &Probes::default()), 2, "a block may end where nobody stands");
        assert_eq!(all.at(1), None);
    }

    #[test]
    fn where_one_stops_no_block_begins() {
        let [first, second] = users();
        let mut all = Breakpoints::default();
        all.replace(first, &probes(&[], &[1, 2]));
        assert_eq!(all.replace(second, &probes(&[2], &[])), [2]);
        assert_eq!(
            [1, 2, 3].map(|gva| all.at(gva)),
            [Some(Stands::Tap), Some(Stands::Breakpoint), None]
        );
        assert_eq!(all.replace(second, &Probes::default()), [2]);
        assert_eq!(all.at(2), Some(Stands::Tap));
    }

    #[test]
    fn the_first_behind_is_not_the_one_at_the_place() {
        let [first, _] = users();
        let mut all = Breakpoints::default();
        all.replace(first, &probes(&[5, u64::MAX], &[8]));
        assert_eq!((all.first_behind(5, 7), all.first_behind(5, 8)), (None, Some(8)));
        assert_eq!((all.first_behind(9, 9), all.first_behind(u64::MAX, u64::MAX)), (None, None));
    }
}
