//! What a wedge consists of: pages of the window, each at its place.

use crate::{
    process::{IMAGE, PAGE},
    strict,
};
use host::{
    Access::{self, Execute, Read, Write},
    Body, Part, Supervision,
};
use std::os::fd::BorrowedFd;
use wedge_abi::{
    ALT_STACK, ALT_STACK_LEN, AREA, AREA_ALIAS, AREA_LEN, BLOB, Base, CACHE, COPIES, COPIES_LEN,
    GATE, JOURNAL, LANDINGS, LANDINGS_LEN, LISTENER_FD, LOOKUPS, Lookups, MARKS, MAX_SITES, RAM,
    RAM_FD, REGIONS, REGIONS_LEN, SHARED, SITES, SITES_LEN, STACK, STACK_LEN, STUB_LEN, STUBS,
    Shared, TABLES, TABLES_LEN, TAPS, TURNS, Taps, TurnsPage, USER_CACHE, USER_CACHE_LEN,
    USER_PAGE, USER_TABLES, VCPU_PAGE, VCPU_PAGE_LEN, WORDS, words,
};

/// Descriptors of memory objects, in the order in which another process is given them.
macro_rules! objects {
    ($($name:ident),*) => {
        /// How many there are.
        pub(crate) const OBJECTS: usize = [$(stringify!($name)),*].len();

        /// Descriptors of the memory objects that a wedge consists of, but for the blob.
        #[derive(Clone, Copy)]
        pub(crate) struct Objects<'a> {
            $(pub(crate) $name: BorrowedFd<'a>,)*
        }

        impl<'a> Objects<'a> {
            /// All of them.
            pub(crate) fn given(&self) -> [BorrowedFd<'a>; OBJECTS] {
                [$(self.$name),*]
            }

            /// Those that were given.
            pub(crate) fn of([$($name),*]: [BorrowedFd<'a>; OBJECTS]) -> Self {
                Self { $($name),* }
            }
        }
    };
}

objects!(
    shared,
    vcpu_page,
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
    ram
);

/// What a wedge consists of, but for the blob.
#[derive(Clone, Copy)]
pub(crate) struct Parts<'a> {
    pub(crate) base: Base,
    pub(crate) objects: Objects<'a>,
    /// Bytes of RAM.
    pub(crate) ram_len: usize,
    /// Where its memory object has the pages of words.
    pub(crate) words: u64,
    pub(crate) walked: bool,
    /// What user code must not reach has a protection key.
    pub(crate) keyed: bool,
    /// If user code has a process of its own, what this one shares with it.
    pub(crate) user: Option<strict::UserDescriptors<'a>>,
}

/// Descriptors of a [`Body`].
const _: () = assert!(RAM_FD == 0 && LISTENER_FD == 1);

/// Bytes a wedge may have of memory that it writes and shares with nobody: stacks, and pages of code while
/// they are changed.
const PRIVATE: u64 = 64 << 20;
/// Address space beyond RAM: the window, and memory without content. RAM may be mapped several times.
const SPACE: u64 = 32 << 30;

/// Address space, and private memory, of a process over so many bytes of RAM.
pub(crate) fn limits(ram: usize) -> (u64, u64) {
    (SPACE + 4 * ram as u64, PRIVATE)
}

/// Pages that have an object's contents from its start on, or zeros. User code can reach them.
pub(crate) fn part<'a>(
    at: usize,
    len: usize,
    access: Access,
    content: Option<BorrowedFd<'a>>,
) -> Part<'a> {
    let len = len.next_multiple_of(PAGE);
    Part { at, len, access, content: content.map(|content| (content, 0)), keyed: false }
}

impl<'a> Parts<'a> {
    /// The process, with the blob.
    pub(crate) fn body(&self, image: BorrowedFd<'a>) -> Body<'a> {
        let parts = self.open(image).chain(self.closed()).chain(self.of_user()).collect();
        let user = self.user.map(|user| Supervision::Supervisor { socket: user.socket });
        let supervision = user.unwrap_or(Supervision::None);
        let (space, private) = limits(self.ram_len);
        Body {
            parts,
            entry: self.base.hva(BLOB),
            keeps: self.objects.ram,
            supervision,
            space,
            private,
        }
    }

    /// What user code can reach.
    fn open(&self, image: BorrowedFd<'a>) -> impl Iterator<Item = Part<'a>> {
        let here = |usual| self.base.hva(usual);
        let areas = (self.objects.vcpu_page, (AREA_ALIAS - VCPU_PAGE) as u64);
        [
            part(here(BLOB), IMAGE.len(), Execute, Some(image)),
            part(here(GATE), PAGE, Write, None),
            part(SITES, SITES_LEN - AREA_LEN, Read, Some(self.objects.sites)),
            Part { content: Some(areas), ..part(AREA, AREA_LEN, Read, None) },
            // The stubs load with the keys closed where they go on.
            part(here(STUBS), MAX_SITES * STUB_LEN, Execute, Some(self.objects.stubs)),
        ]
        .into_iter()
    }

    /// What is closed to user code where there are protection keys.
    fn closed(&self) -> impl Iterator<Item = Part<'a>> {
        let user_tables = TABLES_LEN - USER_TABLES;
        let always = [
            part(SHARED, size_of::<Shared>(), Write, Some(self.objects.shared)),
            part(STACK, STACK_LEN, Write, None),
            part(ALT_STACK, ALT_STACK_LEN, Write, None),
            part(TURNS, size_of::<TurnsPage>(), Write, Some(self.objects.turns)),
            part(VCPU_PAGE, VCPU_PAGE_LEN, Write, Some(self.objects.vcpu_page)),
            part(TAPS, size_of::<Taps>(), Write, Some(self.objects.taps)),
            part(TABLES, USER_TABLES, Read, Some(self.objects.tables)),
            part(TABLES + USER_TABLES, user_tables, Write, Some(self.objects.user_tables)),
            part(CACHE, USER_CACHE - CACHE, Execute, Some(self.objects.cache)),
            part(USER_CACHE, USER_CACHE_LEN, Execute, Some(self.objects.user_cache)),
            part(REGIONS, REGIONS_LEN, Read, Some(self.objects.regions)),
            part(COPIES, COPIES_LEN, Read, Some(self.objects.lookups)),
            part(LANDINGS, LANDINGS_LEN, Read, Some(self.objects.tables)),
        ];
        let walked = [
            part(LOOKUPS, size_of::<Lookups>(), Write, Some(self.objects.lookups)),
            part(MARKS, self.ram_len / PAGE, Read, Some(self.objects.marks)),
            part(RAM, self.ram_len, Write, Some(self.objects.ram)),
            Part {
                content: Some((self.objects.ram, self.words)),
                ..part(WORDS, words::LEN, Write, None)
            },
        ];
        let walked = walked.into_iter().filter(|_| self.walked);
        let (base, keyed) = (self.base, self.keyed);
        always.into_iter().chain(walked).map(move |part| Part {
            at: base.hva(part.at),
            keyed,
            ..part
        })
    }

    /// What it shares with the process of its user code.
    fn of_user(&self) -> impl Iterator<Item = Part<'a>> {
        let here = |usual| self.base.hva(usual);
        let pages = |user: strict::UserDescriptors<'a>| {
            let page = part(here(USER_PAGE), PAGE, Write, Some(user.page));
            [page, part(here(JOURNAL), PAGE, Write, Some(user.journal))]
        };
        self.user.map(pages).into_iter().flatten()
    }
}
