//! A process that starts others in this one's stead, so that this one can give up the right to start any.
//!
//! It is a copy of this process, made while that is small and has one thread. What it starts are children of *this* process
//! (CLONE_PARENT in clone(2)): they are waited for and end as if started here. What it does when asked is its [`Service`]'s, which has
//! to see to it that a caller who was taken over gains nothing. It ends when this process does, however that ends.

// UNSAFETY: makes processes; what they share with others is nothing but descriptors.
#![allow(unsafe_code)]

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd},
    ptr,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use crate::LinuxChild;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
    },
    process::setpgid,
};

/// The longest request or answer, in bytes: an answer or a request holds a few paths.
const MAX_MESSAGE: usize = 64 << 10;
/// The most descriptors with one: a process with guest code is told of 17.
const MAX_DESCRIPTORS: usize = 32;
/// Status of a child that could not become anything.
const FAILED: i32 = 127;

/// What a spawner does.
pub trait Service {
    /// The spawner has been made, and nobody has asked yet.
    fn begin(&mut self);

    /// Answers a request.
    fn answer(&mut self, request: &[u8]) -> Vec<u8>;

    /// Whether [`become_child`](Self::become_child) may be called with a request; if not, says why.
    ///
    /// # Errors
    /// It may not.
    fn check(&self, request: &[u8]) -> io::Result<()>;

    /// The new process: becomes what the request says, and returns only if it cannot.
    fn become_child(&self, request: &[u8], descriptors: Vec<OwnedFd>) -> io::Error;

    /// The process that asks has ended.
    fn finish(&mut self);
}

/// The spawner of this process.
pub struct Spawner {
    socket: OwnedFd,
    line: Mutex<Line>,
    /// Somebody's exchange is over.
    freed: Condvar,
}

/// Whether a thread is exchanging messages, and the number of the last request: an answer that came too late is not the next one's.
#[derive(Default)]
struct Line {
    busy: bool,
    last: u32,
}

/// The right to exchange messages, which one thread has at a time.
struct Exchange<'a> {
    spawner: &'a Spawner,
    number: u32,
}

impl Drop for Exchange<'_> {
    fn drop(&mut self) {
        self.spawner.line().busy = false;
        self.spawner.freed.notify_one();
    }
}

/// What kind of request it is.
const ASK: u8 = 0;
const START: u8 = 1;
/// How long a process may take to be started.
const PATIENCE: Duration = Duration::from_secs(60);

/// What is before a message.
#[derive(Clone, Copy)]
struct Head {
    kind: u8,
    number: u32,
}

/// A message without what is before it, and its descriptors.
type Received = (Vec<u8>, Vec<OwnedFd>);

impl Spawner {
    /// Starts it. There must be no other thread.
    ///
    /// # Errors
    /// The host gives no process.
    pub fn start(service: impl Service) -> io::Result<Self> {
        let (ours, theirs) = pair()?;
        // SAFETY: there is one thread, so the copy is as whole as this process.
        match unsafe { libc::fork() } {
            -1 => Err(io::Error::last_os_error()),
            0 => {
                drop(ours);
                serve(&theirs, service)
            }
            _ => Ok(Self { socket: ours, line: Mutex::default(), freed: Condvar::new() }),
        }
    }

    /// Asks, and waits for the answer as long as `patience`.
    ///
    /// # Errors
    /// The spawner is gone or stands still.
    pub fn ask(&self, request: &[u8], patience: Duration) -> io::Result<Vec<u8>> {
        Ok(self.exchange(ASK, request, &[], patience)?.0)
    }

