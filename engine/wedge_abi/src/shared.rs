//! The pages that the monitor shares with one wedge.

use crate::{
    Shares,
    areas::AREAS,
    command::{MAX_MADE, MAX_ORDERS, RawChange},
    sites::HEAT,
};

/// What the monitor and one wedge tell each other.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct Shared {
    /// What the wedge is. The monitor writes it before the wedge starts.
    pub setup: Setup,
    /// What the wedge says when it is ready.
    pub ready: Ready,
    /// What the monitor orders.
    pub orders: Orders,
    /// What the wedge has done by itself.
    pub made: Made,
    /// What is mapped, and may be.
    pub mapped: Mapped,
    /// Patched system calls.
    pub patched: Patched,
    /// The process of user code, where that has one of its own.
    pub user: UserProcess,
    /// What there is for 32-bit code.
    pub narrow: Narrow,
    /// See [`Shares`].
    pub shares: Shares,
}

/// What the wedge is.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Setup {
    /// The secret a host call from the wedge must carry.
    pub secret: u64,
    /// Not zero: user code runs in a process of its own, whose host calls carry this secret.
    pub user_secret: u64,
    /// The wedge's number.
    pub number: u64,
    /// One past the blob's last byte.
    pub blob_end: u64,
    /// The protection key of what user code must not touch, zero without keys.
    pub key: u64,
    /// Not zero: what user code executes are copies of pages, and no bytes of them open protection keys.
    pub searched: u64,
    /// Not zero: user code's system calls are to come by syscall user dispatch.
    pub user_dispatch: u64,
    /// Not zero: each system call of user code is to come by trap, however often it is made.
    pub unpatched: u64,
    /// Not zero: 32-bit user code is to run directly.
    pub narrow: u64,
    /// Not zero: what is mapped may be shown again, or with other rights, by changing its protection.
    pub keeps: u64,
    /// Bytes of guest RAM, and how many of them lie at GPA 0 and up; the rest begins at 4 GiB.
    pub ram_len: u64,
    /// See `ram_len`.
    pub ram_low: u64,
}

/// What the wedge says when it is ready, before guest code has run.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Ready {
    /// Not zero once it is.
    pub done: u64,
    /// The blob's entry for patched system calls: HVA.
    pub patched_entry: u64,
}

/// What the monitor orders.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Orders {
    /// Not zero: orders are to be carried out, and nothing else.
    pub only: u64,
    /// Negated error number of the first order that failed, zero if none.
    pub failed: i64,
    /// Orders given.
    pub count: u64,
    /// The orders: [`crate::MapCommand`]s.
    pub list: [RawChange; MAX_ORDERS],
}

/// What the wedge has done by itself: [`crate::MapReport`]s.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Made {
    /// How many entries of the list there are.
    pub count: u64,
    /// The reports.
    pub list: [RawChange; MAX_MADE],
}

/// Sets of large pages of the user's that a wedge has mapped, and places in each: 8 GiB side by side.
pub const LARGE_SETS: usize = 512;
/// See [`LARGE_SETS`].
pub const LARGE_WAYS: usize = 8;
/// Hints about what is mapped.
pub const HINTS: usize = 2048;

/// Values of [`Mapped::forks`].
#[allow(missing_docs)]
pub mod forks {
    /// Nobody wants to know.
    pub const UNSEEN: u64 = 0;
    /// It has not since the monitor looked.
    pub const NONE: u64 = 1;
    /// It has, and is run with look-ups.
    pub const SOME: u64 = 2;
}

/// What is mapped, and may be.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Mapped {
    /// Mappings the wedge may still make by itself.
    pub budget: u64,
    /// Not zero: the monitor has mapped something among the user's that is part of a large page which the wedge cannot take away.
    pub large: u64,
    /// Not zero: user code is run translated, with look-ups.
    pub lookups: u64,
    /// Whether the process forks, see [`forks`].
    pub forks: u64,
    /// Not zero: there are, or were, changed copies of pages of code.
    pub copied: u64,
    /// Not zero: the table of patched system calls is closed to user code.
    pub sites_closed: u64,
    /// Offset in RAM of the last page of the user's that was mapped for reading only.
    pub shared_page: u64,
    /// See [`Larges`].
    pub larges: Larges,
    /// Pages that the wedge has mapped or dropped, and nobody has changed since.
    pub hints: [Hint; HINTS],
}

/// The 2 MiB pages of the user's of which something is mapped that the wedge knows of: HVAs, zero for none.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Larges {
    /// The page's number modulo the number of sets tells which set it is in.
    pub sets: [[u64; LARGE_WAYS]; LARGE_SETS],
    /// How many there are. While there are none nobody looks at the sets, which take memory once they are looked at.
    pub noted: u64,
    /// How often one has made room for another.
    pub evicted: u64,
}

impl Larges {
    /// None is mapped.
    pub const NONE: Self = Self { sets: [[0; LARGE_WAYS]; LARGE_SETS], noted: 0, evicted: 0 };
}

/// A page of the guest's and how it is mapped. Without protection it is closed: the mapping is there, and
/// shows nothing.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hint {
    /// HVA, and in its lowest bits the protection; zero for none.
    pub page: u64,
    /// Offset in guest RAM.
    pub offset: u64,
}

/// Patched system calls.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Patched {
    /// System calls by trap, by a hash of their sites.
    pub heat: [u8; HEAT],
    /// By the low twelve bits of the address behind them: there may be system calls whose following
    /// instruction has been displaced.
    pub displaced: [u64; 64],
}

/// What a wedge has for 32-bit user code.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Narrow {
    /// The thread-local segments that the host has for this process, as descriptors.
    pub areas: [u64; AREAS],
    /// Where SYSENTER leads in this process; zero before the first.
    pub entered: u64,
}

/// What a wedge knows of the process of its user code.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct UserProcess {
    /// What the host calls the hand-over of that process that is to be answered; zero before the first.
    pub handed: u64,
    /// Orders in its journal.
    pub journal_count: u64,
    /// It could not do what it was to do.
    pub failed: u64,
}

/// Assembly finds the secret there.
const _: () = assert!(core::mem::offset_of!(Shared, setup.secret) == 0);
