//! Little-endian fields of a file nobody has checked yet: every access may find the file too short.

/// `N` bytes at `offset`.
pub(crate) fn array<const N: usize>(data: &[u8], offset: usize) -> Option<[u8; N]> {
    data.get(offset..)?.first_chunk().copied()
}

/// A byte at `offset`.
pub(crate) fn u8(data: &[u8], offset: usize) -> Option<u8> {
    data.get(offset).copied()
}

/// Two bytes at `offset`.
pub(crate) fn u16(data: &[u8], offset: usize) -> Option<u16> {
    array(data, offset).map(u16::from_le_bytes)
}

/// Four bytes at `offset`.
pub(crate) fn u32(data: &[u8], offset: usize) -> Option<u32> {
    array(data, offset).map(u32::from_le_bytes)
}

/// Eight bytes at `offset`.
pub(crate) fn u64(data: &[u8], offset: usize) -> Option<u64> {
    array(data, offset).map(u64::from_le_bytes)
}

/// `len` bytes at `offset`, both as the file gives them.
pub(crate) fn slice(data: &[u8], offset: u64, len: u64) -> Option<&[u8]> {
    let start = usize::try_from(offset).ok()?;
    let end = start.checked_add(usize::try_from(len).ok()?)?;
    data.get(start..end)
}
