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
//! A page that goes stale loses its mark at once, and every vCPU is told (module `news`): whatever was made from it
//! until a vCPU hears of it is dropped then, and whoever makes anything from it marks it again. It may be dropped once
//! more than strictly needed, never once less.
//!
//! With several vCPUs a page is [`CODE`] before the others have given up writing it unnoticed, and [`SETTLED`] after:
//! writers go by the former, makers of code by the latter.

use std::sync::{
    Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU8, AtomicU64, Ordering, fence},
};

use contract::CodeNews;

use crate::{
    PAGE, RamError,
    mapping::{Marks, Notes},
    news::Inboxes,
};

/// Something was made from the page's bytes.
const CODE: u8 = 1 << 0;
/// ... and nobody writes the page unnoticed any more.
const SETTLED: u8 = 1 << 1;
/// The guest cannot write the page.
const ROM: u8 = 1 << 2;
/// The page is empty, and something was made from that.
const EMPTY: u8 = 1 << 3;
/// The mark of a page that is empty ([`crate::Ram::mark_empty`]).
pub const EMPTY_PAGE: u8 = MADE | EMPTY;
/// The mark of a page that code may be made from.
pub const MADE: u8 = CODE | SETTLED;
/// There is a copy of the page that programs may execute.
const COPIED: u8 = 1 << 4;
/// The mark of a page of code with a copy ([`crate::Ram::copy_code`]).
pub const COPIED_PAGE: u8 = MADE | COPIED;

/// Other processes have noted pages.
const NOTED: u8 = 1 << 1;

/// Whose the marks are.
enum Role {
    /// Ours.
    Owner,
    /// Another process's.
    Reporter,
}

pub(crate) struct PageMap {
    pub(crate) marks: Marks,
    pub(crate) notes: Notes,
    pub(crate) inboxes: Inboxes,
    /// Pages that went stale so far.
    writes: AtomicU64,
    /// Held while a page is copied, or gets its mark.
    copying: Mutex<()>,
    role: Role,
}

impl PageMap {
    pub(crate) fn new(pages: u64) -> Result<Self, RamError> {
        let (marks, notes) = (Marks::new(pages)?, Notes::new(pages)?);
        // The host gets ready for it; code is marked later, perhaps where less may be asked for.
        host::current().fence_all_threads();
        Ok(Self {
            marks,
            notes,
            inboxes: Inboxes::one(),
            writes: AtomicU64::new(0),
            copying: Mutex::new(()),
            role: Role::Owner,
        })
    }

    /// Another process's marks, and where to report to it.
    pub(crate) fn of_another(marks: Marks, notes: Notes) -> Self {
        Self {
            marks,
            notes,
            inboxes: Inboxes::one(),
            writes: AtomicU64::new(0),
            copying: Mutex::new(()),
            role: Role::Reporter,
        }
    }

    #[inline]
    fn mark(&self, offset: u64) -> &AtomicU8 {
        self.marks.get(offset / PAGE)
    }

    /// See [`contract::GuestRam::mark_code`]; `by` is the vCPU, if it is one.
    pub(crate) fn mark_code(&self, offset: u64, by: Option<usize>) -> bool {
        if matches!(self.role, Role::Reporter) || self.is_settled(offset) {
            return false;
        }
        let mark = if self.inboxes.several() { CODE } else { MADE };
        loop {
            let before = {
                let _no_copies = self.lock_copies();
                self.mark(offset).fetch_or(mark, Ordering::SeqCst)
            };
            if before & CODE == 0 {
                // Where the host cannot do it, the fence below is what is left.
                host::current().fence_all_threads();
            }
            fence(Ordering::SeqCst);
            if mark == MADE {
                return before & CODE == 0;
            }
            self.inboxes.close(offset, by);
            if self.add(offset, SETTLED) {
                return true;
            }
            // It was written meanwhile, and its mark taken away.
        }
    }

    /// Adds to a page's mark, if it has one still.
    fn add(&self, offset: u64, bits: u8) -> bool {
        let more = |mark: u8| (mark & CODE != 0).then_some(mark | bits);
        self.mark(offset).fetch_update(Ordering::SeqCst, Ordering::SeqCst, more).is_ok()
    }

