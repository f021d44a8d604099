//! Processes that are nothing but a few mappings, and waiting for one another.

use std::{fmt, io, os::fd::BorrowedFd, sync::atomic::AtomicU32, time::Duration};

use crate::Access;

/// Makes processes, and has them wait.
pub trait Processes: Sync {
    /// Starts a child of this process that is nothing but this.
    ///
    /// # Errors
    /// The host gives no process.
    fn start(&self, body: &Body<'_>) -> io::Result<Box<dyn Child>>;

    /// Becomes that. This process must have one thread. Returns only if the host lacks something that the body
    /// asks for, with nothing of this process lost.
    fn become_body(&self, body: &Body<'_>) -> io::Error;

    /// Wakes a thread, of any process, that waits for this word.
    fn wake(&self, word: &AtomicU32);

    /// Waits until somebody wakes whoever waits for this word, if it has this value, but no longer than
    /// `patience`. May return early.
    fn wait(&self, word: &AtomicU32, value: u32, patience: Duration);
}

/// A process as nothing but mappings, with next to no rights: it keeps the descriptors named here and no others,
/// ends with its parent, ignores signals, and is the first to go where the host runs out of memory.
#[derive(Debug)]
pub struct Body<'a> {
    /// What is mapped, in this order.
    pub parts: Vec<Part<'a>>,
    /// Where it begins. The registers have anything.
    pub entry: usize,
    /// The descriptor that it has as number 0.
    pub keeps: BorrowedFd<'a>,
    /// Its dealings with a process whose calls of the host it answers, or which answers its.
    pub hearing: Hearing<'a>,
    /// Address space it may have, in bytes.
    pub space: u64,
    /// Memory it may have that nobody else has, in bytes.
    pub private: u64,
}

/// A part of a body.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    /// Where: a page's start.
    pub at: usize,
    /// Bytes, whole pages.
    pub len: usize,
    /// What for.
    pub access: Access,
    /// What, from an offset on; nothing but zeros that nobody else sees if `None`.
    pub content: Option<(BorrowedFd<'a>, u64)>,
    /// So many bytes from its start on are closed by a protection key.
    pub keyed: usize,
}

/// Who answers a process's calls of the host.
#[derive(Clone, Copy, Debug)]
pub enum Hearing<'a> {
    /// Whoever does everybody's.
    Host,
    /// A call with this number waits for an answer by whoever is sent the means to, by this socket.
    IsHeard {
        /// A stream socket, whose other end has the other process.
        socket: BorrowedFd<'a>,
        /// All other calls are the host's.
        call: u32,
    },
    /// It answers for another, and has the means to, which come by this socket, as descriptor 1.
    Hears {
        /// As above.
        socket: BorrowedFd<'a>,
    },
}

/// A child of this process. It stands for that process and no other, whatever has its number later.
pub trait Child: fmt::Debug + Send + Sync {
    /// Its number, for [`Processors`](crate::Processors).
    fn number(&self) -> i32;
    /// Interrupts it, as the number says; nothing happens if it has ended.
    fn kick(&self, number: i32);
    /// Ends it and waits until it has ended.
    fn end(&self);
    /// How it has ended, if it has. Told once.
    fn ended(&self) -> Option<End>;
}

/// How a process has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// By itself, with this status.
    Exited(i32),
    /// By a signal with this number.
    Killed(i32),
}
