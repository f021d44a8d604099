//! What a vhost-user server of another program says to our monitor, and writes into the rings it is given, while a driver does anything.

use std::{
    io::{IoSliceMut, Read, Write},
    mem::MaybeUninit,
    os::{fd::OwnedFd, unix::net::UnixStream},
    thread,
};

use fastrand::Rng;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use vhost_user::{ConfigSource, Foreign, Nature};
use virtio::{Chain, RingError};

use super::{all, none};
use crate::devices::{Action, Guest};
use fuzzer::Target;

pub(crate) const TARGET: Target = Target { name: "server", seeds: none, run };

/// Deeds of one input.
const MOST: usize = 100;
/// Messages a server takes before it hangs up.
const PATIENCE: usize = 60;
const HEADER: usize = 12;
const IS_ANSWER: u32 = 1 << 2;
const VERSION: u32 = 1;
const NEEDS_ANSWER: u32 = 1 << 3;
/// VIRTIO_F_VERSION_1, and the protocol's own bit.
const FEATURES: u64 = 1 << 32 | 1 << 30;
/// CONFIG, RESET_DEVICE, MQ.
const PROTOCOL: u64 = 1 << 9 | 1 << 13 | 1;

fn nature() -> Nature {
    fn refuse(_: &Chain, _: &ram::DmaMemory) -> Result<u32, RingError> {
        Ok(0)
    }
    Nature {
        name: "fuzz",
        device_type: 4,
        class: 0xff_00_00,
        queues: &[8, 8],
        known: 1 << 5,
        passed: 1 << 5,
        config: ConfigSource::Asked(4),
        whole_answers: false,
        ours: 0,
        patient: Some(1),
        refuse,
    }
}

/// A server that answers as it should, mostly.
struct Server {
    socket: UnixStream,
    random: Rng,
    /// What it was given.
    files: Vec<OwnedFd>,
}

impl Server {
    /// The next message: its request, flags and body; none if the monitor has hung up.
    fn hear(&mut self) -> Option<(u32, u32, Vec<u8>)> {
        let mut header = [0; HEADER];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let parts = &mut [IoSliceMut::new(&mut header)];
        let count = recvmsg(&self.socket, parts, &mut ancillary, RecvFlags::WAITALL).ok()?.bytes;
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(files) = message {
                self.files.extend(files);
            }
        }
        if count < HEADER {
            return None;
        }
        let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|n| header[at + n]));
        let mut body = vec![0; (word(8) as usize).min(8192)];
        self.socket.read_exact(&mut body).ok()?;
        Some((word(0), word(4), body))
    }

    fn answer(&mut self, request: u32, flags: u32, body: &[u8]) -> Option<()> {
        let mut answer = match request {
            1 => FEATURES.to_le_bytes().to_vec(),
            15 => PROTOCOL.to_le_bytes().to_vec(),
            17 => 2_u64.to_le_bytes().to_vec(),
            // GET_VRING_BASE, GET_CONFIG
            11 | 24 => body.to_vec(),
            _ if flags & NEEDS_ANSWER != 0 => 0_u64.to_le_bytes().to_vec(),
            _ => return Some(()),
        };
        let mut head = [request, VERSION | IS_ANSWER, answer.len() as u32];
        let kind = self.random.u8(..24);
        match kind {
            0 => answer.iter_mut().for_each(|byte| *byte = self.random.u8(..)),
            1 => head[self.random.usize(..3)] = self.random.u32(..),
            2 => answer.truncate(self.random.usize(..=answer.len())),
            3 => return None,
            _ => {}
        }
        let head: Vec<u8> = head.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.socket.write_all(&head).and_then(|()| self.socket.write_all(&answer)).ok()?;
        // The monitor waits seconds for the rest of an answer: one in many keeps it waiting, the others hang up.
        let lacks = matches!(kind, 1 | 2) && self.random.u8(..64) != 0;
        (!lacks).then_some(())
    }

    /// Writes anything into what it was given: memory, and events.
    fn scribble(&mut self) {
        for file in &self.files {
            let mut bytes = [0; 8];
            self.random.fill(&mut bytes);
            if self.random.bool() {
                bytes = [1, 0, 0, 0, 0, 0, 0, 0];
            }
            let at = u64::from(self.random.u16(..));
            // Events take no place.
            if rustix::io::pwrite(file, &bytes, at).is_err() {
                let _ = rustix::io::write(file, &bytes);
            }
        }
    }

    fn serve(mut self) {
        for _ in 0..PATIENCE {
            let Some((request, flags, body)) = self.hear() else { return };
            if self.answer(request, flags, &body).is_none() {
                return;
            }
            self.scribble();
        }
    }
}

fn run(bytes: &[u8]) {
    let (socket, theirs) = UnixStream::pair().expect("a pair");
    let seed = bytes.iter().fold(7_u64, |sum, byte| sum.wrapping_mul(31) ^ u64::from(*byte));
    let server = Server { socket: theirs, random: Rng::with_seed(seed), files: Vec::new() };
    let server = thread::spawn(move || server.serve());
    // That such a server is refused is no failure.
    if let Ok(foreign) = Foreign::at(socket, "fuzz", nature()) {
        let release = foreign.releaser().expect("a descriptor");
        let mut guest = Guest::new(foreign);
        guest.start(u64::MAX);
        for action in all::<Action>(bytes, MOST) {
            guest.perform(&action);
        }
        release();
        guest.reset();
    }
    server.join().expect("the hostile one does not panic");
}
