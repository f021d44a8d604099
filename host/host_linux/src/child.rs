//! Children of this process. A descriptor stands for each, and means no other, unlike a number that is given
//! again once the child is reaped.
// UNSAFETY: system calls on descriptors, which touch no memory but a structure on the stack.
#![allow(unsafe_code)]

use std::{
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    ptr,
};

use host::End;

use crate::trace;

/// A child of this process.
#[derive(Debug)]
pub struct LinuxChild {
    /// Its number.
    pub pid: u32,
    /// A descriptor that stands for it.
    pub pidfd: OwnedFd,
}

impl LinuxChild {
    /// A child that was just made, and that nobody has reaped; it ends if nothing can stand for it.
    pub(crate) fn adopt(pid: i32) -> io::Result<Self> {
        let pidfd = pidfd(pid).inspect_err(|_| {
            // SAFETY: a child of ours that nobody has reaped.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        })?;
        Ok(Self { pid: pid.cast_unsigned(), pidfd })
    }

    /// Sends a signal; one that has ended needs none.
    pub fn signal(&self, number: i32) {
        let (fd, none) = (self.pidfd.as_raw_fd(), ptr::null::<libc::siginfo_t>());
        // SAFETY: touches no memory.
        unsafe { libc::syscall(libc::SYS_pidfd_send_signal, fd, number, none, 0) };
    }

    /// How it has ended, as waitpid(2) says it, if it has. To be asked until then, and not after.
    ///
    /// # Errors
    /// It is no child of this process, or was waited for.
    pub fn try_wait(&self) -> io::Result<Option<i32>> {
        let code = |end| match end {
            End::Exited(status) => status << 8,
            End::Killed(signal) => signal,
        };
        Ok(self.reap(libc::WNOHANG)?.map(code))
    }

    /// Reaps it once it has ended, waiting for that unless the options say otherwise.
    fn reap(&self, options: i32) -> io::Result<Option<End>> {
        // SAFETY: the structure is plain data, for which zero is a value.
        let mut status: libc::siginfo_t = unsafe { std::mem::zeroed() };
        let fd = self.pidfd.as_raw_fd().cast_unsigned();
        // SAFETY: writes the structure.
        if unsafe { libc::waitid(libc::P_PIDFD, fd, &raw mut status, libc::WEXITED | options) } != 0
        {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a child's change has a status.
        let number = unsafe { status.si_status() };
        Ok(match status.si_code {
            libc::CLD_EXITED => Some(End::Exited(number)),
            libc::CLD_KILLED | libc::CLD_DUMPED => Some(End::Killed(number)),
            // Nothing has changed, or it stands still for a debugger that is a thread of ours.
            _ => None,
        })
    }
}

/// A descriptor that stands for a child of ours.
fn pidfd(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: makes a descriptor, which is ours then.
    unsafe {
        match libc::syscall(libc::SYS_pidfd_open, pid, 0) {
            -1 => Err(io::Error::last_os_error()),
            fd => Ok(OwnedFd::from_raw_fd(fd as i32)),
        }
    }
}

impl host::Child for LinuxChild {
    fn number(&self) -> i32 {
        self.pid.cast_signed()
    }

    fn signal(&self, number: i32) {
        Self::signal(self, number);
    }

    fn trace(&self) -> io::Result<()> {
        trace::begin(self.number(), self.pidfd.try_clone()?)
    }

    fn end(&self) {
        self.signal(libc::SIGKILL);
        // One that has been reaped is no child any more.
        let _ = self.reap(0);
    }

    fn ended(&self) -> Option<End> {
        // A look comes first: that it stands still is the debugger's to hear.
        self.reap(libc::WNOHANG | libc::WNOWAIT).ok().flatten()?;
        self.reap(libc::WNOHANG).ok().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use host::Child as _;

    /// A child that has ended by itself is reaped once; who ends it then ends nobody else, whatever has its number.
    #[test]
    fn what_has_been_reaped_is_not_reaped_again() {
        // SAFETY: the child makes one system call.
        let pid = unsafe {
            match libc::fork() {
                0 => libc::_exit(7),
                pid => pid,
            }
        };
        let child = LinuxChild::adopt(pid).expect("a descriptor");
        let end = std::iter::from_fn(|| Some(child.ended())).find_map(|end| {
            std::thread::yield_now();
            end
        });
        assert_eq!(end, Some(End::Exited(7)));
        assert_eq!(child.ended(), None, "it is told once");
        child.signal(libc::SIGKILL);
        child.end();
        assert!(pidfd(pid).is_err(), "there is no such process any more");
    }
}
