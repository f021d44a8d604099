//! The real-time clock.

use super::*;

fn read(machine: &Machine, register: u8) -> u8 {
    machine.outb(0x70, register);
    machine.inb(0x71)
}

fn write(machine: &Machine, register: u8, value: u8) {
    machine.outb(0x70, register);
    machine.outb(0x71, value);
}

/// Century, year, month, day, weekday, hour, minute, second.
fn date(machine: &Machine) -> [u8; 8] {
    [0x32, 9, 8, 7, 6, 4, 2, 0].map(|register| read(machine, register))
}

fn machine() -> Machine {
    let machine = Machine::new(1);
    machine.apic_enable(0);
    machine.route(8, 0x38);
    machine
}

const SECOND: u64 = 1_000_000_000;

#[test]
fn time_in_every_format() {
    let machine = machine();
    assert_eq!(date(&machine), [0x20, 0x26, 0x03, 0x01, 0x01, 0x12, 0x34, 0x56], "a Sunday");
    write(&machine, 0xb, 0x06);
    assert_eq!(date(&machine), [20, 26, 3, 1, 1, 12, 34, 56]);
    write(&machine, 0xb, 0x04);
    assert_eq!(read(&machine, 4), 0x8c, "12 PM");
    machine.pass(13 * 3600 * SECOND);
    assert_eq!(read(&machine, 4), 1, "1 AM");
    assert_eq!(read(&machine, 0xd), 0x80);
    assert_eq!(machine.inb(0x70), 0xff);
}

#[test]
fn update_in_progress_announces_the_second() {
    let machine = machine();
    machine.pass(SECOND - 244_001);
    assert_eq!((read(&machine, 0xa), read(&machine, 0)), (0x26, 0x56));
    machine.pass(1);
    assert_eq!(read(&machine, 0xa), 0xa6);
    machine.pass(244_000);
    assert_eq!((read(&machine, 0xa), read(&machine, 0)), (0x26, 0x57));
}

#[test]
fn setting_the_time() {
    let machine = machine();
    write(&machine, 0xb, 0x82);
    machine.pass(10 * SECOND);
    assert_eq!(read(&machine, 0), 0x56, "updates are held");
    for (register, value) in
        [(0x32, 0x20), (9, 0x24), (8, 0x02), (7, 0x29), (4, 0x23), (2, 0x59), (0, 0x58)]
    {
        write(&machine, register, value);
    }
    write(&machine, 0xb, 0x02);
    assert_eq!(date(&machine), [0x20, 0x24, 0x02, 0x29, 0x05, 0x23, 0x59, 0x58], "a Thursday");
    machine.pass(2 * SECOND);
    assert_eq!(date(&machine), [0x20, 0x24, 0x03, 0x01, 0x06, 0x00, 0x00, 0x00]);
    write(&machine, 0, 0x30);
    assert_eq!(read(&machine, 0), 0x30, "and without holding updates");
}

#[test]
fn garbage_dates_do_no_harm() {
    let machine = machine();
    for value in [0xff, 0x00, 0x99, 0x7f] {
        for register in [0x32, 9, 8, 7, 6, 4, 2, 0] {
            write(&machine, register, value);
            date(&machine);
        }
    }
}

#[test]
fn update_interrupt() {
    let machine = machine();
    write(&machine, 0xb, 0x12);
    machine.pass(SECOND);
    assert_eq!(machine.cpu().acknowledge(), Some(0x38));
    machine.apic_write(0, 0xb0, 0);
    machine.pass(3 * SECOND);
    assert_eq!(machine.cpu().pending(), 0, "the line stays up until the flags are read");
    assert_eq!(read(&machine, 0xc), 0xd0, "the periodic flag is set, not enabled");
    assert_eq!(read(&machine, 0xc), 0);
    machine.pass(SECOND);
    assert_eq!(machine.cpu().acknowledge(), Some(0x38));
}

