//! Two vCPUs of one machine, which run one after the other.

use crate::{
    Fast, FlushCounts, Machine, Placement,
    options::Options,
    test_machine::{MODES, OPTIONS, board, kernel_state, map},
};
use bus::Kicker;
use contract::{Probes, Taps};
use engine::{Engine, VcpuRequests};
use jit::cache::CacheCounters;
use ram::Ram;
use std::sync::{Arc, Mutex};
use x86::{
    Vcpu,
    paging::{P, RW, Roots},
    reg,
    tap::{self, Step},
};
use x86_interp::{Exit, GuestRam};

const CODE: (u64, u64) = (0xffff_ffff_8100_0000, 0x4_0000);
const DATA: (u64, u64) = (0xffff_ffff_8200_0000, 0x5_0000);
/// Other page tables, by which other code lies where [`CODE`] does.
const OTHER_ROOT: u64 = 0x2_0000;
const OTHER_CODE: u64 = 0x6_0000;

struct Nobody;

impl Kicker for Nobody {
    fn kick(&self) {}
}

/// `mov eax, value; hlt`
fn code(value: u8) -> [u8; 6] {
    [0xb8, value, 0, 0, 0, 0xf4]
}

fn start() -> Vcpu {
    kernel_state(CODE.0, DATA.0 + 0x800)
}

/// The handles of RAM of two vCPUs.
fn ram() -> [Ram; 2] {
    let ram = Ram::new(2 << 20).expect("memory");
    map(&ram, &[(CODE, 0), (DATA, 0)]);
    ram.write(CODE.1, &code(1));
    let handles = ram.for_vcpus(vec![Arc::new(Nobody), Arc::new(Nobody)]);
    handles.try_into().unwrap_or_else(|_| panic!("two"))
}

fn vcpu(ram: &Ram, machine: &Arc<Machine>) -> Fast {
    let requests = Arc::new(VcpuRequests::default());
    let board = board(ram.clone(), Arc::clone(&requests));
    Fast::new(start(), board, &requests, MODES, (machine, &Placement::default()))
        .expect("an engine")
}

/// Runs a vCPU from the start; what it has in EAX then.
fn result(vcpu: &mut Fast, from: Vcpu) -> u64 {
    vcpu.set_vcpu(from);
    assert_eq!((vcpu.run(u64::MAX), vcpu.failure()), (Exit::Halted, None));
    vcpu.vcpu().gpr[reg::RAX]
}

fn counters(vcpu: &mut Fast) -> CacheCounters {
    vcpu.code.share().lock().cache.counters
}

#[test]
fn what_one_has_translated_the_other_executes() {
    let (ram, machine) = (ram(), Machine::new(2));
    let [mut first, mut second] = ram.each_ref().map(|ram| vcpu(ram, &machine));
    assert_eq!(result(&mut first, start()), 1);
    let made = counters(&mut first).translated;
    assert_eq!(result(&mut second, start()), 1);
    assert_eq!((made, counters(&mut second).translated), (1, 1));
}

#[test]
fn apart_each_translates_for_itself() {
    let options = Options { translations_apart: true, ..OPTIONS };
    let (ram, machine) =
        (ram(), Machine::with(2, Arc::default(), FlushCounts::default(), &options));
    let [mut first, mut second] = ram.each_ref().map(|ram| vcpu(ram, &machine));
    assert_eq!(result(&mut first, start()), 1);
    assert_eq!([counters(&mut first).translated, counters(&mut second).translated], [1, 0]);
    assert_eq!(result(&mut second, start()), 1);
    assert_eq!(counters(&mut second).translated, 1);
}

/// Who hears of a write late does not drop what another one has made since.
#[test]
fn a_write_drops_the_code_once_for_all() {
    let (ram, machine) = (ram(), Machine::new(2));
    let [mut first, mut second] = ram.each_ref().map(|ram| vcpu(ram, &machine));
    assert_eq!([result(&mut first, start()), result(&mut second, start())], [1, 1]);
    ram[0].write(CODE.1, &code(2));
    ram[0].note_write(CODE.1, 6);
    assert_eq!([result(&mut second, start()), result(&mut first, start())], [2, 2]);
    let CacheCounters { translated, dropped, .. } = counters(&mut first);
    assert_eq!((translated, dropped), (2, 1));
}

/// The uppermost page table that leads to other code.
fn other_tables(ram: &Ram) -> Vcpu {
    let mut table = OTHER_ROOT;
    for shift in [39, 30, 21] {
        ram.store64(table + (CODE.0 >> shift & 0x1ff) * 8, (table + 0x1000) | P | RW);
        table += 0x1000;
    }
    ram.store64(table + (CODE.0 >> 12 & 0x1ff) * 8, OTHER_CODE | P | RW);
    ram.write(OTHER_CODE, &code(3));
    Vcpu { cr3: OTHER_ROOT, ..start() }
}

