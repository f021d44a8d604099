//! Unpacking kernels.
//!
//! A bzImage carries its kernel compressed and the code to unpack it; unpacking it here instead
//! spares the guest a second of emulated decompression. The size of what comes out is bounded before
//! it is produced, and for a bzImage is known beforehand, which also catches most damage in the formats
//! that carry no checksum.

use crate::{Error, bytes, share_out::share_out};
use std::io::Read;

/// No kernel is larger than this, in bytes; a file that unpacks to more is damaged or hostile.
const MAX_UNPACKED: usize = 512 << 20;
/// What the decompressor of xz and lzma may use, in KiB.
const LZMA_MEMORY_KIB: u32 = 512 << 10;
/// Uncompressed size of every block but the last of a legacy LZ4 frame, in bytes.
const LZ4_BLOCK: usize = 8 << 20;
const LZ4_MAGIC: [u8; 4] = 0x184c_2102_u32.to_le_bytes();

/// How something is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    Gzip,
    Lz4,
    Zstd,
    Xz,
    Lzma,
    Bzip2,
    Lzo,
}

impl Format {
    /// The format whose magic `data` starts with.
    pub(crate) fn detect(data: &[u8]) -> Option<Self> {
        const MAGICS: [(&[u8], Format); 7] = [
            (b"\x1f\x8b\x08", Format::Gzip),
            (&LZ4_MAGIC, Format::Lz4),
            (b"\x28\xb5\x2f\xfd", Format::Zstd),
            (b"\xfd7zXZ\0", Format::Xz),
            (b"\x5d\0\0", Format::Lzma),
            (b"BZh", Format::Bzip2),
            (b"\x89LZO", Format::Lzo),
        ];
        MAGICS.iter().find(|(magic, _)| data.starts_with(magic)).map(|(_, format)| *format)
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Gzip => "gzip",
            Self::Lz4 => "lz4",
            Self::Zstd => "zstd",
            Self::Xz => "xz",
            Self::Lzma => "lzma",
            Self::Bzip2 => "bzip2",
            Self::Lzo => "lzo",
        }
    }

    /// Whether [`Format::unpack`] knows how.
    pub(crate) fn is_supported(self) -> bool {
        !matches!(self, Self::Bzip2 | Self::Lzo)
    }

    /// Data can be damaged and yet unpack to as many bytes as before.
    pub(crate) fn lacks_checksum(self) -> bool {
        matches!(self, Self::Lz4 | Self::Lzma)
    }

    /// Unpacks all of `data`.
    pub(crate) fn unpack(self, data: &[u8]) -> Result<Vec<u8>, Error> {
        self.unpack_at_most(data, MAX_UNPACKED)
    }

    /// Unpacks a bzImage payload: compressed data followed by the unpacked size in 4 bytes (which
    /// in gzip is the last field of the format itself).
    pub(crate) fn unpack_payload(self, payload: &[u8]) -> Result<Vec<u8>, Error> {
        if !self.is_supported() {
            return Err(Error::UnsupportedCompression(self.name()));
        }
        let damaged = |why: &str| Error::Decompress { format: self.name(), why: why.into() };
        let (data, size) = payload.split_last_chunk().ok_or_else(|| damaged("it is too short"))?;
        let size = u32::from_le_bytes(*size) as usize;
        if size > MAX_UNPACKED {
            return Err(damaged("it claims to unpack to more than any kernel has"));
        }
        let data = if self == Self::Gzip { payload } else { data };
        let unpacked = self.unpack_at_most(data, size)?;
        if unpacked.len() != size {
            return Err(damaged("it unpacks to fewer bytes than it says"));
        }
        Ok(unpacked)
    }

    fn unpack_at_most(self, data: &[u8], limit: usize) -> Result<Vec<u8>, Error> {
        let unpacked = match self {
            Self::Gzip => read_all(flate2::read::GzDecoder::new(data), limit),
            Self::Lz4 => lz4_legacy(data, limit),
            Self::Zstd => zstd(data, limit),
            Self::Xz => {
                let xz = lzma_rust2::XzReader::new_mem_limit(data, false, LZMA_MEMORY_KIB);
                read_all(xz, limit)
            }
            Self::Lzma => lzma_rust2::LzmaReader::new_mem_limit(data, LZMA_MEMORY_KIB, None)
                .map_err(|e| e.to_string())
                .and_then(|lzma| read_all(lzma, limit)),
            Self::Bzip2 | Self::Lzo => return Err(Error::UnsupportedCompression(self.name())),
        };
        unpacked.map_err(|why| Error::Decompress { format: self.name(), why })
    }
}

