//! Whose turn it is, seen from the monitor; and kicks, which go to whoever has it.
// UNSAFETY: futexes and signals, which touch no memory but the words waited for.
#![allow(unsafe_code)]

use crate::memory::MemoryObject;
use frame::{KICK, MAX_WEDGES, MONITOR};
use std::{
    io, ptr,
    sync::{
        Arc,
        atomic::{AtomicI32, AtomicU32, Ordering},
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
    /// Processes by number, zero for none.
    pids: [AtomicI32; MAX_WEDGES + 1],
}

impl Turns {
    pub(crate) fn new() -> io::Result<Self> {
        let page = MemoryObject::new("ring3-turns", size_of::<frame::Turns>())?;
        Ok(Self(Arc::new(Inner { page, pids: Default::default() })))
    }

    pub(crate) fn fd(&self) -> i32 {
        self.0.page.fd()
    }

    /// The process of the wedge with a number.
    pub(crate) fn set_pid(&self, number: usize, pid: i32) {
        if let Some(known) = self.0.pids.get(number) {
            known.store(pid, Ordering::SeqCst);
        }
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
            let pid = self.0.pids.get(current as usize).map_or(0, |pid| pid.load(Ordering::SeqCst));
            if pid > 0 {
                signal(pid);
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
        self.0.pids.iter().find_map(|known| {
            let pid = known.load(Ordering::SeqCst);
            let status = (pid > 0).then(|| ended(pid)).flatten()?;
            known.store(0, Ordering::SeqCst);
            Some(status)
        })
    }

    fn page(&self) -> &frame::Turns {
        self.0.page.get()
    }
}

fn signal(pid: i32) {
    // SAFETY: a child of ours that is not reaped while its number is known.
    unsafe { libc::kill(pid, KICK) };
}

/// Reaps a child that has ended; returns its status.
fn ended(pid: i32) -> Option<i32> {
    let mut status = 0;
    // SAFETY: our own child.
    let ended = unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) } == pid;
    ended.then_some(status)
}

fn futex(word: &AtomicU32, operation: i32, value: u32, timed: bool) {
    let second = libc::timespec { tv_sec: 1, tv_nsec: 0 };
    let timeout = if timed { &raw const second } else { ptr::null() };
    // SAFETY: the word stays mapped; waking and waiting touch nothing else.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, value, timeout) };
}
