//! A raw image file or block device as a disk.

use rustix::fs::{FallocateFlags, OFlags};
use rustix::io::Errno;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use virtio::{BlockBackend, SECTOR};

/// Why an image cannot be a disk.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// There is no such file.
    #[error("disk image {0:?} does not exist")]
    Missing(PathBuf),
    /// It may be read but not written, and the disk is to be writable.
    #[error("disk image {0:?} is not writable; attach it read-only or change its permissions")]
    NotWritable(PathBuf),
    /// A directory, pipe or the like.
    #[error("disk image {0:?} is neither a regular file nor a block device")]
    NotAnImage(PathBuf),
    /// It has no bytes.
    #[error("disk image {0:?} is empty")]
    Empty(PathBuf),
    /// It is not whole sectors.
    #[error("disk image {path:?} has {len} bytes, which is not a multiple of 512")]
    PartialSector {
        /// The image.
        path: PathBuf,
        /// Its bytes.
        len: u64,
    },
    /// Another process, or another disk of this machine, uses it.
    #[error("disk image {0:?} is in use")]
    InUse(PathBuf),
    /// The host refused otherwise.
    #[error("cannot open disk image {path:?}: {source}")]
    Host {
        /// The image.
        path: PathBuf,
        /// The host's reason.
        source: io::Error,
    },
}

/// An open image, locked against double use: one writer, or any number of readers.
///
/// The lock is advisory (`flock`) and ends with the process. A failed flush is remembered: the host
/// kernel may drop what it could not write and report later flushes as good, so after one failure
/// no flush succeeds any more.
#[derive(Debug)]
pub struct FileImage {
    file: File,
    len: u64,
    read_only: bool,
    flush_failed: bool,
}

impl FileImage {
    /// Opens and locks an image.
    ///
    /// # Errors
    /// See [`ImageError`]: all are the user's to mend.
    pub fn open(path: &Path, read_only: bool) -> Result<Self, ImageError> {
        // Opening a pipe must not wait for its other end.
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        let mut options = OpenOptions::new();
        let opened = options.read(true).write(!read_only).custom_flags(flags).open(path);
        let mut file = opened.map_err(|error| open_error(path, read_only, error))?;
        let host = |source| ImageError::Host { path: path.into(), source };
        let kind = file.metadata().map_err(host)?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(ImageError::NotAnImage(path.into()));
        }
        lock_image(&file, path, read_only)?;
        let len = file.seek(SeekFrom::End(0)).map_err(host)?;
        match len {
            0 => Err(ImageError::Empty(path.into())),
            len if len.is_multiple_of(SECTOR) => {
                Ok(Self { file, len, read_only, flush_failed: false })
            }
            len => Err(ImageError::PartialSector { path: path.into(), len }),
        }
    }

    fn fallocate(&self, flags: FallocateFlags, offset: u64, len: u64) -> rustix::io::Result<()> {
        loop {
            match rustix::fs::fallocate(&self.file, flags, offset, len) {
                Err(Errno::INTR) => {}
                done => return done,
            }
        }
    }

    fn punch(&self, offset: u64, len: u64) -> rustix::io::Result<()> {
        self.fallocate(FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, len)
    }

    fn write_zero_bytes(&self, offset: u64, len: u64) -> io::Result<()> {
        let zeroes = [0; 64 << 10];
        let mut done = 0;
        while done < len {
            let count = (len - done).min(zeroes.len() as u64);
            self.file.write_all_at(&zeroes[..count as usize], offset + done)?;
            done += count;
        }
        Ok(())
    }
}

fn open_error(path: &Path, read_only: bool, error: io::Error) -> ImageError {
    match error.kind() {
        ErrorKind::NotFound => ImageError::Missing(path.into()),
        ErrorKind::IsADirectory => ImageError::NotAnImage(path.into()),
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem
            if !read_only && File::open(path).is_ok() =>
        {
            ImageError::NotWritable(path.into())
        }
        _ => ImageError::Host { path: path.into(), source: error },
    }
}

