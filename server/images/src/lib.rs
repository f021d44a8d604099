//! Disk images of all formats.
//!
//! Plain raw images are files (`raw`); qcow2, its backing files, and access past the host's page cache
//! are imago's. The format is what the user says, or what the file's name says; never what is
//! in the file, because the guest writes that.

mod create;
mod extensions;
mod layered;
mod lock;
mod raw;

use std::{
    fmt,
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
    str::FromStr,
};

use virtio::BlockBackend;

pub use create::{CreateError, Creation, create};
use layered::Layered;
use raw::FileImage;
pub use raw::ImageError;

/// The first bytes of a qcow2 image.
const QCOW2_MAGIC: [u8; 4] = *b"QFI\xfb";

/// How a disk's content is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Byte for byte.
    Raw,
    /// QEMU's copy-on-write format, version 2 or 3.
    Qcow2,
}

impl Format {
    /// What a file's name says.
    pub fn of_name(path: &Path) -> Self {
        match path.extension() {
            Some(extension) if extension == "qcow2" => Self::Qcow2,
            _ => Self::Raw,
        }
    }
}

impl FromStr for Format {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "raw" => Ok(Self::Raw),
            "qcow2" => Ok(Self::Qcow2),
            _ => Err(format!("unknown format `{text}`; there are raw and qcow2")),
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        })
    }
}

/// Where writes are until the guest flushes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cache {
    /// In the host's page cache.
    #[default]
    Writeback,
    /// On the device: the page cache is passed by.
    None,
}

/// An image to open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// The file or block device.
    pub path: PathBuf,
    /// Its format; by its name if none is given.
    pub format: Option<Format>,
    /// The guest may not write.
    pub readonly: bool,
    /// Where writes are until flushed.
    pub cache: Cache,
}

/// Why an image cannot be a disk.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// As any file may not be one.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// A raw disk that looks like another format.
    #[error("disk image {0:?} looks like qcow2; say format=qcow2, or format=raw if it is not")]
    Ambiguous(PathBuf),
    /// It is not of the format it should be, or damaged.
    #[error("disk image {path:?} is no usable {format}: {source}")]
    Damaged {
        /// The image.
        path: PathBuf,
        /// What it should be.
        format: Format,
        /// What is wrong.
        source: io::Error,
    },
}

impl OpenError {
    /// Whether another process, or another disk, has it: which may change.
    pub fn is_in_use(&self) -> bool {
        matches!(self, Self::Image(ImageError::InUse(_)))
    }
}

/// Opens and locks an image.
///
/// # Errors
/// See [`OpenError`]: all are the user's to mend.
pub fn open(image: &Image) -> Result<Box<dyn BlockBackend>, OpenError> {
    let format = image.format.unwrap_or_else(|| Format::of_name(&image.path));
    if image.format.is_none() && format == Format::Raw && looks_like_qcow2(&image.path) {
        return Err(OpenError::Ambiguous(image.path.clone()));
    }
    match (format, image.cache) {
        (Format::Raw, Cache::Writeback) => {
            Ok(Box::new(FileImage::open(&image.path, image.readonly)?))
        }
        _ => Ok(Box::new(Layered::open(image, format)?)),
    }
}

fn looks_like_qcow2(path: &Path) -> bool {
    // Opening a pipe would wait for its other end.
    let is_file = path.metadata().is_ok_and(|metadata| metadata.is_file());
    let mut magic = [0; 4];
    let read = || File::open(path).and_then(|mut file| file.read_exact(&mut magic));
    is_file && { read }().is_ok() && magic == QCOW2_MAGIC
}

#[cfg(test)]
mod tests;
