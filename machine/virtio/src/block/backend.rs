//! What a disk's contents are kept in.

use std::io;

/// Bytes of a sector, the unit of virtio block addresses.
pub const SECTOR: u64 = 512;

/// Storage of a disk. Offsets and lengths are bytes, multiples of [`SECTOR`] and inside
/// [`BlockBackend::len`]: the device has checked that.
#[allow(clippy::len_without_is_empty)] // a disk of no bytes is refused when opened
pub trait BlockBackend: Send {
    /// Bytes of the disk, a multiple of [`SECTOR`] that never changes.
    fn len(&self) -> u64;
    /// Whether writes are refused.
    fn is_read_only(&self) -> bool;
    /// Whether what was written is read by whoever opens the same contents next, though it was not flushed.
    fn writes_through(&self) -> bool {
        false
    }
    /// Fills all of `data`.
    ///
    /// # Errors
    /// The host could not; `data` is undefined.
    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()>;
    /// Writes all of `data`.
    ///
    /// # Errors
    /// The host could not; the range's contents are undefined.
    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()>;
    /// Makes every completed write stable: it survives a crash of the host.
    ///
    /// # Errors
    /// Some completed write may be lost, now or earlier.
    fn flush(&mut self) -> io::Result<()>;
    /// The guest no longer needs what is in the range. May do nothing.
    ///
    /// # Errors
    /// The host failed.
    fn discard(&mut self, offset: u64, len: u64) -> io::Result<()>;
    /// Makes the range read as zeroes. With `unmap`, its space may be given back to the host.
    ///
    /// # Errors
    /// The host could not; the range's contents are undefined.
    fn write_zeroes(&mut self, offset: u64, len: u64, unmap: bool) -> io::Result<()>;
}
