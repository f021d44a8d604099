//! The network interface: frames out, frames in over one or several buffers, and hostile frames.

mod driver;

use driver::{Desc, Machine, Ring, VERSION_1, WRITE};
use std::collections::VecDeque;
use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};
use virtio::{NET_RECEIVE, Net, NetBackend};
use vm_memory::{Bytes, GuestAddress};

const MRG_RXBUF: u64 = 1 << 15;
const GUEST_CSUM: u64 = 1 << 1;
const HEADER: u32 = 12;
const BUFFER: u64 = 0x20_0000;
const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];

#[derive(Clone, Default)]
struct Wire {
    sent: Arc<Mutex<Vec<Vec<u8>>>>,
    waiting: Arc<Mutex<VecDeque<Vec<u8>>>>,
}

impl NetBackend for Wire {
    fn send(&mut self, frame: &[u8]) {
        self.sent.lock().unwrap().push(frame.to_vec());
    }
    fn receive(&mut self, frame: &mut Vec<u8>) -> bool {
        let next = self.waiting.lock().unwrap().pop_front();
        next.map(|next| *frame = next).is_some()
    }
    fn ignores_checksums(&self) -> bool {
        true
    }
}

struct Host {
    machine: Machine,
    receive: Ring,
    transmit: Ring,
    wire: Wire,
}

fn host(features: u64) -> Host {
    let wire = Wire::default();
    let mut machine = Machine::new(Net::new(Box::new(wire.clone()), MAC));
    machine.enable_msix(3);
    let mut rings = machine.start(features | VERSION_1);
    let (transmit, receive) = (rings.pop().unwrap(), rings.pop().unwrap());
    Host { machine, receive, transmit, wire }
}

impl Host {
    /// Puts a frame on the wire to the guest.
    fn arrives(&mut self, frame: &[u8]) {
        self.wire.waiting.lock().unwrap().push_back(frame.to_vec());
        self.machine.doorbell.ring(NET_RECEIVE);
    }

    fn guest_bytes(&self, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        self.machine.ram.read_gpa(BUFFER, &mut data).unwrap();
        data
    }

    /// Offers `count` receive buffers of `len` bytes, one after the other in memory.
    fn offers(&mut self, count: u16, len: u32) {
        for index in 0..count {
            let at = BUFFER + u64::from(index) * u64::from(len);
            self.receive.describe(index, Desc(at, len, WRITE, 0));
            self.receive.offer(index);
        }
        self.machine.notify(0);
    }
}

fn frame(len: usize) -> Vec<u8> {
    (0..len).map(|i| i as u8).collect()
}

#[test]
fn configuration_tells_address_and_mtu() {
    let mut host = host(0);
    assert_eq!(host.machine.device_config::<6>(0), MAC);
    assert_eq!(host.machine.device_config::<2>(10), 1500_u16.to_le_bytes());
}

#[test]
fn a_frame_goes_out_without_its_header() {
    let mut host = host(0);
    let sent = frame(60);
    host.machine.ram.write_gpa(BUFFER, &[0; HEADER as usize]).unwrap();
    host.machine.ram.write_gpa(BUFFER + 0x1000, &sent).unwrap();
    host.transmit.offer_chain(&[(BUFFER, HEADER, false), (BUFFER + 0x1000, 60, false)]);
    host.machine.notify(1);
    assert_eq!(*host.wire.sent.lock().unwrap(), [sent]);
    assert_eq!(host.transmit.take_used(), Some((0, 0)));
}

#[test]
fn frames_no_wire_carries_are_dropped() {
    let mut host = host(0);
    // No whole header; no Ethernet header; beyond the MTU.
    for len in [1, HEADER, HEADER + 13, HEADER + 1519, 0x10_0000] {
        host.transmit.offer_chain(&[(BUFFER, len, false)]);
        host.machine.notify(1);
        assert_eq!(host.transmit.take_used(), Some((0, 0)), "{len}");
    }
    // Segmentation nobody agreed on.
    host.machine.ram.write_gpa(BUFFER, &[0, 1, 0, 0]).unwrap();
    host.transmit.offer_chain(&[(BUFFER, 200, false)]);
    host.machine.notify(1);
    assert!(host.wire.sent.lock().unwrap().is_empty());
}

#[test]
fn a_frame_comes_in_behind_a_header() {
    let mut host = host(GUEST_CSUM);
    host.arrives(&frame(100));
    assert_eq!(host.receive.take_used(), None, "it waits for a buffer");
    host.offers(1, 1526);
    assert_eq!(host.receive.take_used(), Some((0, HEADER + 100)));
    let bytes = host.guest_bytes(112);
    assert_eq!(bytes[..12], [2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0], "valid data, one buffer");
    assert_eq!(bytes[12..], frame(100));
}

#[test]
fn a_long_frame_is_spread_once_there_are_enough_buffers() {
    let mut host = host(MRG_RXBUF);
    host.arrives(&frame(1000));
    host.offers(2, 400);
    assert_eq!(host.receive.take_used(), None, "two are too few");
    host.receive.describe(2, Desc(BUFFER + 800, 400, WRITE, 0));
    host.receive.offer(2);
    host.machine.notify(0);
    let used: Vec<_> = std::iter::from_fn(|| host.receive.take_used()).collect();
    assert_eq!(used, [(0, 400), (1, 400), (2, 212)]);
    let bytes = host.guest_bytes(1012);
    assert_eq!(bytes[10..12], 3_u16.to_le_bytes());
    assert_eq!(bytes[12..], frame(1000));
}

#[test]
fn without_merging_a_frame_too_long_is_lost_and_the_next_arrives() {
    let mut host = host(0);
    host.offers(2, 200);
    host.arrives(&frame(1000));
    assert_eq!(host.receive.take_used(), Some((0, 0)));
    host.arrives(&frame(20));
    assert_eq!(host.receive.take_used(), Some((1, HEADER + 20)));
}

#[test]
fn a_buffer_without_room_for_the_header_breaks_the_device() {
    let mut host = host(MRG_RXBUF);
    host.offers(1, HEADER - 1);
    host.arrives(&frame(20));
    assert_ne!(host.machine.status() & driver::NEEDS_RESET, 0);
}

/// A driver that polls takes the whole frame as soon as it sees the first buffer.
#[test]
fn a_frame_of_several_buffers_appears_at_once() {
    let mut host = host(MRG_RXBUF);
    let (ram, index) = (host.machine.ram.clone(), host.receive.used + 2);
    let done = Arc::new(AtomicBool::new(false));
    let ended = Arc::clone(&done);
    let driver = thread::spawn(move || {
        let mut parts = 0;
        while !ended.load(Ordering::Relaxed) {
            let seen: u16 = ram.dma().load(GuestAddress(index), Ordering::Acquire).unwrap();
            parts += u32::from(!seen.is_multiple_of(3));
        }
        parts
    });
    for _ in 0..20_000 {
        host.offers(3, 400);
        host.arrives(&frame(1000));
        assert_eq!(std::iter::from_fn(|| host.receive.take_used()).count(), 3);
    }
    done.store(true, Ordering::Relaxed);
    assert_eq!(driver.join().unwrap(), 0, "parts of frames seen");
}
