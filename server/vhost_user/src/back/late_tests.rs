//! A driver is told later of answers that may wait.

use std::sync::atomic::{AtomicBool, Ordering};

use virtio::{NET_TRANSMIT as TRANSMIT, Net, NetBackend};

use super::*;

/// A network that swallows all.
struct Sink;

impl NetBackend for Sink {
    fn send(&mut self, _: &[u8]) {}
    fn receive(&mut self, _: &mut Vec<u8>) -> bool {
        false
    }
}

const SHAPE: Shape = Shape { size: 64, descriptors: 0x1000, available: 0x2000, used: 0x3000 };
/// Where each descriptor finds its frame: a header of virtio's and 60 bytes (GPA).
const FRAME: u64 = 0x4000;
const FRAME_LEN: u64 = 12 + 60;

/// A server of a network whose driver has offered 63 frames; and whether that driver has been interrupted.
fn server() -> (DeviceServer, Ram, Arc<AtomicBool>) {
    let ram = Ram::new(1 << 20).expect("memory");
    for descriptor in 0..SHAPE.size {
        let at = SHAPE.descriptors + u64::from(descriptor) * 16;
        ram.write_gpa(at, &FRAME.to_le_bytes()).expect("memory");
        ram.write_gpa(at + 8, &FRAME_LEN.to_le_bytes()).expect("memory");
        let slot = SHAPE.available + 4 + u64::from(descriptor) * 2;
        ram.write_gpa(slot, &descriptor.to_le_bytes()).expect("memory");
    }
    let mut server = DeviceServer::new(Box::new(Net::new(Box::new(Sink), [2; 6])), None);
    let is_told = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&is_told);
    let interrupt = Arc::new(move || told.store(true, Ordering::SeqCst));
    let queue = Queue::new(SHAPE, SHAPE.size, false, ram.clone(), interrupt).expect("sound");
    server.rings[TRANSMIT].queue = Some(queue);
    (server, ram, is_told)
}

/// Offers so many frames in all, and has them sent.
fn send((server, ram, _): &mut (DeviceServer, Ram, Arc<AtomicBool>), frames: u16) {
    ram.write_gpa(SHAPE.available + 2, &frames.to_le_bytes()).expect("memory");
    server.run(TRANSMIT);
}

#[test]
fn a_driver_is_told_later_of_a_few_sent_frames() {
    let mut bench = server();
    send(&mut bench, 3);
    let (mut server, _, is_told) = bench;
    let until = server.late_until.expect("it is to be told");
    assert!(!is_told.load(Ordering::SeqCst), "not at once");
    server.late_until = Some(Instant::now() + Duration::from_secs(600));
    server.tell_late();
    assert!(!is_told.load(Ordering::SeqCst), "not before the time");
    thread::sleep(until.saturating_duration_since(Instant::now()));
    server.late_until = Some(until);
    server.tell_late();
    assert!(is_told.load(Ordering::SeqCst) && server.late_until.is_none());
}

#[test]
fn a_driver_is_told_at_once_of_many() {
    let mut bench = server();
    send(&mut bench, MOST_LATE - 1);
    assert!(!bench.2.load(Ordering::SeqCst), "few");
    send(&mut bench, MOST_LATE);
    assert!(bench.2.load(Ordering::SeqCst), "many");
}
