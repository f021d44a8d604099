//! Tests of the bell that a server's other threads ring.

use std::sync::atomic::{AtomicU32, Ordering};

use virtio::{NET_RECEIVE as RECEIVE, NET_TRANSMIT as TRANSMIT, Net};

use super::*;

/// So often the bell is rung. A ring that falls between two calls of the host's was lost in one of some hundred.
const RINGS: u32 = 20_000;
/// A ring is lost if it has not been heard for so long.
const LOST: Duration = Duration::from_secs(10);

/// A server with a bell, and another queue whose doorbell rings all the time.
fn server(bell: Bell) -> DeviceServer {
    let net = Net::cut(&Net::config_of([2; 6], 1500));
    let mut server = DeviceServer::new(Box::new(net), Some(bell));
    let shape = Shape { size: 64, descriptors: 0x1000, available: 0x2000, used: 0x3000 };
    let ram = Ram::new(1 << 20).expect("memory");
    let kick = File::from(eventfd(1, EventfdFlags::CLOEXEC).expect("a descriptor"));
    let ring = &mut server.rings[TRANSMIT];
    ring.queue = Some(Queue::new(shape, shape.size, false, ram, Arc::new(|| ())).expect("sound"));
    ring.kick = Some(kick);
    server
}

#[test]
fn a_bell_that_rings_while_another_queue_is_asked_is_heard() {
    let bell = Bell::new(RECEIVE).expect("a descriptor");
    let (ring, heard) = (bell.ringer(), Arc::new(AtomicU32::new(0)));
    let server = Mutex::new(server(bell));
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
        let (_, rung) = wait(&socket, &server).expect("a bell");
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
