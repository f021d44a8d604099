//! The end of an interrupt by a bit in memory, and interrupts that a vCPU takes by itself.

use super::lapic::{EOI, ICR, TO_SELF, machine, x2apic};
use super::*;
/// Where the guest has its bit.
const BIT: u64 = 0x5004;

/// A CPU whose guest tells ends by a bit in memory, and serves 0x41.
fn with_bit() -> (Machine, ram::Ram, PutOffEoi) {
    let (machine, ram) = (machine(1), ram::Ram::new(2 << 20).expect("RAM"));
    let eoi = PutOffEoi::new(ram.clone());
    eoi.msr_write(BIT | 1).expect("a place");
    takes(&machine, &eoi, 0x41);
    (machine, ram, eoi)
}

fn takes(machine: &Machine, eoi: &PutOffEoi, vector: u8) {
    machine.apic_write(0, ICR, TO_SELF | u32::from(vector));
    eoi.settle(machine.cpu());
    assert_eq!(machine.cpu().acknowledge(), Some(vector));
    eoi.taken(machine.cpu());
}

fn bit(ram: &ram::Ram) -> u8 {
    let mut byte = [0xff];
    ram.read_gpa(BIT, &mut byte).expect("RAM");
    byte[0]
}

#[test]
fn an_end_told_in_memory_lets_the_next_interrupt_in() {
    let (machine, ram, eoi) = with_bit();
    for _ in 0..3 {
        assert_eq!((bit(&ram), machine.cpu().pending()), (1, 0));
        ram.write_gpa(BIT, &[0]).expect("RAM");
        let kicks = machine.kicks[0].count();
        machine.apic_write(0, ICR, TO_SELF | 0x41);
        assert_eq!(machine.kicks[0].count(), kicks + 1, "only the vCPU can tell");
        takes(&machine, &eoi, 0x41);
    }
    ram.write_gpa(BIT, &[0]).expect("RAM");
    eoi.settle(machine.cpu());
    assert_eq!(machine.apic_read(0, 0x120), 0, "nothing is in service");
}

#[test]
fn an_end_that_something_waits_for_is_told_by_the_register() {
    let (machine, ram, eoi) = with_bit();
    machine.apic_write(0, ICR, TO_SELF | 0x42);
    eoi.settle(machine.cpu());
    assert_eq!((bit(&ram), machine.cpu().pending()), (0, 0), "the bit is taken back");
    assert_eq!(machine.cpu().acknowledge(), None);
    machine.apic_write(0, EOI, 0);
    assert_eq!(machine.cpu().acknowledge(), Some(0x42));
}

#[test]
fn ends_are_not_put_off_where_it_would_matter() {
    let (machine, ram, eoi) = with_bit();
    // Inside another one.
    takes(&machine, &eoi, 0x51);
    assert_eq!(bit(&ram), 0);
    machine.apic_write(0, EOI, 0);
    machine.apic_write(0, EOI, 0);
    // While another one waits.
    machine.apic_write(0, ICR, TO_SELF | 0x31);
    takes(&machine, &eoi, 0x41);
    assert_eq!(bit(&ram), 0);
    machine.apic_write(0, EOI, 0);
    assert_eq!(machine.cpu().acknowledge(), Some(0x31));
    machine.apic_write(0, EOI, 0);
    // Where there is no RAM, no place, or a place that is none.
    assert!(eoi.msr_write(BIT | 3).is_err());
    for place in [1 << 40 | 1, BIT] {
        eoi.msr_write(place).expect("a place");
        takes(&machine, &eoi, 0x41);
        assert_eq!(bit(&ram), 0);
        machine.apic_write(0, EOI, 0);
        assert_eq!(machine.apic_read(0, 0x120), 0, "nothing is in service");
    }
}

