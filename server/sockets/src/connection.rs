//! One connection: a socket, and the credit of both sides (virtio 1.2 section 5.10.6.3).

use std::{
    collections::VecDeque,
    io::{ErrorKind, Read, Write},
    net::Shutdown,
};

use mio::{Token, net::UnixStream};
use virtio::vsock::{VsockHeader, operation};

/// Guest's and host's port.
pub(crate) type Ports = (u32, u32);

/// Bytes of the guest's that we keep at most.
const BUFFER: u32 = 256 << 10;
/// Flags of a shutdown: the sender will not receive, or send, any more.
pub(crate) const NO_RECEIVE: u32 = 1;
pub(crate) const NO_SEND: u32 = 2;

pub(crate) struct Connection {
    stream: UnixStream,
    token: Token,
    /// The socket may have something to read or room to write.
    pub(crate) ready: bool,
    /// Bytes of the guest the socket did not take yet.
    kept: VecDeque<u8>,
    /// Bytes the socket has taken, wrapping; and what the guest was last told of that.
    taken: u32,
    told: u32,
    /// The guest's room, what its user has taken, and what we have sent, wrapping.
    guest_buffer: u32,
    guest_taken: u32,
    sent: u32,
    guest_flags: u32,
    /// The socket's end, or failure, has been told to the guest.
    host_ended: bool,
    broken: bool,
}

impl Connection {
    pub(crate) fn new(stream: UnixStream, token: Token) -> Self {
        Self {
            stream,
            token,
            ready: true,
            kept: VecDeque::new(),
            taken: 0,
            told: 0,
            guest_buffer: 0,
            guest_taken: 0,
            sent: 0,
            guest_flags: 0,
            host_ended: false,
            broken: false,
        }
    }

    pub(crate) fn token(&self) -> Token {
        self.token
    }

    /// Our room and what we have taken, to be told to the guest.
    pub(crate) fn credit(&self) -> (u32, u32) {
        (BUFFER, self.taken)
    }

    /// Takes in what every packet of the guest tells.
    pub(crate) fn learn(&mut self, header: &VsockHeader) {
        (self.guest_buffer, self.guest_taken) = (header.buffer, header.taken);
        self.ready = true;
    }

    /// Keeps data for the socket; false if the guest had no credit for it.
    pub(crate) fn accept(&mut self, data: &[u8]) -> bool {
        if self.kept.len() + data.len() > BUFFER as usize {
            return false;
        }
        self.kept.extend(data);
        true
    }

    /// The guest shut one or both of its directions.
    pub(crate) fn shut(&mut self, flags: u32) {
        self.guest_flags |= flags & (NO_RECEIVE | NO_SEND);
    }

    /// Gives the socket what it takes.
    pub(crate) fn flush(&mut self) {
        while !self.kept.is_empty() && !self.broken {
            let (piece, _) = self.kept.as_slices();
            match self.stream.write(piece) {
                Ok(count) => {
                    self.kept.drain(..count);
                    self.taken = self.taken.wrapping_add(count as u32);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => self.broken = true,
            }
        }
        if self.guest_flags & NO_SEND != 0 && !self.broken {
            // Whoever reads the other end sees the end; if nobody does, all is well too.
            let _ = self.stream.shutdown(Shutdown::Write);
        }
    }

    /// The guest must be told that much has been taken.
    pub(crate) fn owes_credit(&mut self) -> bool {
        let owed = self.taken.wrapping_sub(self.told) >= BUFFER / 4;
        if owed {
            self.told = self.taken;
        }
        owed
    }

    /// Nothing more can come of it: it broke, or both sides have had everything.
    pub(crate) fn is_over(&self) -> bool {
        let guest_ended = self.guest_flags & NO_SEND != 0 && self.kept.is_empty();
        let guest_gone = self.guest_flags & NO_RECEIVE != 0;
        self.broken || guest_ended && (guest_gone || self.host_ended)
    }

    /// The operation and flags of the next packet for the guest, its data read from the socket;
    /// `None`, and not ready any more, if there is nothing to send or no credit.
    pub(crate) fn read(&mut self, room: usize, data: &mut Vec<u8>) -> Option<(u16, u32)> {
        let under_way = self.sent.wrapping_sub(self.guest_taken);
        let credit = self.guest_buffer.saturating_sub(under_way) as usize;
        let room = room.min(credit);
        if self.host_ended || self.guest_flags & NO_RECEIVE != 0 || room == 0 {
            self.ready = false;
            return None;
        }
        data.resize(room, 0);
        let outcome = self.stream.read(data);
        data.truncate(*outcome.as_ref().unwrap_or(&0));
        match outcome {
            Ok(0) => {
                self.host_ended = true;
                Some((operation::SHUTDOWN, NO_SEND))
            }
            Ok(count) => {
                self.sent = self.sent.wrapping_add(count as u32);
                Some((operation::DATA, 0))
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => None,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                self.ready = false;
                None
            }
            Err(_) => {
                self.host_ended = true;
                Some((operation::SHUTDOWN, NO_SEND))
            }
        }
    }
}
