//! Processes that have just begun.
//!
//! Most processes end within milliseconds. Until then a mapping of the host's for each of their pages costs more than all that they
//! compute. So a process that is new runs translated, with look-ups, as one with more pages than mappings does
//! ([`super::pressure`]), until it has run for [`YOUNG`]. That needs code that has been translated before: new code takes longer to
//! translate than a short process has. So a process whose code nobody has run at the same address is left to run directly.

use super::seen::{ENTRIES, ENTRY};
use ram::Ram;
use std::time::Duration;
use x86::paging::{self, Roots};

/// How long a process is young, while its slot has the turn.
const YOUNG: Duration = Duration::from_millis(6);
/// How long a child is young at the most. It writes to many pages and ends soon, and on a slow host that takes longer.
const LONGEST: Duration = Duration::from_millis(12);
/// How long a child is young for each look-up that it has filled. What translation loses meanwhile is about what a mapping would have
/// cost.
const PER_PAGE: Duration = Duration::from_micros(20);
/// How long a process that has forked is young again: it writes to fewer pages meanwhile than a child has.
const AFTER_FORK: Duration = Duration::from_millis(1);
/// Levels of tables below the top one.
const LEVELS: u32 = 3;
/// Present pages that a program may have that has just been loaded: what the kernel has put on its stack.
pub(super) const FEW: usize = 4;
/// Present pages that are looked at.
const ENOUGH: usize = 64;
/// Tables that are looked at.
const TABLES: usize = 16;

/// What a process has to do with look-ups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    /// The process runs directly.
    #[default]
    Grown,
    /// The process has just begun. Whether its code is known turns out when a block is missing.
    Begun,
    /// The process has forked. Whether its code is known turns out when a block is missing.
    Forked,
    /// The process runs translated for a while.
    Young,
}

/// How a process has come to the moment at which the engine decides whether to run the process with look-ups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A program that has been loaded and has not run.
    Program,
    /// A child that has not run.
    Child,
    /// A process that has forked.
    Parent,
}

/// What is known of a space's process.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Youth {
    stage: Stage,
    /// How long the process has run.
    used: Duration,
    /// The process has been forked and has loaded no program.
    child: bool,
    /// Look-ups that there had been, of all processes, when the process was first looked at.
    before: Option<u64>,
}

impl Youth {
    /// A new process runs here, a child or one that has loaded a program.
    pub fn begin(&mut self, child: bool) {
        *self = Self { stage: Stage::Begun, child, ..Self::default() };
    }

    /// The process has forked: each page that it writes next becomes another one.
    pub fn begin_again(&mut self) {
        (self.used, self.before) = (YOUNG - AFTER_FORK, None);
        if self.stage == Stage::Grown {
            self.stage = Stage::Forked;
        }
    }

    /// The process does without look-ups.
    pub fn end(&mut self) {
        self.stage = Stage::Grown;
    }

    /// Look-ups are to be used.
    pub fn is_on(&self) -> bool {
        self.stage != Stage::Grown
    }

    /// The process has run for so long.
    pub fn note(&mut self, time: Duration) {
        self.used += time;
    }

    /// Look-ups are to be used from now on. `filled`: how many have been filled, of all processes. `is_known`: the code that comes next
    /// has often been seen before, by what the process is. `None` if the code is in no page that the process has yet.
    pub fn look(&mut self, filled: u64, is_known: impl FnOnce(Role) -> Option<bool>) -> bool {
        let own = filled.saturating_sub(*self.before.get_or_insert(filled));
        let limit = if self.child { limit(own) } else { YOUNG };
        self.stage = match self.stage {
            Stage::Begun | Stage::Forked => match is_known(self.role()) {
                None => self.stage,
                Some(true) => Stage::Young,
                Some(false) => Stage::Grown,
            },
            Stage::Young if self.used < limit => Stage::Young,
            _ => Stage::Grown,
        };
        self.is_on()
    }

    fn role(&self) -> Role {
        match self.stage {
            Stage::Begun if self.child => Role::Child,
            Stage::Begun => Role::Program,
            _ => Role::Parent,
        }
    }
}

/// How long a child is young that has filled so many look-ups.
fn limit(filled: u64) -> Duration {
    let filled = u32::try_from(filled).unwrap_or(u32::MAX);
    PER_PAGE.saturating_mul(filled).clamp(YOUNG, LONGEST)
}

/// How many pages a process has and has used, by its page tables, as far as somebody has counted.
#[derive(Debug, Default)]
pub(crate) struct PageUse {
    present: usize,
    used: usize,
    tables: usize,
}

