//! This process among others.

// UNSAFETY: close_range and rseq have no safe wrappers in rustix.
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

/// Unregisters the rseq area of the C library, which the kernel writes: for who is about to unmap it, or to close it by a protection
/// key.
///
/// # Safety
/// This thread runs no more of the C library that relies on it.
pub unsafe fn forget_rseq() {
    unsafe extern "C" {
        static __rseq_offset: isize;
        static __rseq_size: u32;
    }
    // SAFETY: the area is the one glibc registered for this thread; 0x53053053 is its signature.
    unsafe {
        let thread: usize;
        std::arch::asm!("rdfsbase {}", out(reg) thread, options(nomem, nostack));
        let area = thread.wrapping_add_signed(__rseq_offset);
        libc::syscall(libc::SYS_rseq, area, 32.max(__rseq_size), 1, 0x5305_3053u32);
    }
}
