//! 8259s, I/O APIC and the wires between.

use bus::MsiSink;

use super::*;

/// Programs both 8259s as PC firmware and kernels do: vectors 0x20 and 0x28, nothing masked.
fn init_pic(machine: &Machine) {
    for (command, words) in [(0x20, [0x20, 0x04, 0x01]), (0xa0, [0x28, 0x02, 0x01])] {
        machine.outb(command, 0x11);
        words.iter().for_each(|word| machine.outb(command + 1, *word));
        machine.outb(command + 1, 0);
    }
}

fn pulse(machine: &Machine, irq: u32) {
    let line = machine.platform.interrupts.isa_line(irq).unwrap();
    line.set(true);
    line.set(false);
}

#[test]
fn pic_priorities_and_end_of_interrupt() {
    let machine = Machine::new(1);
    init_pic(&machine);
    let cpu = machine.cpu();
    pulse(&machine, 5);
    pulse(&machine, 3);
    assert_eq!(cpu.pending(), pending::INTERRUPT);
    assert_eq!(cpu.acknowledge(), Some(0x23));
    assert_eq!(cpu.pending(), 0, "5 is below 3, which is in service");
    pulse(&machine, 1);
    assert_eq!(cpu.acknowledge(), Some(0x21), "1 is above 3");
    machine.outb(0x20, 0x20);
    assert_eq!(cpu.pending(), 0);
    machine.outb(0x20, 0x20);
    assert_eq!(cpu.acknowledge(), Some(0x25));
    machine.outb(0x20, 0x0b);
    assert_eq!(machine.inb(0x20), 1 << 5, "in-service register");
    machine.outb(0x20, 0x65);
    assert_eq!(machine.inb(0x20), 0, "specific end of interrupt");
}

#[test]
fn pic_cascade() {
    let machine = Machine::new(1);
    init_pic(&machine);
    pulse(&machine, 12);
    pulse(&machine, 8);
    assert_eq!(machine.cpu().acknowledge(), Some(0x28));
    assert_eq!(machine.cpu().pending(), 0);
    machine.outb(0xa0, 0x20);
    assert_eq!(machine.cpu().pending(), 0, "the master still serves the slave");
    machine.outb(0x20, 0x20);
    assert_eq!(machine.cpu().acknowledge(), Some(0x2c));
    machine.outb(0xa0, 0x20);
    machine.outb(0x20, 0x20);
    assert_eq!(machine.cpu().pending(), 0);
}

#[test]
fn pic_mask_holds_the_request() {
    let machine = Machine::new(1);
    init_pic(&machine);
    machine.outb(0x21, 0xff);
    pulse(&machine, 4);
    assert_eq!(machine.cpu().pending(), 0);
    machine.outb(0x20, 0x0a);
    assert_eq!(machine.inb(0x20), 1 << 4, "request register");
    machine.outb(0x21, !(1 << 4));
    assert_eq!(machine.cpu().acknowledge(), Some(0x24));
    assert_eq!(machine.inb(0x21), !(1 << 4));
}

#[test]
fn pic_level_triggered_by_elcr() {
    let machine = Machine::new(1);
    init_pic(&machine);
    machine.outb(0x4d0, 0xff);
    machine.outb(0x4d1, 0xff);
    assert_eq!((machine.inb(0x4d0), machine.inb(0x4d1)), (0xf8, 0xde));
    let line = machine.platform.interrupts.isa_line(11).unwrap();
    line.set(true);
    assert_eq!(machine.cpu().acknowledge(), Some(0x2b));
    machine.outb(0xa0, 0x20);
    machine.outb(0x20, 0x20);
    assert_eq!(machine.cpu().acknowledge(), Some(0x2b), "still asserted");
    line.set(false);
    machine.outb(0xa0, 0x20);
    machine.outb(0x20, 0x20);
    assert_eq!(machine.cpu().pending(), 0);
}

/// The wires of two slots share an input: it falls with the last of them.
#[test]
fn pci_wires_reach_the_pic() {
    let machine = Machine::new(1);
    let [first, second] =
        [18, 20].map(|gsi| machine.platform.interrupts.pci_line(gsi, 10).unwrap());
    assert_eq!((machine.inb(0x4d0), machine.inb(0x4d1)), (0, 1 << 2), "as firmware leaves it");
    init_pic(&machine);
    let end_of_interrupt = || [0xa0, 0x20].map(|port| machine.outb(port, 0x20));
    first.set(true);
    second.set(true);
    assert_eq!(machine.cpu().acknowledge(), Some(0x2a));
    first.set(false);
    end_of_interrupt();
    assert_eq!(machine.cpu().acknowledge(), Some(0x2a), "the other is asserted still");
    second.set(false);
    end_of_interrupt();
    assert_eq!(machine.cpu().pending(), 0);
    let isa = machine.platform.interrupts.isa_line(10).unwrap();
    first.set(true);
    isa.set(true);
    isa.set(false);
    assert_eq!(machine.cpu().acknowledge(), Some(0x2a));
    end_of_interrupt();
    assert_eq!(machine.cpu().pending(), pending::INTERRUPT, "an ISA card's edge has not ended it");
}

