//! Where wedges come from: a copy of this process, or one that somebody else starts for it.
//!
//! A monitor that has shut itself in may start no process. It has another one do so, which was made before,
//! is told what the wedge is made of ([`start_by`]), and becomes it ([`become_wedge`]). The blob is that
//! process's own: what it executes before it has its filter is not the monitor's to choose.
// UNSAFETY: makes processes and takes descriptors by number.
#![allow(unsafe_code)]

use crate::{
    child::{self, Parts},
    process,
    strict::{self, UserParts},
};
use frame::Base;
use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    sync::OnceLock,
};

/// A child of this process.
#[derive(Debug)]
pub struct Process {
    /// Its number.
    pub pid: i32,
    /// A descriptor that stands for it.
    pub pidfd: OwnedFd,
}

/// Starts a child of this process that is to call [`become_wedge`] with these words and descriptors.
pub(crate) type Start = fn(&[u64], &[BorrowedFd<'_>]) -> io::Result<Process>;

static START: OnceLock<Start> = OnceLock::new();

/// From now on wedges are started so.
///
/// What is to be known of the host is found out now: later it may not be open any more.
pub fn start_by(start: fn(&[u64], &[BorrowedFd<'_>]) -> io::Result<Process>) {
    let _ = (crate::keys(), crate::cpuid_faults(), crate::has_more_vectors());
    crate::runs_narrow();
    crate::max_mappings();
    // A process has one way.
    let _ = START.set(start);
}

/// Makes what all wedges have in common, in the process that they are to be copies of.
///
/// # Errors
/// The host gives no memory.
pub fn prepare() -> io::Result<()> {
    crate::keys();
    process::image().map(drop)
}

/// Becomes a wedge. To be called in a process that has one thread and was made for this.
pub fn become_wedge(words: &[u64], descriptors: &[OwnedFd]) -> io::Error {
    if let Some(parts) = UserParts::of(words, descriptors) {
        return match process::image() {
            Ok(image) => strict::become_user(image, &parts),
            Err(error) => error,
        };
    }
    let parts = Parts::of(words, descriptors).ok_or_else(|| io::ErrorKind::InvalidInput.into());
    match parts.and_then(|parts| Ok((process::image()?, parts))) {
        Ok((image, parts)) => child::become_wedge(image, &parts),
        Err(error) => error,
    }
}

/// Starts a wedge of these parts.
pub(crate) fn start(parts: &Parts) -> io::Result<Process> {
    start_as(parts.told(), |image| child::become_wedge(image, parts))
}

/// Starts a process by these words and descriptors, or as a copy of this one that does something with the
/// blob.
pub(crate) fn start_as<const N: usize>(
    (words, descriptors): ([u64; N], Vec<i32>),
    becomes: impl FnOnce(i32) -> io::Error,
) -> io::Result<Process> {
    if let Some(start) = START.get() {
        // SAFETY: whoever calls has the descriptors open.
        let borrow = |fd: &i32| unsafe { BorrowedFd::borrow_raw(*fd) };
        let descriptors: Vec<_> = descriptors.iter().map(borrow).collect();
        return start(&words, &descriptors);
    }
    let image = process::image()?;
    // SAFETY: the child only makes plain system calls and then is the blob.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            let _ = becomes(image);
            strict::give_up()
        }
        pid => adopted(pid),
    }
}

/// A child that was just made; it ends if nothing can stand for it.
fn adopted(pid: i32) -> io::Result<Process> {
    let pidfd = pidfd(pid).inspect_err(|_| {
        // SAFETY: a child of ours that nobody has reaped.
        unsafe { libc::kill(pid, libc::SIGKILL) };
    })?;
    Ok(Process { pid, pidfd })
}

/// A descriptor that stands for a child of ours.
pub(crate) fn pidfd(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: makes a descriptor, which is ours then.
    unsafe {
        match libc::syscall(libc::SYS_pidfd_open, pid, 0) {
            -1 => Err(io::Error::last_os_error()),
            fd => Ok(OwnedFd::from_raw_fd(fd as i32)),
        }
    }
}

/// How many descriptors a wedge is given.
const DESCRIPTORS: usize = 14;

impl Parts {
    /// Words and descriptors that say all of it.
    fn told(&self) -> ([u64; 3], Vec<i32>) {
        let Self {
            base,
            shared,
            frame,
            turns,
            taps,
            tables,
            cache,
            user_tables,
            user_cache,
            stubs,
            regions,
            sites,
            lookups,
            marks,
            ram,
            walked,
            user,
        } = *self;
        let descriptors = [
            shared,
            frame,
            turns,
            taps,
            tables,
            cache,
            user_tables,
            user_cache,
            stubs,
            regions,
            sites,
            lookups,
            marks,
            ram.0,
        ];
        let of_user = user.map(|user| [user.page, user.journal, user.socket]);
        let descriptors = descriptors.into_iter().chain(of_user.into_iter().flatten()).collect();
        ([ram.1 as u64, walked.into(), base.entry().into()], descriptors)
    }

    /// What was told; `None` if it cannot be that.
    fn of(words: &[u64], descriptors: &[OwnedFd]) -> Option<Self> {
        let &[len, walked, entry] = words.first_chunk()?;
        let (descriptors, more): (&[OwnedFd; DESCRIPTORS], _) = descriptors.split_first_chunk()?;
        let user = more.first_chunk().map(|of_user: &[OwnedFd; 3]| {
            let [page, journal, socket] = of_user.each_ref().map(|fd| fd.as_raw_fd());
            strict::Shared { page, journal, socket }
        });
        let [
            shared,
            frame,
            turns,
            taps,
            tables,
            cache,
            user_tables,
            user_cache,
            stubs,
            regions,
            sites,
            lookups,
            marks,
            ram,
        ] = descriptors.each_ref().map(|descriptor| descriptor.as_raw_fd());
        let base = Base::of_entry(u16::try_from(entry).ok()?);
        let (ram, walked) = ((ram, usize::try_from(len).ok()?), walked != 0);
        let len_is_possible = ram.1 <= frame::RAM_MAX;
        let parts = Self {
            base,
            shared,
            frame,
            turns,
            taps,
            tables,
            cache,
            user_tables,
            user_cache,
            stubs,
            regions,
            sites,
            lookups,
            marks,
            ram,
            walked,
            user,
        };
        len_is_possible.then_some(parts)
    }
}
