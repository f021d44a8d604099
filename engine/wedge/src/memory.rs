//! Memory objects: memory that several processes map.
// UNSAFETY: maps memory objects and gives out references into them.
#![allow(unsafe_code)]

use std::{
    ffi::CString,
    io,
    marker::PhantomData,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    ptr::{self, NonNull},
};

/// A zeroed memory object of at least a `T`, mapped writable here for as long as it lives.
///
/// `T` must be valid for any bytes another process may put there.
#[derive(Debug)]
pub(crate) struct MemoryObject<T> {
    fd: OwnedFd,
    at: NonNull<u8>,
    len: usize,
    kind: PhantomData<T>,
}

// SAFETY: plain memory; exclusive access goes through `&mut self`.
unsafe impl<T: Send> Send for MemoryObject<T> {}
// SAFETY: shared access is `get`, and `write`, which only initialises.
unsafe impl<T: Sync> Sync for MemoryObject<T> {}

impl<T> MemoryObject<T> {
    /// A new object of `len` bytes, rounded up to whole pages.
    pub fn new(name: &str, len: usize) -> io::Result<Self> {
        let len = len.max(size_of::<T>()).next_multiple_of(4096);
        let name = CString::new(name).unwrap_or_default();
        // SAFETY: plain system calls; the descriptor is ours.
        let fd = unsafe {
            let fd = libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING);
            if fd < 0 || libc::ftruncate(fd, len as i64) != 0 {
                return Err(io::Error::last_os_error());
            }
            OwnedFd::from_raw_fd(fd)
        };
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a fresh mapping where the host likes.
        let at = unsafe {
            libc::mmap(ptr::null_mut(), len, protection, libc::MAP_SHARED, fd.as_raw_fd(), 0)
        };
        match NonNull::new(at.cast::<u8>()) {
            Some(at) if at.as_ptr().cast() != libc::MAP_FAILED => {
                Ok(Self { fd, at, len, kind: PhantomData })
            }
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// From now on nobody can make a mapping that writes it, nor make one writable, nor change its
    /// length. Writes by this mapping go on.
    pub fn seal(&self) -> io::Result<()> {
        let seals =
            libc::F_SEAL_FUTURE_WRITE | libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        // SAFETY: a plain system call on our own descriptor.
        match unsafe { libc::fcntl(self.fd(), libc::F_ADD_SEALS, seals) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub fn fd(&self) -> i32 {
        self.fd.as_raw_fd()
    }

    /// The contents; another process may change them only while it has the turn.
    pub fn get(&self) -> &T {
        // SAFETY: page-aligned, large enough, valid for any bytes.
        unsafe { self.at.cast().as_ref() }
    }

    pub fn get_mut(&mut self) -> &mut T {
        // SAFETY: as for `get`.
        unsafe { self.at.cast().as_mut() }
    }

    /// The byte at an offset, zero beyond the end.
    pub fn byte(&self, offset: usize) -> u8 {
        if offset >= self.len {
            return 0;
        }
        // SAFETY: inside the mapping.
        unsafe { ptr::read_volatile(self.at.as_ptr().add(offset)) }
    }

    /// Copies bytes to an offset.
    ///
    /// # Panics
    /// If they do not fit.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset.checked_add(bytes.len()).is_some_and(|end| end <= self.len));
        // SAFETY: checked above; nobody holds references into the objects written this way.
        unsafe {
            ptr::copy_nonoverlapping(bytes.as_ptr(), self.at.as_ptr().add(offset), bytes.len());
        }
    }
}

impl<T> Drop for MemoryObject<T> {
    fn drop(&mut self) {
        // SAFETY: our own mapping.
        unsafe { libc::munmap(self.at.as_ptr().cast(), self.len) };
    }
}
