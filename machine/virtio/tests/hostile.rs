//! Drivers that break the rules: DEVICE_NEEDS_RESET, and the device works again after a reset.

mod driver;

use driver::{
    ACKNOWLEDGE, DRIVER, DRIVER_OK, Desc, FEATURES_OK, INDIRECT, INDIRECT_DESC, NEEDS_RESET, NEXT,
    RAM, Ring, SIZE, TestMachine, VERSION_1, WRITE,
};
use host::Entropy;
use std::sync::Arc;
use virtio::Rng;

const BUFFER: u64 = 0x20_0000;
const TABLE: u64 = 0x30_0000;

/// Bytes without pattern, the same in every run.
struct Noise;

impl Entropy for Noise {
    fn fill(&self, data: &mut [u8]) -> bool {
        let mut state = 1_u32;
        for byte in data {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *byte = (state >> 24) as u8;
        }
        true
    }
}

/// Lets `mischief` arrange the ring, and checks that the device stops and recovers.
fn needs_reset(mischief: impl FnOnce(&mut Ring)) {
    let mut machine = TestMachine::new(Rng::new(Arc::new(Noise)));
    machine.enable_msix(2);
    let mut ring = machine.start(VERSION_1 | INDIRECT_DESC).remove(0);
    mischief(&mut ring);
    machine.set_common(16, &0_u16.to_le_bytes());
    machine.notify(0);
    assert_eq!(machine.status() & NEEDS_RESET, NEEDS_RESET);
    assert_eq!(machine.take_messages(), [0x40], "one configuration interrupt, nothing else");
    assert_eq!(ring.take_used(), None);
    ring.offer_chain(&[(BUFFER, 8, true)]);
    machine.notify(0);
    assert_eq!(ring.take_used(), None, "a broken device serves nothing");
    recovers(&mut machine);
}

fn recovers(machine: &mut TestMachine) {
    let mut ring = machine.start(VERSION_1).remove(0);
    ring.offer_chain(&[(BUFFER, 8, true)]);
    machine.notify(0);
    assert_eq!(ring.take_used(), Some((0, 8)));
}

#[test]
fn available_index_jumps() {
    needs_reset(|ring| ring.write16(ring.available + 2, SIZE + 1));
    needs_reset(|ring| ring.write16(ring.available + 2, 0xffff));
}

#[test]
fn head_outside_the_table() {
    needs_reset(|ring| ring.offer(SIZE));
    needs_reset(|ring| ring.offer(0xffff));
}

#[test]
fn next_outside_the_table() {
    needs_reset(|ring| {
        ring.describe(0, Desc(BUFFER, 8, NEXT | WRITE, SIZE));
        ring.offer(0);
    });
}

#[test]
fn loops() {
    needs_reset(|ring| {
        ring.describe(0, Desc(BUFFER, 8, NEXT | WRITE, 0));
        ring.offer(0);
    });
    needs_reset(|ring| {
        ring.describe(0, Desc(BUFFER, 8, NEXT | WRITE, 1));
        ring.describe(1, Desc(BUFFER, 8, NEXT | WRITE, 0));
        ring.offer(0);
    });
    needs_reset(|ring| {
        ring.describe_in(TABLE, 0, Desc(BUFFER, 8, NEXT | WRITE, 0));
        ring.describe(0, Desc(TABLE, 64, INDIRECT, 0));
        ring.offer(0);
    });
}

#[test]
fn zero_length() {
    needs_reset(|ring| ring.offer_chain(&[(BUFFER, 0, true)]));
    needs_reset(|ring| ring.offer_chain(&[(BUFFER, 8, true), (BUFFER, 0, true)]));
}

#[test]
fn readable_after_writable() {
    needs_reset(|ring| ring.offer_chain(&[(BUFFER, 8, true), (BUFFER, 8, false)]));
}

#[test]
fn buffers_outside_ram() {
    needs_reset(|ring| ring.offer_chain(&[(RAM, 8, true)]));
    needs_reset(|ring| ring.offer_chain(&[(RAM - 4, 8, true)]));
    needs_reset(|ring| ring.offer_chain(&[(0, u32::MAX, true)]));
    needs_reset(|ring| ring.offer_chain(&[(u64::MAX - 3, 8, true)]));
    needs_reset(|ring| ring.offer_chain(&[(0xc000_0000, 8, true)]));
}

#[test]
fn no_room_for_entropy() {
    needs_reset(|ring| ring.offer_chain(&[(BUFFER, 8, false)]));
}

