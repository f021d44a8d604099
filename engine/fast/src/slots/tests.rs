use super::*;
use crate::{Scattered, listener::Listener};
use wedge::{MapCommand, MapReport, Owner, Rights};
use x86::{
    control::{cr0, cr4, efer},
    paging::{A, D, NX, P, RW, US},
};
use x86_interp::GuestRam;

/// Where each process has its memory (GVA), and how many pages.
const MEMORY: u64 = 0x7fff_0000_0000;
const COUNT: u64 = 8;
/// The identifier that one process after another has.
const PCID: u64 = 1;

/// A guest whose processes have the same pages at the same addresses, as a server's workers do.
struct Guest {
    ram: Ram,
    pages: Pages,
    slots: Slots<Listener>,
}

impl Guest {
    fn new() -> Self {
        let ram = Ram::new(8 << 20).expect("memory");
        let pages = Pages::new().expect("memory");
        let slots = Slots::new(ram.clone(), pages.base(), true);
        Self { ram, pages, slots }
    }

    /// The page tables of a process, four pages of RAM each. With `used` the process has accessed its memory.
    fn process(&self, number: u64, used: u64) -> Roots {
        self.process_with(number, 0, P | US | NX | used)
    }

    /// The same of one whose memory lies in RAM from a GPA onwards, with these bits in its entries.
    fn process_with(&self, number: u64, memory: u64, bits: u64) -> Roots {
        let top = 0x10_0000 + number * 4 * PAGE;
        let tables = [39, 30, 21].map(|shift| (MEMORY >> shift & 0x1ff) * 8);
        for (level, entry) in tables.into_iter().enumerate() {
            let table = top + level as u64 * PAGE;
            self.ram.store64(table + entry, (table + PAGE) | P | RW | US | A);
        }
        for page in 0..COUNT {
            let entry = top + 3 * PAGE + ((MEMORY >> 12) + page) % 512 * 8;
            self.ram.store64(entry, (memory + page * PAGE) | bits);
        }
        let mode = efer::LME | efer::LMA | efer::NXE;
        Roots { cr0: cr0::PE | cr0::PG, cr3: top, cr4: cr4::PAE, efer: mode }
    }

    /// Ends a process: clears the user entries of the process's top page table, as Linux does.
    fn ends(&self, roots: Roots) {
        self.ram.store64(root(roots) + (MEMORY >> 39 & 0x1ff) * 8, 0);
    }

    /// The guest switches to a process, under the identifier that the last one had; returns whether what it had mapped
    /// is there. It is then.
    fn runs(&mut self, roots: Roots) -> bool {
        let record =
            Record { flushes: vec![Flush::Space { pcid: PCID as u16 }], ..Record::default() };
        self.slots.apply(&record, roots, PCID);
        self.slots.select(PCID, roots, &self.pages).expect("a slot");
        let space = self.slots.current().expect("a slot");
        let there = space.entries() >= COUNT as usize;
        let mapped = |page| {
            let (start, offset) = (MEMORY + page * PAGE, page * PAGE);
            let (rights, owner, piece) = (Rights::READ, Owner::User, false);
            MapReport::Mapped { start, len: PAGE, offset, rights, owner, piece }
        };
        space.wedge_mut().made = (0..if there { 0 } else { COUNT }).map(mapped).collect();
        self.slots.run(false, roots).expect("it runs");
        there
    }
}

/// More processes than there are slots at first take turns: after some rounds each finds what it had.
#[test]
fn processes_that_come_back_get_slots_of_their_own() {
    let mut guest = Guest::new();
    let processes: Vec<_> = (0..40).map(|number| guest.process(number, A)).collect();
    for _ in 0..40 {
        for roots in &processes {
            guest.runs(*roots);
        }
    }
    assert_eq!(guest.slots.each().count(), processes.len());
    let told =
        |guest: &Guest| guest.slots.each().map(|space| space.wedge().told.len()).sum::<usize>();
    let before = told(&guest);
    assert!(processes.iter().all(|roots| guest.runs(*roots)));
    assert_eq!(told(&guest), before, "nothing is mapped anew");
}

/// Of more processes than there can be slots, many find what they had, though the one whose turn it is has always waited
/// longest.
#[test]
fn more_processes_than_there_can_be_slots_do_not_all_lose_them() {
    let mut guest = Guest::new();
    let processes: Vec<_> =
        (0..MAX_SLOTS as u64 * 3 / 2).map(|number| guest.process(number, A)).collect();
    for of_them in [MAX_SLOTS, processes.len()] {
        for _ in 0..MAX_SLOTS {
            processes.iter().take(of_them).for_each(|roots| _ = guest.runs(*roots));
        }
        assert_eq!(guest.slots.each().count(), MAX_SLOTS);
    }
    let found = processes.iter().filter(|roots| guest.runs(**roots)).count();
    assert!(found > processes.len() / 4, "{found} of {}", processes.len());
}

