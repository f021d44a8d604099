//! The host as a whole.

use std::{io, os::fd::OwnedFd};

use host::{Entropy, Memory, MemoryObject};

use crate::{LinuxEntropy, memory};

/// Linux, as a program's host: `host::choose!(host_linux::Linux)`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Linux;

impl Memory for Linux {
    fn object(&self, name: &str, len: u64) -> io::Result<Box<dyn MemoryObject>> {
        memory::object(name, len)
    }
    fn adopt(&self, passed: OwnedFd) -> io::Result<Box<dyn MemoryObject>> {
        memory::adopt(passed)
    }
    fn adopt_shrinkable(&self, passed: OwnedFd) -> io::Result<Box<dyn MemoryObject>> {
        memory::adopt_shrinkable(passed)
    }
    fn fence_all_threads(&self) -> bool {
        memory::fence_all_threads()
    }
}

impl Entropy for Linux {
    fn fill(&self, data: &mut [u8]) -> bool {
        LinuxEntropy.fill(data)
    }
}
