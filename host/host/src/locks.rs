//! Locks that programs of one user share.

use std::fmt;

/// Locks with numbers, each of which one holder has at a time. What a holder has locked is free when it has ended.
pub trait Locks: fmt::Debug + Send + Sync {
    /// Takes a lock, and waits for it as long as it takes: false if the host does not let it wait.
    fn lock(&self, number: usize) -> bool;
    /// Takes a lock if nobody else has it: true if it is this holder's now.
    fn try_lock(&self, number: usize) -> bool;
    /// Gives a lock back.
    fn unlock(&self, number: usize);
}
