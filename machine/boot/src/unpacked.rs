//! A kernel that has been unpacked before, and the bytes of a segment, wherever they are.

use crate::{
    Error,
    bzimage::{self, BzImage},
    share_out::share_out,
};
use ram::Ram;
use std::{
    fmt, io,
    ops::Range,
    sync::{Mutex, PoisonError},
};

/// Bytes of each piece of an [`Unpacked`] but the last. One CPU writes so many bytes to RAM at a time.
pub const PIECE: usize = 1 << 20;

/// True if a kernel file is a bzImage of a 64-bit kernel: of others nothing that was unpacked is used.
#[must_use]
pub fn is_of_use(file: &[u8]) -> bool {
    bzimage::is_bzimage(file) && BzImage::parse(file).is_ok_and(|image| image.has_64bit_entry())
}

/// The ELF file in a bzImage, unpacked by an earlier machine.
pub trait Unpacked: fmt::Debug + Send + Sync {
    /// Its length in bytes.
    fn size(&self) -> u64;

    /// Reads the piece that begins `number` times [`PIECE`] bytes from the start. `into` is as long as that piece.
    ///
    /// # Errors
    /// The piece is not what was unpacked, or cannot be read.
    fn read(&self, number: u64, into: &mut [u8]) -> io::Result<()>;
}

/// Bytes of a kernel's file.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Bytes<'a> {
    Read(&'a [u8]),
    /// So many bytes from an offset on.
    Kept {
        file: &'a dyn Unpacked,
        offset: u64,
        len: u64,
    },
}

impl Bytes<'_> {
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::Read(bytes) => bytes.len() as u64,
            Self::Kept { len, .. } => *len,
        }
    }

    /// Writes all bytes to RAM, at `gpa` and behind. Most of the time goes into the host's finding pages for them, so CPUs
    /// share it.
    pub(crate) fn write(&self, memory: &Ram, gpa: u64) -> Result<(), Error> {
        let result = Mutex::new(Ok(()));
        share_out(self.parts().into_iter(), Vec::new, |buffer, part| {
            let at = gpa.saturating_add(part.start);
            let done = self.get(part, buffer);
            let done = done.and_then(|bytes| Ok(memory.write_untouched(at, bytes)?));
            if done.is_err() {
                *result.lock().unwrap_or_else(PoisonError::into_inner) = done;
            }
        });
        result.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    /// The bytes in parts, each of which lies in one piece of the file.
    fn parts(&self) -> Vec<Range<u64>> {
        let piece = PIECE as u64;
        let before = match self {
            Self::Read(_) => 0,
            Self::Kept { offset, .. } => offset % piece,
        };
        let ends = (1..).map(|number| (number * piece - before).min(self.len()));
        let ends: Vec<_> = ends.take((before + self.len()).div_ceil(piece) as usize).collect();
        let starts = [0].into_iter().chain(ends.iter().copied());
        starts.zip(&ends).map(|(start, end)| start..*end).collect()
    }

    /// One of the parts.
    fn get<'b>(&'b self, part: Range<u64>, buffer: &'b mut Vec<u8>) -> Result<&'b [u8], Error> {
        let (start, len) = (part.start, (part.end - part.start) as usize);
        match *self {
            Self::Read(bytes) => Ok(&bytes[start as usize..][..len]),
            Self::Kept { file, offset, .. } => {
                let at = offset + start;
                read(file, at / PIECE as u64, buffer)?;
                Ok(&buffer[(at % PIECE as u64) as usize..][..len])
            }
        }
    }
}

/// Reads a piece of a file.
pub(crate) fn read(file: &dyn Unpacked, number: u64, into: &mut Vec<u8>) -> Result<(), Error> {
    let rest = file.size().saturating_sub(number * PIECE as u64);
    into.resize(rest.min(PIECE as u64) as usize, 0);
    file.read(number, into).map_err(|_| Error::NotAsUnpacked)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Unread;

    impl Unpacked for Unread {
        fn size(&self) -> u64 {
            u64::MAX
        }

        fn read(&self, _: u64, _: &mut [u8]) -> io::Result<()> {
            Err(io::ErrorKind::Unsupported.into())
        }
    }

    #[test]
    fn parts_lie_in_one_piece_each() {
        let piece = PIECE as u64;
        let parts = |offset, len| Bytes::Kept { file: &Unread, offset, len }.parts();
        assert_eq!(parts(0, 0), []);
        assert_eq!(parts(piece - 1, 1), [Range { start: 0, end: 1 }]);
        assert_eq!(parts(piece - 1, piece + 2), [0..1, 1..piece + 1, piece + 1..piece + 2]);
    }
}