fn lock_image(file: &File, path: &Path, read_only: bool) -> Result<(), ImageError> {
    let locked = if read_only { file.try_lock_shared() } else { file.try_lock() };
    locked.map_err(|error| match error {
        TryLockError::WouldBlock => ImageError::InUse(path.into()),
        TryLockError::Error(source) => ImageError::Host { path: path.into(), source },
    })
}

/// The file system or device cannot do this kind of fallocate.
fn is_unsupported(error: Errno) -> bool {
    matches!(error, Errno::OPNOTSUPP | Errno::NOSYS | Errno::NODEV | Errno::INVAL)
}

impl BlockBackend for FileImage {
    fn len(&self) -> u64 {
        self.len
    }

    fn is_read_only(&self) -> bool {
        self.read_only
    }

    fn writes_through(&self) -> bool {
        true
    }

    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(data, offset)
    }

    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.file.write_all_at(data, offset)
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.flush_failed {
            return Err(io::Error::other("an earlier flush failed"));
        }
        if self.read_only {
            return Ok(());
        }
        let flushed = self.file.sync_data();
        self.flush_failed = flushed.is_err();
        flushed
    }

    fn discard(&mut self, offset: u64, len: u64) -> io::Result<()> {
        match self.punch(offset, len) {
            Err(error) if !is_unsupported(error) => Err(error.into()),
            _ => Ok(()),
        }
    }

    fn write_zeroes(&mut self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        let done = match unmap {
            true => self.punch(offset, len),
            false => self.fallocate(FallocateFlags::ZERO_RANGE, offset, len),
        };
        match done {
            Ok(()) => Ok(()),
            Err(error) if is_unsupported(error) => self.write_zero_bytes(offset, len),
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(len: u64) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(len).unwrap();
        file
    }

    #[test]
    fn images_are_checked_when_opened() {
        let open = |path: &std::path::Path| FileImage::open(path, false);
        let missing = open("/nonexistent/disk.img".as_ref());
        assert!(matches!(missing, Err(ImageError::Missing(_))));
        assert!(matches!(open("/".as_ref()), Err(ImageError::NotAnImage(_))));
        let directory = FileImage::open("/".as_ref(), true);
        assert!(matches!(directory, Err(ImageError::NotAnImage(_))));
        assert!(matches!(open("/dev/null".as_ref()), Err(ImageError::NotAnImage(_))));
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        let mode = rustix::fs::Mode::RWXU;
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        for read_only in [false, true] {
            let opened = FileImage::open(&pipe, read_only);
            assert!(matches!(opened, Err(ImageError::NotAnImage(_))));
        }
        assert!(matches!(open(image(0).path()), Err(ImageError::Empty(_))));
        let partial = open(image(1000).path());
        assert!(matches!(partial, Err(ImageError::PartialSector { len: 1000, .. })));
    }

    #[test]
    fn images_are_locked_against_double_use() {
        let image = image(4096);
        let writer = FileImage::open(image.path(), false).unwrap();
        for read_only in [false, true] {
            let second = FileImage::open(image.path(), read_only);
            assert!(matches!(second, Err(ImageError::InUse(_))));
        }
        drop(writer);
        let _reader = FileImage::open(image.path(), true).unwrap();
        let _reader = FileImage::open(image.path(), true).unwrap();
        assert!(matches!(FileImage::open(image.path(), false), Err(ImageError::InUse(_))));
    }

    #[test]
    fn file_images_hold_data() {
        let image = image(1 << 20);
        let mut disk = FileImage::open(image.path(), false).unwrap();
        disk.write_at(4096, &[7; 8192]).unwrap();
        disk.flush().unwrap();
        disk.write_zeroes(4096, 4096, true).unwrap();
        disk.write_zeroes(8192, 512, false).unwrap();
        disk.discard(0, 4096).unwrap();
        let mut data = vec![1; 8192];
        disk.read_at(4096, &mut data).unwrap();
        assert_eq!(data[..4608], [0; 4608]);
        assert_eq!(data[4608..], [7; 3584]);
        image.as_file().set_len(4096).unwrap();
        assert!(disk.read_at(4096, &mut data).is_err(), "the file shrank under us");
    }
}
