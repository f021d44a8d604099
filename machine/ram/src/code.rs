//! Which pages hold code someone translated, and which of those have been written since.
//!
//! One byte a page. A reader of code marks the page *first* and reads the bytes *after*; a writer
//! stores first and looks at the mark after. For neither to miss the other, each needs its store
//! seen before its load, but stores are the hottest path of the machine and must not pay for a
//! fence. So the rare side pays for both: the first mark of a page runs a `membarrier`, which
//! puts a full fence into every running thread of the process. A store before it is seen by the
//! reader; a store after it sees the mark.
//!
//! Devices write much at a time and may be in other processes, which that `membarrier` does not reach: they pay for a
//! fence of their own ([`PageMap::note_dma`]). A process that serves a device ([`PageMap::of_another`]) may look at the marks
//! and not change them; what it writes to goes into [`Notes`], where the worst it can do is to have code translated anew.
//!
//! The list of stale pages is behind a mutex, touched once for each page that goes stale. A page
//! marked again while stale stays stale: whatever was made from it is dropped once more than
//! strictly needed, never once less.

use std::sync::atomic::{AtomicU8, Ordering, fence};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::thread::{MembarrierCommand, membarrier};

use crate::{
    PAGE, RamError,
    mapping::{Marks, Notes},
};

/// Something was made from the page's bytes.
const CODE: u8 = 1 << 0;
/// ... and they may have changed since.
const STALE: u8 = 1 << 1;
/// The guest cannot write the page.
const ROM: u8 = 1 << 2;
/// The page is empty, and something was made from that.
const EMPTY: u8 = 1 << 3;
/// The mark of a page that is empty ([`crate::Ram::mark_empty`]) and not stale.
pub const EMPTY_PAGE: u8 = CODE | EMPTY;

/// Pages are in the list of stale ones.
const LISTED: u8 = 1 << 0;
/// Other processes have noted pages.
const NOTED: u8 = 1 << 1;

/// Whose the marks are.
enum Role {
    /// Ours.
    Owner {
        /// The process may use expedited membarriers.
        barriers: bool,
    },
    /// Another process's.
    Reporter,
}

pub(crate) struct PageMap {
    pub(crate) marks: Marks,
    pub(crate) notes: Notes,
    stale: Mutex<Vec<u64>>,
    role: Role,
}

impl PageMap {
    pub(crate) fn new(pages: u64) -> Result<Self, RamError> {
        let (marks, notes) = (Marks::new(pages)?, Notes::new(pages)?);
        let barriers = membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok();
        Ok(Self { marks, notes, stale: Mutex::default(), role: Role::Owner { barriers } })
    }

    /// Another process's marks, and where to report to it.
    pub(crate) fn of_another(marks: Marks, notes: Notes) -> Self {
        Self { marks, notes, stale: Mutex::default(), role: Role::Reporter }
    }

    #[inline]
    fn mark(&self, offset: u64) -> &AtomicU8 {
        self.marks.get(offset / PAGE)
    }

    fn list(&self) -> MutexGuard<'_, Vec<u64>> {
        self.stale.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn mark_code(&self, offset: u64) {
        let Role::Owner { barriers } = self.role else { return };
        let before = self.mark(offset).fetch_or(CODE, Ordering::SeqCst);
        if before & CODE == 0 && barriers {
            // Cannot fail once registered; if it could, the fence below is what is left.
            let _ = membarrier(MembarrierCommand::PrivateExpedited);
        }
        fence(Ordering::SeqCst);
    }

    /// Marks a page as empty that `is_empty`, which is asked again once a write would come to light.
    pub(crate) fn mark_empty(&self, offset: u64, is_empty: impl Fn() -> bool) -> bool {
        let empty = is_empty() && {
            self.mark_code(offset);
            is_empty()
        };
        if empty {
            self.mark(offset).fetch_or(EMPTY, Ordering::SeqCst);
        }
        empty
    }

    #[inline]
    pub(crate) fn is_code(&self, offset: u64) -> bool {
        self.mark(offset).load(Ordering::Relaxed) & CODE != 0
    }

    #[inline]
    pub(crate) fn note_write(&self, offset: u64, len: u64) {
        if len == 0 {
            return;
        }
        for page in offset / PAGE..=(offset + (len - 1)) / PAGE {
            if self.mark(page * PAGE).load(Ordering::Relaxed) & CODE != 0 {
                self.go_stale(page * PAGE);
            }
        }
    }

    /// As [`PageMap::note_write`], for writers that no `membarrier` of the marks' owner reaches.
    pub(crate) fn note_dma(&self, offset: u64, len: u64) {
        fence(Ordering::SeqCst);
        self.note_write(offset, len);
    }

    #[cold]
    fn go_stale(&self, offset: u64) {
        if matches!(self.role, Role::Reporter) {
            self.notes.page(offset / PAGE).store(1, Ordering::Release);
            self.notes.state().fetch_or(NOTED, Ordering::Release);
            return;
        }
        self.add_stale(&mut self.list(), offset);
    }

    fn add_stale(&self, list: &mut Vec<u64>, offset: u64) {
        if self.mark(offset).fetch_or(STALE, Ordering::AcqRel) & STALE == 0 {
            list.push(offset);
            self.notes.state().fetch_or(LISTED, Ordering::Release);
        }
    }

    #[inline]
    pub(crate) fn has_stale(&self) -> bool {
        self.notes.state().load(Ordering::Relaxed) != 0
    }

    /// Takes what other processes noted. A note that comes while we look leaves the state set for the next time.
    fn take_notes(&self, list: &mut Vec<u64>) {
        for page in 0..self.notes.pages() {
            let noted = self.notes.page(page);
            if noted.load(Ordering::Relaxed) != 0 && noted.swap(0, Ordering::AcqRel) != 0 {
                self.add_stale(list, page * PAGE);
            }
        }
    }

    pub(crate) fn take_stale(&self) -> Vec<u64> {
        let mut list = self.list();
        if self.notes.state().swap(0, Ordering::AcqRel) & NOTED != 0 {
            self.take_notes(&mut list);
            self.notes.state().fetch_and(!LISTED, Ordering::Relaxed);
        }
        for &offset in list.iter() {
            self.mark(offset).fetch_and(!(CODE | STALE | EMPTY), Ordering::AcqRel);
        }
        std::mem::take(&mut list)
    }

    pub(crate) fn set_rom(&self, offset: u64, len: u64) {
        for page in offset / PAGE..(offset + len).div_ceil(PAGE) {
            self.mark(page * PAGE).fetch_or(ROM, Ordering::Relaxed);
        }
    }

    #[inline]
    pub(crate) fn is_rom(&self, offset: u64) -> bool {
        self.mark(offset).load(Ordering::Relaxed) & ROM != 0
    }
}
