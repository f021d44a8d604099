//! What was found in pages of user code, so that the same page is not searched for every program.
//!
//! A page that has been written meanwhile does not count: the bytes are kept, and compared.

use crate::scan::{self, Patch};
use rustc_hash::FxHashMap;
use std::{cell::RefCell, rc::Rc};

/// Pages remembered; programs share most of theirs.
const MAX_PAGES: usize = 512;

/// What was found, for all spaces.
#[derive(Clone, Debug, Default)]
pub struct Scans(Rc<RefCell<FxHashMap<(u64, bool), Scan>>>);

#[derive(Debug)]
struct Scan {
    bytes: Box<[u8]>,
    patches: Vec<Patch>,
}

impl Scans {
    /// What has to be changed in the page at an offset in RAM, which holds these bytes and which the
    /// program has `written`, or may write.
    pub fn patches(&self, offset: u64, bytes: &[u8], written: bool) -> Vec<Patch> {
        let mut known = self.0.borrow_mut();
        if let Some(scan) = known.get(&(offset, written)).filter(|scan| *scan.bytes == *bytes) {
            return scan.patches.clone();
        }
        if known.len() >= MAX_PAGES {
            known.clear();
        }
        let patches = scan::patches(bytes, written);
        known.insert((offset, written), Scan { bytes: bytes.into(), patches: patches.clone() });
        patches
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_that_was_written_is_searched_again() {
        let scans = Scans::default();
        let mut page = vec![0x90; 4096];
        assert_eq!(scans.patches(0x1000, &page, false), []);
        page[700..703].copy_from_slice(&[0x0f, 0x02, 0xc1]); // lar eax, cx
        assert_eq!(scans.patches(0x1000, &page, false).len(), 1);
        assert_eq!(scans.patches(0x1000, &page, false), scan::patches(&page, false));
        assert_eq!(scans.patches(0x1000, &page, true), []);
    }
}