impl PageUse {
    /// Counts the pages of the process with these page tables, which have four levels.
    pub fn of(ram: &Ram, roots: Roots) -> Self {
        let mut pages = Self::default();
        pages.add(ram, roots.top(), roots.entries_of_programs(), LEVELS);
        pages
    }

    /// A child has been forked and has not run: none of its pages has been accessed.
    pub fn are_newborn(&self) -> bool {
        self.used == 0 && self.present > 0
    }

    /// A program has been loaded and has not run.
    pub fn are_few(&self) -> bool {
        self.present <= FEW && self.tables < TABLES
    }

    fn are_enough(&self) -> bool {
        self.tables >= TABLES || self.present >= ENOUGH || self.used > FEW
    }

    fn add(&mut self, ram: &Ram, table: u64, entries: usize, levels: u32) {
        self.tables += 1;
        let mut bytes = [0; ENTRIES * ENTRY];
        // A table that is not in RAM has no pages: the walk of it faults.
        let Some(bytes) = bytes.get_mut(..entries * ENTRY) else { return };
        if ram.read_gpa(table, bytes).is_err() {
            return;
        }
        // Few entries are present, and most of the time would go into the others.
        let (bytes, _) = bytes.as_chunks::<ENTRY>();
        let entries = bytes.iter().map(|bytes| u64::from_le_bytes(*bytes));
        for entry in entries.filter(|entry| entry & paging::P != 0) {
            if self.are_enough() {
                return;
            }
            if levels == 0 || entry & paging::PS != 0 {
                self.present += 1;
                self.used += usize::from(entry & paging::A != 0);
            } else {
                self.add(ram, entry & paging::ADDRESS, ENTRIES, levels - 1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use x86::paging::{A, P, RW, US};
    use x86_interp::GuestRam;

    const USER: u64 = P | RW | US;

    /// Page tables with this many pages, so many of them accessed; the tables are accessed in any case.
    fn tables(present: u64, used: u64) -> Ram {
        let ram = Ram::new(2 << 20).expect("memory");
        for (table, next) in [(0x1000, 0x2000), (0x2000, 0x3000), (0x3000, 0x4000)] {
            ram.store64(table + 5 * 8, next | USER | A);
        }
        for at in 0..present {
            ram.store64(0x4000 + at * 16, 0x8000 | USER | if at < used { A } else { 0 });
        }
        ram
    }

    #[test]
    fn new_processes_are_told_by_their_page_tables() {
        let roots = Roots { cr3: 0x1000, ..Roots::default() };
        let of = |present, used| {
            let pages = PageUse::of(&tables(present, used), roots);
            (pages.are_newborn(), pages.are_few())
        };
        assert_eq!(of(100, 0), (true, false), "a child");
        assert_eq!(of(100, 5), (false, false), "it has run");
        assert_eq!(of(3, 3), (false, true), "a program");
        assert_eq!(of(0, 0), (false, true), "one without anything yet");
        assert_eq!(of(30, 30), (false, false));
    }

    #[test]
    fn a_process_is_young_for_a_while_if_its_code_is_known() {
        let mut youth = Youth::default();
        let known = |_| Some(true);
        assert!(!youth.look(0, known), "it was here before");
        youth.begin(false);
        assert!(youth.is_on() && youth.look(0, |_| None) && youth.look(0, known));
        youth.note(YOUNG / 2);
        assert!(youth.look(0, |_| Some(false)), "it is asked once");
        youth.note(YOUNG / 2);
        assert!(!youth.look(0, known) && !youth.is_on());
        youth.begin(false);
        assert!(!youth.look(0, |_| Some(false)) && !youth.look(0, known), "unknown code");
        youth.begin_again();
        assert!(youth.look(0, |role| Some(role == Role::Parent)), "it has forked");
    }

    /// Its look-ups alone count.
    #[test]
    fn a_child_that_fills_many_look_ups_is_young_longer() {
        let young_for = |(child, own): (bool, u64)| {
            let mut youth = Youth::default();
            youth.begin(child);
            assert!(youth.look(1_000_000, |_| Some(true)));
            let steps = (1..).take_while(|_| {
                youth.note(Duration::from_millis(1));
                youth.look(1_000_000 + own, |_| None)
            });
            steps.count()
        };
        assert_eq!(
            [(true, 100), (true, 400), (true, 10_000), (false, 400)].map(young_for),
            [5, 7, 11, 5]
        );
    }
}