/// Processes that end are not waited for, however many there are.
#[test]
fn processes_that_never_come_back_share_few_slots() {
    let mut guest = Guest::new();
    for number in 0..200 {
        let roots = guest.process(number, A);
        guest.runs(roots);
    }
    assert_eq!(guest.slots.each().count(), FEW_SLOTS);
}

/// A process that has lost its slot finds its memory in the one that it gets, writable where it has written.
#[test]
fn who_gets_the_slot_of_another_of_the_same_program_has_its_own_data_there() {
    let mut guest = Guest::new();
    let few = FEW_SLOTS as u64;
    let memory = |number: u64| (4 << 20) + number * COUNT * PAGE;
    let bits = |page: u64| P | US | NX | A | if page == 0 { RW | D } else { RW };
    for number in 0..few {
        let roots = guest.process_with(number, memory(number), bits(0));
        guest.runs(roots);
    }
    for (number, rights) in [(few, Rights::READ_WRITE), (few + 1, Rights::READ)] {
        let roots = guest.process_with(number, memory(number), bits(number - few));
        assert!(guest.runs(roots), "mapped before it runs");
        let told = &guest.slots.current().expect("a slot").wedge().told;
        for page in 0..COUNT {
            let (start, offset) = (MEMORY + page * PAGE, memory(number) + page * PAGE);
            let map = MapCommand::Map { start, len: PAGE, offset, rights, owner: Owner::User };
            assert!(told.contains(&map), "{map:?}");
        }
    }
}

/// A worker that has run keeps its slot when another worker comes that has none; a child just forked takes one over.
#[test]
fn only_a_newborn_takes_over_the_slot_of_another() {
    let mut guest = Guest::new();
    let [first, second] = [1, 2].map(|number| guest.process(number, A));
    let newborn = guest.process(3, 0);
    guest.runs(first);
    guest.runs(second);
    assert!(guest.runs(first) && guest.runs(second));
    assert_eq!(guest.slots.each().count(), 2);
    guest.ends(second);
    guest.runs(newborn);
    assert_eq!(guest.slots.each().count(), 2);
}

/// The parent ran last before the child, and keeps its slot with everything mapped in it.
#[test]
fn a_child_does_not_take_its_parents_slot() {
    let mut guest = Guest::new();
    let [parent, ended] = [1, 2].map(|number| guest.process(number, A));
    guest.runs(ended);
    guest.ends(ended);
    for number in 3..9 {
        let child = guest.process(number, 0);
        guest.runs(parent);
        guest.runs(child);
        assert!(guest.runs(parent), "child {number}");
        guest.ends(child);
    }
    assert_eq!(guest.slots.each().count(), 2);
}

/// A child takes a living process's slot when no slot may be added and no process has ended.
#[test]
fn a_child_takes_a_slot_in_which_its_program_is_mapped_where_there_may_be_no_more() {
    let mut guest = Guest::new();
    for number in 0..FEW_SLOTS as u64 {
        let roots = guest.process(number, A);
        guest.runs(roots);
    }
    let child = guest.process(FEW_SLOTS as u64, 0);
    assert!(guest.runs(child), "what is mapped is its own");
    assert_eq!(guest.slots.each().count(), FEW_SLOTS);
}

/// New processes that reuse the page tables of ended processes do not raise the number of slots.
#[test]
fn page_tables_that_are_used_again_need_no_slot_of_their_own() {
    let mut guest = Guest::new();
    for round in 0..20 {
        for number in 0..FEW_SLOTS as u64 * 2 {
            let roots = guest.process(number, A);
            guest.runs(roots);
            guest.ends(roots);
        }
        assert!(guest.slots.each().count() <= FEW_SLOTS, "round {round}");
    }
}

/// Linux gives the page table of a process that has ended to the next one, and its identifiers go round: now and then a program that
/// has just been loaded has both of another one's.
#[test]
fn a_program_with_the_page_table_and_the_identifier_of_another_is_new() {
    let mut guest = Guest::new();
    guest.slots.look_for_youths();
    let roots = guest.process(0, A);
    let is_young = |guest: &mut Guest| {
        guest.runs(roots);
        let space = guest.slots.current().expect("a slot");
        space.looks_up(Scattered::Map, 0, |_| Some(true))
    };
    assert!(!is_young(&mut guest) && !is_young(&mut guest), "it has many pages");
    let stack = root(roots) + 3 * PAGE + (MEMORY >> 12) % 512 * 8;
    (1..COUNT).for_each(|page| guest.ram.store64(stack + page * 8, 0));
    assert!(is_young(&mut guest), "it has one page");
}
