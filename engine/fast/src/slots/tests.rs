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
/// Where each process of a 32-bit kernel has its memory (GVA).
const NARROW_MEMORY: u64 = 0x0804_8000;
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
        let mode = efer::LME | efer::LMA | efer::NXE;
        let roots = Roots { cr0: cr0::PE | cr0::PG, cr3: top, cr4: cr4::PAE, efer: mode };
        for page in 0..COUNT {
            self.ram.store64(Self::entry(roots, page), (memory + page * PAGE) | bits);
        }
        roots
    }

    /// The page tables of a 32-bit kernel's process. The accessed bits of its memory's pages are set. The top tables of all processes lie in
    /// one page.
    fn narrow_process(&self, number: u64) -> Roots {
        let [top, directory] = [0x10_0000 + number * 32, 0x20_0000 + number * 2 * PAGE];
        self.ram.store64(top + (NARROW_MEMORY >> 30) * 8, directory | P);
        let table = directory + PAGE;
        self.ram.store64(directory + (NARROW_MEMORY >> 21 & 0x1ff) * 8, table | P | RW | US | A);
        for page in 0..COUNT {
            let entry = table + ((NARROW_MEMORY >> 12 & 0x1ff) + page) * 8;
            self.ram.store64(entry, (page * PAGE) | P | US | NX | A);
        }
        Roots { cr0: cr0::PE | cr0::PG, cr3: top, cr4: cr4::PAE, efer: efer::NXE }
    }

    /// Where a page of a process's memory has its entry.
    fn entry(roots: Roots, page: u64) -> u64 {
        roots.top() + 3 * PAGE + ((MEMORY >> 12) + page) % 512 * 8
    }

    /// Ends a process: clears the user entries of the process's top page table, as Linux does.
    fn ends(&self, roots: Roots) {
        self.ram.store64(roots.top() + (MEMORY >> 39 & 0x1ff) * 8, 0);
    }

    /// The guest switches to a process, under the identifier that the last one had; returns whether what it had mapped
    /// is there. It is then.
    fn runs(&mut self, roots: Roots) -> bool {
        self.runs_at(roots, None)
    }

    /// The guest loads a process's page table, with a flush.
    fn loads(&mut self, roots: Roots, version: Option<SpaceVersion>) -> Result<(), Error> {
        self.flushes(Flush::Space { pcid: PCID as u16 }, roots);
        self.slots.select(Selection { pcid: PCID, roots, version }, &self.pages)
    }

    /// The guest flushes while these page tables are loaded.
    fn flushes(&mut self, flush: Flush, roots: Roots) {
        let record = Record { flushes: vec![flush], ..Record::default() };
        self.slots.apply(&record, roots, PCID);
    }

    /// The same as [`Guest::runs`], of a kernel that counts, and has taken back from the process's memory so often.
    fn runs_counted(&mut self, roots: Roots, flushes: u64) -> bool {
        self.runs_at(roots, Some(version(roots, flushes)))
    }

    fn runs_at(&mut self, roots: Roots, version: Option<SpaceVersion>) -> bool {
        self.loads(roots, version).expect("a slot");
        let space = self.slots.current().expect("a slot");
        let there = space.entries() >= COUNT as usize;
        let memory = if roots.long_mode() { MEMORY } else { NARROW_MEMORY };
        let mapped = |page| {
            let (start, offset) = (memory + page * PAGE, page * PAGE);
            let (rights, owner, piece) = (Rights::READ, Owner::User, false);
            MapReport::Mapped { start, len: PAGE, offset, rights, owner, piece }
        };
        space.wedge_mut().made = (0..if there { 0 } else { COUNT }).map(mapped).collect();
        self.slots.run(true, roots).expect("it runs");
        there
    }
}

