//! Whose turn it is, seen from the monitor; and kicks, which go to whoever has it.
// UNSAFETY: futexes and signals, which touch no memory but the words waited for.
#![allow(unsafe_code)]

use crate::memory::MemoryObject;
use frame::{KICK, MAX_WEDGES, MONITOR};
use std::{
    io,
    os::fd::{AsRawFd, OwnedFd},
    ptr,
    sync::{
        Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
        atomic::{AtomicU32, Ordering},
    },
};

/// Times a kick follows the turn from wedge to wedge: more often than a guest can have it passed on.
const FOLLOW: usize = 16;

/// The turns of a vCPU's monitor and wedges.
#[derive(Clone, Debug)]
pub struct Turns(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    page: MemoryObject<frame::Turns>,
    /// Processes by number, until they are reaped.
    children: Children,
    /// Those of their user code, where that has one of its own.
    users: Children,
}

/// A process of ours. A descriptor stands for it, which means no other, unlike a number that is given again
/// once it is reaped.
#[derive(Debug)]
struct Child(OwnedFd);

impl Turns {
    pub(crate) fn new() -> io::Result<Self> {
        let page = MemoryObject::new("ring3-turns", size_of::<frame::Turns>())?;
        let [children, users] = [(); 2].map(|()| std::array::from_fn(|_| RwLock::new(None)));
        Ok(Self(Arc::new(Inner { page, children, users })))
    }

    pub(crate) fn fd(&self) -> i32 {
        self.0.page.fd()
    }

    /// The wedge with a number is this child of ours, which has not been reaped.
    pub(crate) fn adopt(&self, number: usize, pidfd: OwnedFd) {
        if let Some(mut known) = self.child_mut(number) {
            *known = Some(Child(pidfd));
        }
    }

    /// So for the process of its user code.
    pub(crate) fn adopt_user(&self, number: usize, pidfd: OwnedFd) {
        if let Some(mut known) = write(&self.0.users, number) {
            *known = Some(Child(pidfd));
        }
    }

    /// Ends the wedge with a number.
    pub(crate) fn end(&self, number: usize) {
        self.publish(number, None); // another may come with this number
        for known in [&self.0.children, &self.0.users] {
            let child = write(known, number).and_then(|mut known| known.take());
            if let Some(child) = child {
                child.signal(libc::SIGKILL);
                child.reap(0);
            }
        }
    }

    fn child_mut(&self, number: usize) -> Option<RwLockWriteGuard<'_, Option<Child>>> {
        write(&self.0.children, number)
    }

    /// Kicks reach the wedge with this number from now on, and those that it passes its turn on to.
    pub(crate) fn aim(&self, number: usize) {
        self.page().current.store(number as u32, Ordering::SeqCst);
    }

    /// The wedge with a number can go on in the space of a PCID by itself, or cannot.
    pub(crate) fn publish(&self, number: usize, pcid: Option<u64>) {
        if let Some(space) = self.page().spaces.get(number) {
            space.store(pcid.map_or(0, |pcid| pcid as u32 + 1), Ordering::Relaxed);
        }
    }

    /// Makes the wedge that has the turn come back, from any thread.
    pub fn kick(&self) {
        for _ in 0..FOLLOW {
            let current = self.page().current.load(Ordering::SeqCst);
            // The wedge first: it then knows of the kick when its user code comes back with one.
            for known in [&self.0.children, &self.0.users] {
                if let Some(child) =
                    read(known, current as usize).as_deref().and_then(Option::as_ref)
                {
                    child.signal(KICK);
                }
            }
            if self.page().current.load(Ordering::SeqCst) == current {
                return;
            }
        }
    }

    /// Gives the wedge with a number its turn.
    pub(crate) fn give(&self, number: usize) {
        if let Some(word) = self.page().words.get(number) {
            word.store(1, Ordering::SeqCst);
            futex(word, libc::FUTEX_WAKE, 1, false);
        }
    }

    /// Waits for the monitor's turn, a second at the most; false if it has not come.
    pub(crate) fn wait(&self) -> bool {
        let own = &self.page().words[MONITOR];
        if own.load(Ordering::SeqCst) == 0 {
            futex(own, libc::FUTEX_WAIT, 0, true);
        }
        own.swap(0, Ordering::SeqCst) != 0
    }

    /// One of the wedges has ended, with this status.
    pub(crate) fn lost_one(&self) -> Option<i32> {
        let all = [&self.0.children, &self.0.users];
        let numbers = (0..=MAX_WEDGES).flat_map(|number| all.map(|known| (known, number)));
        numbers.into_iter().find_map(|(known, number)| {
            let mut known = write(known, number)?;
            let status = known.as_ref().and_then(|child| child.reap(libc::WNOHANG))?;
            *known = None;
            Some(status)
        })
    }

    fn page(&self) -> &frame::Turns {
        self.0.page.all()
    }
}