#[test]
fn indirect_tables() {
    let indirect = |address, len, flags| {
        needs_reset(|ring| {
            ring.describe_in(TABLE, 0, Desc(BUFFER, 8, WRITE, 0));
            ring.describe(0, Desc(address, len, INDIRECT | flags, 1));
            ring.offer(0);
        });
    };
    indirect(TABLE, 0, 0); // no entries
    indirect(TABLE, 17, 0); // part of an entry
    indirect(RAM, 16, 0); // outside RAM
    indirect(u64::MAX - 7, 16, 0);
    indirect(TABLE, 0x10_0000, 0); // more entries than an index can name
    needs_reset(|ring| {
        // Indirect inside indirect.
        ring.describe_in(TABLE, 0, Desc(TABLE + 64, 16, INDIRECT, 0));
        ring.describe_in(TABLE + 64, 0, Desc(BUFFER, 8, WRITE, 0));
        ring.describe(0, Desc(TABLE, 16, INDIRECT, 0));
        ring.offer(0);
    });
}

#[test]
fn more_descriptors_than_allowed() {
    needs_reset(|ring| {
        let entries = 0xffff_u16;
        for i in 0..entries {
            let flags = if i + 1 == entries { WRITE } else { NEXT | WRITE };
            ring.describe_in(TABLE, i, Desc(BUFFER, 1, flags, i + 1));
        }
        ring.describe(0, Desc(TABLE, u32::from(entries) * 16, INDIRECT, 0));
        ring.offer(0);
    });
}

#[test]
fn more_than_4_gib_in_a_chain() {
    needs_reset(|ring| {
        for i in 0..300_u16 {
            let flags = if i == 299 { WRITE } else { NEXT | WRITE };
            ring.describe_in(TABLE, i, Desc(0, RAM as u32, flags, i + 1));
        }
        ring.describe(0, Desc(TABLE, 300 * 16, INDIRECT, 0));
        ring.offer(0);
    });
}

/// Enables queue 0 with a field of the common configuration changed; the device must refuse.
fn refuses_queue(offset: u64, value: &[u8]) {
    let mut machine = TestMachine::new(Rng::new(Arc::new(Noise)));
    let ring = machine.prepare(VERSION_1).remove(0);
    machine.set_status(0);
    machine.set_status(ACKNOWLEDGE | DRIVER);
    machine.accept(VERSION_1);
    machine.set_status(ACKNOWLEDGE | DRIVER | FEATURES_OK);
    machine.place(0, &ring);
    machine.set_common(offset, value);
    machine.set_common(28, &1_u16.to_le_bytes());
    assert_eq!(machine.common(28), [0; 2]);
    assert_eq!(machine.status() & NEEDS_RESET, NEEDS_RESET);
    machine.set_status(ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
    machine.notify(0);
    recovers(&mut machine);
}

#[test]
fn queues_outside_ram() {
    for ring in [32, 40, 48] {
        refuses_queue(ring, &RAM.to_le_bytes());
        refuses_queue(ring, &(RAM - 16).to_le_bytes());
        refuses_queue(ring, &(!15_u64).to_le_bytes());
        refuses_queue(ring, &0xc000_0000_u64.to_le_bytes());
    }
}

#[test]
fn misaligned_queues() {
    for ring in [32, 40, 48] {
        refuses_queue(ring, &0x10_0001_u64.to_le_bytes());
    }
}

#[test]
fn queue_sizes() {
    for size in [0_u16, 3, 128, 0x8000, 0xffff] {
        refuses_queue(24, &size.to_le_bytes());
    }
}

#[test]
fn queue_enabled_before_negotiation() {
    let mut machine = TestMachine::new(Rng::new(Arc::new(Noise)));
    let ring = machine.prepare(VERSION_1).remove(0);
    machine.set_status(0);
    machine.place(0, &ring);
    machine.set_common(28, &1_u16.to_le_bytes());
    assert_eq!(machine.status(), NEEDS_RESET);
    recovers(&mut machine);
}

#[test]
fn rings_overwritten_while_running() {
    // The device's own structures as buffers: it writes random bytes over its rings.
    let mut machine = TestMachine::new(Rng::new(Arc::new(Noise)));
    let mut ring = machine.start(VERSION_1).remove(0);
    ring.offer_chain(&[(ring.descriptors, 0x1000, true), (ring.used, 0x1000, true)]);
    machine.notify(0);
    ring.offer_chain(&[(ring.available, 0x1000, true)]);
    machine.notify(0);
    machine.notify(0);
    recovers(&mut machine);
}
