//! Processes that are nothing but a few mappings, and waiting for one another.

use std::{fmt, io, os::fd::BorrowedFd, sync::atomic::AtomicU32, time::Duration};

use crate::Access;

/// Makes processes, and has threads wait.
pub trait Processes: Sync {
    /// Starts a child of this process that is nothing but this body.
    ///
    /// # Errors
    /// The host gives no process.
    fn start(&self, body: &Body<'_>) -> io::Result<Box<dyn Child>>;

    /// Turns this process into a body. The process must have one thread. Returns only if the body asks for
    /// notifications and the host has none; the process can still say so then.
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
    /// Where it begins: HVA. The registers have anything.
    pub entry: usize,
    /// The descriptor that it has as number 0.
    pub keeps: BorrowedFd<'a>,
    /// Who answers its host calls.
    pub supervision: Supervision<'a>,
    /// Address space it may have, in bytes.
    pub space: u64,
    /// Memory it may have that it shares with nobody, in bytes.
    pub private: u64,
}

/// A mapping of a body.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    /// Where it begins: HVA of a page.
    pub at: usize,
    /// Bytes, whole pages.
    pub len: usize,
    /// What it may be used for.
    pub access: Access,
    /// The memory object and the offset in it, in bytes; private zeros if `None`.
    pub content: Option<(BorrowedFd<'a>, u64)>,
    /// A protection key, the same for all that have one, closes it.
    pub keyed: bool,
}

/// Who answers a process's host calls.
#[derive(Clone, Copy, Debug)]
pub enum Supervision<'a> {
    /// The host.
    None,
    /// The host, but for one call, for which the process waits until its supervisor has answered. The process begins
    /// with all signals blocked: what is sent waits until the process has handlers.
    Target {
        /// A stream socket, at whose other end the supervisor is: the means to answer go through it.
        socket: BorrowedFd<'a>,
        /// The number of the call.
        call: u32,
    },
    /// The host; the process itself supervises another one, by descriptor 1, which comes through the socket.
    Supervisor {
        /// A stream socket, at whose other end the target is.
        socket: BorrowedFd<'a>,
    },
}

/// A child of this process. It stands for that process and no other, whatever has its number later.
pub trait Child: fmt::Debug + Send + Sync {
    /// Its number, for [`Processors`](crate::Processors).
    fn number(&self) -> i32;
    /// Sends it a signal with a number; nothing happens if it has ended.
    fn signal(&self, number: i32);
    /// From now on it stands still at each signal until a thread of this process, made for it, has let it go on with that.
    ///
    /// # Errors
    /// The host lets this process trace nobody.
    fn trace(&self) -> io::Result<()>;
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
