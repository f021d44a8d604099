//! The host as a whole.

use std::{io, os::fd::OwnedFd};

use host::{Entropy, Memory, MemoryObject};

use crate::memory;

/// A host in memory, as a program's host: `host::choose!(host_fake::Fake)`. It has memory objects
/// and no processes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fake;

impl Memory for Fake {
    fn object(&self, _: &str, len: u64) -> io::Result<Box<dyn MemoryObject>> {
        memory::object(len)
    }
    fn adopt(&self, passed: OwnedFd) -> io::Result<Box<dyn MemoryObject>> {
        memory::adopt(passed)
    }
    fn adopt_shrinkable(&self, passed: OwnedFd) -> io::Result<Box<dyn MemoryObject>> {
        memory::adopt(passed)
    }
    fn fence_all_threads(&self) -> bool {
        false
    }
}

impl Entropy for Fake {
    /// Zeros: what is to repeat and differ is asked of a [`crate::FakeEntropy`].
    fn fill(&self, data: &mut [u8]) -> bool {
        data.fill(0);
        true
    }
}