#[test]
fn pic_rotation_special_mask_auto_eoi_and_poll() {
    let machine = Machine::new(1);
    init_pic(&machine);
    machine.outb(0x20, 0xc4); // 4 becomes lowest, so 5 is first
    pulse(&machine, 3);
    pulse(&machine, 6);
    assert_eq!(machine.cpu().acknowledge(), Some(0x26));
    machine.outb(0x20, 0x68); // special mask mode: only masked inputs in service yield
    assert_eq!(machine.cpu().pending(), 0);
    machine.outb(0x21, 1 << 6);
    assert_eq!(machine.cpu().acknowledge(), Some(0x23));

    init_pic(&machine);
    machine.outb(0x20, 0x11);
    [0x20, 0x04, 0x03, 0x00].iter().for_each(|word| machine.outb(0x21, *word)); // auto EOI
    pulse(&machine, 1);
    assert_eq!(machine.cpu().acknowledge(), Some(0x21));
    machine.outb(0x20, 0x0b);
    assert_eq!(machine.inb(0x20), 0);
    pulse(&machine, 7);
    machine.outb(0x20, 0x0c);
    assert_eq!(machine.inb(0x20), 0x87, "poll");
    machine.outb(0x20, 0x0c);
    assert_eq!(machine.inb(0x20), 0, "nothing left");
    assert_eq!(machine.cpu().pending(), 0);
}

#[test]
fn masked_lint0_hides_the_pic() {
    let machine = Machine::new(2);
    init_pic(&machine);
    machine.apic_enable(0);
    pulse(&machine, 1);
    assert_eq!(machine.platform.cpus[1].pending(), 0, "only the bootstrap processor takes it");
    assert_eq!(machine.cpu().pending(), pending::INTERRUPT);
    machine.apic_write(0, 0x350, 0x1_0700);
    assert_eq!(machine.cpu().pending(), 0);
    machine.apic_write(0, 0x350, 0x0700);
    assert_eq!(machine.cpu().acknowledge(), Some(0x21));
    // Without a local APIC the wire goes to the CPU.
    machine.outb(0x20, 0x20);
    machine.apic_write(0, 0x350, 0x1_0700);
    pulse(&machine, 1);
    assert_eq!(machine.cpu().pending(), 0);
    let base = machine.cpu().msr_read(0x1b).unwrap();
    machine.cpu().msr_write(0x1b, base & !0x800).unwrap();
    assert_eq!(machine.cpu().acknowledge(), Some(0x21));
}

#[test]
fn ioapic_identifies_itself() {
    let machine = Machine::new(1);
    assert_eq!(machine.ioapic_read(1), 0x0017_0020);
    machine.ioapic_write(0, 0x0f00_0000);
    assert_eq!(machine.ioapic_read(0), 0x0f00_0000);
    assert_eq!(machine.ioapic_read(2), 0x0f00_0000, "arbitration follows the ID");
    assert_eq!(machine.ioapic_read(0x10), 0x1_0000, "masked at reset");
    machine.ioapic_write(0x10, 0xffff_ffff);
    assert_eq!(machine.ioapic_read(0x10), 0x1_afff, "read-only bits");
    machine.ioapic_write(0x11, 0xffff_ffff);
    assert_eq!(machine.ioapic_read(0x11), 0xff00_0000);
    assert_eq!(machine.read32(ioapic::BASE), 0x11);
}

#[test]
fn ioapic_edges() {
    let machine = Machine::new(1);
    machine.apic_enable(0);
    machine.route(4, 0x31);
    let line = machine.platform.interrupts.line(4).unwrap();
    line.set(true);
    assert_eq!(machine.cpu().acknowledge(), Some(0x31));
    machine.apic_write(0, 0xb0, 0);
    assert_eq!(machine.cpu().pending(), 0, "one edge, one interrupt");
    line.set(false);
    machine.route(4, 0x1_0031);
    line.set(true);
    machine.route(4, 0x31);
    assert_eq!(machine.cpu().pending(), 0, "an edge while masked is lost");
    line.set(false);
    line.set(true);
    assert_eq!(machine.cpu().acknowledge(), Some(0x31));
}

