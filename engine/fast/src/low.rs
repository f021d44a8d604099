//! Programs that have been given memory near the table of patched system calls, by any vCPU of a machine: the table is closed
//! wherever one of them runs.
//!
//! Page tables show memory that has been touched. What was only given is noted when it is asked for, before the kernel has heard
//! of it ([`wedge_abi::calls::asks_near_sites`]): between the end of such a call and the program's next instruction others may run, on
//! this vCPU, and the program may go on on another one.

use rustc_hash::FxHashSet;
use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicBool, Ordering},
};

/// Programs that are remembered.
const MOST: usize = 256;

/// The uppermost page tables of those programs: GPAs.
#[derive(Clone, Debug, Default)]
pub struct LowPrograms(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    /// There is one: hardly ever.
    some: AtomicBool,
    roots: Mutex<FxHashSet<u64>>,
}

impl LowPrograms {
    /// The program with this page table is one. If there are too many, all others are forgotten.
    pub fn note(&self, root: u64) {
        let mut roots = self.0.roots.lock().unwrap_or_else(PoisonError::into_inner);
        if roots.len() == MOST {
            roots.clear();
        }
        roots.insert(root);
        self.0.some.store(true, Ordering::Release);
    }

    /// The program with this page table is one.
    pub fn has(&self, root: u64) -> bool {
        let known = || self.0.roots.lock().unwrap_or_else(PoisonError::into_inner).contains(&root);
        self.0.some.load(Ordering::Acquire) && known()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_share_it_know_the_last_ones() {
        let low = LowPrograms::default();
        let of_another_vcpu = low.clone();
        assert!(!of_another_vcpu.has(0x1000));
        (1..=MOST as u64 + 1).for_each(|n| low.note(n * 0x1000));
        assert!(of_another_vcpu.has((MOST as u64 + 1) * 0x1000) && !of_another_vcpu.has(0x1000));
    }
}
