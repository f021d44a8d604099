//! The local APIC.

use super::*;

const ID: u64 = 0x20;
const TPR: u64 = 0x80;
const PPR: u64 = 0xa0;
pub(super) const EOI: u64 = 0xb0;
const LDR: u64 = 0xd0;
const DFR: u64 = 0xe0;
const ESR: u64 = 0x280;
pub(super) const ICR: u64 = 0x300;
const ICR_HIGH: u64 = 0x310;
const LVT_TIMER: u64 = 0x320;
const LVT_ERROR: u64 = 0x370;
const TIMER_INITIAL: u64 = 0x380;
const TIMER_CURRENT: u64 = 0x390;
const TIMER_DIVIDE: u64 = 0x3e0;

pub(super) const TO_SELF: u32 = 1 << 18;
const TO_ALL: u32 = 2 << 18;
const TO_OTHERS: u32 = 3 << 18;

pub(super) fn machine(cpus: usize) -> Machine {
    let machine = Machine::new(cpus);
    (0..cpus).for_each(|cpu| machine.apic_enable(cpu));
    machine
}

fn pending_of(machine: &Machine) -> Vec<u32> {
    machine.platform.cpus.iter().map(|cpu| cpu.pending()).collect()
}

/// Switches a CPU to x2APIC mode.
pub(super) fn x2apic(machine: &Machine, cpu: usize) -> &CpuInterrupts {
    let cpu = &machine.platform.cpus[cpu];
    cpu.msr_write(0x1b, cpu.msr_read(0x1b).unwrap() | 0x400).unwrap();
    cpu
}

#[test]
fn identity() {
    let machine = Machine::new(2);
    assert_eq!(machine.apic_read(1, ID), 1 << 24);
    assert_eq!(machine.apic_read(1, 0x30), 0x0006_0014);
    assert_eq!(machine.cpu().msr_read(0x1b), Ok(0xfee0_0900));
    assert_eq!(machine.platform.cpus[1].msr_read(0x1b), Ok(0xfee0_0800), "not bootstrap");
    assert_eq!(machine.apic_read(0, DFR), u32::MAX);
    assert_eq!(machine.apic_read(0, 0xf0), 0xff);
    assert_eq!(machine.apic_read(1, 0x350), 0x1_0000);
}

#[test]
fn priorities() {
    let machine = machine(1);
    let cpu = machine.cpu();
    machine.apic_write(0, ICR, TO_SELF | 0x41);
    machine.apic_write(0, ICR, TO_SELF | 0x5f);
    assert_eq!(cpu.acknowledge(), Some(0x5f));
    assert_eq!(machine.apic_read(0, PPR), 0x50);
    assert_eq!(cpu.acknowledge(), None, "0x41 waits for 0x5f to end");
    machine.apic_write(0, ICR, TO_SELF | 0x5e);
    assert_eq!(cpu.pending(), 0, "same class");
    machine.apic_write(0, ICR, TO_SELF | 0x60);
    assert_eq!(cpu.acknowledge(), Some(0x60));
    machine.apic_write(0, EOI, 0);
    machine.apic_write(0, EOI, 0);
    assert_eq!(cpu.acknowledge(), Some(0x5e));
    machine.apic_write(0, EOI, 0);
    cpu.set_cr8(4);
    assert_eq!((machine.apic_read(0, TPR), cpu.cr8(), cpu.pending()), (0x40, 4, 0));
    machine.apic_write(0, TPR, 0x3f);
    assert_eq!(machine.apic_read(0, PPR), 0x3f);
    assert_eq!(cpu.acknowledge(), Some(0x41));
    machine.apic_write(0, EOI, 0);
    machine.apic_write(0, EOI, 0);
    assert_eq!(cpu.pending(), 0);
}

#[test]
fn request_and_service_registers() {
    let machine = machine(1);
    machine.apic_write(0, ICR, TO_SELF | 0xe3);
    assert_eq!(machine.apic_read(0, 0x270), 1 << 3);
    machine.cpu().acknowledge();
    assert_eq!((machine.apic_read(0, 0x270), machine.apic_read(0, 0x170)), (0, 1 << 3));
}