#[test]
fn ioapic_levels_wait_for_the_end_of_interrupt() {
    let machine = Machine::new(1);
    machine.apic_enable(0);
    machine.route(20, 0x8055);
    let (a, b) = (
        machine.platform.interrupts.line(20).unwrap(),
        machine.platform.interrupts.line(20).unwrap(),
    );
    a.set(true);
    assert_eq!(machine.ioapic_read(0x10 + 40), 0xc055, "remote IRR");
    assert_eq!(machine.cpu().acknowledge(), Some(0x55));
    b.set(true);
    a.set(false);
    assert_eq!(machine.cpu().pending(), 0);
    machine.apic_write(0, 0xb0, 0);
    assert_eq!(machine.cpu().acknowledge(), Some(0x55), "the other device still asserts it");
    b.set(false);
    machine.apic_write(0, 0xb0, 0);
    assert_eq!(machine.cpu().pending(), 0);
    assert_eq!(machine.ioapic_read(0x10 + 40), 0x8055);
}

#[test]
fn ioapic_eoi_register_and_mode_switch_end_a_level() {
    let machine = Machine::new(1);
    machine.apic_enable(0);
    machine.route(20, 0x8055);
    let line = machine.platform.interrupts.line(20).unwrap();
    line.set(true);
    line.set(false);
    machine.write32(ioapic::BASE + 0x40, 0x55);
    assert_eq!(machine.ioapic_read(0x10 + 40), 0x8055);
    line.set(true);
    machine.route(20, 0x1_0055);
    machine.route(20, 0x1_8055);
    assert_eq!(machine.ioapic_read(0x10 + 40), 0x1_8055, "as edge-triggered it waits for none");
}

#[test]
fn ioapic_level_is_sent_on_unmask() {
    let machine = Machine::new(1);
    machine.apic_enable(0);
    machine.route(20, 0x1_8055);
    machine.platform.interrupts.line(20).unwrap().set(true);
    assert_eq!(machine.cpu().pending(), 0, "that line was dropped, and with it its level");
    let line = machine.platform.interrupts.line(20).unwrap();
    line.set(true);
    machine.route(20, 0x8055);
    assert_eq!(machine.cpu().acknowledge(), Some(0x55));
}

#[test]
fn isa_timer_is_gsi_2() {
    let machine = Machine::new(1);
    machine.apic_enable(0);
    machine.route(0, 0x40);
    machine.route(2, 0x42);
    pulse(&machine, 0);
    assert_eq!(machine.cpu().acknowledge(), Some(0x42));
    assert!(machine.platform.interrupts.line(24).is_err());
}

#[test]
fn msi() {
    let machine = Machine::new(3);
    (0..3).for_each(|cpu| machine.apic_enable(cpu));
    let sink = &machine.platform.interrupts;
    sink.send(0xfee0_1000, 0x61);
    assert_eq!(machine.platform.cpus[1].acknowledge(), Some(0x61));
    machine.apic_write(1, 0xb0, 0);
    sink.send(0xfeef_f000, 0x62);
    assert!(machine.platform.cpus.iter().all(|cpu| cpu.pending() == pending::INTERRUPT));
    sink.send(0xfee0_9000, 0x63);
    assert_eq!(machine.apic_read(0, 0x230), 1 << 2, "no CPU 9: only 0x62 waits");
}

#[test]
fn kicks_only_for_news() {
    let machine = Machine::new(1);
    machine.apic_enable(0);
    let kicks = || machine.kicks[0].count();
    let before = kicks();
    let sink = &machine.platform.interrupts;
    sink.send(0xfee0_0000, 0x61);
    assert_eq!(kicks(), before + 1);
    sink.send(0xfee0_0000, 0x61);
    sink.send(0xfee0_0000, 0x51);
    assert_eq!(kicks(), before + 1, "it has been told already");
    machine.cpu().acknowledge();
    sink.send(0xfee0_0000, 0x71);
    assert_eq!(kicks(), before + 2);
}

#[test]
fn nmi_button() {
    let machine = Machine::new(2);
    machine.platform.interrupts.nmi();
    assert!(machine.cpu().take_nmi() && !machine.cpu().take_nmi());
    assert!(!machine.platform.cpus[1].take_nmi(), "LINT1 of others is masked at reset");
}
