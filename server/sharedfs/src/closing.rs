//! Closing a descriptor where the host's answer matters.

// UNSAFETY: std and rustix close in silence.
#![allow(unsafe_code)]

use std::{
    io,
    os::fd::{IntoRawFd, OwnedFd},
};

/// Closes; the error is what could not be written of the file.
pub(crate) fn close(fd: OwnedFd) -> io::Result<()> {
    // SAFETY: the descriptor was owned, and its owner has given it up.
    let done = unsafe { libc::close(fd.into_raw_fd()) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
