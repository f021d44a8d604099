//! vsock packets to the host's ends of streams.

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use arbitrary::Arbitrary;
use sockets::Sockets;
use virtio::vsock::{VsockBackend, VsockHeader};

use super::{all, none};
use fuzzer::Target;

pub(crate) const TARGET: Target = Target { name: "sockets", seeds: none, run };

/// Deeds of one input.
const MOST: usize = 200;
const PORTS: [u32; 3] = [1, 2, 3];
/// How long a thread may take to end.
const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Arbitrary, Debug)]
enum Action {
    /// A packet of a connection there may be.
    Likely { guest: u8, host: u8, operation: u8, flags: u8, buffer: u16, taken: u16, data: Vec<u8> },
    /// Any packet.
    Any { guest: u32, host: u32, operation: u16, flags: u32, buffer: u32, taken: u32, len: u16 },
    /// The guest takes what there is for it.
    Next { room: u16 },
    /// The host's end says something.
    Say { which: u8, len: u16 },
    /// It listens.
    Hear { which: u8 },
    /// The guest's driver starts anew.
    Reset,
}

fn run(bytes: &[u8]) {
    let mut ends = Vec::new();
    let ports = PORTS.map(|port| {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        ours.set_nonblocking(true).expect("set");
        ends.push(ours);
        (port, theirs)
    });
    let mut sockets = Sockets::new(ports).expect("sockets");
    let told: virtio::Notify = Arc::new(|| {});
    sockets.ringer()(Arc::clone(&told));
    let mut data = Vec::new();
    for action in all::<Action>(bytes, MOST) {
        match action {
            Action::Likely { guest, host, operation, flags, buffer, taken, data } => {
                let header = VsockHeader {
                    guest_port: u32::from(guest % 4),
                    host_port: u32::from(host % 4),
                    operation: u16::from(operation % 9),
                    flags: u32::from(flags % 4),
                    buffer: buffer.into(),
                    taken: taken.into(),
                };
                sockets.packet(&header, &data);
            }
            Action::Any { guest, host, operation, flags, buffer, taken, len } => {
                let (guest_port, host_port) = (guest, host);
                let header = VsockHeader { guest_port, host_port, operation, flags, buffer, taken };
                sockets.packet(&header, &vec![7; len.into()]);
            }
            Action::Next { room } => {
                data.clear();
                sockets.next(room.into(), &mut data);
                assert!(data.len() <= room.into(), "{} bytes in {room}", data.len());
            }
            // An end that is full, or gone, is no failure.
            Action::Say { which, len } => {
                let _ = (&ends[usize::from(which) % ends.len()]).write(&vec![9; len.into()]);
            }
            Action::Hear { which } => {
                let _ = (&ends[usize::from(which) % ends.len()]).read(&mut [0; 65536]);
            }
            Action::Reset => sockets.reset(),
        }
    }
    drop(sockets);
    has_ended(&told);
}

/// The thread that waits for the sockets ends with them, and gives up what it tells.
fn has_ended(told: &virtio::Notify) {
    let started = Instant::now();
    while Arc::strong_count(told) > 1 {
        assert!(started.elapsed() < PATIENCE, "a thread is left behind");
        thread::yield_now();
    }
}
