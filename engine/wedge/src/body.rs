//! What a wedge consists of: pages of the window, each at its place.

use crate::{
    process::{IMAGE, PAGE},
    strict,
};
use frame::{
    ALT_STACK, ALT_STACK_LEN, BLOB, Base, CACHE, CACHE_LEN, COPIES, COPIES_LEN, FRAME, FRAME_LEN,
    GATE, JOURNAL, LOOKUPS, Lookups, MARKS, RAM, REGIONS, REGIONS_LEN, SHARED, SITES, SITES_LEN,
    STACK, STACK_LEN, STUBS, Shared, TABLES, TABLES_LEN, TURNS, Turns as TurnsPage, USER_PAGE,
};
use host::{
    Access::{self, Execute, Read, Write},
    Body, Hearing, Part,
};
use std::os::fd::BorrowedFd;

/// Descriptors of what a wedge consists of, but for the blob.
#[derive(Clone, Copy)]
pub(crate) struct Parts<'a> {
    pub(crate) base: Base,
    pub(crate) shared: BorrowedFd<'a>,
    pub(crate) frame: BorrowedFd<'a>,
    pub(crate) turns: BorrowedFd<'a>,
    pub(crate) tables: BorrowedFd<'a>,
    pub(crate) cache: BorrowedFd<'a>,
    pub(crate) regions: BorrowedFd<'a>,
    pub(crate) sites: BorrowedFd<'a>,
    pub(crate) lookups: BorrowedFd<'a>,
    pub(crate) marks: BorrowedFd<'a>,
    /// With its length in bytes.
    pub(crate) ram: (BorrowedFd<'a>, usize),
    pub(crate) walked: bool,
    /// If user code has a process of its own, what this one shares with it.
    pub(crate) user: Option<strict::Shared<'a>>,
}

/// Bytes a wedge may have of memory that it writes and shares with nobody: stacks, and pages of code while
/// they are changed.
const PRIVATE: u64 = 64 << 20;
/// Address space beyond RAM: the window, and memory without content. RAM may be mapped several times.
const SPACE: u64 = 32 << 30;

/// Address space of a wedge over so many bytes of RAM.
pub(crate) fn limits(ram: usize) -> (u64, u64) {
    (SPACE + 4 * ram as u64, PRIVATE)
}

/// A part that user code can reach where there are protection keys.
pub(crate) fn open<'a>(
    at: usize,
    len: usize,
    access: Access,
    content: Option<BorrowedFd<'a>>,
) -> Part<'a> {
    let len = len.next_multiple_of(PAGE);
    Part { at, len, access, content: content.map(|content| (content, 0)), keyed: 0 }
}

impl<'a> Parts<'a> {
    /// The process, with the blob.
    pub(crate) fn body(&self, image: BorrowedFd<'a>) -> Body<'a> {
        let here = |usual: usize| self.base.at(usual as u64) as usize;
        let mut parts = vec![
            open(here(BLOB), IMAGE.len(), Execute, Some(image)),
            open(here(GATE), PAGE, Write, None),
            open(SITES, SITES_LEN, Read, Some(self.sites)),
        ];
        parts.extend(self.closed().map(|part| Part { at: here(part.at), ..part }));
        if let Some(user) = self.user {
            parts.push(open(here(USER_PAGE), PAGE, Write, Some(user.page)));
            parts.push(open(here(JOURNAL), PAGE, Write, Some(user.journal)));
        }
        let hearing =
            self.user.map_or(Hearing::Host, |user| Hearing::Hears { socket: user.socket });
        let (space, private) = limits(self.ram.1);
        Body { parts, entry: here(BLOB), keeps: self.ram.0, hearing, space, private }
    }

    /// What is closed to user code where there are protection keys, at its usual place.
    fn closed(&self) -> impl Iterator<Item = Part<'a>> {
        let always = [
            open(SHARED, size_of::<Shared>(), Write, Some(self.shared)),
            open(STACK, STACK_LEN, Write, None),
            open(ALT_STACK, ALT_STACK_LEN, Write, None),
            open(TURNS, size_of::<TurnsPage>(), Write, Some(self.turns)),
            open(FRAME, FRAME_LEN, Write, Some(self.frame)),
            open(TABLES, TABLES_LEN, Read, Some(self.tables)),
            open(CACHE, CACHE_LEN, Execute, Some(self.cache)),
            open(REGIONS, REGIONS_LEN, Read, Some(self.regions)),
            open(COPIES, COPIES_LEN, Read, Some(self.lookups)),
        ];
        let walked = [
            open(LOOKUPS, size_of::<Lookups>(), Write, Some(self.lookups)),
            open(MARKS, self.ram.1 / PAGE, Read, Some(self.marks)),
            open(RAM, self.ram.1, Write, Some(self.ram.0)),
        ];
        let walked = walked.into_iter().filter(|_| self.walked);
        always.into_iter().chain(walked).map(|part| Part { keyed: keyed(&part), ..part })
    }
}

/// So much of a part is closed. The stubs, at the end of the cache, load with the keys closed where they go on.
fn keyed(part: &Part<'_>) -> usize {
    match part.at {
        _ if !crate::keys() => 0,
        CACHE => STUBS - CACHE,
        _ => part.len,
    }
}
