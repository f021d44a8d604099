//! Machine-check banks.

use super::*;
use crate::{MachineError, Severity};

const CAP: u32 = 0x179;
const STATUS: u32 = 0x17a;
const CTL: u32 = 0x17b;
/// CTL2, CTL, STATUS, ADDR and MISC of bank 7.
const BANK: [u32; 5] = [0x287, 0x41c, 0x41d, 0x41e, 0x41f];
/// The register of the local vector table, by its offset.
const LVT_CMCI: u64 = 0x2f0;

fn error(severity: Severity) -> MachineError {
    MachineError { severity, bank: 7, code: 0x9f, address: Some(0x1234_5678) }
}

fn values(cpu: &CpuInterrupts) -> [u64; 3] {
    [BANK[2], BANK[3], BANK[4]].map(|index| cpu.msr_read(index).unwrap())
}

#[test]
fn banks_are_empty_and_take_what_they_should() {
    let machine = Machine::new(1);
    let cpu = machine.cpu();
    assert_eq!(cpu.msr_read(CAP), Ok(10 | 1 << 8 | 1 << 10 | 1 << 24));
    assert_eq!((cpu.msr_read(STATUS), cpu.msr_read(CTL)), (Ok(0), Ok(u64::MAX)));
    assert_eq!(values(cpu), [0; 3]);
    for (index, value, taken) in [
        (CAP, 0, false),
        (STATUS, 7, true),
        (STATUS, 8, false),
        (CTL, 0, true),
        (BANK[0], 1 << 30 | 1, true),
        (BANK[0], 1 << 31, false),
        (BANK[1], 0xff, true),
        (BANK[2], 0, true),
        (BANK[2], 1, false),
        (BANK[3], 1, false),
        (BANK[4], 1, false),
        (0x28a, 0, false),
        (0x428, 0, false),
    ] {
        assert_eq!(cpu.msr_write(index, value).is_ok(), taken, "{index:#x} {value:#x}");
    }
    assert!(cpu.msr_read(0x28a).is_err() && cpu.msr_read(0x428).is_err(), "there are ten");
    assert_eq!(cpu.msr_read(BANK[0]), Ok(1 << 30 | 1));
}

#[test]
fn corrected_errors_are_counted_and_interrupt_when_there_are_enough() {
    let machine = Machine::new(1);
    machine.apic_enable(0);
    machine.apic_write(0, LVT_CMCI, 0xf7);
    let cpu = machine.cpu();
    assert!(!cpu.log_error(&error(Severity::Corrected)).interrupts, "nobody asked for it");
    cpu.msr_write(BANK[2], 0).unwrap();
    cpu.msr_write(BANK[0], 1 << 30 | 2).unwrap();
    assert_eq!(cpu.log_error(&error(Severity::Corrected)).status, 0x9c00_0040_0000_009f);
    assert_eq!((values(cpu)[1], values(cpu)[2], cpu.pending()), (0x1234_5678, 0x86, 0));
    let second = cpu.log_error(&error(Severity::Corrected));
    assert_eq!(
        (second.status, second.raises),
        (0xdc00_0080_0000_009f, false),
        "two, one of them lost"
    );
    assert_eq!(cpu.acknowledge(), Some(0xf7));
}

#[test]
fn uncorrected_errors_stay_until_they_are_read() {
    let machine = Machine::new(1);
    let cpu = machine.cpu();
    cpu.log_error(&error(Severity::Corrected));
    let fatal = cpu.log_error(&error(Severity::Fatal));
    assert!(fatal.raises && !fatal.interrupts);
    assert_eq!(fatal.status, 0xfe00_0040_0000_009f, "the corrected one gave way, and counts");
    let other = MachineError { code: 1, ..error(Severity::Required) };
    assert_eq!(cpu.log_error(&other).status, fatal.status);
    cpu.msr_write(BANK[2], 0).unwrap();
    assert_eq!(cpu.log_error(&other).status, 0xbd80_0000_0000_0001);
    cpu.msr_write(BANK[2], 0).unwrap();
    assert_eq!(cpu.log_error(&error(Severity::Optional)).status, 0xbd00_0000_0000_009f);
}

#[test]
fn what_is_switched_off_raises_nothing() {
    for index in [CTL, BANK[1]] {
        let machine = Machine::new(1);
        machine.cpu().msr_write(index, 0).unwrap();
        let logged = machine.cpu().log_error(&error(Severity::Fatal));
        assert_eq!((logged.raises, logged.status), (false, 0xae00_0000_0000_009f), "{index:#x}");
    }
}

#[test]
fn a_second_exception_comes_too_early() {
    let machine = Machine::new(1);
    let cpu = machine.cpu();
    assert!(cpu.begin_machine_check(Some(&error(Severity::Required))));
    assert_eq!(
        cpu.msr_read(STATUS),
        Ok(0b111),
        "in progress, at an instruction that can be repeated"
    );
    assert!(!cpu.begin_machine_check(None));
    cpu.msr_write(STATUS, 0).unwrap();
    assert!(cpu.begin_machine_check(None));
    assert_eq!(cpu.msr_read(STATUS), Ok(0b101), "another's");
    cpu.msr_write(STATUS, 0).unwrap();
    cpu.begin_machine_check(Some(&error(Severity::Fatal)));
    assert_eq!(cpu.msr_read(STATUS), Ok(0b100), "nothing can be repeated");
}