    /// Marks a page as empty that `is_empty`, which is asked again once a write would come to light.
    pub(crate) fn mark_empty(
        &self,
        offset: u64,
        by: Option<usize>,
        is_empty: impl Fn() -> bool,
    ) -> bool {
        let empty = is_empty() && {
            self.mark_code(offset, by);
            is_empty()
        };
        empty && self.add(offset, EMPTY)
    }

    fn lock_copies(&self) -> MutexGuard<'_, ()> {
        self.copying.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has a page of code copied by `copy`, which says whether the copy is good, if there is no copy yet. Pages get no marks
    /// meanwhile: a mark that is there at the end has been there all the time, so nobody has written the page.
    pub(crate) fn copy_code(&self, offset: u64, copy: impl FnOnce() -> bool) -> bool {
        let _alone = self.lock_copies();
        let mark = self.mark(offset);
        match mark.load(Ordering::Acquire) {
            COPIED_PAGE => true,
            MADE if copy() => {
                mark.compare_exchange(MADE, COPIED_PAGE, Ordering::SeqCst, Ordering::SeqCst).is_ok()
            }
            _ => false,
        }
    }

    #[inline]
    pub(crate) fn is_code(&self, offset: u64) -> bool {
        self.mark(offset).load(Ordering::Relaxed) & CODE != 0
    }

    /// Whether code may be made from the page's bytes: every write to them is noticed.
    #[inline]
    pub(crate) fn is_settled(&self, offset: u64) -> bool {
        self.mark(offset).load(Ordering::Acquire) & MADE == MADE
    }

    /// What is written was written by the vCPU `by`, if by one.
    #[inline]
    pub(crate) fn note_write(&self, offset: u64, len: u64, by: Option<usize>) {
        if len == 0 {
            return;
        }
        for page in offset / PAGE..=(offset + (len - 1)) / PAGE {
            if self.mark(page * PAGE).load(Ordering::Relaxed) & CODE != 0 {
                self.go_stale(page * PAGE, by);
            }
        }
    }

    /// As [`PageMap::note_write`], for writers that no `membarrier` of the marks' owner reaches.
    pub(crate) fn note_dma(&self, offset: u64, len: u64) {
        fence(Ordering::SeqCst);
        self.note_write(offset, len, None);
    }

    #[cold]
    fn go_stale(&self, offset: u64, by: Option<usize>) {
        if matches!(self.role, Role::Reporter) {
            self.notes.page(offset / PAGE).store(1, Ordering::Release);
            self.notes.state().fetch_or(NOTED, Ordering::Release);
            return;
        }
        let before = self.mark(offset).fetch_and(!(COPIED_PAGE | EMPTY), Ordering::AcqRel);
        if before & CODE != 0 {
            let number = self.writes.fetch_add(1, Ordering::SeqCst) + 1;
            self.inboxes.written(offset, number, by);
        }
    }

    /// Pages that went stale so far. Whoever asks, and then reads the bytes of a page that is marked, has them as they are
    /// after those writes: one that comes later has a higher number.
    pub(crate) fn writes(&self) -> u64 {
        self.writes.load(Ordering::SeqCst)
    }

    /// Other processes have noted pages.
    #[inline]
    pub(crate) fn has_notes(&self) -> bool {
        self.notes.state().load(Ordering::Relaxed) != 0
    }

    /// Takes what other processes noted. A note that comes while we look leaves the state set for the next time.
    #[cold]
    fn take_notes(&self) {
        for page in 0..self.notes.pages() {
            let noted = self.notes.page(page);
            if noted.load(Ordering::Relaxed) != 0 && noted.swap(0, Ordering::AcqRel) != 0 {
                self.go_stale(page * PAGE, None);
            }
        }
    }

    /// What a vCPU has to hear.
    pub(crate) fn take_news(&self, vcpu: usize) -> CodeNews {
        if self.notes.state().swap(0, Ordering::AcqRel) & NOTED != 0 {
            self.take_notes();
        }
        self.inboxes.take(vcpu)
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
