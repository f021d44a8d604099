//! The process of user code, where that has one of its own (`stub/src/user.rs`): what it consists of, and its
//! start.
//!
//! It has the program's pages, and of ours the blob, a page that it shares with its wedge, one that says what
//! it is to do, the table of patched calls and their stubs. Before it has all of its filters it makes the
//! descriptor by which the wedge hears of it, and sends that to the wedge, by a socket that both then close.
//! The monitor never has it.

use crate::{
    body::{self, Parts, part},
    memory::{MemoryObject, field},
    process::{self, PAGE},
    starter::{self, passed},
};
use host::{
    Access::{Execute, Read, Write},
    Body, Child, Supervision,
};
use std::{
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
};
use wedge_abi::{
    ALT_STACK, ALT_STACK_LEN, AREA_LEN, BLOB, Base, HAND_OVER, JOURNAL, Journal, MAX_SITES,
    SIGNAL_STACK_FLAGS, SITES, SITES_LEN, STUB_LEN, STUBS, USER_PAGE, USER_START, UserPage,
};

/// What a wedge shares with the process of its user code: descriptors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UserDescriptors<'a> {
    pub(crate) page: BorrowedFd<'a>,
    pub(crate) journal: BorrowedFd<'a>,
    /// Where the one sends, or the other receives, what the wedge hears by.
    pub(crate) socket: BorrowedFd<'a>,
}

/// Both sides' of it, for as long as they are started.
pub(crate) struct BothSides {
    page: MemoryObject<UserPage>,
    journal: MemoryObject<Journal>,
    sockets: [UnixStream; 2],
}

impl BothSides {
    pub(crate) fn new() -> io::Result<Self> {
        let page = MemoryObject::new("ring3-user", size_of::<UserPage>())?;
        let journal = MemoryObject::new("ring3-journal", size_of::<Journal>())?;
        Ok(Self { page, journal, sockets: UnixStream::pair()?.into() })
    }

    /// What the wedge has of it.
    pub(crate) fn of_kernel(&self) -> io::Result<UserDescriptors<'_>> {
        self.shared(0)
    }

    fn shared(&self, side: usize) -> io::Result<UserDescriptors<'_>> {
        let [page, journal] = [passed(self.page.object())?, passed(self.journal.object())?];
        Ok(UserDescriptors { page, journal, socket: self.sockets[side].as_fd() })
    }

    /// Starts the process, beside a wedge of these parts.
    pub(crate) fn start(
        &self,
        wedge: &Parts<'_>,
        told: &wedge_abi::Setup,
    ) -> io::Result<Box<dyn Child>> {
        let start = [told.user_secret, told.blob_end, told.user_dispatch];
        self.page.set(field!(UserPage, start), start);
        let stack = [wedge.base.at(ALT_STACK as u64), SIGNAL_STACK_FLAGS, ALT_STACK_LEN as u64];
        self.journal.set(field!(Journal, signal_stack), stack);
        let parts = UserParts {
            base: wedge.base,
            ram: (wedge.objects.ram, wedge.ram_len),
            stubs: wedge.objects.stubs,
            sites: wedge.objects.sites,
            shared: self.shared(1)?,
        };
        starter::start_as(parts.told(), |image| parts.body(image))
    }
}

/// What the process consists of, but for the blob.
pub(crate) struct UserParts<'a> {
    base: Base,
    /// With its length in bytes.
    ram: (BorrowedFd<'a>, usize),
    stubs: BorrowedFd<'a>,
    sites: BorrowedFd<'a>,
    shared: UserDescriptors<'a>,
}

/// Tells the words of such a process from a wedge's.
const USER: u64 = u64::MAX;
/// How many descriptors it is given.
const DESCRIPTORS: usize = 6;

impl<'a> UserParts<'a> {
    fn told(&self) -> ([u64; 3], Vec<BorrowedFd<'a>>) {
        let Self { base, ram, stubs, sites, shared: UserDescriptors { page, journal, socket } } =
            *self;
        (
            [ram.1 as u64, USER, base.entry().into()],
            vec![ram.0, stubs, sites, page, journal, socket],
        )
    }

    /// What was told; `None` if it cannot be that.
    pub(crate) fn of(words: &[u64], descriptors: &'a [OwnedFd]) -> Option<Self> {
        let &[len, USER, entry] = words else { return None };
        let descriptors: &[OwnedFd; DESCRIPTORS] = descriptors.first_chunk()?;
        let [ram, stubs, sites, page, journal, socket] = descriptors.each_ref().map(AsFd::as_fd);
        let ram = (ram, usize::try_from(len).ok().filter(|len| *len <= wedge_abi::RAM_MAX)?);
        let base = Base::of_entry(u16::try_from(entry).ok()?);
        Some(Self { base, ram, stubs, sites, shared: UserDescriptors { page, journal, socket } })
    }

    /// The process, with the blob, whose other side it begins at.
    pub(crate) fn body(&self, image: BorrowedFd<'a>) -> Body<'a> {
        let UserDescriptors { page, journal, socket } = self.shared;
        let here = |usual| self.base.hva(usual);
        let parts = vec![
            part(here(BLOB), process::IMAGE.len(), Execute, Some(image)),
            part(SITES, SITES_LEN - AREA_LEN, Read, Some(self.sites)),
            part(here(STUBS), MAX_SITES * STUB_LEN, Execute, Some(self.stubs)),
            part(here(USER_PAGE), PAGE, Write, Some(page)),
            part(here(JOURNAL), PAGE, Read, Some(journal)),
            part(here(ALT_STACK), ALT_STACK_LEN, Write, None),
        ];
        let entry = here(BLOB) + USER_START;
        let supervision = Supervision::Target { socket, call: HAND_OVER as u32 };
        let (space, private) = body::limits(self.ram.1);
        Body { parts, entry, keeps: self.ram.0, supervision, space, private }
    }
}

/// A secret.
///
/// # Errors
/// The host has none.
pub(crate) fn secret() -> io::Result<u64> {
    let mut secret = [0; 8];
    let known = host::current().fill(&mut secret);
    known.then(|| u64::from_le_bytes(secret)).ok_or_else(|| io::ErrorKind::WouldBlock.into())
}
