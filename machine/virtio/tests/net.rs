//! The network interface: frames out, frames in over one or several buffers, and hostile frames.

mod driver;

use driver::{Desc, Ring, TestMachine, VERSION_1, WRITE};
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
    machine: TestMachine,
    receive: Ring,
    transmit: Ring,
    wire: Wire,
}

fn host(features: u64) -> Host {
    let wire = Wire::default();
    let mut machine = TestMachine::new(Net::new(Box::new(wire.clone()), MAC));
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

const MQ: u64 = 1 << 22;
const CONTROL: u64 = 1 << 17;

/// A connection's frame, to or from port 80.
fn connection(port: u16, comes_in: bool) -> Vec<u8> {
    let (us, them) = ([10, 0, 2, 15], [192, 0, 2, 1]);
    let ends = [(us, port), (them, 80)];
    let [(from, source), (to, destination)] = if comes_in { [ends[1], ends[0]] } else { ends };
    let mut frame = vec![0; 12];
    frame.extend([8, 0, 0x45, 0, 0, 40, 0, 0, 0, 0, 64, 6, 0, 0]);
    frame.extend([from, to].concat());
    frame.extend([source.to_be_bytes(), destination.to_be_bytes()].concat());
    frame.resize(60, 0);
    frame
}

/// An interface with this many pairs, and its rings: receive and transmit of each, then control.
fn with_pairs(pairs: u16, features: u64) -> (TestMachine, Vec<Ring>, Wire) {
    let wire = Wire::default();
    let mut machine = TestMachine::new(Net::new(Box::new(wire.clone()), MAC).with_pairs(pairs));
    machine.enable_msix(u32::from(2 * pairs + 2));
    let rings = machine.start(features | VERSION_1);
    (machine, rings, wire)
}

/// Has the driver say how many pairs it uses by the queue `index`; the answer.
fn uses(machine: &mut TestMachine, control: &mut Ring, index: u16, pairs: u16) -> u8 {
    let [low, high] = pairs.to_le_bytes();
    machine.ram.write_gpa(BUFFER, &[4, 0, low, high, 0xee]).unwrap();
    control.offer_chain(&[(BUFFER, 2, false), (BUFFER + 2, 2, false), (BUFFER + 4, 1, true)]);
    machine.notify(index);
    assert_eq!(control.take_used(), Some((0, 1)));
    let mut answer = [0];
    machine.ram.read_gpa(BUFFER + 4, &mut answer).unwrap();
    answer[0]
}

#[test]
fn a_connection_comes_in_by_the_pair_that_it_goes_out_by() {
    let (mut machine, mut rings, wire) = with_pairs(3, MQ | CONTROL);
    assert_eq!(machine.device_config::<2>(8), 3_u16.to_le_bytes());
    assert_eq!((rings.len(), uses(&mut machine, &mut rings[6], 6, 3)), (7, 0));
    assert_eq!(uses(&mut machine, &mut rings[6], 6, 4), 1, "there are three");
    assert_eq!(uses(&mut machine, &mut rings[6], 6, 0), 1);
    for (pair, port) in [(1, 1001), (2, 1002), (0, 1003), (2, 1003)] {
        let at = BUFFER + 0x1000;
        machine.ram.write_gpa(at, &[0; HEADER as usize]).unwrap();
        machine.ram.write_gpa(at + u64::from(HEADER), &connection(port, false)).unwrap();
        rings[2 * pair + 1].offer_chain(&[(at, HEADER + 60, false)]);
        machine.notify(2 * pair as u16 + 1);
        assert!(rings[2 * pair + 1].take_used().is_some());
        for other in 0..3 {
            rings[2 * other].offer_chain(&[(BUFFER + 0x2000 + 0x1000 * other as u64, 1526, true)]);
            machine.notify(2 * other as u16);
        }
        machine.take_messages();
        wire.waiting.lock().unwrap().push_back(connection(port, true));
        machine.doorbell.ring(NET_RECEIVE);
        let came: Vec<_> = (0..3).filter(|pair| rings[2 * pair].take_used().is_some()).collect();
        assert_eq!(came, [pair], "port {port}");
    }
    assert_eq!(wire.sent.lock().unwrap().len(), 4);
}

/// What was told of fewer pairs comes in by one that is used.
#[test]
fn a_driver_that_uses_fewer_pairs_loses_no_connection() {
    let (mut machine, mut rings, wire) = with_pairs(2, MQ | CONTROL);
    assert_eq!(uses(&mut machine, &mut rings[4], 4, 2), 0);
    machine.ram.write_gpa(BUFFER, &[0; HEADER as usize]).unwrap();
    machine.ram.write_gpa(BUFFER + u64::from(HEADER), &connection(7, false)).unwrap();
    rings[3].offer_chain(&[(BUFFER, HEADER + 60, false)]);
    machine.notify(3);
    assert_eq!(uses(&mut machine, &mut rings[4], 4, 1), 0);
    rings[0].offer_chain(&[(BUFFER, 1526, true)]);
    wire.waiting.lock().unwrap().push_back(connection(7, true));
    machine.doorbell.ring(NET_RECEIVE);
    assert_eq!(rings[0].take_used(), Some((0, HEADER + 60)));
}

/// One that has not accepted several pairs has its control queue behind the first.
#[test]
fn a_driver_of_one_pair_finds_its_queues() {
    let (mut machine, mut rings, wire) = with_pairs(2, CONTROL);
    assert_eq!(uses(&mut machine, &mut rings[2], 2, 1), 0);
    rings[0].offer_chain(&[(BUFFER, 1526, true)]);
    wire.waiting.lock().unwrap().push_back(connection(7, true));
    machine.doorbell.ring(NET_RECEIVE);
    assert_eq!(rings[0].take_used(), Some((0, HEADER + 60)));
}

#[test]
fn a_control_request_without_room_for_an_answer_breaks_the_device() {
    let (mut machine, mut rings, _wire) = with_pairs(2, MQ | CONTROL);
    rings[4].offer_chain(&[(BUFFER, 4, false)]);
    machine.notify(4);
    assert_ne!(machine.status() & driver::NEEDS_RESET, 0);
}

#[test]
fn one_pair_is_what_it_was() {
    let mut machine = TestMachine::new(Net::new(Box::new(Wire::default()), MAC).with_pairs(1));
    assert_eq!(machine.offered() & (MQ | CONTROL), 0);
    assert_eq!(machine.device_config::<2>(8), 1_u16.to_le_bytes());
    assert_eq!(machine.start(VERSION_1).len(), 2);
}