#[test]
fn shorthands_and_destinations() {
    let machine = machine(3);
    let int = pending::INTERRUPT;
    let drain = || {
        machine.platform.cpus.iter().enumerate().for_each(|(i, cpu)| {
            cpu.acknowledge();
            machine.apic_write(i, EOI, 0);
        })
    };
    for (command, high, expected) in [
        (TO_SELF, 0, [0, int, 0]),
        (TO_ALL, 0, [int, int, int]),
        (TO_OTHERS, 0, [int, 0, int]),
        (0, 2 << 24, [0, 0, int]),
        (0, 0xff << 24, [int, int, int]),
        (0, 7 << 24, [0, 0, 0]),
    ] {
        machine.apic_write(1, ICR_HIGH, high);
        machine.apic_write(1, ICR, command | 0x44);
        assert_eq!(pending_of(&machine), expected, "{command:#x} {high:#x}");
        drain();
    }
}

#[test]
fn logical_destinations() {
    let machine = machine(3);
    let int = pending::INTERRUPT;
    (0..3).for_each(|cpu| machine.apic_write(cpu, LDR, 1 << (24 + cpu)));
    machine.apic_write(0, ICR_HIGH, 0b110 << 24);
    machine.apic_write(0, ICR, 0x844);
    assert_eq!(pending_of(&machine), [0, int, int], "flat");
    let machine = self::machine(3);
    for (cpu, ldr) in [(0, 0x11), (1, 0x12), (2, 0x21)] {
        machine.apic_write(cpu, DFR, 0x0fff_ffff);
        machine.apic_write(cpu, LDR, ldr << 24);
    }
    machine.apic_write(0, ICR_HIGH, 0x13 << 24);
    machine.apic_write(0, ICR, 0x844);
    assert_eq!(pending_of(&machine), [int, int, 0], "cluster");
}

#[test]
fn lowest_priority_goes_to_one() {
    let machine = machine(3);
    machine.apic_write(0, TPR, 0x30);
    machine.apic_write(2, TPR, 0x20);
    machine.apic_write(1, TPR, 0x40);
    machine.apic_write(0, ICR_HIGH, 0xff << 24);
    machine.apic_write(0, ICR, 0x155);
    assert_eq!(pending_of(&machine), [0, 0, pending::INTERRUPT]);
}

/// A CPU takes the first at once and keeps another; further ones are lost.
#[test]
fn two_nmis_wait() {
    let machine = machine(2);
    let other = &machine.platform.cpus[1];
    machine.apic_write(0, ICR_HIGH, 1 << 24);
    (0..3).for_each(|_| machine.apic_write(0, ICR, 0x400));
    assert_eq!([(); 3].map(|()| other.take_nmi()), [true, true, false]);
    assert_eq!(other.pending(), 0);
    (0..3).for_each(|_| machine.apic_write(0, ICR, 0x400));
    other.nmi_ended();
    assert_eq!([(); 2].map(|()| other.take_nmi()), [true, false], "one came while the handler ran");
}

#[test]
fn nmi_init_and_start_up() {
    let machine = machine(2);
    let other = &machine.platform.cpus[1];
    machine.apic_write(0, ICR_HIGH, 1 << 24);
    machine.apic_write(0, ICR, 0x400);
    assert_eq!(other.pending(), pending::NMI);
    assert!(other.take_nmi() && !other.take_nmi());
    machine.apic_write(1, TPR, 0x20);
    machine.apic_write(0, ICR, 0xc500);
    machine.apic_write(0, ICR, 0x8500);
    assert_eq!(other.pending(), pending::INIT);
    assert_eq!(machine.apic_read(1, TPR), 0);
    assert!(other.take_init() && !other.take_init(), "de-assert does nothing");
    machine.apic_write(0, ICR, 0x69a);
    machine.apic_write(0, ICR, 0x69a);
    assert_eq!(other.pending(), pending::START_UP);
    assert_eq!(other.take_start_up(), Some(0x9a));
    assert_eq!(other.take_start_up(), None);
    assert_eq!(machine.kicks[1].count(), 3);
}

#[test]
fn disabled_by_software_it_takes_no_interrupts() {
    let machine = machine(1);
    machine.apic_write(0, LVT_TIMER, 0x30);
    machine.apic_write(0, 0xf0, 0xff);
    assert_eq!(machine.apic_read(0, LVT_TIMER), 0x1_0030, "LVTs are masked");
    machine.apic_write(0, LVT_TIMER, 0x31);
    assert_eq!(machine.apic_read(0, LVT_TIMER), 0x1_0031, "and stay so");
    machine.apic_write(0, ICR, TO_SELF | 0x41);
    assert_eq!(machine.cpu().pending(), 0);
    machine.apic_write(0, ICR, TO_SELF | 0x400);
    assert_eq!(machine.cpu().pending(), pending::NMI, "NMIs pass");
}

