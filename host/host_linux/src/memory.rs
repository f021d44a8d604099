//! Memory objects: memfds, sealed against resizing.
// UNSAFETY: maps memory.
#![allow(unsafe_code)]

use std::{
    ffi::{CString, c_void},
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    ptr::{self, NonNull},
    sync::OnceLock,
};

use host::{Access, Mapping, MemoryObject, Piece, Seal};
use rustix::{
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create},
    mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap},
    thread::{MembarrierCommand, membarrier},
};

#[derive(Debug)]
struct Object {
    file: OwnedFd,
    len: u64,
}

pub(crate) fn object(name: &str, len: u64) -> io::Result<Box<dyn MemoryObject>> {
    let name = CString::new(name).unwrap_or_default();
    let file = memfd_create(&name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, len)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
    Ok(Box::new(Object { file, len }))
}

pub(crate) fn adopt(file: OwnedFd) -> io::Result<Box<dyn MemoryObject>> {
    if !fcntl_get_seals(&file)?.contains(SealFlags::SHRINK) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it can be shortened"));
    }
    adopt_shrinkable(file)
}

pub(crate) fn adopt_shrinkable(file: OwnedFd) -> io::Result<Box<dyn MemoryObject>> {
    // Not the library's way, which asks by a call that can name files: who serves a device may not make it.
    let len = fstat(&file)?.st_size.cast_unsigned();
    Ok(Box::new(Object { file, len }))
}

/// Has the host prepare for barriers in all threads, which takes a process of several threads some 15 ms, and one without
/// threads nothing.
pub fn prepare_fences() -> bool {
    static REGISTERED: OnceLock<bool> = OnceLock::new();
    let register = || membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok();
    *REGISTERED.get_or_init(register)
}

/// A barrier in all threads of the process.
pub(crate) fn fence_all_threads() -> bool {
    prepare_fences() && membarrier(MembarrierCommand::PrivateExpedited).is_ok()
}

impl MemoryObject for Object {
    fn len(&self) -> u64 {
        self.len
    }

    fn seal(&self, seal: Seal) -> io::Result<()> {
        let seals = match seal {
            Seal::Seals => SealFlags::SEAL,
            Seal::Writers => SealFlags::FUTURE_WRITE | SealFlags::SEAL,
        };
        Ok(fcntl_add_seals(&self.file, seals)?)
    }

    fn map(&self, pieces: &[Piece], access: Access) -> io::Result<Mapping> {
        Ok(Range::of_pieces(&self.file, pieces, access)?.into_mapping())
    }

    fn map_large(&self) -> io::Result<Mapping> {
        let all = Piece { offset: 0, len: self.len as usize };
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        let range = Range::anywhere(&self.file, all, Access::Write, flags)?;
        // SAFETY: our own mapping. A host without huge pages for shared memory refuses; that costs speed only.
        let _ = unsafe { madvise(range.at.as_ptr(), range.len, Advice::LinuxHugepage) };
        Ok(range.into_mapping())
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            match rustix::io::pwrite(&self.file, &bytes[done..], offset + done as u64) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => done += count,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.file.as_fd())
    }
}

/// Pages of this process that are ours to unmap.
pub(crate) struct Range {
    at: NonNull<c_void>,
    len: usize,
}

// SAFETY: an address and a length, valid in every thread.
unsafe impl Send for Range {}
// SAFETY: as above; nothing is dereferenced by it.
unsafe impl Sync for Range {}

impl Range {
    pub(crate) fn anywhere(
        file: impl AsFd,
        piece: Piece,
        access: Access,
        flags: MapFlags,
    ) -> io::Result<Self> {
        let protection = protection(access);
        // SAFETY: a new mapping at an address of the kernel's choice aliases nothing.
        let at =
            unsafe { mmap(ptr::null_mut(), piece.len, protection, flags, file, piece.offset)? };
        Self::of(at, piece.len)
    }

    fn of(at: *mut c_void, len: usize) -> io::Result<Self> {
        let at = NonNull::new(at).ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok(Self { at, len })
    }

