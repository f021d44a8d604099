//! Programs with memory where the machine has its own: that is theirs, and the machine moves.

use super::*;
use crate::test_machine::{MODES, board, kernel_state, map};
use engine::{Engine, Probes, Reached, VcpuRequests};
use ram::Ram;
use std::sync::Arc;
use wedge_abi::{
    BLOB, CACHE, COPIES, GATE, LANDINGS, MARKS, RAM, REGIONS, SHARED, STACK, TABLES, TURNS,
    VCPU_PAGE,
};
use x86::{
    Vcpu, flags,
    paging::{G, US},
    reg, seg,
    segment::attr,
};
use x86_interp::{Exit, GuestRam};

/// GVA of the kernel's code, and its place in RAM. So for the others.
const CODE: (u64, u64) = (0xffff_ffff_8100_0000, 0x100_0000);
const DATA: (u64, u64) = (0xffff_ffff_8200_0000, 0x100_1000);
const PROGRAM: (u64, u64) = (0x5555_0000_0000, 0x100_2000);
/// Where the program's memory is in RAM.
const MEMORY: u64 = 0x100_3000;
const WORD: u64 = 0x1234_5678_9abc_def0;

/// A kernel that looks at its data and halts, and a program with a page at each of these addresses that loads a word from
/// the first and ends.
fn machine(addresses: &[u64]) -> Fast {
    let ram = Ram::new(32 << 20).expect("memory");
    let own = [(CODE, G), (DATA, G), (PROGRAM, US)];
    let pages: Vec<_> =
        own.into_iter().chain(addresses.iter().map(|at| ((*at, MEMORY), US))).collect();
    map(&ram, &pages);
    ram.write(CODE.1, &[0x48, 0x8b, 0x04, 0x25, 0, 0, 0, 0x82, 0xf4]); // mov rax, [DATA]; hlt
    ram.write(PROGRAM.1, &[0x48, 0xb8]); // mov rax, address
    ram.write(PROGRAM.1 + 2, &addresses[0].to_le_bytes());
    ram.write(PROGRAM.1 + 10, &[0x48, 0x8b, 0x18, 0x0f, 0x0b]); // mov rbx, [rax]; ud2
    ram.write(MEMORY, &WORD.to_le_bytes());
    let requests = Arc::<VcpuRequests>::default();
    Fast::new(
        kernel(),
        board(ram, Arc::clone(&requests)),
        &requests,
        MODES,
        (&crate::Machine::new(1), &crate::Placement::default()),
    )
    .expect("an engine")
}

fn kernel() -> Vcpu {
    kernel_state(CODE.0, DATA.0 + 0x800)
}

fn program() -> Vcpu {
    let mut v = Vcpu { rip: PROGRAM.0, rflags: flags::FIXED | flags::IF, ..kernel() };
    for segment in [seg::CS, seg::SS] {
        v.seg[segment].attr |= 3 << attr::DPL_SHIFT;
    }
    v
}

/// The kernel runs, then the program, which finds its own; how often the machine has moved, and whether the program was
/// interpreted.
fn finds_its_own(mut fast: Fast) -> (u64, bool) {
    assert_eq!((fast.run(u64::MAX), fast.failure()), (Exit::Halted, None));
    runs(&mut fast)
}

/// The program runs.
fn runs(fast: &mut Fast) -> (u64, bool) {
    fast.cpu.vcpu = program();
    fast.cpu.state_changed();
    assert_eq!((fast.run(u64::MAX), fast.failure()), (Exit::Shutdown, None));
    assert_eq!((fast.vcpu().rip, fast.vcpu().gpr[reg::RBX]), (PROGRAM.0 + 13, WORD));
    (fast.moves.count(), fast.claims.are_met())
}

#[test]
fn a_program_elsewhere_changes_nothing() {
    assert_eq!(finds_its_own(machine(&[0x7fff_0000_0000])), (0, false));
}

