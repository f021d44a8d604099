//! The backend as a guest's driver meets it.

use std::{
    io::{Read, Write},
    sync::mpsc::{RecvTimeoutError, channel},
    time::Duration,
};

use super::*;
use connection::{NO_RECEIVE, NO_SEND};

const GUEST_PORT: u32 = 1000;
const PORT: u32 = 7;

struct Guest {
    sockets: Sockets,
    bells: std::sync::mpsc::Receiver<()>,
}

fn guest() -> (Guest, UnixStream) {
    let (ours, theirs) = UnixStream::pair().expect("a pair");
    let sockets = Sockets::new([(PORT, theirs)]).expect("sockets");
    let (sender, bells) = channel();
    let ring = move || {
        let _ = sender.send(()); // a test that has ended listens no more
    };
    sockets.ringer()(Arc::new(ring));
    (Guest { sockets, bells }, ours)
}

impl Guest {
    fn says(&mut self, operation: u16, flags: u32, buffer: u32, taken: u32, data: &[u8]) {
        let (guest_port, host_port) = (GUEST_PORT, PORT);
        let header = VsockHeader { guest_port, host_port, operation, flags, buffer, taken };
        self.sockets.packet(&header, data);
    }

    fn connects(&mut self, buffer: u32) {
        self.says(operation::REQUEST, 0, buffer, 0, &[]);
        assert_eq!(self.hears().0.operation, operation::RESPONSE);
    }

    /// The next packet, waited for.
    fn hears(&mut self) -> (VsockHeader, Vec<u8>) {
        loop {
            let mut data = Vec::new();
            if let Some(header) = self.sockets.next(4096, &mut data) {
                return (header, data);
            }
            self.bells.recv_timeout(Duration::from_secs(10)).expect("a packet");
        }
    }

    fn hears_nothing(&mut self) {
        assert_eq!(self.sockets.next(4096, &mut Vec::new()), None);
    }
}

#[test]
fn bytes_go_both_ways_and_ends_too() {
    let (mut guest, mut host) = guest();
    guest.connects(1 << 16);
    guest.says(operation::DATA, 0, 1 << 16, 0, b"to the host");
    let mut buffer = [0; 11];
    host.read_exact(&mut buffer).expect("read");
    assert_eq!(&buffer, b"to the host");
    host.write_all(b"to the guest").expect("written");
    assert_eq!(guest.hears().1, b"to the guest");
    drop(host);
    let (header, _) = guest.hears();
    assert_eq!((header.operation, header.flags), (operation::SHUTDOWN, NO_SEND));
    guest.says(operation::SHUTDOWN, NO_SEND | NO_RECEIVE, 1 << 16, 12, &[]);
    assert_eq!(guest.hears().0.operation, operation::RESET);
}

#[test]
fn what_the_guest_sent_before_it_left_arrives() {
    let (mut guest, mut host) = guest();
    guest.connects(1 << 16);
    let bytes: Vec<u8> = (0..200_000).map(|i| i as u8).collect();
    bytes.chunks(4096).for_each(|piece| guest.says(operation::DATA, 0, 1 << 16, 0, piece));
    guest.says(operation::SHUTDOWN, NO_SEND | NO_RECEIVE, 1 << 16, 0, &[]);
    let reader = thread::spawn(move || {
        let mut all = Vec::new();
        host.read_to_end(&mut all).map(|_| all)
    });
    while guest.hears().0.operation != operation::RESET {}
    assert_eq!(reader.join().expect("no panic").expect("read"), bytes);
}

#[test]
fn the_guests_credit_is_kept_to() {
    let (mut guest, mut host) = guest();
    guest.connects(10);
    host.write_all(&[7; 25]).expect("written");
    assert_eq!(guest.hears().1.len(), 10);
    guest.hears_nothing();
    guest.says(operation::CREDIT_UPDATE, 0, 10, 4, &[]);
    assert_eq!(guest.hears().1.len(), 4);
    // A guest that claims to have taken more than it was sent gets no more than its buffer holds.
    guest.says(operation::CREDIT_UPDATE, 0, 10, 1000, &[]);
    guest.hears_nothing();
}

#[test]
fn a_guest_beyond_its_credit_is_cut_off() {
    let (mut guest, _host) = guest();
    guest.connects(1 << 16);
    let mut cut = false;
    for _ in 0..100 {
        guest.says(operation::DATA, 0, 1 << 16, 0, &[0; 60_000]);
        let header = guest.sockets.next(4096, &mut Vec::new());
        cut |= header.is_some_and(|header| header.operation == operation::RESET);
    }
    assert!(cut);
}

#[test]
fn unknown_ports_and_second_connections_are_refused() {
    let (mut guest, _host) = guest();
    guest.connects(1 << 16);
    guest.says(operation::REQUEST, 0, 1 << 16, 0, &[]);
    assert_eq!(guest.hears().0.operation, operation::RESET);
    let (guest_port, host_port) = (5, 99);
    let operation = operation::REQUEST;
    let header = VsockHeader { guest_port, host_port, operation, ..VsockHeader::default() };
    guest.sockets.packet(&header, &[]);
    let (reply, _) = guest.hears();
    assert_eq!((reply.operation, reply.host_port), (operation::RESET, 99));
}

/// A machine's end leaves neither thread nor descriptor: what the thread tells is given up with it.
#[test]
fn the_waiting_thread_ends_with_the_sockets() {
    for _ in 0..200 {
        let (Guest { sockets, bells }, _host) = guest();
        drop(sockets);
        let end = bells.recv_timeout(Duration::from_secs(20));
        assert_eq!(end, Err(RecvTimeoutError::Disconnected));
    }
}
