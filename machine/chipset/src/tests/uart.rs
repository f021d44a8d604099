//! The serial port, as Linux' 8250 driver uses it.

use super::*;

const PORT: u64 = 0x3f8;

fn machine() -> Machine {
    let machine = Machine::new(1);
    machine.apic_enable(0);
    machine.route(4, 0x34);
    machine
}

fn take(machine: &Machine) -> bool {
    let taken = machine.cpu().acknowledge();
    machine.apic_write(0, 0xb0, 0);
    taken == Some(0x34)
}

fn receive(machine: &Machine, bytes: &[u8]) -> usize {
    lock(&machine.platform.uart).receive(bytes)
}

#[test]
fn output() {
    let machine = machine();
    for byte in b"ring3" {
        assert_eq!(machine.inb(PORT + 5), 0x60);
        machine.outb(PORT, *byte);
    }
    assert_eq!(*lock(&machine.output.0), b"ring3");
}

#[test]
fn probing_finds_a_16550a() {
    let machine = machine();
    machine.outb(PORT + 1, 0);
    assert_eq!(machine.inb(PORT + 1), 0);
    machine.outb(PORT + 1, 0xff);
    assert_eq!(machine.inb(PORT + 1), 0x0f);
    machine.outb(PORT + 1, 0);
    machine.outb(PORT + 4, 0x1a);
    assert_eq!(machine.inb(PORT + 6) & 0xf0, 0x90, "loopback wires");
    machine.outb(PORT + 4, 0);
    assert_eq!(machine.inb(PORT + 6) & 0xf0, 0xb0);
    machine.outb(PORT + 2, 0x01);
    assert_eq!(machine.inb(PORT + 2), 0xc1, "FIFOs");
    machine.outb(PORT + 2, 0x00);
    assert_eq!(machine.inb(PORT + 2), 0x01);
    machine.outb(PORT + 7, 0xa5);
    assert_eq!(machine.inb(PORT + 7), 0xa5);
}

#[test]
fn divisor_latch() {
    let machine = machine();
    machine.outb(PORT + 3, 0x83);
    machine.outb(PORT, 0x01);
    machine.outb(PORT + 1, 0x02);
    assert_eq!((machine.inb(PORT), machine.inb(PORT + 1)), (1, 2));
    machine.outb(PORT + 3, 0x03);
    assert_eq!((machine.inb(PORT), machine.inb(PORT + 1)), (0, 0));
    assert!(lock(&machine.output.0).is_empty());
}

#[test]
fn transmitter_interrupts() {
    let machine = machine();
    machine.outb(PORT + 4, 0x0b);
    machine.outb(PORT + 1, 0x02);
    assert!(take(&machine), "enabled while empty");
    assert_eq!(machine.inb(PORT + 2), 0x02);
    assert_eq!(machine.inb(PORT + 2), 0x01, "reading it clears it");
    machine.outb(PORT, b'x');
    assert!(take(&machine));
    machine.outb(PORT + 1, 0x00);
    machine.outb(PORT + 1, 0x02);
    assert!(take(&machine), "Linux tests for this");
    machine.outb(PORT + 4, 0x03);
    machine.outb(PORT, b'y');
    assert!(!take(&machine), "OUT2 is off");
}

#[test]
fn receiver_interrupts() {
    let machine = machine();
    machine.outb(PORT + 4, 0x0b);
    machine.outb(PORT + 2, 0x81); // trigger at 8
    machine.outb(PORT + 1, 0x01);
    assert_eq!(receive(&machine, b"ab"), 2);
    assert!(take(&machine));
    assert_eq!(machine.inb(PORT + 2), 0xcc, "below the trigger level: timeout");
    receive(&machine, &[b'c'; 30]);
    assert_eq!(machine.inb(PORT + 2), 0xc4);
    assert_eq!(machine.inb(PORT + 5), 0x61);
    let mut bytes = vec![];
    while machine.inb(PORT + 5) & 1 != 0 {
        bytes.push(machine.inb(PORT));
    }
    assert_eq!(bytes, [b"ab".to_vec(), vec![b'c'; 30]].concat(), "the backlog follows");
    assert_eq!(machine.inb(PORT + 2), 0xc1);
    receive(&machine, b"d");
    assert!(take(&machine), "the line had been lowered");
}

#[test]
fn input_is_bounded() {
    let machine = machine();
    let megabyte = vec![0; 1 << 20];
    let taken = receive(&machine, &megabyte);
    assert!(taken < 1 << 17, "{taken}");
    assert_eq!(receive(&machine, b"x") + receive(&machine, b"x"), 1, "one went to the FIFO");
    while machine.inb(PORT + 5) & 1 != 0 {
        machine.inb(PORT);
    }
    assert_eq!(lock(&machine.platform.uart).unread(), 0);
    assert_eq!(receive(&machine, b"x"), 1);
}

#[test]
fn loopback() {
    let machine = machine();
    machine.outb(PORT + 2, 0x01);
    machine.outb(PORT + 4, 0x10);
    receive(&machine, b"from outside");
    (0..20).for_each(|byte| machine.outb(PORT, byte));
    assert_eq!(machine.inb(PORT + 5), 0x63, "overrun");
    assert_eq!(machine.inb(PORT + 5), 0x61);
    assert_eq!((0..16).map(|_| machine.inb(PORT)).collect::<Vec<_>>(), Vec::from_iter(0..16));
    assert_eq!(machine.inb(PORT + 5), 0x60);
    assert!(lock(&machine.output.0).is_empty());
    machine.outb(PORT + 4, 0x00);
    assert_eq!(machine.inb(PORT), b'f');
}

#[test]
fn modem_changes() {
    let machine = machine();
    machine.outb(PORT + 4, 0x1f);
    machine.inb(PORT + 6);
    machine.outb(PORT + 4, 0x10);
    assert_eq!(machine.inb(PORT + 6), 0x0f, "all changed, RI by its trailing edge");
    assert_eq!(machine.inb(PORT + 6), 0);
}