/// Reads to the end, but no more than `limit` bytes.
fn read_all(reader: impl Read, limit: usize) -> Result<Vec<u8>, String> {
    let mut unpacked = Vec::new();
    reader.take(limit as u64 + 1).read_to_end(&mut unpacked).map_err(|e| e.to_string())?;
    if unpacked.len() > limit {
        return Err(format!("it unpacks to more than {limit} bytes"));
    }
    Ok(unpacked)
}

fn zstd(data: &[u8], limit: usize) -> Result<Vec<u8>, String> {
    let mut decoder = ruzstd::decoding::StreamingDecoder::new(data).map_err(|e| e.to_string())?;
    let unpacked = read_all(&mut decoder, limit)?;
    let frame = &decoder.decoder;
    match (frame.get_checksum_from_data(), frame.get_calculated_checksum()) {
        (Some(stored), Some(computed)) if stored != computed => Err("checksum mismatch".into()),
        _ => Ok(unpacked),
    }
}

/// The frame of `lz4 -l`: a magic, then blocks of at most 8 MiB, each after its compressed size.
/// No checksum, no end mark. Frames may follow each other.
///
/// Blocks know nothing of each other, so CPUs share them. Each is given the room it can need, and the gaps are closed
/// afterwards; kernels have none, because all their blocks but the last unpack to 8 MiB.
fn lz4_legacy(data: &[u8], limit: usize) -> Result<Vec<u8>, String> {
    let blocks = lz4_blocks(data)?;
    let rooms: Vec<_> = blocks.iter().map(|packed| lz4_room(packed)).collect();
    let room = rooms.iter().sum();
    if room > MAX_UNPACKED {
        return Err(format!("it unpacks to more than {limit} bytes"));
    }
    let mut unpacked = vec![0; room];
    let lens = lz4_unpack(&blocks, split(&mut unpacked, &rooms))?;
    close_gaps(&mut unpacked, &rooms, &lens);
    if unpacked.len() > limit {
        return Err(format!("it unpacks to more than {limit} bytes"));
    }
    Ok(unpacked)
}

/// The most bytes a block can unpack to: 255 for each of its own.
fn lz4_room(packed: &[u8]) -> usize {
    packed.len().saturating_mul(255).min(LZ4_BLOCK)
}

/// Unpacks each block to its place; returns their lengths.
fn lz4_unpack(blocks: &[&[u8]], places: Vec<&mut [u8]>) -> Result<Vec<usize>, String> {
    let mut lens = vec![Ok(0); blocks.len()];
    let pieces = blocks.iter().zip(places).zip(&mut lens);
    share_out(
        pieces,
        || (),
        |(), ((packed, place), len)| {
            *len = lz4_flex::block::decompress_into(packed, place).map_err(|e| e.to_string());
        },
    );
    lens.into_iter().collect()
}

/// Consecutive parts of these lengths.
fn split<'a>(mut bytes: &'a mut [u8], lens: &[usize]) -> Vec<&'a mut [u8]> {
    let part = |len: &usize| {
        let (part, rest) = std::mem::take(&mut bytes).split_at_mut(*len);
        bytes = rest;
        part
    };
    lens.iter().map(part).collect()
}

/// The blocks of a legacy frame, packed.
fn lz4_blocks(data: &[u8]) -> Result<Vec<&[u8]>, String> {
    let (mut blocks, mut rest) = (Vec::new(), data);
    while let Some((head, tail)) = rest.split_first_chunk() {
        rest = tail;
        if *head == LZ4_MAGIC {
            continue;
        }
        let size = u64::from(u32::from_le_bytes(*head));
        let packed = bytes::slice(rest, 0, size).ok_or("a block reaches beyond the end")?;
        rest = &rest[packed.len()..];
        blocks.push(packed);
    }
    if rest.is_empty() { Ok(blocks) } else { Err("bytes follow the last block".into()) }
}

/// Moves what was unpacked behind blocks that are shorter than their rooms.
fn close_gaps(unpacked: &mut Vec<u8>, rooms: &[usize], lens: &[usize]) {
    let (mut start, mut end) = (0, 0);
    for (room, len) in rooms.iter().zip(lens) {
        if start != end {
            unpacked.copy_within(start..start + len, end);
        }
        start += room;
        end += len;
    }
    unpacked.truncate(end);
}