/// An engine reads such a register at each entry, and the guest is to tell the end in memory all the same.
#[test]
fn a_read_takes_the_bit_back_only_if_the_end_would_show_in_it() {
    let (machine, ram, eoi) = with_bit();
    let cpu = x2apic(&machine, 0);
    let in_service = |vector: u32| 0x810 + vector / 32;
    for (index, left, value) in [(in_service(0x80), 1, 0), (in_service(0x41), 0, 2)] {
        eoi.settle_for_read(cpu, index);
        assert_eq!((bit(&ram), cpu.msr_read(index)), (left, Ok(value)), "{index:#x}");
    }
    cpu.msr_write(0x80b, 0).expect("the end");
    cpu.msr_write(0x83f, 0x41).expect("to itself");
    assert_eq!(cpu.acknowledge(), Some(0x41));
    eoi.taken(cpu);
    // The priority of what is served.
    eoi.settle_for_read(cpu, 0x80a);
    assert_eq!((bit(&ram), cpu.msr_read(0x80a)), (0, Ok(0x40)));
}

#[test]
fn an_end_that_was_put_off_does_not_outlive_a_reset() {
    let (machine, ram, eoi) = with_bit();
    machine.apic_write(0, ICR, TO_SELF | 5 << 8);
    assert!(machine.cpu().take_init());
    eoi.reset();
    ram.write_gpa(BIT, &[0]).expect("RAM");
    machine.apic_enable(0);
    takes(&machine, &eoi, 0x41);
    assert_eq!((bit(&ram), eoi.msr_read()), (0, 0));
}

#[test]
fn a_vcpu_may_take_an_interrupt_by_itself_only_if_nothing_is_served_or_waits() {
    let (machine, ram, eoi) = with_bit();
    let cpu = machine.cpu();
    assert_eq!(eoi.direct(cpu), Some((BIT, 0)), "once the end of 0x41 has been told");
    ram.write_gpa(BIT, &[1]).expect("RAM");
    eoi.took(cpu, 0x52);
    assert_eq!((cpu.pending(), cpu.acknowledge()), (0, None));
    // What comes meanwhile waits for the end, of which only the vCPU can tell.
    machine.apic_write(0, ICR, TO_SELF | 0x51);
    assert_eq!(eoi.direct(cpu), None, "0x51 waits");
    eoi.settle(cpu);
    assert_eq!((bit(&ram), cpu.acknowledge()), (0, None), "0x52 is served");
    assert_eq!(eoi.direct(cpu), None, "its end comes by the register");
    machine.apic_write(0, EOI, 0);
    assert_eq!(cpu.acknowledge(), Some(0x51));
    machine.apic_write(0, EOI, 0);
    assert_eq!(eoi.direct(cpu), Some((BIT, 0)));
    cpu.set_cr8(7);
    assert_eq!(eoi.direct(cpu), Some((BIT, 7)));
    eoi.took(cpu, 3);
    assert_eq!(eoi.direct(cpu), Some((BIT, 7)), "there is no such vector");
    cpu.msr_write(0x1b, 0).expect("off");
    assert_eq!(eoi.direct(cpu), None);
}

#[test]
fn a_message_has_a_vector_for_the_one_cpu_that_it_is_for() {
    let machine = machine(2);
    let vectors = |message| [0, 1].map(|cpu: usize| machine.platform.cpus[cpu].vector_of(message));
    let to = |id: u64| 0xfee0_0000 | id << 12;
    assert_eq!(vectors((to(0), 0x41)), [Some(0x41), None]);
    assert_eq!(vectors((to(1), 0x141)), [None, Some(0x41)], "of lowest priority");
    assert_eq!(vectors((to(0xff), 0x41)), [None; 2], "both");
    assert_eq!(vectors((to(0), 0x8041)), [None; 2], "level-triggered");
    assert_eq!(vectors((to(0), 0x441)), [None; 2], "an NMI");
    assert_eq!(vectors((to(0), 0xf)), [None; 2], "no vector");
}
