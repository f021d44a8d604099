//! A block request's bytes: header, data, status (virtio 1.2 section 5.2.6).
//!
//! Nothing is assumed about how the driver split them into descriptors: the header is the first 16
//! readable bytes, the status is the last writable byte.

use super::{DISCARD, SECTOR, WRITE_ZEROES};
use crate::{Chain, RingError};
use ram::DmaMemory;
use virtio_bindings::virtio_blk as spec;

/// Bytes of the header.
pub(super) const HEADER: u64 = 16;
/// Bytes of a range of discard and write-zeroes.
const RANGE: usize = 16;

/// What the driver asks for, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockRequest {
    /// Read from the disk.
    In {
        /// First byte on the disk.
        offset: u64,
        /// How many.
        len: u64,
    },
    /// Write to the disk.
    Out {
        /// First byte on the disk.
        offset: u64,
        /// How many.
        len: u64,
    },
    /// Make writes stable.
    Flush,
    /// The serial number.
    GetId,
    /// Discard, or write zeroes.
    Ranges {
        /// Write zeroes rather than discard.
        zeroes: bool,
    },
    /// A type this device does not know.
    Unknown,
    /// No header, or data that is not whole sectors, or sectors beyond any disk.
    Malformed,
}

impl BlockRequest {
    /// Reads a request's header.
    ///
    /// # Errors
    /// The chain has no room for the status, or its memory is not accessible.
    pub fn parse(chain: &Chain, memory: &DmaMemory) -> Result<Self, RingError> {
        if chain.readable.len() < HEADER {
            return Ok(Self::Malformed);
        }
        let mut header = [0; HEADER as usize];
        chain.readable.read(memory, 0, &mut header)?;
        let [t0, t1, t2, t3, _, _, _, _, sector @ ..] = header;
        let sector = u64::from_le_bytes(sector);
        let data_in = chain.writable.len().checked_sub(1).ok_or(RingError::NoRoom)?;
        let data_out = chain.readable.len() - HEADER;
        Ok(match u32::from_le_bytes([t0, t1, t2, t3]) {
            spec::VIRTIO_BLK_T_IN => {
                transfer(sector, data_in, |offset, len| Self::In { offset, len })
            }
            spec::VIRTIO_BLK_T_OUT => {
                transfer(sector, data_out, |offset, len| Self::Out { offset, len })
            }
            spec::VIRTIO_BLK_T_FLUSH => Self::Flush,
            spec::VIRTIO_BLK_T_GET_ID => Self::GetId,
            spec::VIRTIO_BLK_T_DISCARD => Self::Ranges { zeroes: false },
            spec::VIRTIO_BLK_T_WRITE_ZEROES => Self::Ranges { zeroes: true },
            _ => Self::Unknown,
        })
    }
}

fn transfer(sector: u64, len: u64, make: impl Fn(u64, u64) -> BlockRequest) -> BlockRequest {
    match sector.checked_mul(SECTOR) {
        Some(offset) if len.is_multiple_of(SECTOR) => make(offset, len),
        _ => BlockRequest::Malformed,
    }
}

/// How much one discard or write-zeroes request may name.
pub(super) struct RangeLimits {
    /// Ranges in a request.
    pub(super) ranges: u32,
    /// Sectors in a range.
    pub(super) sectors: u32,
}

/// A range to discard or zero, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ByteRange {
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) unmap: bool,
}

/// Reads the ranges of a discard or write-zeroes request; the inner error is what to tell the
/// driver.
pub(super) fn ranges(
    chain: &Chain,
    memory: &DmaMemory,
    zeroes: bool,
) -> Result<Result<Vec<ByteRange>, Reply>, RingError> {
    let limits = if zeroes { WRITE_ZEROES } else { DISCARD };
    let len = chain.readable.len() - HEADER;
    if len == 0
        || !len.is_multiple_of(RANGE as u64)
        || len > u64::from(limits.ranges) * RANGE as u64
    {
        return Ok(Err(Reply::FAILED));
    }
    let mut bytes = vec![0; len as usize];
    chain.readable.read(memory, HEADER, &mut bytes)?;
    let (ranges, _) = bytes.as_chunks::<RANGE>();
    Ok(ranges.iter().map(|range| parse_range(range, limits.sectors, zeroes)).collect())
}

fn parse_range(bytes: &[u8; RANGE], max_sectors: u32, zeroes: bool) -> Result<ByteRange, Reply> {
    let [s0, s1, s2, s3, s4, s5, s6, s7, n0, n1, n2, n3, flags @ ..] = *bytes;
    let sector = u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]);
    let sectors = u32::from_le_bytes([n0, n1, n2, n3]);
    let flags = u32::from_le_bytes(flags);
    let known = if zeroes { spec::VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP } else { 0 };
    if flags & !known != 0 {
        return Err(Reply::UNSUPPORTED);
    }
    let offset = sector.checked_mul(SECTOR).ok_or(Reply::FAILED)?;
    if sectors > max_sectors {
        return Err(Reply::FAILED);
    }
    Ok(ByteRange { offset, len: u64::from(sectors) * SECTOR, unmap: flags != 0 })
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reply {
    /// The status byte.
    pub(super) status: u8,
    /// Data bytes written before the status.
    data: u64,
}

impl Reply {
    /// The host failed, or the driver asked for what cannot be.
    pub(super) const FAILED: Self = Self { status: spec::VIRTIO_BLK_S_IOERR as u8, data: 0 };
    /// The device does not do this.
    pub(super) const UNSUPPORTED: Self = Self { status: spec::VIRTIO_BLK_S_UNSUPP as u8, data: 0 };

    /// Success, with `data` bytes for the driver.
    pub(super) fn ok(data: u64) -> Self {
        Self { status: spec::VIRTIO_BLK_S_OK as u8, data }
    }

    /// Success or failure of something that has no data.
    pub(super) fn of(result: &std::io::Result<()>) -> Self {
        match result {
            Ok(()) => Self::ok(0),
            Err(error) => {
                tracing::error!(%error, "disk flush");
                Self::FAILED
            }
        }
    }

    /// The used length: bytes written from the start of the writable buffer without a gap. The
    /// status counts only if it follows the data.
    pub(super) fn written(self, status_at: u64) -> u32 {
        let total = if self.data == status_at { self.data + 1 } else { self.data };
        u32::try_from(total).unwrap_or(u32::MAX)
    }
}
