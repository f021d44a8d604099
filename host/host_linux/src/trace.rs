//! A tracer for a child of this process: a thread that hears of each of its signals first, and lets it go on with that.
//!
//! It changes nothing but how long that takes. It is there to be compared with.
// UNSAFETY: ptrace and waitid, which write one structure on the stack.
#![allow(unsafe_code)]

use std::{
    io,
    os::fd::{AsRawFd, OwnedFd},
    ptr,
    sync::mpsc::{SyncSender, sync_channel},
    thread,
};

/// Starts the tracer of a child that has not been reaped.
///
/// # Errors
/// The host lets this process trace nobody, or gives no thread.
pub(crate) fn begin(pid: i32, pidfd: OwnedFd) -> io::Result<()> {
    let (began, begins) = sync_channel(1);
    thread::Builder::new().name("tracer".into()).spawn(move || follow(pid, &pidfd, &began))?;
    begins.recv().unwrap_or(Err(io::ErrorKind::BrokenPipe.into()))
}

fn follow(pid: i32, pidfd: &OwnedFd, began: &SyncSender<io::Result<()>>) {
    // The child ends with its tracer, which ends with this process.
    let seized = request(libc::PTRACE_SEIZE, pid, libc::PTRACE_O_EXITKILL.cast_unsigned() as usize);
    let traces = seized.is_ok();
    // Who has given up waiting is told by nobody.
    let _ = began.send(seized);
    while traces && let Some(signal) = stopped(pidfd) {
        // One that has been killed meanwhile does not go on.
        let _ = request(libc::PTRACE_CONT, pid, signal);
    }
}

fn request(what: libc::c_uint, pid: i32, data: usize) -> io::Result<()> {
    // SAFETY: neither request has an address.
    match unsafe { libc::ptrace(what, pid, ptr::null_mut::<u8>(), data) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Waits until the child stands, and says what signal it is about to get: none where it stands for another reason. `None` if it
/// has ended, which is left for its parent to find.
fn stopped(pidfd: &OwnedFd) -> Option<usize> {
    // SAFETY: the structure is plain data, for which zero is a value.
    let mut status: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let (fd, options) = (pidfd.as_raw_fd().cast_unsigned(), libc::WEXITED | libc::WSTOPPED);
    // SAFETY: writes the structure.
    let waited =
        unsafe { libc::waitid(libc::P_PIDFD, fd, &raw mut status, options | libc::WNOWAIT) };
    let stands = waited == 0 && matches!(status.si_code, libc::CLD_TRAPPED | libc::CLD_STOPPED);
    // SAFETY: a child's change has a status.
    let reason = unsafe { status.si_status() };
    stands.then(|| usize::try_from(reason).ok().filter(|signal| *signal < 65).unwrap_or(0))
}
