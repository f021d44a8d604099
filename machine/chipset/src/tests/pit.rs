//! The 8254, as calibration loops and tick handlers use it.

use super::*;
use crate::pit::HZ;

/// Nanoseconds of `ticks`, rounded up.
fn ns(ticks: u64) -> u64 {
    (ticks * 1_000_000_000).div_ceil(HZ)
}

fn machine() -> Machine {
    let machine = Machine::new(1);
    machine.apic_enable(0);
    machine.route(2, 0x30);
    machine
}

/// Writes a control word and a two-byte count.
fn program(machine: &Machine, channel: u8, mode: u8, count: u16) {
    machine.outb(0x43, channel << 6 | 0x30 | mode << 1);
    count.to_le_bytes().iter().for_each(|byte| machine.outb(0x40 + u64::from(channel), *byte));
}

/// Latches and reads a two-byte count.
fn count(machine: &Machine, channel: u8) -> u16 {
    machine.outb(0x43, channel << 6);
    let port = 0x40 + u64::from(channel);
    u16::from_le_bytes([machine.inb(port), machine.inb(port)])
}

/// Latches and reads a status byte.
fn status(machine: &Machine, channel: u8) -> u8 {
    machine.outb(0x43, 0xe0 | 2 << channel);
    machine.inb(0x40 + u64::from(channel))
}

#[test]
fn periodic_tick() {
    for mode in [2, 3] {
        let machine = machine();
        program(&machine, 0, mode, 11_932); // 100 Hz
        assert_eq!(machine.platform.timers.deadline(), Some(ns(11_932)));
        assert_eq!(machine.count_interrupts(0x30, 1000, 1_000_000), 99);
    }
}

#[test]
fn count_zero_is_65536() {
    let machine = machine();
    program(&machine, 0, 2, 0);
    assert_eq!(machine.platform.timers.deadline(), Some(ns(65_536)));
}

#[test]
fn one_shot_interrupts_once_and_counts_on() {
    let machine = machine();
    program(&machine, 0, 0, 1000);
    assert_eq!(status(&machine, 0) & 0x80, 0);
    machine.pass(ns(400));
    assert_eq!(count(&machine, 0), 600);
    assert_eq!(machine.count_interrupts(0x30, 100, ns(100)), 1);
    assert_eq!(status(&machine, 0), 0xb0);
    assert_eq!(count(&machine, 0), 0u16.wrapping_sub(9400));
    program(&machine, 0, 0, 1000);
    assert_eq!(machine.count_interrupts(0x30, 20, ns(100)), 1);
}

#[test]
fn mode_2_counts_down_to_one_and_mode_3_by_twos() {
    let machine = machine();
    program(&machine, 0, 2, 100);
    program(&machine, 1, 3, 100);
    machine.pass(ns(99));
    assert_eq!((count(&machine, 0), count(&machine, 1)), (1, 2));
    assert_eq!(status(&machine, 0) & 0x80, 0, "low for the last tick");
    assert_eq!(status(&machine, 1) & 0x80, 0, "low for the second half");
    machine.pass(ns(1) + 1);
    assert_eq!((count(&machine, 0), count(&machine, 1)), (100, 100));
    assert_eq!((status(&machine, 0) & 0x80, status(&machine, 1) & 0x80), (0x80, 0x80));
}

#[test]
fn latch_holds_until_read() {
    let machine = machine();
    program(&machine, 0, 2, 10_000);
    machine.outb(0x43, 0x00);
    machine.pass(ns(5000));
    machine.outb(0x43, 0x00);
    assert_eq!([machine.inb(0x40), machine.inb(0x40)], 10_000u16.to_le_bytes());
    assert_eq!(count(&machine, 0), 5000);
    machine.outb(0x43, 0xc2); // read-back: status and count
    assert_eq!(machine.inb(0x40), 0xb4);
    assert_eq!([machine.inb(0x40), machine.inb(0x40)], 5000u16.to_le_bytes());
    machine.outb(0x43, 0x34);
    assert_eq!(status(&machine, 0) & 0x40, 0x40, "no count yet");
}

#[test]
fn single_byte_access() {
    let machine = machine();
    machine.outb(0x43, 0x14);
    machine.outb(0x40, 200);
    assert_eq!((machine.inb(0x40), machine.inb(0x40)), (200, 200));
    machine.outb(0x43, 0x24);
    machine.outb(0x40, 2);
    assert_eq!(machine.platform.timers.deadline(), Some(ns(512)));
    assert_eq!(machine.inb(0x40), 2);
}

#[test]
fn bcd() {
    let machine = machine();
    machine.outb(0x43, 0x35);
    [0x34, 0x12].iter().for_each(|byte| machine.outb(0x40, *byte));
    machine.pass(ns(235));
    assert_eq!(count(&machine, 0), 0x0999);
}