    /// Has it start a process, which is given descriptors.
    ///
    /// # Errors
    /// The spawner is gone or refuses, or the host gives no process.
    pub fn spawn(&self, request: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<LinuxChild> {
        let (answer, mut received) = self.exchange(START, request, descriptors, PATIENCE)?;
        let number = answer.first_chunk().map_or(0, |number| i32::from_le_bytes(*number));
        match received.pop() {
            Some(pidfd) if number > 0 => Ok(LinuxChild { pid: number.cast_unsigned(), pidfd }),
            _ if number < 0 => Err(io::Error::from_raw_os_error(-number)),
            _ => Err(gone()),
        }
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no other thread exchanges messages, and not past the deadline: who has little time must not wait as long as
    /// another may.
    fn begin(&self, deadline: Instant) -> io::Result<Exchange<'_>> {
        let waited = self.freed.wait_timeout_while(self.line(), until(deadline), |line| line.busy);
        let (mut line, over) = waited.unwrap_or_else(PoisonError::into_inner);
        if over.timed_out() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        line.busy = true;
        line.last = line.last.wrapping_add(1);
        Ok(Exchange { spawner: self, number: line.last })
    }

    fn exchange(
        &self,
        kind: u8,
        request: &[u8],
        descriptors: &[BorrowedFd<'_>],
        patience: Duration,
    ) -> io::Result<Received> {
        let deadline = Instant::now() + patience;
        let exchange = self.begin(deadline)?;
        let (socket, head) = (self.socket.as_fd(), Head { kind, number: exchange.number });
        send(socket, head, request, descriptors)?;
        loop {
            wait(socket, until(deadline))?;
            match receive(socket)?.ok_or_else(gone)? {
                (answered, received) if answered.number == head.number => return Ok(received),
                _ => {}
            }
        }
    }
}

fn until(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

/// Waits until there is something to receive.
fn wait(socket: BorrowedFd<'_>, patience: Duration) -> io::Result<()> {
    let patience = Timespec::try_from(patience).map_err(io::Error::other)?;
    let mut polled = [PollFd::new(&socket, PollFlags::IN)];
    match rustix::io::retry_on_intr(|| poll(&mut polled, Some(&patience)))? {
        0 => Err(io::ErrorKind::TimedOut.into()),
        _ => Ok(()),
    }
}

fn gone() -> io::Error {
    io::Error::other("the process that starts others has ended")
}

fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC;
    Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

fn send(to: BorrowedFd<'_>, head: Head, body: &[u8], with: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !with.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(with)) {
        return Err(io::Error::other(format!("{} descriptors at once are too many", with.len())));
    }
    let number = head.number.to_le_bytes();
    let kind = [head.kind];
    let parts = [IoSlice::new(&kind), IoSlice::new(&number), IoSlice::new(body)];
    sendmsg(to, &parts, &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// A message; `None` if nobody is there any more.
fn receive(from: BorrowedFd<'_>) -> io::Result<Option<(Head, Received)>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut body = vec![0; MAX_MESSAGE];
    let into = &mut [IoSliceMut::new(&mut body)];
    let received =
        rustix::io::retry_on_intr(|| recvmsg(from, into, &mut ancillary, RecvFlags::CMSG_CLOEXEC))?;
    let mut descriptors = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    body.truncate(received.bytes);
    let Some((&[kind, a, b, c, d], rest)) = body.split_first_chunk() else { return Ok(None) };
    let number = u32::from_le_bytes([a, b, c, d]);
    Ok(Some((Head { kind, number }, (rest.to_vec(), descriptors))))
}

/// The spawner's life.
fn serve(socket: &OwnedFd, mut service: impl Service) -> ! {
    let _ = rustix::thread::set_name(c"spawner");
    // What is typed at a terminal, and what ends a group of processes, is for the one that asks.
    let _ = setpgid(None, None);
    let _ = leave_streams();
    service.begin();
    while let Ok(Some((head, (request, descriptors)))) = receive(socket.as_fd()) {
        let done = match head.kind {
            START => start(socket, head, &service, &request, descriptors),
            _ => send(socket.as_fd(), head, &service.answer(&request), &[]),
        };
        if done.is_err() {
            break;
        }
    }
    service.finish();
    // SAFETY: ends this process without what was to be done at the other's end.
    unsafe { libc::_exit(0) }
}

/// Lets go of standard input and output: who reads there waits for their end. Errors are still said.
fn leave_streams() -> io::Result<()> {
    let null = std::fs::File::options().read(true).write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    Ok(())
}

/// Starts a process, or says why not.
fn start(
    socket: &OwnedFd,
    head: Head,
    service: &impl Service,
    request: &[u8],
    descriptors: Vec<OwnedFd>,
) -> io::Result<()> {
    let child = service.check(request).and_then(|()| clone_for_parent());
    match child {
        Ok(None) => {
            let error = service.become_child(request, descriptors);
            eprintln!("ring3: a process cannot be started: {error}");
            // SAFETY: as in `serve`.
            unsafe { libc::_exit(FAILED) }
        }
        Ok(Some(LinuxChild { pid, pidfd })) => {
            send(socket.as_fd(), head, &pid.cast_signed().to_le_bytes(), &[pidfd.as_fd()])
        }
        Err(error) => {
            let number = -error.raw_os_error().unwrap_or(libc::EPERM);
            send(socket.as_fd(), head, &number.to_le_bytes(), &[])
        }
    }
}

/// A copy of this process whose parent is this one's; `None` in the copy.
fn clone_for_parent() -> io::Result<Option<LinuxChild>> {
    let mut pidfd: libc::c_int = -1;
    let flags = libc::CLONE_PARENT | libc::CLONE_PIDFD;
    let none = ptr::null_mut::<libc::c_void>();
    // SAFETY: there is one thread, and no memory is shared: as with fork(2). The host writes the descriptor's number.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags, none, &raw mut pidfd, none, none) };
    match pid {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(None),
        pid => {
            let pid = u32::try_from(pid).map_err(io::Error::other)?;
            // SAFETY: the host has just made it, for us.
            Ok(Some(LinuxChild { pid, pidfd: unsafe { OwnedFd::from_raw_fd(pidfd) } }))
        }
    }
}