#[test]
fn a_program_in_the_wedge_s_place_has_it_move() {
    for at in [
        BLOB, SHARED, STACK, GATE, TURNS, VCPU_PAGE, TABLES, CACHE, MARKS, RAM, REGIONS, COPIES,
        LANDINGS,
    ] {
        assert_eq!(finds_its_own(machine(&[at as u64])), (1, false), "{at:#x}");
    }
}

#[test]
fn breakpoints_stay_where_the_machine_moves() {
    let mut fast = machine(&[BLOB as u64]);
    let last = CODE.0 + 8;
    fast.set_probes(&Probes { breakpoints: [last].into(), ..Probes::default() });
    assert_eq!(runs(&mut fast), (1, false));
    fast.cpu.vcpu = kernel();
    fast.cpu.state_changed();
    assert_eq!((fast.run(u64::MAX), fast.vcpu().rip), (Exit::Probe(Reached::Breakpoint), last));
}

#[test]
fn a_program_in_the_kernel_s_place_has_it_move() {
    let at = DATA.0.wrapping_add(first().bias());
    assert_eq!(finds_its_own(machine(&[at])), (1, false));
}

/// It is interpreted.
#[test]
fn a_program_in_every_place_finds_its_own() {
    for first in [BLOB as u64, DATA.0.wrapping_add(first().bias())] {
        let windows = (241..=252).map(|entry| Base::of_entry(entry).at(BLOB as u64));
        let all: Vec<_> = [first].into_iter().chain(windows).collect();
        assert_eq!(finds_its_own(machine(&all)), (0, true), "{first:#x}");
    }
}

/// A machine that has just moved may not move again at once. A program whose reservation no place would spare, as
/// ThreadSanitizer makes one, does not wait for that: it runs directly.
#[test]
fn what_no_place_spares_is_not_waited_for() {
    let mut fast = machine(&[0x7fff_0000_0000]);
    fast.moves.note();
    fast.pages.vcpu_page().claims.given = [1 << 40, 31 << 40];
    assert_eq!(runs(&mut fast), (1, false));
}

/// A program whose memory another place would spare is interpreted until the machine may move there.
#[test]
fn what_a_place_spares_is_waited_for_while_the_machine_rests() {
    let mut fast = machine(&[0x7fff_0000_0000]);
    fast.moves.note();
    fast.pages.vcpu_page().claims.given = [BLOB as u64 & !0xffff, 1 << 20];
    assert_eq!(runs(&mut fast), (1, true));
}

/// Where Linux has memory, as entries of its uppermost page table: the direct map, vmalloc, the page structures, the
/// CPU entry areas, its text.
const LINUX: [u16; 5] = [273, 402, 468, 508, 511];

/// The entries of a base: those of the kernel's memory and its own.
fn entries(base: Base) -> Vec<u16> {
    LINUX.iter().map(|entry| (entry + base.entry()) % 512).chain([base.entry()]).collect()
}

#[test]
fn machines_inside_of_each_other_share_nothing() {
    for (n, entry) in ENTRIES[..DEPTHS].iter().enumerate() {
        for other in &ENTRIES[..n] {
            let [a, b] = [*entry, *other].map(|entry| entries(Base::of_entry(entry)));
            assert!(a.iter().all(|entry| !b.contains(entry)), "{a:?} {b:?}");
        }
    }
}

#[test]
fn every_base_has_room_for_linux_and_leaves_programs_their_usual_places() {
    for entry in ENTRIES {
        let base = Base::of_entry(entry);
        assert!(u64::from(LINUX[0]) << 39 | 0xffff << 48 >= base.kernel_start());
        // Without PIE, Go's arenas; with PIE; stacks and libraries.
        let usual = [0, 1, 170, 171, 172, 253, 254, 255];
        assert!(entries(base).iter().all(|entry| !usual.contains(entry)), "{entry}");
    }
}

#[test]
fn claims_move_with_their_base() {
    let claim = Claim { entry: 13, first: 1, last: 3 };
    let to = moved(&claim, Base::of_entry(252), Base::of_entry(245));
    assert_eq!(to, Claim { entry: 6, ..claim });
}
