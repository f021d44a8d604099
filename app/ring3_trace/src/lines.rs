//! What a machine sends to a service: lines on a socket, and events in a ring if the service asked for one.

use std::{
    io::{self, BufRead, BufReader, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use crate::{Line, ring::RingReader};

/// Lines of a machine. Events that come by a ring are lines as well.
pub struct Lines {
    reader: BufReader<UnixStream>,
    ring: Option<RingReader>,
    /// The beginning of the first line, with which a ring may have come.
    first: Option<u8>,
}

impl Lines {
    /// What comes on a connection on which the request was just sent. Waits for the answer.
    ///
    /// # Errors
    /// The connection fails, or what was passed is no ring.
    pub fn new(reader: BufReader<UnixStream>, has_ring: bool) -> io::Result<Self> {
        let (first, passed) = if has_ring { first_byte(reader.get_ref())? } else { (None, None) };
        let ring = passed.map(RingReader::new).transpose()?;
        Ok(Self { reader, ring, first })
    }

    /// The connection, to send orders.
    pub fn connection(&mut self) -> &mut UnixStream {
        self.reader.get_mut()
    }

    /// Events that were lost, as far as a ring tells of them.
    pub fn lost(&self) -> u64 {
        self.ring.as_ref().map_or(0, RingReader::lost)
    }

    /// The next line; `None` once the machine has ended, or has hung up. `idle` is called before this has to wait.
    ///
    /// # Errors
    /// The connection fails, or what comes is no line.
    pub fn next(&mut self, mut idle: impl FnMut() -> io::Result<()>) -> io::Result<Option<Line>> {
        loop {
            if let Some(ring) = &mut self.ring {
                if let Some(event) = ring.take()? {
                    return Ok(Some(Line::Event(event)));
                }
                if !ring.may_sleep() {
                    continue;
                }
                idle()?;
            }
            match self.next_of_socket()? {
                Some(Line::Wake) => {}
                Some(line) => return Ok(Some(line)),
                // What was written before the end.
                None => {
                    return Ok(self
                        .ring
                        .as_mut()
                        .map_or(Ok(None), RingReader::take)?
                        .map(Line::Event));
                }
            }
        }
    }

    /// The next line of the socket, whatever is in the ring.
    ///
    /// # Errors
    /// As for [`Lines::next`].
    pub fn next_of_socket(&mut self) -> io::Result<Option<Line>> {
        let mut line: Vec<u8> = self.first.take().into_iter().collect();
        // A machine that ends may hang up in the middle of a line.
        if self.reader.read_until(b'\n', &mut line)? == 0 || !line.ends_with(b"\n") {
            return Ok(None);
        }
        let wrong = |_| io::Error::other(String::from_utf8_lossy(&line).trim().to_owned());
        serde_json::from_slice(&line).map(Some).map_err(wrong)
    }
}

/// The first byte of an answer, and what was passed with it.
fn first_byte(connection: &UnixStream) -> io::Result<(Option<u8>, Option<OwnedFd>)> {
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut passed = RecvAncillaryBuffer::new(&mut room);
    let mut byte = [0];
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(connection, &mut [IoSliceMut::new(&mut byte)], &mut passed, flags)?;
    let descriptors = passed.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    Ok(((received.bytes != 0).then_some(byte[0]), descriptors.flatten().next()))
}

/// Sends bytes with a descriptor: the machine's side of what [`Lines::new`] takes.
///
/// # Errors
/// The service has gone.
pub fn pass(connection: &UnixStream, bytes: &[u8], descriptor: BorrowedFd<'_>) -> io::Result<()> {
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut passed = SendAncillaryBuffer::new(&mut room);
    let descriptors = [descriptor];
    // There is room for one.
    passed.push(SendAncillaryMessage::ScmRights(&descriptors));
    sendmsg(connection, &[IoSlice::new(bytes)], &mut passed, SendFlags::NOSIGNAL)?;
    Ok(())
}
