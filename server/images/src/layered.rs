//! An image imago reads and writes: qcow2 with its backing files, or raw without the page cache.

use std::{fs, io, path::Path};

use imago::{
    FormatAccess, FormatDriverBuilder, Storage, StorageOpenOptions, file::File,
    format::drivers::FormatDriverInstance, format::gate::ImplicitOpenGate, qcow2::Qcow2, raw::Raw,
};
use virtio::{BlockBackend, SECTOR};

use crate::ImageError;

use crate::{Cache, Format, Image, OpenError, extensions, lock::lock};

pub(crate) struct Layered {
    access: FormatAccess<File>,
    len: u64,
    format: Format,
    readonly: bool,
    flush_failed: bool,
    /// Held for as long as the image is open.
    _locks: Vec<fs::File>,
}

impl Layered {
    pub(crate) fn open(image: &Image, format: Format) -> Result<Self, OpenError> {
        let Image { path, readonly, .. } = image;
        check(path, *readonly)?;
        let mut locks = Locks(vec![lock(path, *readonly)?]);
        let damaged = |source| OpenError::Damaged { path: path.clone(), format, source };
        let options = StorageOpenOptions::new().direct(image.cache == Cache::None);
        let access = match format {
            Format::Qcow2 => extensions::check(path).and_then(|()| {
                build(Qcow2::<File>::builder_path(path), !readonly, options, &mut locks)
            }),
            Format::Raw => build(Raw::<File>::builder_path(path), !readonly, options, &mut locks),
        };
        let access = access.map_err(damaged)?;
        let len = access.size();
        if len == 0 {
            return Err(ImageError::Empty(path.clone()).into());
        }
        if !len.is_multiple_of(SECTOR) {
            return Err(ImageError::PartialSector { path: path.clone(), len }.into());
        }
        let readonly = *readonly;
        Ok(Self { access, len, format, readonly, flush_failed: false, _locks: locks.0 })
    }
}

fn check(path: &Path, readonly: bool) -> Result<(), ImageError> {
    let host = |source: io::Error| match source.kind() {
        io::ErrorKind::NotFound => ImageError::Missing(path.into()),
        _ => ImageError::Host { path: path.into(), source },
    };
    let metadata = path.metadata().map_err(host)?;
    if !metadata.is_file() {
        return Err(ImageError::NotAnImage(path.into()));
    }
    let writable = || fs::OpenOptions::new().write(true).open(path);
    if !readonly && writable().is_err() {
        return Err(ImageError::NotWritable(path.into()));
    }
    Ok(())
}

fn build<B: FormatDriverBuilder<File>>(
    builder: B,
    writable: bool,
    options: StorageOpenOptions,
    locks: &mut Locks,
) -> io::Result<FormatAccess<File>>
where
    B::Format: FormatDriverInstance<Storage = File> + 'static,
{
    let format = builder.write(writable).storage_open_options(options).open(locks)?;
    Ok(FormatAccess::new(format))
}

/// Files an image may consist of. Each is opened within the opening of the one before, and one could be its own backing file.
const MOST_FILES: usize = 32;

/// Locks every file an image refers to, for reading, before it is opened.
struct Locks(Vec<fs::File>);

impl Locks {
    fn add(&mut self, path: Option<&Path>, shared: bool) -> io::Result<()> {
        let path = path.ok_or_else(|| io::Error::other("a backing file without a name"))?;
        if self.0.len() >= MOST_FILES {
            let problem = format!("{} leads to {MOST_FILES} backing files or more", path.display());
            return Err(io::Error::other(problem));
        }
        self.0.push(lock(path, shared).map_err(io::Error::other)?);
        extensions::check(path)
    }
}

impl ImplicitOpenGate<File> for &mut Locks {
    fn open_format<F: FormatDriverBuilder<File>>(
        &mut self,
        builder: F,
    ) -> io::Result<FormatAccess<File>> {
        self.add(builder.get_image_path().as_deref(), !builder.get_writable())?;
        Ok(FormatAccess::new(builder.open(&mut **self)?))
    }

    fn open_storage(&mut self, options: StorageOpenOptions) -> io::Result<File> {
        File::open(options)
    }
}

impl BlockBackend for Layered {
    fn len(&self) -> u64 {
        self.len
    }

    fn is_read_only(&self) -> bool {
        self.readonly
    }

    /// imago keeps tables of qcow2 images to itself until they are flushed.
    fn writes_through(&self) -> bool {
        self.format == Format::Raw || self.readonly
    }

    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.access.read(data, offset)
    }

    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.access.write(data, offset)
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.flush_failed {
            return Err(io::Error::other("an earlier flush failed"));
        }
        if self.readonly {
            return Ok(());
        }
        // What imago keeps, then what the host keeps.
        let flushed = self.access.flush().and_then(|()| self.access.sync());
        self.flush_failed = flushed.is_err();
        flushed
    }

    fn discard(&mut self, offset: u64, len: u64) -> io::Result<()> {
        match self.access.discard_to_any(offset, len) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(()),
            done => done,
        }
    }

    fn write_zeroes(&mut self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        if unmap {
            match self.access.discard_to_zero(offset, len) {
                Err(error) if error.kind() == io::ErrorKind::Unsupported => {}
                done => return done,
            }
        }
        self.access.write_zeroes(offset, len)
    }
}
