//! Tells somebody in the guest of what the host has changed, so that the guest asks for it anew.
//!
//! The listener says that it listens by one byte. We then say paths in the folder, each with a NUL behind it, and an empty one when there are no
//! more for now; the listener answers by a byte once it has seen to all of them. `.` is the folder itself. `/` with a number is a file by its
//! node: the guest has it open, and perhaps no path leads there.

use std::{
    io::{self, Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, eventfd, poll},
    io::{Errno, read},
};

use crate::{
    tree::{Tree, lock},
    watches::Watches,
};

/// How long changes are gathered before the listener is told. They often come together and concern the same files.
const TOGETHER: Duration = Duration::from_millis(20);
/// How many changes are looked at before the server answers requests again.
const AT_ONCE: usize = 64;

/// What tells a listener in the guest of the host's changes to a server's tree.
pub struct Withdrawals(Arc<Mutex<Tree>>);

impl Withdrawals {
    pub(crate) fn of(tree: Arc<Mutex<Tree>>) -> Self {
        Self(tree)
    }

    /// Starts a thread that tells `listener` what the host changes, by so many watches of the host's at the most.
    /// It ends when the listener hangs up.
    ///
    /// # Errors
    /// The host gives no thread, or no more instances of inotify to this user.
    pub fn start(self, listener: UnixStream, watches: usize) -> io::Result<()> {
        let watches = Watches::new(watches)?;
        let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let tell = move || {
            // Whoever hangs up is told nothing more, and relies on nothing for long.
            let _ = tell(&self.0, listener, watches, bell);
            lock(&self.0).leases.stop();
        };
        thread::Builder::new().name("changes".into()).spawn(tell).map(drop)
    }
}

fn tell(
    tree: &Mutex<Tree>,
    mut listener: UnixStream,
    watches: Watches,
    bell: Arc<OwnedFd>,
) -> io::Result<()> {
    let mut heard = [0];
    listener.read_exact(&mut heard)?;
    let changes = watches.descriptor();
    lock(tree).leases.start(watches, Arc::clone(&bell));
    loop {
        wait(&[&changes, &bell], &listener)?;
        // How often it was rung does not matter.
        let _ = read(&bell, &mut [0; 8]);
        thread::sleep(TOGETHER);
        loop {
            let (paths, has_more) = lock(tree).take_changes(AT_ONCE);
            if !paths.is_empty() {
                listener.write_all(&message(&paths))?;
                listener.read_exact(&mut heard)?;
            }
            if !has_more {
                break;
            }
        }
    }
}

/// Waits for changes; an error if the listener has hung up, or says something unasked.
fn wait([watches, bell]: &[&OwnedFd; 2], listener: &UnixStream) -> io::Result<()> {
    let readable = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
    loop {
        let fds = [watches.as_fd(), bell.as_fd(), listener.as_fd()];
        let mut polled = fds.map(readable);
        match poll(&mut polled, None) {
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
            Ok(_) if !polled[2].revents().is_empty() => {
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            Ok(_) => return Ok(()),
        }
    }
}

fn message(paths: &[Vec<u8>]) -> Vec<u8> {
    let ended = paths.iter().flat_map(|path| [&path[..], b"\0"]);
    ended.chain([&b"\0"[..]]).collect::<Vec<_>>().concat()
}
