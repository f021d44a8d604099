//! Files that are mapped to be read.
// UNSAFETY: a mapping as bytes.
#![allow(unsafe_code)]

use std::{fs::File, io, ops::Deref, os::unix::fs::MetadataExt, slice};

use host::{Access, Mapping, Piece};
use rustix::mm::MapFlags;

use crate::memory::Range;

/// The bits of a file's mode that let somebody write.
const WRITABLE: u32 = 0o222;

/// The bytes of a file that nobody may write. They are the host's own copy: all who have the file mapped share them, and to
/// read them takes no copy and no memory of this process.
#[derive(Debug)]
pub struct MappedFile(Option<Mapping>);

impl MappedFile {
    /// Maps all of a file. To be called when whoever has made the file has closed it.
    ///
    /// # Errors
    /// The file's mode lets somebody write, or the host refuses.
    pub fn of(file: &File) -> io::Result<Self> {
        let data = file.metadata()?;
        if data.mode() & WRITABLE != 0 {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let len = usize::try_from(data.len()).map_err(io::Error::other)?;
        if len == 0 {
            return Ok(Self(None));
        }
        let flags = MapFlags::PRIVATE | MapFlags::POPULATE;
        let range = Range::anywhere(file, Piece { offset: 0, len }, Access::Read, flags)?;
        Ok(Self(Some(range.into_mapping())))
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let Some(mapping) = &self.0 else { return &[] };
        // SAFETY: mapped to be read for as long as `self` lives. Nobody may write the file, so the bytes stay as they are.
        unsafe { slice::from_raw_parts(mapping.base().as_ptr(), mapping.len()) }
    }
}

impl AsRef<[u8]> for MappedFile {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs::Permissions, io::Write as _, os::unix::fs::PermissionsExt};

    fn allow(file: &File, mode: u32) {
        file.set_permissions(Permissions::from_mode(mode)).expect("ours");
    }

    #[test]
    fn a_mapped_file_has_the_bytes_of_the_file() {
        let mut file = tempfile::tempfile().expect("a file");
        allow(&file, 0o400);
        assert!(MappedFile::of(&file).expect("mapped").is_empty());
        file.write_all(&[7; 5000]).expect("written");
        assert_eq!(*MappedFile::of(&file).expect("mapped"), [7; 5000]);
    }

    #[test]
    fn what_somebody_may_write_is_not_mapped() {
        let file = tempfile::tempfile().expect("a file");
        for mode in [0o600, 0o420, 0o402] {
            allow(&file, mode);
            assert!(MappedFile::of(&file).is_err(), "{mode:o}");
        }
    }
}
