//! The PCI transport: capabilities, negotiation, status, interrupts, reset.

mod driver;

use driver::{
    ACKNOWLEDGE, DRIVER, DRIVER_OK, EVENT_IDX, FEATURES_OK, INDIRECT_DESC, NEEDS_RESET, RING_RESET,
    TestMachine, VERSION_1,
};
use host::Entropy;
use std::sync::Arc;
use virtio::Rng;

const BUFFER: u64 = 0x20_0000;

/// Hands out 0x5a.
struct FakeEntropy;
impl Entropy for FakeEntropy {
    fn fill(&self, data: &mut [u8]) -> bool {
        data.fill(0x5a);
        true
    }
}

fn machine() -> TestMachine {
    TestMachine::new(Rng::new(Arc::new(FakeEntropy)))
}

fn bytes_at(machine: &TestMachine, gpa: u64, len: usize) -> Vec<u8> {
    let mut data = vec![0; len];
    machine.ram.read_gpa(gpa, &mut data).unwrap();
    data
}

#[test]
fn the_function_says_who_it_is() {
    let mut machine = machine();
    assert_eq!(machine.config(0), 0x1044_1af4);
    assert_eq!(machine.config(8) & 0xff, 1, "modern devices have revision 1 or more");
    assert_eq!(machine.config(0x3c) & 0xffff, 0x010a, "INTA# on IRQ 10");
    let ids: Vec<u8> = machine.capabilities().into_iter().map(|(_, id)| id).collect();
    assert_eq!(ids, [0x11, 9, 9, 9, 9], "no device configuration, hence four structures");
    let features = INDIRECT_DESC | EVENT_IDX | VERSION_1 | RING_RESET;
    assert_eq!(machine.offered(), features);
    machine.set_common(0, &2_u32.to_le_bytes());
    assert_eq!(machine.common(4), [0; 4], "features beyond bit 63");
}

#[test]
fn entropy_arrives() {
    let mut machine = machine();
    let mut ring = machine.start(VERSION_1).remove(0);
    ring.offer_chain(&[(BUFFER, 10, true), (BUFFER + 20, 5, true)]);
    machine.notify(0);
    assert_eq!(ring.take_used(), Some((0, 15)));
    assert_eq!(bytes_at(&machine, BUFFER, 10), [0x5a; 10]);
    assert_eq!(bytes_at(&machine, BUFFER + 10, 10), [0; 10]);
    assert_eq!(bytes_at(&machine, BUFFER + 20, 6), [0x5a, 0x5a, 0x5a, 0x5a, 0x5a, 0]);
    ring.offer_chain(&[(BUFFER, 1 << 20, true)]);
    machine.notify(0);
    assert_eq!(ring.take_used(), Some((0, 4096)), "not as much as asked for");
}

