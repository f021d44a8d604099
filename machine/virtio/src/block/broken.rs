//! A disk whose contents are gone: every request fails, so that the driver knows.

use super::BlockBackend;
use std::io;

/// What is left of a disk.
pub struct BrokenDisk {
    len: u64,
}

impl BrokenDisk {
    /// One that had so many bytes.
    pub fn new(len: u64) -> Self {
        Self { len }
    }
}

fn gone() -> io::Error {
    io::Error::other("the disk is gone")
}

impl BlockBackend for BrokenDisk {
    fn len(&self) -> u64 {
        self.len
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn read_at(&mut self, _: u64, _: &mut [u8]) -> io::Result<()> {
        Err(gone())
    }

    fn write_at(&mut self, _: u64, _: &[u8]) -> io::Result<()> {
        Err(gone())
    }

    fn flush(&mut self) -> io::Result<()> {
        Err(gone())
    }

    fn discard(&mut self, _: u64, _: u64) -> io::Result<()> {
        Err(gone())
    }

    fn write_zeroes(&mut self, _: u64, _: u64, _: bool) -> io::Result<()> {
        Err(gone())
    }
}
