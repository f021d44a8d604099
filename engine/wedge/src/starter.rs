//! Where wedges come from: the host starts a process that is nothing but the wedge, or somebody else does so for it.
//!
//! A monitor that has shut itself in may start no process. It has another one do so, which was made before,
//! is told what the wedge is made of ([`start_by`]), and becomes it ([`become_wedge`]). The blob is that
//! process's own: what it executes before it has its filter is not the monitor's to choose.

use crate::{
    body::{OBJECTS, Objects, Parts},
    process,
    strict::{self, UserParts},
};
use host::{Body, Child};
use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::OnceLock,
};
use wedge_abi::Base;

/// Starts a child of this process that is to call [`become_wedge`] with these words and descriptors.
type Start = fn(&[u64], &[BorrowedFd<'_>]) -> io::Result<Box<dyn Child>>;

static START: OnceLock<Start> = OnceLock::new();

/// From now on wedges are started so.
///
/// What is to be known of the host is found out now: later it may not be open any more.
pub fn start_by(start: Start) {
    host::current().facts();
    host::current().runs_32_bit();
    // A process has one way.
    let _ = START.set(start);
}

/// Makes what all wedges have in common, in the process that they are to be copies of.
///
/// # Errors
/// The host gives no memory.
pub fn prepare() -> io::Result<()> {
    host::current().facts();
    process::image().map(drop)
}

/// Becomes a wedge. To be called in a process that has one thread and was made for this.
pub fn become_wedge(words: &[u64], descriptors: &[OwnedFd]) -> io::Error {
    let become_body = || {
        let image = process::image()?;
        let body = match UserParts::of(words, descriptors) {
            Some(user) => user.body(image),
            None => Parts::of(words, descriptors).ok_or(io::ErrorKind::InvalidInput)?.body(image),
        };
        Err::<(), _>(host::current().become_body(&body))
    };
    become_body().err().unwrap_or_else(|| io::ErrorKind::Other.into())
}

/// Starts a wedge of these parts.
pub(crate) fn start(parts: &Parts<'_>) -> io::Result<Box<dyn Child>> {
    start_as(parts.told(), |image| parts.body(image))
}

/// Starts a process by these words and descriptors, or as this with the blob.
pub(crate) fn start_as<'a, const N: usize>(
    (words, descriptors): ([u64; N], Vec<BorrowedFd<'_>>),
    body: impl FnOnce(BorrowedFd<'a>) -> Body<'a>,
) -> io::Result<Box<dyn Child>> {
    match START.get() {
        Some(start) => start(&words, &descriptors),
        None => host::current().start(&body(process::image()?)),
    }
}

/// What of an object another process can be passed.
pub(crate) fn passed(object: &dyn host::MemoryObject) -> io::Result<BorrowedFd<'_>> {
    object.descriptor().ok_or_else(|| io::ErrorKind::Unsupported.into())
}

impl<'a> Parts<'a> {
    /// Words and descriptors that say all of it.
    fn told(&self) -> ([u64; 5], Vec<BorrowedFd<'a>>) {
        let Self { base, objects, ram_len, words, walked, keyed, user } = *self;
        let of_user = user.map(|user| [user.page, user.journal, user.socket]);
        let descriptors = objects.given().into_iter().chain(of_user.into_iter().flatten());
        let told = [ram_len as u64, words, walked.into(), keyed.into(), base.entry().into()];
        (told, descriptors.collect())
    }

    /// What was told; `None` if it cannot be that.
    fn of(told: &[u64], descriptors: &'a [OwnedFd]) -> Option<Self> {
        let &[len, words, walked, keyed, entry] = told.first_chunk()?;
        let (objects, more): (&[OwnedFd; OBJECTS], _) = descriptors.split_first_chunk()?;
        let user = more.first_chunk().map(|of_user: &[OwnedFd; 3]| {
            let [page, journal, socket] = of_user.each_ref().map(AsFd::as_fd);
            strict::UserDescriptors { page, journal, socket }
        });
        let ram_len = usize::try_from(len).ok().filter(|len| *len <= wedge_abi::RAM_MAX)?;
        let base = Base::of_entry(u16::try_from(entry).ok()?);
        let objects = Objects::of(objects.each_ref().map(AsFd::as_fd));
        let (walked, keyed) = (walked != 0, keyed != 0);
        Some(Self { base, objects, ram_len, words, walked, keyed, user })
    }
}