#[test]
fn features_the_device_did_not_offer_are_refused() {
    let mut machine = machine();
    for features in [VERSION_1 | 1 << 5, EVENT_IDX, 0, VERSION_1 | 1 << 63] {
        machine.set_status(0);
        machine.set_status(ACKNOWLEDGE | DRIVER);
        machine.accept(features);
        machine.set_status(ACKNOWLEDGE | DRIVER | FEATURES_OK);
        assert_eq!(machine.status(), ACKNOWLEDGE | DRIVER, "{features:#x}");
        machine.set_status(ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
        assert_eq!(machine.status(), ACKNOWLEDGE | DRIVER, "{features:#x}");
    }
}

#[test]
fn status_bits_stay_and_features_freeze() {
    let mut machine = machine();
    machine.start(VERSION_1);
    machine.set_status(ACKNOWLEDGE);
    assert_eq!(machine.status(), ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
    machine.set_status(NEEDS_RESET);
    assert_eq!(machine.status() & NEEDS_RESET, 0, "only the device sets it");
    machine.accept(0);
    machine.set_common(8, &1_u32.to_le_bytes());
    assert_eq!(machine.common(12), 1_u32.to_le_bytes(), "VERSION_1 as negotiated");
    machine.set_status(0);
    assert_eq!(machine.status(), 0);
    assert_eq!(machine.common(28), [0; 2], "no queue is enabled");
}

#[test]
fn requests_made_before_driver_ok_are_served_then() {
    let mut machine = machine();
    let mut ring = machine.prepare(VERSION_1).remove(0);
    ring.offer_chain(&[(BUFFER, 8, true)]);
    machine.notify(0);
    assert_eq!(ring.take_used(), None);
    machine.set_status(ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
    assert_eq!(ring.take_used(), Some((0, 8)));
}

#[test]
fn without_bus_mastering_memory_is_left_alone() {
    let mut machine = machine();
    let mut ring = machine.start(VERSION_1).remove(0);
    machine.set_config(4, 0x0002);
    ring.offer_chain(&[(BUFFER, 8, true)]);
    machine.notify(0);
    assert_eq!(ring.take_used(), None);
    machine.set_config(4, 0x0006);
    assert_eq!(ring.take_used(), Some((0, 8)));
}

#[test]
fn intx_is_level_triggered_by_the_isr() {
    let mut machine = machine();
    let mut ring = machine.start(VERSION_1).remove(0);
    ring.offer_chain(&[(BUFFER, 8, true)]);
    machine.notify(0);
    assert!(machine.line_is_high());
    assert_eq!(machine.config(4) >> 16 & 8, 8, "interrupt status");
    machine.set_config(4, 0x0406);
    assert!(!machine.line_is_high(), "INTx disable");
    machine.set_config(4, 0x0006);
    assert!(machine.line_is_high());
    assert_eq!(machine.isr(), 1);
    assert!(!machine.line_is_high());
    assert_eq!(machine.config(4) >> 16 & 8, 0);
    assert_eq!(machine.isr(), 0);
}

#[test]
fn msix_messages_per_queue() {
    let mut machine = machine();
    machine.enable_msix(2);
    let mut ring = machine.start(VERSION_1).remove(0);
    ring.offer_chain(&[(BUFFER, 8, true)]);
    machine.notify(0);
    assert_eq!(machine.take_messages(), [0x41]);
    assert!(!machine.line_is_high());
    machine.set_common(26, &0xffff_u16.to_le_bytes());
    ring.offer_chain(&[(BUFFER, 8, true)]);
    machine.notify(0);
    assert!(machine.take_messages().is_empty(), "NO_VECTOR");
    machine.set_common(26, &2_u16.to_le_bytes());
    assert_eq!(machine.common(26), [0xff; 2], "a vector that does not exist");
}

#[test]
fn interrupts_are_suppressed_on_request() {
    let mut machine = machine();
    machine.enable_msix(2);
    let mut ring = machine.start(VERSION_1).remove(0);
    ring.write16(ring.available, 1); // NO_INTERRUPT
    ring.offer_chain(&[(BUFFER, 8, true)]);
    machine.notify(0);
    assert!(ring.take_used().is_some());
    assert!(machine.take_messages().is_empty());

    let mut ring = machine.start(VERSION_1 | EVENT_IDX).remove(0);
    machine.set_common(26, &1_u16.to_le_bytes());
    ring.set_used_event(1);
    for (expected, available) in [(vec![], 1), (vec![0x41], 2), (vec![], 3)] {
        ring.offer_chain(&[(BUFFER, 8, true)]);
        machine.notify(0);
        assert!(ring.take_used().is_some());
        assert_eq!(machine.take_messages(), expected);
        assert_eq!(ring.available_event(), available, "asks to hear of the next request");
    }
}

#[test]
fn device_reset_forgets_everything() {
    let mut machine = machine();
    machine.enable_msix(2);
    let mut ring = machine.start(VERSION_1).remove(0);
    machine.set_status(0);
    ring.offer_chain(&[(BUFFER, 8, true)]);
    machine.notify(0);
    assert_eq!(ring.take_used(), None);
    assert_eq!(machine.common::<2>(16), [0xff; 2]);
    assert_eq!(machine.common::<2>(26), [0xff; 2]);
    assert_eq!(machine.common::<8>(32), [0; 8]);
    assert_eq!(machine.common::<2>(24), 64_u16.to_le_bytes(), "the largest size again");
}

#[test]
fn one_queue_can_be_reset() {
    let mut machine = machine();
    let mut ring = machine.start(VERSION_1 | RING_RESET).remove(0);
    machine.set_common(58, &1_u16.to_le_bytes());
    assert_eq!((machine.common::<2>(58), machine.common::<2>(28)), ([0; 2], [0; 2]));
    ring.offer_chain(&[(BUFFER, 8, true)]);
    machine.notify(0);
    assert_eq!(ring.take_used(), None);
    let mut ring = machine.enable(0);
    ring.offer_chain(&[(BUFFER, 8, true)]);
    machine.notify(0);
    assert_eq!(ring.take_used(), Some((0, 8)));
}

#[test]
fn machine_reset_turns_the_function_off() {
    let mut machine = machine();
    let bar = machine.bar(0);
    machine.start(VERSION_1);
    machine.set_config(0x10, 0xd000_0000);
    machine.host.reset();
    assert_eq!(machine.config(4) & 0xffff, 0x0002);
    assert_eq!(machine.bar(0), bar);
    assert_eq!(machine.status(), 0);
}

#[test]
fn the_bar_can_move_and_vanish() {
    let mut machine = machine();
    let common = machine.structure(1);
    machine.set_config(0x10, 0xd000_0000);
    assert_eq!(machine.mmio_read::<2>(common + 18), [0xff; 2]);
    assert_eq!(machine.mmio_read::<2>(0xd000_0000 + 18), [1, 0]);
    machine.set_config(0x14, 1);
    assert_eq!(machine.mmio_read::<2>(0xd000_0000 + 18), [0xff; 2], "above 4 GiB");
    machine.set_config(0x14, 0);
    machine.set_config(4, 0);
    assert_eq!(machine.mmio_read::<2>(0xd000_0000 + 18), [0xff; 2], "memory decoding off");
}

#[test]
fn access_through_configuration_space() {
    let mut machine = machine();
    let window = machine.capabilities().last().unwrap().0;
    assert_eq!(machine.config(window) >> 24, 5);
    machine.set_config(window + 8, 18); // num_queues
    machine.set_config(window + 12, 2);
    assert_eq!(machine.config(window + 16) & 0xffff, 1);
    machine.set_config(window + 8, 20); // status
    machine.set_config(window + 12, 1);
    machine.set_config(window + 16, u32::from(ACKNOWLEDGE));
    assert_eq!(machine.status(), ACKNOWLEDGE);
    for (offset, len) in [(0x7fff, 4), (0x8000, 1), (u32::MAX, 1), (0, 3), (0, 0), (1, 2)] {
        machine.set_config(window + 8, offset);
        machine.set_config(window + 12, len);
        machine.set_config(window + 16, 0);
        machine.config(window + 16);
    }
    assert_eq!(machine.status(), ACKNOWLEDGE, "senseless accesses go nowhere");
}

#[test]
fn registers_take_any_access() {
    let mut machine = machine();
    machine.prepare(VERSION_1);
    let common = machine.structure(1);
    assert_eq!(machine.mmio_read::<1>(common + 19), [0], "high byte of num_queues");
    assert_eq!(machine.mmio_read::<8>(common + 56)[4..], [0xff; 4], "beyond the structure");
    machine.mmio_write(common + 23, &[0xff]);
    assert_eq!(machine.common(22), [0, 0], "half a field is not written");
    machine.set_common(22, &7_u16.to_le_bytes());
    let no_queue: [u8; 8] = machine.common(24);
    assert_eq!(no_queue, [0, 0, 0xff, 0xff, 0, 0, 0, 0], "queue 7 does not exist");
    machine.set_common(28, &1_u16.to_le_bytes());
    machine.set_common(58, &1_u16.to_le_bytes());
    machine.notify(7);
    machine.notify(1000);
    assert_eq!(machine.status() & NEEDS_RESET, 0);
}
