//! New images.

use std::{
    fs::{File, OpenOptions},
    io,
    path::{Path, PathBuf},
};

use imago::{
    FormatAccess, FormatCreateBuilder, FormatDriverBuilder, PermissiveImplicitOpenGate, Storage,
    StorageOpenOptions, qcow2::Qcow2,
};
use virtio::SECTOR;

use crate::Format;

/// An image to be made.
#[derive(Clone, Debug)]
pub struct Creation {
    /// Where; nothing may be there yet.
    pub path: PathBuf,
    /// Its format.
    pub format: Format,
    /// Bytes of the disk; those of the backing image if none are given.
    pub size: Option<u64>,
    /// The image, and its format, whose content shows until it is overwritten; for qcow2 only.
    pub backing: Option<(PathBuf, Format)>,
}

/// Why there is no new image.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// There is something already.
    #[error("{0:?} exists already; choose another name or remove it")]
    Exists(PathBuf),
    /// Neither a size nor a backing image.
    #[error("give the disk's size")]
    NoSize,
    /// A size that is no disk's.
    #[error("the size must be a multiple of {SECTOR} bytes and more than none")]
    BadSize,
    /// Raw images are all there is of them.
    #[error("a raw image has no backing image; use qcow2")]
    RawBacking,
    /// The backing image cannot be used.
    #[error("backing image {path:?}: {source}")]
    Backing {
        /// The backing image.
        path: PathBuf,
        /// What is wrong.
        source: io::Error,
    },
    /// The host refused.
    #[error("cannot create {path:?}: {source}")]
    Host {
        /// The image.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// Makes an image; nothing is left of it if that fails.
///
/// # Errors
/// See [`CreateError`].
pub fn create(creation: &Creation) -> Result<(), CreateError> {
    let size = match (creation.size, &creation.backing) {
        (Some(size), _) => size,
        (None, Some((path, format))) => backing_size(path, *format)?,
        (None, None) => return Err(CreateError::NoSize),
    };
    if size == 0 || !size.is_multiple_of(SECTOR) {
        return Err(CreateError::BadSize);
    }
    if creation.format == Format::Raw && creation.backing.is_some() {
        return Err(CreateError::RawBacking);
    }
    let path = &creation.path;
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(path);
    let file = file.map_err(|source| match source.kind() {
        io::ErrorKind::AlreadyExists => CreateError::Exists(path.clone()),
        _ => CreateError::Host { path: path.clone(), source },
    })?;
    fill(&file, creation, size).map_err(|source| {
        // The failure to report is the first one.
        let _ = std::fs::remove_file(path);
        CreateError::Host { path: path.clone(), source }
    })
}

fn fill(file: &File, creation: &Creation, size: u64) -> io::Result<()> {
    if creation.format == Format::Raw {
        return file.set_len(size);
    }
    let options = StorageOpenOptions::new().write(true).filename(&creation.path);
    let mut builder = Qcow2::<imago::file::File>::create_builder(imago::file::File::open(options)?);
    if let Some((path, format)) = &creation.backing {
        let name = path.canonicalize()?.into_os_string().into_string();
        let name = name.map_err(|_| io::Error::other("the backing image's name is not UTF-8"))?;
        builder = builder.backing(name, format.to_string());
    }
    builder.size(size).create()?;
    file.sync_all()
}

fn backing_size(path: &Path, format: Format) -> Result<u64, CreateError> {
    let size = match format {
        Format::Raw => path.metadata().map(|metadata| metadata.len()),
        Format::Qcow2 => Qcow2::<imago::file::File>::builder_path(path)
            .open(PermissiveImplicitOpenGate::default())
            .map(|image| FormatAccess::new(image).size()),
    };
    size.map_err(|source| CreateError::Backing { path: path.into(), source })
}