#[test]
fn errors() {
    let machine = machine(1);
    machine.apic_write(0, LVT_ERROR, 0xfe);
    machine.apic_write(0, ICR, TO_SELF | 0x0f);
    assert_eq!(machine.cpu().acknowledge(), Some(0xfe));
    machine.apic_write(0, EOI, 0);
    assert_eq!(machine.apic_read(0, ESR), 0, "latched by a write only");
    machine.apic_write(0, ESR, 0);
    assert_eq!(machine.apic_read(0, ESR), 1 << 5);
    assert_eq!(machine.apic_read(0, 0x3a0), 0);
    machine.apic_write(0, ESR, 0);
    assert_eq!(machine.apic_read(0, ESR), 1 << 7);
    assert_eq!(machine.cpu().acknowledge(), Some(0xfe));
    bus::MsiSink::send(&machine.platform.interrupts, 0xfee0_0000, 5);
    machine.apic_write(0, ESR, 0);
    assert_eq!(machine.apic_read(0, ESR), 1 << 6);
}

#[test]
fn apic_base_moves_and_disables() {
    let machine = machine(1);
    let cpu = machine.cpu();
    assert!(cpu.claims(0xfee0_0ff0) && !cpu.claims(0xfee0_1000));
    cpu.msr_write(0x1b, 0xfed4_0900).unwrap();
    assert!(cpu.claims(0xfed4_0000) && !cpu.claims(0xfee0_0000));
    for bad in [0xfee0_0901, 0xfee0_0b00, 1 << 46 | 0xfee0_0900, 0xfee0_0500] {
        assert_eq!(cpu.msr_write(0x1b, bad), Err(x86::Fault::gp(0)), "{bad:#x}");
    }
    machine.apic_write(0, TPR, 0x20);
    cpu.msr_write(0x1b, 0xfee0_0100).unwrap();
    assert!(!cpu.claims(0xfee0_0000) && !cpu.apic_enabled());
    assert!(cpu.msr_write(0x1b, 0xfee0_0d00).is_err(), "disabled to x2APIC");
    cpu.msr_write(0x1b, 0xfee0_0900).unwrap();
    assert_eq!((machine.apic_read(0, TPR), machine.apic_read(0, 0xf0)), (0, 0xff));
    cpu.msr_write(0x1b, 0xfee0_0d00).unwrap();
    assert!(!cpu.claims(0xfee0_0000), "no MMIO in x2APIC mode");
    assert!(cpu.msr_write(0x1b, 0xfee0_0900).is_err(), "x2APIC to xAPIC");
    cpu.msr_write(0x1b, 0xfee0_0100).unwrap();
}

#[test]
fn x2apic_registers() {
    let machine = machine(2);
    let cpu = &machine.platform.cpus[1];
    assert!(cpu.msr_read(0x802).is_err(), "not in xAPIC mode");
    x2apic(&machine, 1);
    assert_eq!(cpu.msr_read(0x802), Ok(1));
    assert_eq!(cpu.msr_read(0x80d), Ok(2), "logical ID");
    assert_eq!(cpu.msr_read(0x80f), Ok(0x1ff), "registers are kept");
    cpu.msr_write(0x808, 0x20).unwrap();
    assert_eq!(cpu.cr8(), 2);
    for absent in [0x800, 0x80e, 0x809, 0x831, 0x83a, 0x840, 0x8ff] {
        assert!(cpu.msr_read(absent).is_err(), "{absent:#x}");
        assert!(cpu.msr_write(absent, 0).is_err(), "{absent:#x}");
    }
    for read_only in [0x802, 0x803, 0x80a, 0x80d, 0x810, 0x827, 0x839] {
        assert!(cpu.msr_read(read_only).is_ok(), "{read_only:#x}");
        assert!(cpu.msr_write(read_only, 0).is_err(), "{read_only:#x}");
    }
    for write_only in [0x80b, 0x83f] {
        assert!(cpu.msr_read(write_only).is_err());
    }
    for (register, bad) in [
        (0x808, 0x100),
        (0x830, 1 << 20),
        (0x80b, 1),
        (0x828, 1),
        (0x832, 1 << 20),
        (0x80f, 1 << 12),
        (0x832, 1 << 14),
        (0x835, 1 << 11),
    ] {
        assert!(cpu.msr_write(register, bad).is_err(), "{register:#x}");
    }
    for lint in [0x835, 0x836] {
        cpu.msr_write(lint, 0x5700).unwrap();
        assert_eq!(cpu.msr_read(lint), Ok(0x700), "status bits are read-only");
    }
}