/// Linux, pit_calibrate_tsc: gate channel 2 on, mode 0, poll OUT2 at port 0x61.
#[test]
fn calibration_by_output_2() {
    let machine = machine();
    machine.outb(0x61, machine.inb(0x61) & !2 | 1);
    program(&machine, 2, 0, 11_931);
    let polls = (1..).take_while(|_| {
        machine.pass(1000);
        machine.inb(0x61) & 0x20 == 0
    });
    let us = polls.count() as u64 + 1;
    assert_eq!(us, ns(11_931).div_ceil(1000));
}

/// Linux, quick_pit_calibrate: the high byte of channel 2 in mode 0, read unlatched.
#[test]
fn calibration_by_the_high_byte() {
    let machine = machine();
    machine.outb(0x61, 1);
    program(&machine, 2, 0, 0xffff);
    let high = || {
        machine.inb(0x42);
        machine.inb(0x42)
    };
    for expected in (0xf0..=0xff).rev() {
        assert_eq!(high(), expected);
        machine.pass(ns(256));
    }
}

#[test]
fn gate_2() {
    let machine = machine();
    program(&machine, 2, 0, 1000);
    machine.pass(ns(500));
    assert_eq!(count(&machine, 2), 1000, "the gate is off");
    machine.outb(0x61, 1);
    machine.pass(ns(300));
    machine.outb(0x61, 0);
    machine.pass(ns(500));
    assert_eq!(count(&machine, 2), 700, "mode 0 pauses");
    machine.outb(0x61, 1);
    machine.pass(ns(100));
    assert_eq!(count(&machine, 2), 600);
    program(&machine, 2, 1, 1000);
    machine.pass(ns(50));
    assert_eq!(status(&machine, 2) & 0x80, 0x80, "mode 1 waits for its trigger");
    machine.outb(0x61, 0);
    machine.outb(0x61, 1);
    assert_eq!(machine.inb(0x61) & 0x20, 0);
    machine.pass(ns(1000));
    assert_eq!(machine.inb(0x61) & 0x20, 0x20);
}

#[test]
fn refresh_toggles() {
    let machine = machine();
    let toggles = (0..1000).filter(|_| {
        let before = machine.inb(0x61) & 0x10;
        machine.pass(1000);
        machine.inb(0x61) & 0x10 != before
    });
    assert_eq!(toggles.count(), 1_000_000 / 15_085);
}

#[test]
fn a_due_tick_survives_other_accesses() {
    let machine = machine();
    program(&machine, 0, 2, 1000);
    machine.pass_unseen(ns(1500));
    program(&machine, 2, 0, 50);
    assert_eq!(machine.cpu().acknowledge(), Some(0x30));
    assert_eq!(machine.platform.timers.deadline(), Some(ns(2000)));
}

#[test]
fn too_fast_to_serve() {
    let machine = machine();
    program(&machine, 0, 2, 1);
    assert!(machine.count_interrupts(0x30, 1000, 1000) <= 21, "at most one in 50 us");
}

/// A host that was away: the guest still gets every tick, one when it takes the other.
#[test]
fn ticks_missed_are_made_up_for() {
    let machine = machine();
    program(&machine, 0, 2, 4772); // 250 Hz
    machine.oversleep(ns(4772 * 5));
    assert_eq!(machine.burst(0x30), 5);
    machine.oversleep(ns(4772));
    machine.oversleep(ns(4772));
    assert_eq!(machine.burst(0x30), 2, "the second came while the first waited");
    assert_eq!(machine.count_interrupts(0x30, 1000, 1_000_000), 250);
}

/// As Linux has it before it finds the I/O APIC.
#[test]
fn ticks_missed_are_made_up_for_by_the_8259() {
    let machine = Machine::new(1);
    [(0x20, 0x11), (0x21, 0x30), (0x21, 4), (0x21, 1), (0x21, 0xfe)]
        .iter()
        .for_each(|(port, value)| machine.outb(*port, *value));
    program(&machine, 0, 2, 4772);
    machine.oversleep(ns(4772 * 5));
    let taken = (0..10).filter(|_| {
        let vector = machine.cpu().acknowledge();
        machine.outb(0x20, 0x20);
        vector == Some(0x30)
    });
    assert_eq!(taken.count(), 5);
}

#[test]
fn ticks_owed_are_bounded_and_forgotten() {
    let machine = machine();
    program(&machine, 0, 2, 4772);
    machine.oversleep(ns(4772 * 100_000));
    assert_eq!(machine.burst(0x30), 101);
    machine.oversleep(ns(4772 * 5));
    program(&machine, 0, 0, 4772);
    assert_eq!(machine.burst(0x30), 1, "a clock set anew owes nothing");
    program(&machine, 0, 2, 4772);
    machine.route(2, 1 << 16 | 0x30);
    machine.oversleep(ns(4772 * 5));
    machine.route(2, 0x30);
    assert_eq!(machine.burst(0x30), 0, "ticks nothing takes are lost");
}

/// A guest that cannot follow its clock must still get on.
#[test]
fn fast_ticks_merge() {
    let machine = machine();
    program(&machine, 0, 2, 200);
    machine.oversleep(ns(200 * 50));
    assert_eq!(machine.burst(0x30), 1);
}
