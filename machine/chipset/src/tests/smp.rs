//! Several CPUs, devices and the timer thread at once: nothing is lost and nobody waits for
//! another in a circle.

use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::{Duration, Instant};

use super::*;

const ROUNDS: usize = 3000;
/// Something was lost when nothing has happened for that long; a busy host may be slow.
const STILL: Duration = Duration::from_secs(20);
const PING: u8 = 0x41;
const LEVEL: u8 = 0x55;
const TICK: u8 = 0x66;
const LEVEL_GSI: u32 = 20;

/// What the CPUs have seen.
#[derive(Default)]
struct Seen {
    pings: [AtomicUsize; 2],
    levels: AtomicUsize,
    ticks: AtomicUsize,
    over: AtomicBool,
}

/// Lets the others run: with more of them than host CPUs, who merely yields soon has the CPU again.
fn rest() {
    thread::sleep(Duration::from_micros(10));
}

/// A CPU's handlers: a ping is answered, a level is withdrawn at its device.
fn run_cpu(machine: &Machine, cpu: usize, line: &dyn bus::InterruptLine, seen: &Seen) {
    let interrupts = &machine.platform.cpus[cpu];
    while !seen.over.load(Ordering::Relaxed) {
        if interrupts.pending() == 0 {
            rest();
            continue;
        }
        match interrupts.acknowledge() {
            Some(PING) => {
                seen.pings[cpu].fetch_add(1, Ordering::Relaxed);
                interrupts.msr_write(0x830, (1 - cpu as u64) << 32 | u64::from(PING)).unwrap();
            }
            Some(LEVEL) => {
                line.set(false);
                seen.levels.fetch_add(1, Ordering::Release);
            }
            Some(TICK) => drop(seen.ticks.fetch_add(1, Ordering::Relaxed)),
            Some(other) => panic!("vector {other:#x}"),
            None => continue,
        }
        interrupts.msr_write(0x80b, 0).unwrap();
    }
}

/// Asserts its line anew whenever the last interrupt was served.
fn run_device(line: &dyn bus::InterruptLine, seen: &Seen) {
    for round in 0..ROUNDS {
        line.set(true);
        while seen.levels.load(Ordering::Acquire) <= round && !seen.over.load(Ordering::Relaxed) {
            rest();
        }
    }
}

fn run_timer(machine: &Machine, seen: &Seen) {
    while !seen.over.load(Ordering::Relaxed) {
        machine.pass(10_000);
        rest();
    }
}

#[test]
fn pings_levels_and_ticks_are_never_lost() {
    let machine = Machine::new(2);
    for cpu in &machine.platform.cpus {
        cpu.msr_write(0x1b, cpu.msr_read(0x1b).unwrap() | 0x400).unwrap();
        cpu.msr_write(0x80f, 0x1ff).unwrap();
        cpu.msr_write(0x832, 2 << 16 | u64::from(TICK)).unwrap();
        cpu.msr_write(0x838, 10_000).unwrap();
    }
    machine.route(LEVEL_GSI, 0x8900 | u32::from(LEVEL));
    machine.ioapic_write(0x11 + LEVEL_GSI * 2, 0xff << 24);
    let line = machine.platform.interrupts.line(LEVEL_GSI).unwrap();
    let seen = Seen::default();
    machine.platform.cpus[1].msr_write(0x830, u64::from(PING)).unwrap();
    let least = || {
        let counts = seen.pings.iter().chain([&seen.levels, &seen.ticks]);
        counts.map(|count| count.load(Ordering::Relaxed)).min().unwrap_or(0)
    };
    thread::scope(|scope| {
        scope.spawn(|| run_cpu(&machine, 0, &*line, &seen));
        scope.spawn(|| run_cpu(&machine, 1, &*line, &seen));
        scope.spawn(|| run_device(&*line, &seen));
        scope.spawn(|| run_timer(&machine, &seen));
        let mut last = (0, Instant::now());
        while last.0 < ROUNDS && last.1.elapsed() < STILL {
            thread::sleep(Duration::from_millis(5));
            if least() > last.0 {
                last = (least(), Instant::now());
            }
        }
        seen.over.store(true, Ordering::Relaxed);
    });
    assert!(
        least() >= ROUNDS,
        "pings {:?}, levels {:?}, ticks {:?}",
        seen.pings,
        seen.levels,
        seen.ticks
    );
}

#[test]
fn a_hypercall_interrupts_one_cpu_by_its_identifier() {
    const NMI: u32 = 4 << 8;
    const INIT: u32 = 5 << 8;
    let machine = Machine::new(2);
    let [first, second] = &machine.platform.cpus[..] else { panic!("two") };
    second.msr_write(0x1b, 0xfee0_0c00).unwrap();
    second.msr_write(0x80f, 0x1ff).unwrap();
    assert!(first.send(1, PING.into()));
    assert!(first.send(1, NMI));
    assert_eq!((second.acknowledge(), second.take_nmi()), (Some(PING), true));
    assert!(!first.send(1, INIT) && !second.take_init(), "that is not for hypercalls");
    for nobody in [2, u32::MAX] {
        assert!(!first.send(nobody, PING.into()));
    }
    assert_eq!((first.pending(), second.pending()), (0, 0));
}
