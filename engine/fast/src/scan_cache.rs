//! What was found in pages of user code, so that the same page is not searched for every program.
//!
//! A page that has been written meanwhile does not count: the bytes are kept, and compared.

use crate::{
    plausible::Page,
    scan::{self, Patch},
};
use rustc_hash::FxHashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Pages remembered; programs share most of theirs.
const MAX_PAGES: usize = 512;

/// What was found, for all spaces of a machine.
#[derive(Clone, Debug, Default)]
pub struct ScanCache {
    known: Arc<Mutex<FxHashMap<Key, Scan>>>,
    searches: Arc<Mutex<Searches>>,
    /// Processes share no copies of code ([`crate::Options::copies_apart`]).
    apart: bool,
}

/// Offset in RAM; whether the program has written the page; the bits of the code in it.
type Key = (u64, bool, u32);

#[derive(Debug)]
struct Scan {
    bytes: Box<[u8]>,
    patches: Vec<Patch>,
}

/// What came of the search for what opens protection keys.
#[derive(Clone, Copy, Debug, Default)]
struct Searches {
    mapped: u64,
    open: u64,
    refused: u64,
}

/// How the search of a page ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Search {
    /// It may be executed, as far as the monitor can tell.
    Closed,
    /// It has what opens keys, even when it is changed as it must be.
    Open,
    /// The wedge has seen what the monitor could not: at a border, or written a moment before.
    Refused,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ScanCache {
    /// The same cache, for processes that share copies of code or, if `apart`, share none.
    #[must_use]
    pub fn with_copies_apart(&self, apart: bool) -> Self {
        Self { apart, ..self.clone() }
    }

    /// Processes share no copies of code.
    pub fn are_copies_apart(&self) -> bool {
        self.apart
    }

    /// What has to be changed in the page of code at an offset in RAM, which the program has `written`, or may
    /// write.
    pub fn patches(&self, offset: u64, page: Page<'_>, written: bool) -> Vec<Patch> {
        let mut known = lock(&self.known);
        let key = (offset, written, page.bits);
        if let Some(scan) = known.get(&key).filter(|scan| *scan.bytes == *page.bytes) {
            return scan.patches.clone();
        }
        if known.len() >= MAX_PAGES {
            known.clear();
        }
        let patches = scan::patches(page, written);
        known.insert(key, Scan { bytes: page.bytes.into(), patches: patches.clone() });
        patches
    }

    /// Counts a search.
    pub fn count(&self, search: Search) {
        let mut searches = lock(&self.searches);
        match search {
            Search::Closed => searches.mapped += 1,
            Search::Open => searches.open += 1,
            Search::Refused => searches.refused += 1,
        }
    }

    /// Name and count of each.
    pub fn searches(&self) -> [(&'static str, u64); 3] {
        let Searches { mapped, open, refused } = *lock(&self.searches);
        [
            ("code pages searched for keys", mapped + open),
            ("code pages that open keys", open),
            ("code pages refused by the wedge", refused),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wide(bytes: &[u8]) -> Page<'_> {
        Page { bytes, bits: 64 }
    }

    #[test]
    fn a_page_that_was_written_is_searched_again() {
        let scans = ScanCache::default();
        let mut page = vec![0x90; 4096];
        assert_eq!(scans.patches(0x1000, wide(&page), false), []);
        page[700..703].copy_from_slice(&[0x0f, 0x02, 0xc1]); // lar eax, cx
        assert_eq!(scans.patches(0x1000, wide(&page), false).len(), 1);
        assert_eq!(scans.patches(0x1000, wide(&page), false), scan::patches(wide(&page), false));
        assert_eq!(scans.patches(0x1000, wide(&page), true), []);
    }
}
