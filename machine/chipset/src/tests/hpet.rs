//! The HPET.

use super::*;
use crate::hpet::BASE;

const CONFIG: u64 = BASE + 0x10;
const STATUS: u64 = BASE + 0x20;
const COUNTER: u64 = BASE + 0xf0;

fn timer(index: u64) -> u64 {
    BASE + 0x100 + index * 0x20
}

fn comparator(index: u64) -> u64 {
    timer(index) + 8
}

fn machine() -> Machine {
    let machine = Machine::new(1);
    machine.apic_enable(0);
    machine
}

#[test]
fn identity() {
    let machine = machine();
    assert_eq!(machine.read64(BASE), 10_000_000 << 32 | 0x8086_a201);
    assert_eq!(machine.read32(BASE + 4), 10_000_000);
    for index in 0..3 {
        assert_eq!(machine.read64(timer(index)), 0x00ff_0104_0000_0030);
        assert_eq!(machine.read64(comparator(index)), u64::MAX);
    }
    assert_eq!(machine.read64(timer(3)), 0);
}

#[test]
fn counter_runs_while_enabled() {
    let machine = machine();
    machine.pass(1000);
    assert_eq!(machine.read64(COUNTER), 0);
    machine.write64(COUNTER, 0xffff_fff0);
    machine.write64(CONFIG, 1);
    machine.pass(320);
    assert_eq!(machine.read64(COUNTER), 0x1_0000_0010);
    assert_eq!((machine.read32(COUNTER), machine.read32(COUNTER + 4)), (0x10, 1));
    machine.write32(CONFIG, 0);
    machine.pass(1000);
    assert_eq!(machine.read64(COUNTER), 0x1_0000_0010);
}

#[test]
fn one_shot_edge() {
    let machine = machine();
    machine.route(20, 0x50);
    machine.write64(timer(2), 20 << 9 | 1 << 2);
    machine.write64(comparator(2), 1000);
    machine.write64(CONFIG, 1);
    machine.pass(9_999);
    assert_eq!(machine.cpu().pending(), 0);
    machine.pass(1);
    assert_eq!(machine.cpu().acknowledge(), Some(0x50));
    assert_eq!(machine.read64(STATUS), 0, "edges have no status");
    machine.apic_write(0, 0xb0, 0);
    machine.pass(1_000_000);
    assert_eq!(machine.cpu().pending(), 0);
    machine.write64(comparator(2), machine.read64(COUNTER) + 5);
    machine.pass(50);
    assert_eq!(machine.cpu().acknowledge(), Some(0x50));
}

#[test]
fn level_stays_until_cleared() {
    let machine = machine();
    machine.route(16, 0x8050);
    machine.write64(timer(1), 16 << 9 | 1 << 2 | 1 << 1);
    machine.write64(comparator(1), 10);
    machine.write64(CONFIG, 1);
    machine.pass(100);
    assert_eq!(machine.read64(STATUS), 2);
    assert_eq!(machine.cpu().acknowledge(), Some(0x50));
    machine.apic_write(0, 0xb0, 0);
    assert_eq!(machine.cpu().acknowledge(), Some(0x50), "still asserted");
    machine.write64(STATUS, 2);
    machine.apic_write(0, 0xb0, 0);
    assert_eq!((machine.cpu().pending(), machine.read64(STATUS)), (0, 0));
}

/// Linux, hpet_clkevt_set_state_periodic with legacy replacement: SET_VALUE, comparator, period.
#[test]
fn periodic_in_place_of_the_pit() {
    let machine = machine();
    machine.route(2, 0x30);
    machine.outb(0x43, 0x34);
    [0xa9, 0x04].iter().for_each(|byte| machine.outb(0x40, *byte));
    machine.write32(CONFIG, 3);
    machine.write32(timer(0), 0x14c);
    machine.write32(comparator(0), machine.read32(COUNTER).wrapping_add(100_000));
    machine.write32(comparator(0), 100_000);
    assert_eq!(machine.read32(timer(0)) & 0x40, 0, "SET_VALUE is cleared");
    assert_eq!(machine.count_interrupts(0x30, 10_000, 100_000), 1000, "1 kHz, and no PIT");
    assert_eq!(machine.read32(comparator(0)), 100_000 * 1001);
    machine.write32(CONFIG, 1);
    machine.write32(timer(0), 0);
    assert!(machine.count_interrupts(0x30, 100, 1_000_000) >= 99, "the PIT is back");
}

#[test]
fn comparator_in_the_past_waits_for_the_wrap() {
    let machine = machine();
    machine.route(20, 0x50);
    machine.write64(COUNTER, 0xffff_ff00);
    machine.write64(CONFIG, 1);
    machine.write64(timer(2), 20 << 9 | 1 << 8 | 1 << 2);
    machine.write64(comparator(2), 0x10);
    machine.pass(0x10f * 10);
    assert_eq!(machine.cpu().pending(), 0);
    machine.pass(10);
    assert_eq!(machine.cpu().acknowledge(), Some(0x50), "32-bit mode wraps");
}

#[test]
fn a_due_match_survives_other_accesses() {
    let machine = machine();
    machine.route(20, 0x50);
    machine.write64(timer(2), 20 << 9 | 1 << 2);
    machine.write64(comparator(2), 1000);
    machine.write64(CONFIG, 1);
    machine.pass_unseen(20_000);
    machine.write64(timer(1), 0);
    machine.write64(CONFIG, 1);
    assert_eq!(machine.cpu().acknowledge(), Some(0x50));
}

#[test]
fn missed_periods_merge_and_keep_phase() {
    let machine = machine();
    machine.route(20, 0x50);
    machine.write64(timer(0), 20 << 9 | 1 << 2 | 1 << 3 | 1 << 6);
    machine.write64(comparator(0), 100_000);
    machine.write64(comparator(0), 100_000);
    machine.write64(CONFIG, 1);
    machine.pass_unseen(5_500_000);
    assert_eq!(machine.count_interrupts(0x50, 1, 0), 1);
    assert_eq!(machine.platform.timers.deadline(), Some(6_000_000));
}

#[test]
fn unroutable_interrupts_go_nowhere() {
    let machine = machine();
    (0..24).for_each(|pin| machine.route(pin, 0x50));
    machine.write64(timer(2), 9 << 9 | 1 << 2);
    machine.write64(comparator(2), 10);
    machine.write64(CONFIG, 1);
    machine.pass(1000);
    assert_eq!(machine.cpu().pending(), 0);
}

/// Linux's tick at boot: timer 0, periodic, in place of the PIT.
#[test]
fn ticks_missed_are_made_up_for() {
    let machine = machine();
    machine.route(2, 0x30);
    machine.write64(timer(0), 1 << 6 | 1 << 3 | 1 << 2);
    machine.write64(comparator(0), 400_000);
    machine.write64(comparator(0), 400_000);
    machine.write64(CONFIG, 3);
    machine.oversleep(4_000_000 * 5);
    assert_eq!(machine.burst(0x30), 5);
    machine.oversleep(4_000_000);
    machine.oversleep(4_000_000);
    assert_eq!(machine.burst(0x30), 2);
    machine.oversleep(4_000_000 * 5);
    machine.write64(CONFIG, 0);
    assert_eq!(machine.burst(0x30), 1, "a stopped clock owes nothing");
}
