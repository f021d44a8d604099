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

/// Linux reads the time early, by itself, and then by its driver: twice for an alarm, and to set the clock.
#[test]
fn the_drivers_third_reading_sets_the_clock() {
    const PLACE: u64 = 0x5000;
    let clock = Arc::new(FakeClock::default());
    let (bell, line) = (Arc::new(Bell::default()), Arc::new(NoLine));
    let ram = ram::Ram::new(2 << 20).unwrap();
    let kvm = Arc::new(KvmClock::new(ram.clone(), clock.clone()));
    assert!(kvm.msr_write(0, x86::kvm::SYSTEM_TIME, PLACE | x86::kvm::ENABLED));
    let mut rtc = crate::rtc::Rtc::new(clock.clone(), bell, line, Some(kvm.clone()));
    let mut at = |ms: u64, registers: &[u8]| -> Vec<u8> {
        clock.0.store(ms * 1_000_000, Ordering::Relaxed);
        let read = registers.iter().map(|register| {
            bus::Device::write(&mut rtc, 0, &[*register]);
            if *register == 0xb {
                bus::Device::write(&mut rtc, 1, &[2]);
            }
            let mut value = [0];
            bus::Device::read(&mut rtc, 1, &mut value);
            value[0]
        });
        read.collect()
    };
    let time = [0, 0xa, 0, 2, 4, 7, 8, 9, 0xa, 0];
    at(100, &time);
    at(200, &[1, 3, 5, 0]);
    at(250, &[0xb]);
    at(260, &time);
    assert!(!kvm.is_held(), "no look for an alarm");
    at(300, &[0xb, 1, 3, 5]);
    assert_eq!(at(301, &[0]), [0x55], "half a second behind");
    assert!(kvm.is_held());
    assert_eq!(at(302, &time)[0], 0x55);
    // A minute has ended: once more.
    at(303, &[0, 0xa, 0, 1, 3, 5, 0xa, 0]);
    assert_eq!(at(304, &time)[0], 0x55);
    assert_eq!(at(305, &time)[0], 0x55);
    (0..100).for_each(|_| kvm.refresh());
    assert!(kvm.is_held(), "for as long as it makes its files");
    assert_eq!(at(600, &time)[0], 0x56);
    let time_at = |place| {
        let mut bytes = [0; 8];
        ram.read_gpa(place, &mut bytes).unwrap();
        u64::from_le_bytes(bytes)
    };
    let before = time_at(PLACE + 16);
    (0..100).for_each(|_| kvm.refresh());
    assert!(!kvm.is_held());
    // It was 600 ms, and was set to 500.
    let missing = time_at(PLACE + 16) - before;
    assert!(missing.abs_diff(100_000_000) < 1_000_000, "{missing}");
    at(700, &[0xb, 1, 3, 5]);
    at(700, &time);
    assert!(!kvm.is_held(), "once");
}
