//! This process among others.

// UNSAFETY: close_range has no safe wrapper in rustix.
#![allow(unsafe_code)]

use std::io;

use rustix::process::{Signal, set_parent_process_death_signal};

/// The first descriptor that is not a standard stream.
const FIRST: libc::c_uint = 3;

/// Closes what the process that started this one has left open, but for the standard streams. To be called first of all.
///
/// # Errors
/// The host refuses.
pub fn keep_only_standard_streams() -> io::Result<()> {
    // SAFETY: nothing of this process has opened any yet, so nobody uses what is closed.
    let closed = unsafe { libc::syscall(libc::SYS_close_range, FIRST, libc::c_uint::MAX, 0) };
    match closed {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Has this process killed when the one that started it ends, however it does.
///
/// # Errors
/// The host refuses.
pub fn die_with_parent() -> io::Result<()> {
    Ok(set_parent_process_death_signal(Some(Signal::KILL))?)
}
