//! Tables of entries of one length, one behind the other: each is the number of its entries and then the entries.

use std::ops::Range;

/// The tables in some bytes, read one after the other.
#[derive(Clone, Copy, Debug)]
pub(in crate::cache) struct PackedTables<'a> {
    all: &'a [u8],
    at: usize,
}

impl<'a> PackedTables<'a> {
    pub fn of(all: &'a [u8]) -> Self {
        Self { all, at: 0 }
    }

    fn take(&mut self, len: usize) -> Option<Range<usize>> {
        let end = self.at.checked_add(len).filter(|end| *end <= self.all.len())?;
        Some(std::mem::replace(&mut self.at, end)..end)
    }

    /// Where the entries of the next table lie, each of so many bytes; `None` if it is cut off.
    fn entries(&mut self, len: usize) -> Option<Range<usize>> {
        let count = self.take(4)?;
        let count = u32::from_le_bytes(self.all[count].try_into().ok()?);
        self.take((count as usize).checked_mul(len)?)
    }

    /// The next table; `None` if it is cut off.
    pub fn table<const LEN: usize>(&mut self) -> Option<&'a [[u8; LEN]]> {
        let (entries, _) = self.entries(LEN).map(|at| self.all[at].as_chunks())?;
        Some(entries)
    }

    /// Where the bytes of the next table lie, whose entries are bytes.
    pub fn range(&mut self) -> Option<Range<usize>> {
        self.entries(1)
    }

    /// The next table, whose entries are bytes.
    pub fn bytes(&mut self) -> Option<&'a [u8]> {
        self.range().map(|at| &self.all[at])
    }
}

/// Appends a table.
pub(in crate::cache) fn put<const LEN: usize>(
    to: &mut Vec<u8>,
    entries: impl Iterator<Item = [u8; LEN]>,
) {
    let head = to.len();
    to.extend([0; 4]);
    let mut count = 0_u32;
    for entry in entries {
        to.extend(entry);
        count += 1;
    }
    to[head..head + 4].copy_from_slice(&count.to_le_bytes());
}

/// Appends a table of bytes.
pub(in crate::cache) fn put_bytes(to: &mut Vec<u8>, bytes: &[u8]) {
    to.extend((bytes.len() as u32).to_le_bytes());
    to.extend_from_slice(bytes);
}

/// The two bytes at an offset.
pub(in crate::cache) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

/// The four bytes at an offset.
pub(in crate::cache) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

/// The eight bytes at an offset.
pub(in crate::cache) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}