#[test]
fn periodic_interrupt() {
    let machine = machine();
    let take = |machine: &Machine| {
        let taken = machine.cpu().acknowledge();
        machine.apic_write(0, 0xb0, 0);
        read(machine, 0xc);
        taken.is_some()
    };
    write(&machine, 0xb, 0x42);
    let ticks = (0..10_000).filter(|_| {
        machine.pass(100_000);
        take(&machine)
    });
    assert_eq!(ticks.count(), 1024);
    write(&machine, 0xa, 0x2f); // 2 Hz
    let ticks = (0..100).filter(|_| {
        machine.pass(SECOND / 10);
        take(&machine)
    });
    assert_eq!(ticks.count(), 20);
    write(&machine, 0xa, 0x20);
    assert_eq!(machine.platform.timers.deadline(), None, "rate 0 is off");
}

#[test]
fn alarm() {
    let machine = machine();
    [(1, 0x00), (3, 0x36), (5, 0xff)].iter().for_each(|(r, v)| write(&machine, *r, *v));
    write(&machine, 0xb, 0x22);
    machine.pass(63 * SECOND);
    assert_eq!(machine.cpu().pending(), 0);
    machine.pass(SECOND);
    assert_eq!(machine.cpu().acknowledge(), Some(0x38));
    machine.apic_write(0, 0xb0, 0);
    assert_eq!(read(&machine, 0xc) & 0xa0, 0xa0);
    machine.pass(3600 * SECOND);
    assert_eq!(machine.cpu().acknowledge(), Some(0x38), "any hour");
    write(&machine, 0xb, 0x02);
    read(&machine, 0xc);
    machine.pass_unseen(3600 * SECOND);
    assert_eq!(read(&machine, 0xc) & 0xa0, 0x20, "the flag needs no interrupt");
}

#[test]
fn ram_is_kept() {
    let machine = machine();
    write(&machine, 0x8f, 0x0a);
    assert_eq!(read(&machine, 0x0f), 0x0a);
    write(&machine, 0x7f, 0x55);
    assert_eq!(read(&machine, 0x7f), 0x55);
}

struct NoLine;

impl bus::InterruptLine for NoLine {
    fn set(&self, _: bool) {}
}

/// Naps that were asked for, in nanoseconds: one test's.
static NAPS: Mutex<Vec<u64>> = Mutex::new(Vec::new());

/// Linux reads the time early, by itself, and then by its driver, which sets the clock by that.
#[test]
fn the_drivers_last_reading_ends_in_the_middle_of_a_second() {
    let clock = Arc::new(FakeClock::default());
    let (bell, line) = (Arc::new(Bell::default()), Arc::new(NoLine));
    let nap = |ns| lock(&NAPS).push(ns);
    let mut rtc = crate::rtc::Rtc::new(clock.clone(), bell, line, Some(nap));
    let mut at = |ms: u64, registers: &[u8]| {
        clock.0.store(ms * 1_000_000, Ordering::Relaxed);
        for register in registers {
            bus::Device::write(&mut rtc, 0, &[*register]);
            if *register == 0xb {
                bus::Device::write(&mut rtc, 1, &[2]);
            }
            bus::Device::read(&mut rtc, 1, &mut [0]);
        }
        std::mem::take(&mut *lock(&NAPS))
    };
    let time = [0, 0xa, 0, 2, 4, 7, 8, 9, 0xa, 0];
    assert!(at(100, &time).is_empty() && at(200, &[1, 3, 5, 0]).is_empty(), "no driver");
    assert!(at(250, &[0xb]).is_empty() && at(260, &time).is_empty(), "no look for an alarm");
    assert_eq!(at(300, &[0, 1, 3, 5, 0]), [180_000_000]);
    assert!(at(481, &time).is_empty());
    assert_eq!(at(485, &time), [15_000_000]);
    assert!(at(600, &[0xb, 1, 3, 5]).is_empty() && at(650, &time).is_empty(), "once");
}
