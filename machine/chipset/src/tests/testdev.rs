//! The devices of tests: exit port, firmware configuration, pc-testdev.

use super::*;

#[test]
fn debug_exit() {
    let machine = Machine::new(1);
    machine.ports.write(0xf4, &0x10_u32.to_le_bytes());
    machine.outb(0xf4, 0);
    assert_eq!(*lock(&machine.events.0), [0x10, 0].map(MachineEvent::DebugExit));
}

#[test]
fn fw_cfg() {
    let machine = Machine::new(3);
    let read = |key, len: usize| {
        machine.outw(0x510, key);
        (0..len).map(|_| machine.inb(0x511)).collect::<Vec<_>>()
    };
    assert_eq!(read(0, 6), b"QEMU\0\0");
    assert_eq!(read(1, 4), [1, 0, 0, 0]);
    assert_eq!(read(3, 8), (64_u64 << 20).to_le_bytes());
    assert_eq!(read(5, 2), [3, 0]);
    assert_eq!(read(0xf, 2), [3, 0]);
    assert_eq!(read(0x8000, 2), [0, 0]);
}

#[test]
fn echo() {
    let machine = Machine::new(1);
    machine.ports.write(0xe0, &0x1234_5678_u32.to_le_bytes());
    assert_eq!(
        (machine.inl(0xe0), machine.inl(0xe8), machine.inb(0xe2)),
        (0x1234_5678, 0x1234_5678, 0x34)
    );
    machine.outb(0xe9, 0xaa);
    assert_eq!(machine.inl(0xe0), 0x1234_aa78);
    machine.ports.write(0xe4, &0x1000_u32.to_le_bytes());
    assert_eq!(machine.inl(0xe0), 0x1234_aa78);
}

#[test]
fn lines_and_memory() {
    let machine = Machine::new(1);
    machine.apic_enable(0);
    machine.route(14, 0x8044);
    machine.outb(0x2000 + 14, 1);
    assert_eq!(machine.cpu().acknowledge(), Some(0x44));
    machine.outb(0x2000 + 14, 0);
    machine.apic_write(0, 0xb0, 0);
    assert_eq!(machine.cpu().pending(), 0);
    machine.write64(0xff00_fff8, 0x1122_3344_5566_7788);
    assert_eq!(machine.read32(0xff00_fffc), 0x1122_3344);
}
