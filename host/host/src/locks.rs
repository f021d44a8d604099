//! Locks that programs share.

use std::fmt;

/// One holder of numbered locks. At most one holder has a lock at a time. The host frees the locks of a holder that has
/// ended.
pub trait Locks: fmt::Debug + Send + Sync {
    /// Takes a lock, and waits for the lock without limit. Best effort: where the host refuses, the call returns without
    /// the lock.
    fn lock(&self, number: usize);
    /// Takes a lock unless another holder has it: true if this holder has the lock now.
    fn try_lock(&self, number: usize) -> bool;
    /// Gives a lock back, if this holder has it.
    fn unlock(&self, number: usize);
}