type Children = [RwLock<Option<Child>>; MAX_WEDGES + 1];

fn read(known: &Children, number: usize) -> Option<RwLockReadGuard<'_, Option<Child>>> {
    Some(known.get(number)?.read().unwrap_or_else(PoisonError::into_inner))
}

fn write(known: &Children, number: usize) -> Option<RwLockWriteGuard<'_, Option<Child>>> {
    Some(known.get(number)?.write().unwrap_or_else(PoisonError::into_inner))
}

impl Child {
    /// Sends a signal; one that has ended needs none.
    fn signal(&self, number: i32) {
        let none = ptr::null::<libc::siginfo_t>();
        // SAFETY: touches no memory.
        unsafe { libc::syscall(libc::SYS_pidfd_send_signal, self.0.as_raw_fd(), number, none, 0) };
    }

    /// Reaps it once it has ended, waiting for that unless the options say otherwise; returns how it ended,
    /// as waitpid(2) says it.
    fn reap(&self, options: i32) -> Option<i32> {
        // SAFETY: the structure is plain data, for which zero is a value.
        let mut status: libc::siginfo_t = unsafe { std::mem::zeroed() };
        let (fd, options) = (self.0.as_raw_fd() as libc::id_t, libc::WEXITED | options);
        // SAFETY: our own child; writes the structure.
        let done = unsafe { libc::waitid(libc::P_PIDFD, fd, &raw mut status, options) };
        if done != 0 || status.si_signo == 0 {
            return None;
        }
        // SAFETY: a child's end has a status.
        let number = unsafe { status.si_status() };
        Some(if status.si_code == libc::CLD_EXITED { number << 8 } else { number })
    }
}

fn futex(word: &AtomicU32, operation: i32, value: u32, timed: bool) {
    let second = libc::timespec { tv_sec: 1, tv_nsec: 0 };
    let timeout = if timed { &raw const second } else { ptr::null() };
    // SAFETY: the word stays mapped; waking and waiting touch nothing else.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, value, timeout) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::starter::pidfd;

    /// A child that has ended by itself is reaped once; who ends it then ends nobody else, whatever has its
    /// number.
    #[test]
    fn what_has_been_reaped_is_not_signalled() {
        let turns = Turns::new().expect("memory");
        // SAFETY: the child makes one system call.
        let pid = unsafe {
            match libc::fork() {
                0 => libc::_exit(7),
                pid => pid,
            }
        };
        turns.adopt(1, pidfd(pid).expect("a descriptor"));
        while turns.lost_one().is_none() {
            std::thread::yield_now();
        }
        assert_eq!(turns.lost_one(), None, "it is lost once");
        assert!(read(&turns.0.children, 1).is_some_and(|known| known.is_none()));
        turns.aim(1);
        turns.kick();
        turns.end(1);
        assert!(pidfd(pid).is_err(), "there is no such process any more");
    }
}