/// The version of a process's memory from which so much was taken back.
fn version(roots: Roots, flushes: u64) -> SpaceVersion {
    SpaceVersion { root: roots.top(), owner: roots.cr3, flushes }
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
    let stack = roots.top() + 3 * PAGE + (MEMORY >> 12) % 512 * 8;
    (1..COUNT).for_each(|page| guest.ram.store64(stack + page * 8, 0));
    assert!(is_young(&mut guest), "it has one page");
}

impl Guest {
    /// A guest whose kernel counts, and two of its processes, of which the first has run. With `checks` the count is checked.
    fn counting(checks: bool) -> (Self, [Roots; 2]) {
        let mut guest = Self::new();
        guest.slots.count_by(Arc::new(FlushCounts::at(8)), checks);
        let processes = [1, 2].map(|number| guest.process(number, A));
        guest.runs_counted(processes[0], 7);
        (guest, processes)
    }

    /// The other process runs, and a page of the first is taken back. Returns how often the first's slot has been given orders.
    fn takes_back_from_parked(&mut self, [one, other]: [Roots; 2]) -> usize {
        self.runs_counted(other, 7);
        self.takes_back(one, 3);
        self.told(one)
    }

    /// How many orders the slot of a process has had.
    fn told(&self, roots: Roots) -> usize {
        self.slot(roots).wedge().told.len()
    }

    /// A page of a process's is mapped nowhere from now on.
    fn takes_back(&self, roots: Roots, page: u64) {
        self.ram.store64(Self::entry(roots, page), 0);
    }

    /// The slot of a process.
    fn slot(&self, roots: Roots) -> &Space<Listener> {
        self.slots.each().find(|space| space.root == roots.top()).expect("a slot")
    }
}

/// As a TLB keeps what is not taken back: a kernel that counts has its pages compared with page tables when it has counted.
#[test]
fn what_counts_the_same_is_not_compared() {
    let (mut guest, [one, other]) = Guest::counting(false);
    let before = guest.takes_back_from_parked([one, other]);
    guest.runs_counted(one, 7);
    assert_eq!(guest.told(one), before, "it counts the same");
    guest.runs_counted(other, 7);
    guest.runs_counted(one, 8);
    assert!(guest.told(one) > before, "it has counted");
}

/// A process takes memory back, flushes it and counts: what wedges have seen of that is believed of its own memory alone.
#[test]
fn what_was_flushed_when_it_was_left_is_not_compared() {
    let (mut guest, [one, other]) = Guest::counting(false);
    let leaves = |guest: &mut Guest, at: SpaceVersion| {
        let wedge = guest.slot(one).wedge();
        wedge.left.set(Some(at));
        wedge.moved.set(true);
        guest.slots.run(true, one).expect("it runs");
        guest.takes_back(one, at.flushes % COUNT);
        guest.runs_counted(other, 7);
        let before = guest.told(one);
        guest.runs_counted(one, at.flushes);
        guest.told(one) == before
    };
    assert!(leaves(&mut guest, version(one, 9)));
    assert!(!leaves(&mut guest, SpaceVersion { owner: 1, ..version(one, 10) }), "another's");
    assert!(!leaves(&mut guest, SpaceVersion { root: 0, ..version(one, 11) }), "another table");
    assert!(leaves(&mut guest, version(one, 12)));
}

/// The other vCPUs' flushes of everything reach a slot while it is parked, and so do those that the guest asks for.
#[test]
fn after_a_flush_of_everything_the_count_says_nothing() {
    let (mut guest, [one, other]) = Guest::counting(false);
    let before = guest.takes_back_from_parked([one, other]);
    guest.flushes(Flush::All, other);
    guest.runs_counted(one, 7);
    assert!(guest.told(one) > before);
}