#[test]
fn who_has_other_code_at_the_same_address_translates_apart() {
    let (ram, machine) = (ram(), Machine::new(2));
    let other = other_tables(&ram[0]);
    let [mut first, mut second] = ram.each_ref().map(|ram| vcpu(ram, &machine));
    assert_eq!(result(&mut first, start()), 1);
    // It is about to run again.
    assert!(first.code.share().come_in(Roots::from(&start())));
    assert_eq!(result(&mut second, other), 3);
    assert_eq!((first.statistics.parted, second.statistics.parted), (0, 1));
    assert_eq!([result(&mut first, start()), result(&mut second, start())], [1, 1]);
}

/// As kernels change their page tables before there are other vCPUs.
#[test]
fn where_nobody_else_is_what_is_there_is_made_to_fit() {
    let (ram, machine) = (ram(), Machine::new(2));
    let other = other_tables(&ram[0]);
    let [mut first, mut second] = ram.each_ref().map(|ram| vcpu(ram, &machine));
    for (value, from) in [(1, start()), (3, other), (1, start())] {
        assert_eq!(result(&mut first, from.clone()), value);
        assert_eq!(result(&mut second, from), value);
    }
    assert_eq!(first.statistics.parted + second.statistics.parted, 0);
}

#[test]
fn a_full_translation_is_left_by_one_after_the_other() {
    let (ram, machine) = (ram(), Machine::new(2));
    let [mut first, mut second] = ram.each_ref().map(|ram| vcpu(ram, &machine));
    assert_eq!([result(&mut first, start()), result(&mut second, start())], [1, 1]);
    second.leave_full_translation().expect("another one");
    let same = |first: &mut Fast, second: &mut Fast| {
        Arc::ptr_eq(&first.code.share().translation, &second.code.share().translation)
    };
    assert!(!same(&mut first, &mut second));
    assert_eq!([result(&mut first, start()), result(&mut second, start())], [1, 1]);
    first.leave_full_translation().expect("the other's");
    assert!(same(&mut first, &mut second));
    assert_eq!(result(&mut first, start()), 1);
}

/// A vCPU that is being started flushes what no page tables of its lead to.
#[test]
fn who_is_just_being_started_drops_nothing_of_the_others() {
    let (ram, machine) = (ram(), Machine::new(2));
    let [mut first, mut second] = ram.each_ref().map(|ram| vcpu(ram, &machine));
    assert_eq!(result(&mut first, start()), 1);
    second.set_vcpu(Vcpu::default());
    second.flush();
    second.synchronize().expect("a wedge");
    assert_eq!((counters(&mut first).dropped, result(&mut second, start())), (0, 1));
    // It looks when it comes.
    second.set_vcpu(Vcpu::default());
    second.flush();
    second.synchronize().expect("a wedge");
    ram[0].write(OTHER_CODE, &code(4));
    ram[0].store64(pte(&ram[0]), OTHER_CODE | P | RW);
    assert_eq!(result(&mut second, start()), 4);
}

/// The RIPs of records.
type Seen = Arc<Mutex<Vec<u64>>>;

/// A tap at the code, whose program begins at a step.
fn tapped(seen: &Seen, first: u32) -> Probes {
    let seen = Arc::clone(seen);
    let sink = move |records: Vec<u8>, _| {
        let rips = tap::records(&records).map(|record| record.moment.rip);
        seen.lock().expect("nobody failed").extend(rips);
    };
    let (points, steps) = ([(CODE.0, first)].into(), vec![Step::End.encode(); 8]);
    let taps = Some(Arc::new(Taps { points, steps, sink: Box::new(sink) }));
    Probes { breakpoints: [CODE.0].into(), taps, ..Probes::default() }
}

/// Code that has a tap is all vCPUs'. Their programs are their own, and one that has none goes on.
#[test]
fn a_tap_records_those_that_have_it() {
    let (ram, machine, seen) = (ram(), Machine::new(2), [Seen::default(), Seen::default()]);
    let [mut first, mut second] = ram.each_ref().map(|ram| vcpu(ram, &machine));
    let mut records = |probes: Option<[Probes; 2]>| {
        if let Some([of_first, of_second]) = probes {
            first.set_probes(&of_first);
            second.set_probes(&of_second);
        }
        assert_eq!([result(&mut second, start()), result(&mut first, start())], [1, 1]);
        let seen = seen.each_ref().map(|seen| std::mem::take(&mut *seen.lock().expect("it")).len());
        (seen, counters(&mut first).dropped)
    };
    let (none, taps) = (Probes::default, |n: usize| tapped(&seen[n], 1 + n as u32));
    assert_eq!(records(None), ([0, 0], 0));
    assert_eq!(records(Some([taps(0), none()])), ([1, 0], 1));
    assert_eq!(records(Some([taps(0), taps(1)])), ([1, 1], 1), "it has been dropped for both");
    assert_eq!(records(None), ([1, 1], 1));
    assert_eq!(records(Some([none(), taps(1)])), ([0, 1], 1));
    assert_eq!(records(Some([none(), none()])), ([0, 0], 2));
}

/// GPA of the entry that maps the code.
fn pte(ram: &Ram) -> u64 {
    let down = |table: u64, shift: u64| {
        ram.load64(table + (CODE.0 >> shift & 0x1ff) * 8) & x86::paging::ADDRESS
    };
    [39, 30, 21].into_iter().fold(start().cr3, down) + (CODE.0 >> 12 & 0x1ff) * 8
}