#[test]
fn x2apic_interrupts() {
    let machine = machine(3);
    (0..3).for_each(|cpu| {
        x2apic(&machine, cpu);
    });
    let [a, b, c] = &machine.platform.cpus[..] else { panic!() };
    a.msr_write(0x830, 2 << 32 | 0x51).unwrap();
    assert_eq!(c.acknowledge(), Some(0x51));
    c.msr_write(0x80b, 0).unwrap();
    a.msr_write(0x830, 0xffff_ffff << 32 | 0x52).unwrap();
    assert_eq!([a, b, c].map(|cpu| cpu.acknowledge()), [Some(0x52); 3]);
    for cpu in [a, b, c] {
        cpu.msr_write(0x80b, 0).unwrap();
    }
    a.msr_write(0x830, 0b110 << 32 | 0x853).unwrap();
    assert_eq!([a, b, c].map(|cpu| cpu.acknowledge()), [None, Some(0x53), Some(0x53)], "logical");
    a.msr_write(0x830, 0xff << 32 | 0x54).unwrap();
    assert_eq!(a.acknowledge(), None, "0xff is no broadcast here");
    a.msr_write(0x83f, 0x55).unwrap();
    assert_eq!(a.acknowledge(), Some(0x55), "self IPI");
}

#[test]
fn timer_one_shot() {
    let machine = machine(1);
    machine.apic_write(0, TIMER_DIVIDE, 0xb);
    machine.apic_write(0, LVT_TIMER, 0xec);
    machine.apic_write(0, TIMER_INITIAL, 25_000);
    assert_eq!(machine.platform.timers.deadline(), Some(1_000_000), "25 MHz");
    machine.pass(400_000);
    assert_eq!(machine.apic_read(0, TIMER_CURRENT), 15_000);
    machine.pass(599_999);
    assert_eq!((machine.apic_read(0, TIMER_CURRENT), machine.cpu().pending()), (1, 0));
    machine.pass(1);
    assert_eq!(machine.apic_read(0, TIMER_CURRENT), 0);
    assert_eq!(machine.cpu().acknowledge(), Some(0xec));
    machine.apic_write(0, EOI, 0);
    machine.pass(10_000_000);
    assert_eq!(machine.cpu().pending(), 0);
    machine.apic_write(0, LVT_TIMER, 0x2_00ec);
    assert_eq!(machine.apic_read(0, TIMER_CURRENT), 0, "a change of mode does not restart it");
    assert_eq!(machine.apic_read(0, TIMER_INITIAL), 25_000);
}

#[test]
fn timer_dividers() {
    let machine = machine(1);
    for (code, divider) in [(0, 2), (1, 4), (2, 8), (3, 16), (8, 32), (9, 64), (0xa, 128), (0xb, 1)]
    {
        machine.apic_write(0, TIMER_DIVIDE, code);
        machine.apic_write(0, TIMER_INITIAL, 1000);
        machine.pass(40 * divider * 400);
        assert_eq!(machine.apic_read(0, TIMER_CURRENT), 600, "divider {divider}");
    }
}

#[test]
fn timer_periodic() {
    let machine = machine(1);
    machine.apic_write(0, TIMER_DIVIDE, 0xb);
    machine.apic_write(0, LVT_TIMER, 0x2_00ec);
    machine.apic_write(0, TIMER_INITIAL, 2500); // 100 us
    assert_eq!(machine.count_interrupts(0xec, 1000, 50_000), 500);
    machine.pass_unseen(1_030_000);
    assert_eq!(machine.apic_read(0, TIMER_CURRENT), 1750, "it counts although nobody woke");
    machine.platform.timers.expire(machine.now());
    assert!(machine.cpu().acknowledge().is_some());
    machine.apic_write(0, EOI, 0);
    assert_eq!(machine.platform.timers.deadline(), Some(machine.now() + 70_000), "in phase");
    machine.apic_write(0, LVT_TIMER, 0xec);
    assert_eq!(machine.apic_read(0, TIMER_CURRENT), 1750, "now one-shot, it counts on");
    assert_eq!(machine.count_interrupts(0xec, 10, 100_000), 1);
    machine.apic_write(0, TIMER_INITIAL, 2500);
    machine.apic_write(0, TIMER_INITIAL, 0);
    assert_eq!(machine.platform.timers.deadline(), None, "zero stops it");
}

