//! Tests of the bell that a server's other threads ring.

use std::sync::atomic::{AtomicU32, Ordering};

use virtio::{NET_RECEIVE as RECEIVE, NET_TRANSMIT as TRANSMIT, Net};

use super::*;

/// So often the bell is rung. A ring that falls between two calls of the host's was lost in one of some hundred.
const RINGS: u32 = 20_000;
/// A ring is lost if it has not been heard for so long.
const LOST: Duration = Duration::from_secs(10);

/// A server with a bell, and with another queue that has this doorbell.
fn server(bell: Bell, kick: File) -> DeviceServer {
    let net = Net::cut(&Net::config_of([2; 6], 1500));
    let mut server = DeviceServer::new(Box::new(net), Some(bell));
    let shape = Shape { size: 64, descriptors: 0x1000, available: 0x2000, used: 0x3000 };
    let ram = Ram::new(1 << 20).expect("memory");
    let ring = &mut server.rings[TRANSMIT];
    ring.queue = Some(Queue::new(shape, shape.size, false, ram, Arc::new(|| ())).expect("sound"));
    ring.kick = Some(kick);
    server
}

#[test]
fn a_bell_that_rings_while_another_queue_is_asked_is_heard() {
    let bell = Bell::new(RECEIVE).expect("a descriptor");
    let (ring, heard) = (bell.ringer(), Arc::new(AtomicU32::new(0)));
    let mut kick = File::from(eventfd(0, EventfdFlags::CLOEXEC).expect("a descriptor"));
    let server = Mutex::new(server(bell, kick.try_clone().expect("a descriptor")));
    let (socket, _monitor) = UnixStream::pair().expect("sockets");
    let hears = Arc::clone(&heard);
    let rings = thread::spawn(move || {
        for number in 1..=RINGS {
            ring();
            while hears.load(Ordering::SeqCst) < number {
                thread::yield_now();
            }
        }
    });
    let mut last = Instant::now();
    while heard.load(Ordering::SeqCst) < RINGS {
        kick.write_all(&1_u64.to_ne_bytes()).expect("it rings");
        let (_, rung) = wait(&socket, &server).expect("a bell");
        lock(&server).run_rung(&rung);
        if rung.contains(&RECEIVE) {
            heard.fetch_add(1, Ordering::SeqCst);
            last = Instant::now();
        }
        // On a host with one CPU whoever rings is to have its turn.
        thread::yield_now();
        assert!(last.elapsed() < LOST, "ring {} was lost", heard.load(Ordering::SeqCst) + 1);
    }
    rings.join().expect("no panic");
}
