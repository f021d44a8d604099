//! One writer, or any number of readers, of every file an image consists of.
//!
//! `flock` on a descriptor of our own: it needs no help of whoever else opens the file, and ends with
//! the process however that ends.

use std::{
    fs::{File, TryLockError},
    io,
    path::Path,
};

use crate::ImageError;

/// Opens and locks a file until it is dropped.
pub(crate) fn lock(path: &Path, shared: bool) -> Result<File, ImageError> {
    let host = |source| ImageError::Host { path: path.into(), source };
    let file = File::open(path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => ImageError::Missing(path.into()),
        _ => host(error),
    })?;
    let locked = if shared { file.try_lock_shared() } else { file.try_lock() };
    match locked {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(ImageError::InUse(path.into())),
        Err(TryLockError::Error(source)) => Err(host(source)),
    }
}