/// Wedges are told of parked slots, and not any more once the monitor has orders, or what is mapped is doubtful.
#[test]
fn wedges_can_go_on_in_slots_that_are_up_to_date() {
    let (mut guest, [one, other]) = Guest::counting(false);
    guest.runs_counted(other, 9);
    let published = |guest: &Guest, roots| guest.slot(roots).wedge().version.get();
    assert_eq!(published(&guest, one), Some(version(one, 7)));
    assert_eq!(published(&guest, other), Some(version(other, 9)));
    guest.slots.hold_back(FxHashSet::from_iter([one.top()]));
    guest.slots.run(true, other).expect("it runs");
    assert_eq!(published(&guest, one), None, "held back");
    guest.slots.hold_back(FxHashSet::default());
    guest.slots.run(true, other).expect("it runs");
    assert_eq!(published(&guest, one), Some(version(one, 7)));
    guest.flushes(Flush::All, other);
    guest.slots.run(true, other).expect("it runs");
    assert_eq!(published(&guest, one), None, "doubtful");
}

/// What wedges have done is followed, and what guest code may write in their name gives no identifier to two slots.
#[test]
fn an_identifier_is_where_wedges_have_moved_it() {
    let (mut guest, [one, other]) = Guest::counting(false);
    let third = guest.process(3, A);
    guest.runs_counted(other, 7);
    guest.runs_counted(third, 7);
    let moves = |guest: &mut Guest, made: &[(Roots, Move)]| {
        for (roots, its_move) in made {
            guest.slot(*roots).wedge().its_move.set(Some(*its_move));
        }
        let running = guest.slots.current().expect("a slot");
        running.wedge().moved.set(true);
        let root = running.root;
        let roots = [one, other, third].into_iter().find(|roots| roots.top() == root);
        guest.slots.run(true, roots.expect("one of them")).expect("it runs");
        [one, other, third].map(|roots| guest.slot(roots).pcid)
    };
    let got = Move::Got(PCID);
    assert_eq!(moves(&mut guest, &[(one, got), (third, Move::Left)]), [Some(PCID), None, None]);
    assert_eq!(moves(&mut guest, &[(one, Move::Got(2))]), [Some(2), None, None], "it has moved on");
    assert_eq!(moves(&mut guest, &[(other, got)]), [Some(2), Some(PCID), None]);
    let both = moves(&mut guest, &[(one, got), (third, got)]);
    assert_eq!(both.into_iter().flatten().collect::<Vec<_>>(), [PCID], "{both:?}");
    guest.slots.select(Selection::uncounted(PCID, third), &guest.pages).expect("a slot");
    assert_eq!(guest.slots.spaces.len(), 1);
}

/// A kernel that takes back and does not count is found out, if it goes on so.
#[test]
fn a_wrong_count_is_found_out() {
    let (mut guest, [one, other]) = Guest::counting(true);
    guest.takes_back(one, 3);
    let check = |guest: &mut Guest| {
        guest.runs_counted(other, 7);
        guest.loads(one, Some(version(one, 7)))
    };
    check(&mut guest).expect("a kernel counts a little later than it takes back");
    std::thread::sleep(Duration::from_millis(1_100));
    assert!(matches!(check(&mut guest), Err(Error::Miscounted(page)) if page == MEMORY + 3 * PAGE));
}

/// Several top page tables of a 32-bit kernel lie in one page. Each process finds what it had all the same, and one that has ended is known.
#[test]
fn processes_of_a_32_bit_kernel_have_slots_of_their_own() {
    let mut guest = Guest::new();
    let processes = [0, 1, 2].map(|number| guest.narrow_process(number));
    processes.iter().for_each(|roots| {
        guest.runs(*roots);
    });
    assert!(processes.iter().all(|roots| guest.runs(*roots)));
    let ended = |guest: &Guest| {
        processes.map(|roots| {
            let of_it = guest.slots.each().find(|space| space.root == roots.top());
            of_it.expect("a slot").is_left_behind(&guest.ram)
        })
    };
    assert_eq!(ended(&guest), [false; 3]);
    (0..3).for_each(|entry| guest.ram.store64(processes[1].top() + entry * 8, 0));
    assert_eq!(ended(&guest), [false, true, false]);
}
