//! Programs that read their own code: debuggers of themselves, checksums, translators.
//!
//! What user code executes may be a changed copy ([`super::code_pages`]), and what it reads there then are the changes: the host
//! has no memory that can be executed and not read. But a reader of code mostly reads more than was executed, page after page,
//! and comes upon pages that are not mapped. From then on nothing is changed in that text: its copies go, system calls made
//! there trap, and a page that must not be executed as it is, is interpreted; unless that comes to too much, since the page may hold
//! what the program does all the time.
//!
//! Where what is executed has protection keys, a load of it faults ([`super::closed`]): nobody needs to be found there.
//!
//! A few pages are not yet a reader: old linkers put a program's constants among its code.
//!
//! A text is what the program may execute around a page, up to a page that it may not. Pages it has not used count as
//! either.

use super::{PAGE, walk::Walker};
use ram::Ram;
use rustc_hash::FxHashMap;
use std::{collections::VecDeque, ops::Range};
use x86::paging::Roots;

/// Texts remembered; what is forgotten is found again, or changed.
const MAX_TEXTS: usize = 64;
/// Pages not used, one beside the other, that still lie in a text.
const MAX_GAP: u64 = 4096;
/// Pages between two that are read, if all of them can be read, too.
const MAX_BETWEEN: u64 = 64;
/// Pages read one behind the other that make a reader.
const READER: u32 = 8;
/// Times that control may come to a page to be interpreted there.
const MAX_VISITS: u32 = 1000;

/// Code that the program has read: HVAs.
#[derive(Default)]
pub(super) struct Texts {
    known: VecDeque<Range<u64>>,
    /// The page of code that was read last, and how many right before it.
    last: (u64, u32),
    /// Visits to pages that were to be interpreted.
    visits: FxHashMap<u64, u32>,
}

impl Texts {
    pub(super) fn has(&self, hva: u64) -> bool {
        self.known.iter().any(|text| text.contains(&hva))
    }

    fn add(&mut self, text: Range<u64>) {
        if self.known.len() == MAX_TEXTS {
            self.known.pop_front();
        }
        self.known.push_back(text);
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// The program, or the guest's kernel for it, reads code at a page. Returns the text that is to be shown as it is from
    /// now on, if that makes a reader of one that was none.
    pub(super) fn read(
        &mut self,
        ram: &Ram,
        roots: Roots,
        page: u64,
        can_be_read: impl Fn(u64) -> bool,
    ) -> Option<Range<u64>> {
        if self.has(page) || !self.reads_on(page, can_be_read) {
            return None;
        }
        let text = text_around(ram, roots, page);
        self.add(text.clone());
        Some(text)
    }

    /// A page of code is read; true if that makes a reader. Pages in between that can be read without anybody noticing may have been.
    fn reads_on(&mut self, page: u64, can_be_read: impl Fn(u64) -> bool) -> bool {
        let (last, count) = self.last;
        let between = last.saturating_add(PAGE)..page;
        let follows = page > last
            && between.end - between.start.min(page) <= MAX_BETWEEN * PAGE
            && between.step_by(PAGE as usize).all(can_be_read);
        self.last = (page, if follows { count + 1 } else { 0 });
        self.last.1 + 1 >= READER
    }

    /// Control comes to a page that would have to be changed; whether it is to be interpreted there.
    pub(super) fn is_interpreted(&mut self, page: u64) -> bool {
        if !self.has(page) {
            return false;
        }
        if self.visits.len() > MAX_TEXTS * MAX_TEXTS {
            self.visits.clear();
        }
        let visits = self.visits.entry(page).or_default();
        *visits += 1;
        *visits < MAX_VISITS
    }
}

/// What may be executed around a page.
fn text_around(ram: &Ram, roots: Roots, page: u64) -> Range<u64> {
    let (mut above, mut below) = (Walker::new(ram, roots), Walker::new(ram, roots));
    let up = (page / PAGE + 1..1 << 35).map(|number| number * PAGE);
    let down = (0..page / PAGE).rev().map(|number| number * PAGE);
    let end = last_of_text(&mut above, up).unwrap_or(page) + PAGE;
    last_of_text(&mut below, down).unwrap_or(page)..end
}

/// The last of these pages, in this order, that the program has used and may execute, before one that it may not.
fn last_of_text(walker: &mut Walker<'_>, pages: impl Iterator<Item = u64>) -> Option<u64> {
    let (mut last, mut gap) = (None, 0);
    for page in pages {
        match walker.find(page) {
            Some(found) if found.user && found.executable => (last, gap) = (Some(page), 0),
            None if gap < MAX_GAP => gap += 1,
            _ => break,
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_reads_one_page_after_the_other() {
        let mut texts = Texts::default();
        for n in 0..100 {
            let page = 0x40_0000 + n % 7 * PAGE;
            assert!(!texts.reads_on(page, |_| false), "constants among code");
        }
        let reads = |texts: &mut Texts, page: u64, mapped: bool| texts.reads_on(page, |_| mapped);
        let first = |pages: Vec<bool>| pages.iter().position(|reads| *reads);
        let every = (0..10).map(|n| reads(&mut texts, 0x50_0000 + n * PAGE, false)).collect();
        assert_eq!(first(every), Some(READER as usize - 1));
        let among_code =
            (0..10).map(|n| reads(&mut texts, 0x60_0000 + 5 * n * PAGE, true)).collect();
        assert_eq!(first(among_code), Some(READER as usize - 1));
        let apart = (0..10).map(|n| reads(&mut texts, 0x70_0000 + 5 * n * PAGE, false)).collect();
        assert_eq!(first(apart), None, "what is between would have faulted");
    }

    #[test]
    fn what_is_executed_often_is_not_interpreted_for_ever() {
        let mut texts = Texts::default();
        assert!(!texts.is_interpreted(0x40_0000), "nobody has read it");
        texts.add(0x40_0000..0x41_0000);
        let visits = (0..2 * MAX_VISITS).filter(|_| texts.is_interpreted(0x40_1000)).count();
        assert_eq!(visits, MAX_VISITS as usize - 1);
        assert!(texts.is_interpreted(0x40_2000));
        texts.clear();
        assert!(!texts.is_interpreted(0x40_2000));
    }
}