#[test]
fn timer_too_fast_to_serve() {
    let machine = machine(1);
    machine.apic_write(0, TIMER_DIVIDE, 0xb);
    machine.apic_write(0, LVT_TIMER, 0x2_00ec);
    machine.apic_write(0, TIMER_INITIAL, 1);
    assert!(machine.count_interrupts(0xec, 1000, 1000) <= 21, "at most one in 50 us");
}

#[test]
fn timer_masked_still_counts() {
    let machine = machine(1);
    machine.apic_write(0, LVT_TIMER, 0x1_00ec);
    machine.apic_write(0, TIMER_INITIAL, 1000);
    machine.pass(40_000);
    assert_eq!(machine.apic_read(0, TIMER_CURRENT), 500);
    machine.pass(40_000);
    assert_eq!(machine.cpu().pending(), 0);
}

#[test]
fn timer_tsc_deadline() {
    let machine = machine(1);
    let cpu = machine.cpu();
    cpu.msr_write(0x6e0, 1).unwrap();
    assert_eq!(cpu.msr_read(0x6e0), Ok(0), "ignored in other modes");
    machine.apic_write(0, LVT_TIMER, 0x4_00ec);
    machine.apic_write(0, TIMER_INITIAL, 5);
    assert_eq!(machine.apic_read(0, TIMER_CURRENT), 0, "no counts in this mode");
    cpu.msr_write(0x6e0, 20_001).unwrap();
    assert_eq!(cpu.msr_read(0x6e0), Ok(20_001));
    machine.pass(10_000);
    assert_eq!(cpu.pending(), 0, "a tick is missing");
    machine.pass(1);
    assert_eq!((cpu.acknowledge(), cpu.msr_read(0x6e0)), (Some(0xec), Ok(0)));
    machine.apic_write(0, EOI, 0);
    cpu.msr_write(0x6e0, 7).unwrap();
    assert_eq!(cpu.acknowledge(), Some(0xec), "the past is now");
    machine.apic_write(0, EOI, 0);
    cpu.msr_write(0x6e0, 90_000).unwrap();
    machine.apic_write(0, LVT_TIMER, 0xec);
    machine.pass(1_000_000);
    assert_eq!(cpu.pending(), 0, "leaving the mode disarms");
    machine.apic_write(0, LVT_TIMER, 0x4_00ec);
    cpu.msr_write(0x6e0, u64::MAX).unwrap();
    assert_eq!(cpu.pending(), 0);
}

#[test]
fn only_earlier_deadlines_wake_the_timer_thread() {
    let machine = machine(1);
    machine.apic_write(0, LVT_TIMER, 0xec);
    let arm = |count| machine.apic_write(0, TIMER_INITIAL, count);
    let rearms = || machine.rearms.count();
    let before = rearms();
    arm(1000);
    assert_eq!(rearms(), before + 1);
    machine.platform.timers.deadline();
    arm(2000);
    arm(0);
    arm(1500);
    assert_eq!(rearms(), before + 1, "it wakes before that anyway");
    machine.platform.timers.deadline();
    arm(1400);
    assert_eq!(rearms(), before + 2, "it would now sleep to the later deadline");
}

#[test]
fn a_due_interrupt_comes_before_a_new_count() {
    let machine = machine(1);
    machine.apic_write(0, LVT_TIMER, 0xec);
    machine.apic_write(0, TIMER_INITIAL, 1000);
    machine.pass_unseen(1_000_000);
    machine.apic_write(0, TIMER_INITIAL, 1000);
    assert_eq!(machine.cpu().acknowledge(), Some(0xec));
    machine.apic_write(0, EOI, 0);
    machine.pass_unseen(80_000);
    assert_eq!(machine.apic_read(0, TIMER_CURRENT), 0);
    assert_eq!(machine.cpu().acknowledge(), Some(0xec), "zero is seen no earlier");
}

#[test]
fn periods_missed_are_made_up_for() {
    let machine = Machine::new(1);
    machine.apic_enable(0);
    machine.apic_write(0, 0x3e0, 0xb);
    machine.apic_write(0, 0x320, 1 << 17 | 0x40);
    machine.apic_write(0, 0x380, 25_000_000 / 250);
    machine.pass(0);
    let period = machine.platform.timers.deadline().expect("armed");
    machine.oversleep(period * 5);
    assert_eq!(machine.burst(0x40), 5);
    machine.oversleep(period * 100_000);
    assert_eq!(machine.burst(0x40), 101, "bounded");
    machine.oversleep(period * 5);
    machine.apic_write(0, 0x320, 0x40);
    assert_eq!(machine.burst(0x40), 1, "a mode set anew owes nothing");
}
