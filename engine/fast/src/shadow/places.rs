//! Where RAM pages are mapped.
//!
//! A page is mapped again and again at the same place, and a space has thousands of them: each place is kept
//! once, without memory of its own.

use std::collections::BTreeSet;

/// Pairs of an offset in RAM and an HVA. What has gone may still be in it.
#[derive(Default)]
pub(super) struct Places(BTreeSet<(u64, u64)>);

impl Places {
    pub(super) fn add(&mut self, offset: u64, hva: u64) {
        self.0.insert((offset, hva));
    }

    /// Forgets a RAM page, and says where it was: HVAs, ascending.
    pub(super) fn take(&mut self, offset: u64) -> Vec<u64> {
        let found = self.0.range((offset, 0)..=(offset, u64::MAX)).map(|(_, hva)| *hva);
        let found: Vec<u64> = found.collect();
        for hva in &found {
            self.0.remove(&(offset, *hva));
        }
        found
    }

    /// Forgets everything in a range, and says where there was any: HVAs, ascending.
    pub(super) fn take_within(&mut self, range: &std::ops::Range<u64>) -> Vec<u64> {
        let found = self.0.extract_if(.., |(_, hva)| range.contains(hva)).map(|(_, hva)| hva);
        let found: BTreeSet<u64> = found.collect();
        found.into_iter().collect()
    }

    /// Forgets that a RAM page is at an HVA.
    pub(super) fn remove(&mut self, offset: u64, hva: u64) {
        self.0.remove(&(offset, hva));
    }

    /// A RAM page has been mapped at an HVA.
    pub(super) fn has(&self, offset: u64, hva: u64) -> bool {
        self.0.contains(&(offset, hva))
    }

    /// Forgets everything, and says where there was any: HVAs, ascending.
    pub(super) fn take_all(&mut self) -> Vec<u64> {
        let all = std::mem::take(&mut self.0).into_iter().map(|(_, hva)| hva);
        let all: BTreeSet<u64> = all.collect();
        all.into_iter().collect()
    }

    /// Keeps only places, by offset and HVA, that are to be kept.
    pub(super) fn retain(&mut self, mut keep: impl FnMut(u64, u64) -> bool) {
        self.0.retain(|(offset, hva)| keep(*offset, *hva));
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_where_it_was_mapped_once_each() {
        let mut places = Places::default();
        for (offset, hva) in [(1, 20), (1, 10), (2, 10), (1, 20), (3, 5)] {
            places.add(offset, hva);
        }
        assert_eq!(places.take(1), [10, 20]);
        assert_eq!(places.take(1), [0; 0]);
        places.retain(|offset, _| offset != 3);
        places.add(7, 30);
        assert_eq!(places.take_within(&(20..31)), [30]);
        assert_eq!(places.take_all(), [10]);
        assert_eq!(places.take(2), [0; 0]);
    }
}
