//! Monitors that say anything to a server, and hang up.

use std::{
    fs::File,
    io::Write,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::mpsc::{RecvTimeoutError, channel},
    thread,
    time::Duration,
};

use rustix::{
    event::{EventfdFlags, eventfd},
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create},
    net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg},
};
use vhost_user::serve;
use virtio::{Queue, RingError, VirtioDevice};

const PATIENCE: Duration = Duration::from_secs(10);
/// Requests of the protocol there are, and a few there are not.
const REQUESTS: u32 = 48;
const VERSION: u32 = 1;
const WANTS_ANSWER: u32 = 1 << 3;
const QUEUES: [u16; 2] = [128, 128];
const MEMORY: u64 = 1 << 20;

/// Gives every request back, with a byte of it changed.
pub struct Echo;

impl VirtioDevice for Echo {
    fn device_type(&self) -> u16 {
        4
    }
    fn class(&self) -> u32 {
        0xff_00_00
    }
    fn features(&self) -> u64 {
        1 << 5
    }
    fn queue_sizes(&self) -> &[u16] {
        &QUEUES
    }
    fn config(&self) -> Vec<u8> {
        vec![1, 2, 3, 4]
    }
    fn process(&mut self, _: usize, queue: &mut Queue) -> Result<(), RingError> {
        while let Some(chain) = queue.pop()? {
            let mut data = [0];
            chain.readable.read(
                queue.memory(),
                0,
                &mut data[..(chain.readable.len() as usize).min(1)],
            )?;
            chain.writable.write(
                queue.memory(),
                0,
                &data[..(chain.writable.len() as usize).min(1)],
            )?;
            queue.complete(chain, 1)?;
        }
        Ok(())
    }
}

/// Hostile, but the same each time.
struct Monitor {
    random: fastrand::Rng,
    memory: OwnedFd,
    /// Other ends, kept open.
    kept: Vec<OwnedFd>,
}

impl Monitor {
    fn new(seed: u64) -> Self {
        let memory = memfd_create("hostile", MemfdFlags::ALLOW_SEALING).expect("memory");
        ftruncate(&memory, MEMORY).expect("as long as that");
        // What shrinks ends a process of its own; here there are other tests in it.
        fcntl_add_seals(&memory, SealFlags::SHRINK).expect("sealed");
        let mut random = fastrand::Rng::with_seed(seed);
        let mut bytes = vec![0; MEMORY as usize];
        // Rings with small numbers in them, mostly.
        bytes.iter_mut().step_by(5).for_each(|byte| *byte = random.u8(..9));
        File::from(memory.try_clone().expect("another")).write_all(&bytes).expect("written");
        Self { random, memory, kept: Vec::new() }
    }

    /// A descriptor to be had: events that block, full ones, pipes, files and what is none of these.
    fn descriptor(&mut self) -> OwnedFd {
        let event = |count| eventfd(count, EventfdFlags::empty()).expect("an event");
        match self.random.u8(..8) {
            0 => event(0),
            1 => event(1),
            2 => {
                let full = event(0);
                let most = (u64::MAX - 1).to_ne_bytes();
                rustix::io::write(&full, &most).expect("filled");
                full
            }
            3 => {
                let (reader, writer) = rustix::pipe::pipe().expect("a pipe");
                self.kept.push(writer);
                reader
            }
            4 => rustix::pipe::pipe().expect("a pipe").0,
            5 => {
                let (ours, theirs) = UnixStream::pair().expect("a pair");
                self.kept.push(ours.into());
                theirs.into()
            }
            6 => File::open("/").expect("a folder").into(),
            _ => self.memory.try_clone().expect("another"),
        }
    }

    /// The body of a message, with what a driver would say in it as often as not.
    fn body(&mut self, request: u32) -> Vec<u8> {
        let queue = u32::from(self.random.u8(..3));
        let words = |words: &[u64]| words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let halves = |halves: &[u32]| halves.iter().flat_map(|half| half.to_ne_bytes()).collect();
        let at = |random: &mut fastrand::Rng| u64::from(random.u16(..)) & !0xf;
        match request {
            _ if self.random.u8(..8) == 0 => {
                let len = self.random.usize(..64);
                (0..len).map(|_| self.random.u8(..)).collect()
            }
            2 | 16 => words(&[self.random.u64(..)]),
            // SET_MEM_TABLE: one region of guest memory.
            5 => words(&[1, 0, MEMORY, 0, 0]),
            // SET_VRING_NUM, SET_VRING_BASE, GET_VRING_BASE, SET_VRING_ENABLE
            8 | 10 | 11 | 18 => halves(&[queue, self.random.u32(..3) * 64]),
            // SET_VRING_ADDR
            9 => {
                let [a, b, c] = [(); 3].map(|()| at(&mut self.random));
                words(&[queue.into(), a, b, c, 0])
            }
            // SET_VRING_KICK, SET_VRING_CALL, SET_VRING_ERR
            12..=14 => words(&[queue.into()]),
            // GET_CONFIG, SET_CONFIG
            24 | 25 => [halves(&[0, 4, 0]), vec![0; 4]].concat(),
            _ => Vec::new(),
        }
    }

    fn say(&mut self, socket: &UnixStream) {
        // Those that make queues run, more often than others.
        let likely = [1, 2, 3, 5, 8, 9, 10, 11, 12, 13, 14, 18, 24];
        let request = match self.random.u8(..4) {
            0 => self.random.u32(..REQUESTS),
            _ => *self.random.choice(&likely).expect("one"),
        };
        let body = self.body(request);
        let answer = if self.random.bool() { WANTS_ANSWER } else { 0 };
        let len = if self.random.u8(..16) == 0 { self.random.u32(..) } else { body.len() as u32 };
        let mut bytes: Vec<u8> =
            [request, VERSION | answer, len].iter().flat_map(|word| word.to_ne_bytes()).collect();
        bytes.extend(body);
        let files: Vec<_> = match request {
            5 => vec![self.memory.try_clone().expect("another")],
            12..=14 => vec![self.descriptor()],
            _ if self.random.u8(..8) == 0 => vec![self.descriptor(), self.descriptor()],
            _ => Vec::new(),
        };
        let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(&files));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        // A server that has hung up hears no more.
        let _ = sendmsg(socket, &[std::io::IoSlice::new(&bytes)], &mut ancillary, flags);
    }
}

/// A server by itself, the monitor of this seed, which says these words at last, and the end of both.
///
/// # Panics
/// The server does not end.
pub fn connection(seed: u64, last_words: &[u8]) {
    let (ours, theirs) = UnixStream::pair().expect("a pair");
    ours.set_nonblocking(true).expect("set");
    let (done, ended) = channel();
    thread::spawn(move || {
        // That the monitor breaks the protocol is what this is about.
        let _ = serve(Box::new(Echo), None, theirs);
        done.send(()).expect("waited for");
    });
    let mut monitor = Monitor::new(seed);
    for _ in 0..monitor.random.usize(1..40) {
        monitor.say(&ours);
    }
    // A server that has hung up hears no more.
    let _ = (&ours).write(last_words);
    // What is under way is looked at before or after the end.
    if monitor.random.bool() {
        thread::yield_now();
    }
    drop(ours);
    let outcome = ended.recv_timeout(PATIENCE);
    assert_ne!(outcome, Err(RecvTimeoutError::Timeout), "monitor {seed}: its server hangs");
    assert_eq!(outcome, Ok(()), "monitor {seed}: its server panicked");
}