    /// The first piece goes on for as long as all are; each of the others replaces its part of that.
    fn of_pieces(file: &OwnedFd, pieces: &[Piece], access: Access) -> io::Result<Self> {
        let [first, others @ ..] = pieces else { return Err(io::ErrorKind::InvalidInput.into()) };
        let all = Piece { len: pieces.iter().map(|piece| piece.len).sum(), ..*first };
        let range = Self::anywhere(file, all, access, MapFlags::SHARED)?;
        let (mut done, flags) = (first.len, MapFlags::SHARED | MapFlags::FIXED);
        for piece in others {
            // SAFETY: inside the range just mapped, which nobody else knows.
            unsafe {
                let at = range.at.as_ptr().byte_add(done);
                mmap(at, piece.len, protection(access), flags, file, piece.offset)?;
            }
            done += piece.len;
        }
        Ok(range)
    }

    pub(crate) fn into_mapping(self) -> Mapping {
        Mapping::new(self.at.cast(), self.len, Box::new(self))
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        // SAFETY: ours; whoever had an address in it had it by the mapping, which is gone. Failure would leak
        // address space, no more.
        let _ = unsafe { munmap(self.at.as_ptr(), self.len) };
    }
}

fn protection(access: Access) -> ProtFlags {
    match access {
        Access::Read => ProtFlags::READ,
        Access::Write => ProtFlags::READ | ProtFlags::WRITE,
        Access::Execute => ProtFlags::READ | ProtFlags::EXEC,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = 4096;

    fn first_byte(mapping: &Mapping) -> *mut u8 {
        mapping.base().as_ptr()
    }

    #[test]
    fn mappings_of_an_object_show_the_same() {
        let object = object("test", 2 * PAGE as u64).expect("memory");
        let piece = |page: u64| Piece { offset: page * PAGE as u64, len: PAGE };
        let straight = object.map_large().expect("mapped");
        let crossed = object.map(&[piece(1), piece(0)], Access::Write).expect("mapped");
        // SAFETY: both are mapped, two pages each, and nobody else has them.
        let seen = unsafe {
            first_byte(&straight).add(PAGE).write(7);
            first_byte(&crossed).add(PAGE).write(9);
            [first_byte(&crossed).read(), first_byte(&straight).read()]
        };
        assert_eq!(seen, [7, 9]);
    }

    #[test]
    fn what_is_written_is_mapped() {
        let object = object("test", 2 * PAGE as u64).expect("memory");
        object.write(PAGE as u64 - 1, &[7, 9]).expect("written");
        let mapped = object.map_large().expect("mapped");
        // SAFETY: two pages are mapped, and nobody else has them.
        let seen = [PAGE - 1, PAGE].map(|at| unsafe { first_byte(&mapped).add(at).read() });
        assert_eq!(seen, [7, 9]);
        assert!(object.write(2 * PAGE as u64 - 1, &[1, 2]).is_err(), "it does not grow");
    }

    #[test]
    fn what_is_sealed_stays_as_it_is() {
        let object = object("test", PAGE as u64).expect("memory");
        let ours = object.map_large().expect("mapped");
        object.seal(Seal::Writers).expect("sealed");
        assert!(object.seal(Seal::Seals).is_err());
        assert!(object.map_large().is_err(), "no further mapping that writes");
        assert!(object.map(&[Piece { offset: 0, len: PAGE }], Access::Read).is_ok());
        // SAFETY: mapped to be written before.
        unsafe { first_byte(&ours).write(1) };
        let theirs =
            object.descriptor().expect("a descriptor").try_clone_to_owned().expect("a copy");
        assert_eq!(adopt(theirs).expect("it cannot shrink").len(), PAGE as u64);
    }

    #[test]
    fn what_can_shrink_is_not_adopted_as_if_it_could_not() {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(PAGE as u64).expect("a page");
        let file = OwnedFd::from(file);
        assert!(adopt(file.try_clone().expect("a copy")).is_err());
        assert_eq!(adopt_shrinkable(file).expect("a file").len(), PAGE as u64);
    }
}
