//! Power management, resets and the keyboard controller.

use super::*;

fn events(machine: &Machine) -> Vec<MachineEvent> {
    std::mem::take(&mut lock(&machine.events.0))
}

#[test]
fn soft_off() {
    let machine = Machine::new(1);
    machine.outw(0x604, 5 << 10);
    assert_eq!(machine.inl(0x604) & 0xffff, 5 << 10 | 1, "ACPI mode is on");
    assert_eq!(events(&machine), []);
    machine.outw(0x604, 4 << 10 | 1 << 13);
    assert_eq!(events(&machine), [], "not S5");
    machine.outw(0x604, 5 << 10 | 1 << 13);
    assert_eq!(events(&machine), [MachineEvent::PowerOff]);
}

#[test]
fn resets() {
    let machine = Machine::new(1);
    machine.outb(0xcf9, 2);
    assert_eq!(machine.inb(0xcf9), 2);
    assert_eq!(events(&machine), []);
    machine.outb(0xcf9, 6);
    assert_eq!(events(&machine), [MachineEvent::Reset]);
    machine.outb(0x64, 0xfe);
    assert_eq!(events(&machine), [MachineEvent::Reset]);
    machine.outb(0x64, 0xd1);
    machine.outb(0x60, 0xdf);
    assert_eq!(events(&machine), [], "A20");
    machine.outb(0x64, 0xd1);
    machine.outb(0x60, 0xde);
    assert_eq!(events(&machine), [MachineEvent::Reset]);
    machine.outb(0x92, 3);
    assert_eq!(events(&machine), [MachineEvent::Reset]);
    assert_eq!(machine.inb(0x92), 3);
}

#[test]
fn keyboard_controller_answers() {
    let machine = Machine::new(1);
    assert_eq!(machine.inb(0x64), 0x04);
    machine.outb(0x64, 0xaa);
    assert_eq!((machine.inb(0x64), machine.inb(0x60), machine.inb(0x64)), (0x0d, 0x55, 0x0c));
    machine.outb(0x64, 0x60);
    machine.outb(0x60, 0x45);
    machine.outb(0x64, 0x20);
    assert_eq!(machine.inb(0x60), 0x45);
    machine.outb(0x60, 0xf2);
    assert_eq!(machine.inb(0x64) & 1, 0, "no keyboard");
}

#[test]
fn pm_timer() {
    let machine = Machine::new(1);
    machine.pass(1_000_000_000);
    assert_eq!(machine.inl(0x608), 3_579_545);
    machine.pass(4_000_000_000);
    assert_eq!(machine.inl(0x608), 17_897_725 & 0xff_ffff, "24 bits");
}

#[test]
fn power_button_raises_the_sci() {
    let machine = Machine::new(1);
    machine.apic_enable(0);
    machine.route(9, 0x8039);
    lock(&machine.platform.power).press_power_button();
    assert_eq!(machine.cpu().pending(), 0, "not enabled");
    machine.outw(0x602, 0x120);
    assert_eq!(machine.inl(0x600), 0x0120_0100);
    assert_eq!(machine.cpu().acknowledge(), Some(0x39));
    machine.outw(0x600, 0x100);
    machine.apic_write(0, 0xb0, 0);
    assert_eq!(machine.cpu().pending(), 0);
    lock(&machine.platform.power).press_power_button();
    assert_eq!(machine.cpu().acknowledge(), Some(0x39));
    machine.outb(0x601, 1);
    assert_eq!(machine.inl(0x600) & 0xffff, 0, "by bytes too");
}

#[test]
fn pm_timer_interrupt() {
    let machine = Machine::new(1);
    machine.apic_enable(0);
    machine.route(9, 0x8039);
    machine.outw(0x602, 1);
    let half = (1u64 << 23) * 1_000_000_000 / 3_579_545;
    machine.pass(half);
    assert_eq!(machine.cpu().pending(), 0);
    machine.pass(1);
    assert_eq!(machine.cpu().acknowledge(), Some(0x39));
    machine.outw(0x600, 1);
    machine.apic_write(0, 0xb0, 0);
    machine.pass(half + 1);
    assert_eq!(machine.cpu().acknowledge(), Some(0x39));
}
