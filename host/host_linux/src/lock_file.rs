//! Locks on a file, which processes share by the file's name.
// UNSAFETY: a plain system call on a structure that lives on the stack.
#![allow(unsafe_code)]

use std::{
    fs::{File, OpenOptions},
    io,
    mem::zeroed,
    os::{fd::AsRawFd, unix::fs::OpenOptionsExt},
    path::Path,
};

/// The number of the lock by which [`LockFile::open`] finds out whether the host has locks. Nobody takes it for himself.
const PROBE: usize = i64::MAX as usize;

/// A file whose offsets are the numbers of locks. The file stays empty. Each value is a holder of its own, also in one process
/// (fcntl(2), "open file description locks").
#[derive(Debug)]
pub struct LockFile(File);

impl LockFile {
    /// Opens the file at `path`, and creates the file if there is none.
    ///
    /// # Errors
    /// The host refuses to open the file, or has no open file description locks.
    pub fn open(path: &Path) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        options.custom_flags(libc::O_NOFOLLOW);
        let file = Self(options.open(path)?);
        // A lock that all may have at once.
        if file.set(libc::F_OFD_SETLK, PROBE, libc::F_RDLCK) {
            file.set(libc::F_OFD_SETLK, PROBE, libc::F_UNLCK);
            return Ok(file);
        }
        Err(io::Error::last_os_error())
    }

    fn set(&self, command: i32, number: usize, kind: i32) -> bool {
        // SAFETY: all-zero is a lock of nothing.
        let mut lock: libc::flock = unsafe { zeroed() };
        lock.l_type = kind as i16;
        lock.l_whence = libc::SEEK_SET as i16;
        lock.l_start = number as i64;
        lock.l_len = 1;
        // SAFETY: the descriptor is open, and the call only reads the structure.
        unsafe { libc::fcntl(self.0.as_raw_fd(), command, &raw const lock) == 0 }
    }
}

impl host::Locks for LockFile {
    fn lock(&self, number: usize) {
        self.set(libc::F_OFD_SETLKW, number, libc::F_WRLCK);
    }
    fn try_lock(&self, number: usize) -> bool {
        self.set(libc::F_OFD_SETLK, number, libc::F_WRLCK)
    }
    fn unlock(&self, number: usize) {
        self.set(libc::F_OFD_SETLK, number, libc::F_UNLCK);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use host::Locks;

    #[test]
    fn one_holder_has_a_lock() {
        let folder = tempfile::tempdir().expect("there is room");
        let open = || LockFile::open(&folder.path().join("locks")).expect("opened");
        let [first, second] = [open(), open()];
        assert!(first.try_lock(3) && first.try_lock(3), "it has it already");
        assert!(!second.try_lock(3) && second.try_lock(4));
        first.unlock(3);
        assert!(second.try_lock(3));
        drop(second);
        assert!(first.try_lock(3) && first.try_lock(4), "its holder has ended");
    }
}
