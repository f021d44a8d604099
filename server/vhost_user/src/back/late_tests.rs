//! Tests of when a server tells a driver of its answers.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use virtio::{NET_RECEIVE as RECEIVE, NET_TRANSMIT as TRANSMIT, Net, NetBackend};

use super::*;
use crate::words::{Reply, Turn, Waiting};

/// A network that drops what the guest sends, and has as many frames for the guest as the counter says.
struct Network(Arc<AtomicUsize>);

impl NetBackend for Network {
    fn send(&mut self, _: &[u8]) {}
    fn receive(&mut self, frame: &mut Vec<u8>) -> bool {
        *frame = vec![0; 60];
        let less = |frames: usize| frames.checked_sub(1);
        self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less).is_ok()
    }
}

const SHAPE: Shape = Shape { size: 64, descriptors: 0x1000, available: 0x2000, used: 0x3000 };
/// The buffer of every descriptor (GPA).
const FRAME: u64 = 0x4000;
/// Bytes of each descriptor's buffer: virtio's header, and a frame of 60 bytes.
const FRAME_LEN: u64 = 12 + 60;

/// Flag of a descriptor whose buffer the device writes, in the word that begins with the buffer's length.
const WRITTEN: u64 = 2 << 32;

struct Bench {
    server: DeviceServer,
    ram: Ram,
    is_told: Arc<AtomicBool>,
    /// How many frames the network has for the guest.
    frames: Arc<AtomicUsize>,
}

impl Bench {
    /// A server of a network, one of whose queues the driver uses.
    fn new(index: usize) -> Self {
        let ram = Ram::new(1 << 20).expect("memory");
        let written = if index == RECEIVE { WRITTEN } else { 0 };
        for descriptor in 0..SHAPE.size {
            let at = SHAPE.descriptors + u64::from(descriptor) * 16;
            ram.write_gpa(at, &FRAME.to_le_bytes()).expect("memory");
            ram.write_gpa(at + 8, &(FRAME_LEN | written).to_le_bytes()).expect("memory");
            let slot = SHAPE.available + 4 + u64::from(descriptor) * 2;
            ram.write_gpa(slot, &descriptor.to_le_bytes()).expect("memory");
        }
        let frames: Arc<AtomicUsize> = Arc::default();
        let network = Network(Arc::clone(&frames));
        let mut server = DeviceServer::new(Box::new(Net::new(Box::new(network), [2; 6])), None);
        let is_told: Arc<AtomicBool> = Arc::default();
        let told = Arc::clone(&is_told);
        let interrupt = Arc::new(move || told.store(true, Ordering::SeqCst));
        let queue = Queue::new(SHAPE, SHAPE.size, false, ram.clone(), interrupt).expect("sound");
        server.rings[index].queue = Some(queue);
        Self { server, ram, is_told, frames }
    }

    /// Offers so many buffers in all.
    fn offer(&self, buffers: u16) {
        self.ram.write_gpa(SHAPE.available + 2, &buffers.to_le_bytes()).expect("memory");
    }

    /// Whether the driver has been interrupted since the last call.
    fn is_told(&self) -> bool {
        self.is_told.swap(false, Ordering::SeqCst)
    }

    /// Waits until the server is to tell a driver of late answers, and has the server do so.
    fn wait(&mut self) {
        let until = self.server.late_until.expect("it is to be told");
        thread::sleep(until.saturating_duration_since(Instant::now()));
        self.server.tell_late();
        assert!(self.server.late_until.is_none());
    }
}

#[test]
fn a_driver_is_told_later_of_a_few_sent_frames() {
    let mut bench = Bench::new(TRANSMIT);
    bench.offer(3);
    bench.server.run(TRANSMIT);
    let until = bench.server.late_until.replace(Instant::now() + Duration::from_secs(600));
    bench.server.tell_late();
    assert!(!bench.is_told(), "not before the time");
    bench.server.late_until = until;
    bench.wait();
    assert!(bench.is_told());
}

#[test]
fn a_vcpu_that_waits_goes_on_though_the_driver_is_told_later() {
    let mut bench = Bench::new(TRANSMIT);
    let words = Arc::new(Words::new().expect("a page"));
    bench.server.words = Some(Arc::clone(&words));
    bench.offer(3);
    assert_eq!(words.expect(TRANSMIT, Waiting::Looking), Some(Turn::Ours));
    bench.server.run(TRANSMIT);
    assert_eq!(words.wait(TRANSMIT, Waiting::Looking, LATE), Reply::Silence);
    assert!(!bench.is_told());
}

#[test]
fn a_driver_is_told_at_once_of_many() {
    let mut bench = Bench::new(TRANSMIT);
    bench.offer(MOST_LATE - 1);
    bench.server.run(TRANSMIT);
    assert!(!bench.is_told(), "few");
    bench.offer(MOST_LATE);
    bench.server.run(TRANSMIT);
    assert!(bench.is_told(), "many");
}

#[test]
fn a_frame_that_comes_alone_is_told_of_at_once_and_others_that_follow_together() {
    let mut bench = Bench::new(RECEIVE);
    bench.offer(SHAPE.size - 1);
    let comes = |bench: &mut Bench| {
        bench.frames.store(1, Ordering::SeqCst);
        bench.server.run(RECEIVE);
    };
    comes(&mut bench);
    assert!(bench.is_told() && bench.server.late_until.is_none(), "alone");
    // As if that had been a moment ago, however busy the host is.
    let ring = &mut bench.server.rings[RECEIVE];
    ring.told = ring.told.map(|told| told + Duration::from_millis(20));
    comes(&mut bench);
    comes(&mut bench);
    assert!(!bench.is_told(), "close together");
    bench.wait();
    assert!(bench.is_told());
    bench.server.rings[RECEIVE].told = Instant::now().checked_sub(LATE);
    comes(&mut bench);
    assert!(bench.is_told(), "alone again");
}
