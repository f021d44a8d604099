//! A shared folder (virtio 1.2 section 5.11): FUSE requests of the guest's kernel.
//!
//! The body carries bytes: it copies a whole request out of guest memory, has a [`FileServer`] answer
//! it, and copies the answer back. What the server looks at can therefore not change under it.

use crate::{Chain, Queue, RingError, VirtioDevice, layout::MAX_QUEUES};
use ram::DmaMemory;
use std::{collections::VecDeque, iter};

/// The size of the queue of high-priority requests (forgets), which is the first.
const PRIORITY: u16 = 64;
/// The size of each request queue.
const REQUESTS: u16 = 1024;
/// The most request queues: as many as a device can have, less the one of high priority.
const MOST_QUEUES: u16 = MAX_QUEUES as u16 - 1;
/// Requests of a queue that are answered before other queues are looked at: a program that keeps one queue full must not keep the
/// other CPUs' programs waiting.
const TURN: usize = 8;
/// Bytes of the tag's field, which the number of request queues follows.
const TAG: usize = 36;
/// The longest request and the longest answer: 1 MiB of data, with their headers.
pub const MAX_MESSAGE: usize = (1 << 20) + 8192;

/// Who answers FUSE requests.
pub trait FileServer: Send {
    /// Answers a request, in at most `room` bytes; nothing for requests that have no answer.
    /// Neither is longer than [`MAX_MESSAGE`].
    fn answer(&mut self, request: &[u8], room: usize) -> &[u8];
}

/// Answers for a folder that nobody serves any more: every request fails, so that the guest's programs know.
struct GoneFolder {
    refusal: [u8; REFUSAL],
}

/// Bytes of an answer that is an error: `struct fuse_out_header`.
const REFUSAL: usize = 16;
/// Bytes of a request up to the end of its number.
const QUESTION: usize = 16;
const EIO: i32 = 5;
/// FUSE_FORGET, FUSE_INTERRUPT, FUSE_BATCH_FORGET: nobody waits for an answer.
const UNANSWERED: [u32; 3] = [2, 36, 42];

/// The answer that a request failed, if it is one that has an answer.
fn refusal(request: &[u8]) -> Option<[u8; REFUSAL]> {
    // Behind its length a request has its opcode and its number.
    let (&opcode, rest) = request.get(4..)?.split_first_chunk()?;
    let number = rest.first_chunk::<8>()?;
    let mut refusal = [0; REFUSAL];
    refusal[..4].copy_from_slice(&(REFUSAL as u32).to_le_bytes());
    refusal[4..8].copy_from_slice(&(-EIO).to_le_bytes());
    refusal[8..].copy_from_slice(number);
    (!UNANSWERED.contains(&u32::from_le_bytes(opcode))).then_some(refusal)
}

impl FileServer for GoneFolder {
    fn answer(&mut self, request: &[u8], _room: usize) -> &[u8] {
        let Some(refusal) = refusal(request) else { return &[] };
        self.refusal = refusal;
        &self.refusal
    }
}

/// The device body.
pub struct Fs {
    server: Box<dyn FileServer>,
    tag: [u8; TAG],
    request: Vec<u8>,
    /// The size of each queue, in order.
    queues: Vec<u16>,
    /// Queues that are to be served next, in this order. There are some only after a queue has used up its turn.
    due: VecDeque<usize>,
}

impl Fs {
    /// A folder the guest mounts by this tag, of 1 to 36 bytes.
    pub fn new(server: Box<dyn FileServer>, tag: &str) -> Self {
        let mut field = [0; TAG];
        field.iter_mut().zip(tag.bytes()).for_each(|(to, from)| *to = from);
        let (queues, due) = (vec![PRIORITY, REQUESTS], VecDeque::new());
        Self { server, tag: field, request: Vec::new(), queues, due }
    }

    /// Has the folder offer so many request queues, 1 to 63. The requests of all queues are answered one after the other.
    pub fn with_queues(mut self, queues: u16) -> Self {
        let requests = queues.clamp(1, MOST_QUEUES);
        self.queues =
            iter::once(PRIORITY).chain(iter::repeat_n(REQUESTS, requests.into())).collect();
        self
    }

    /// What is left of a folder whose configuration structure was this.
    pub fn gone(config: &[u8]) -> Self {
        let queues = config.get(TAG..).and_then(<[u8]>::first_chunk).copied();
        let queues = queues.map_or(1, u32::from_le_bytes);
        let mut gone = Self::new(Box::new(GoneFolder { refusal: [0; REFUSAL] }), "");
        gone.tag.iter_mut().zip(config).for_each(|(to, from)| *to = *from);
        gone.with_queues(queues.try_into().unwrap_or(MOST_QUEUES))
    }

    /// The configuration structure of a folder with one request queue that the guest mounts by this tag, of 1 to 36 bytes.
    pub fn config_of(tag: &str) -> Vec<u8> {
        Self::new(Box::new(GoneFolder { refusal: [0; REFUSAL] }), tag).config()
    }

    /// Answers one request that it failed; returns the bytes written.
    ///
    /// # Errors
    /// Its buffers are not accessible.
    pub fn refuse(chain: &Chain, memory: &DmaMemory) -> Result<u32, RingError> {
        let mut request = [0; QUESTION];
        if chain.readable.len() < QUESTION as u64 || chain.writable.len() < REFUSAL as u64 {
            return Ok(0);
        }
        chain.readable.read(memory, 0, &mut request)?;
        let Some(refusal) = refusal(&request) else { return Ok(0) };
        chain.writable.write(memory, 0, &refusal)?;
        Ok(REFUSAL as u32)
    }

    /// Bytes of the answer written.
    fn serve(&mut self, chain: &Chain, queue: &Queue) -> Result<u32, RingError> {
        let len = chain.readable.len() as usize;
        if len > MAX_MESSAGE {
            tracing::warn!(len, "dropped a file system request that is too long");
            return Ok(0);
        }
        self.request.resize(len, 0);
        chain.readable.read(queue.memory(), 0, &mut self.request)?;
        let room = chain.writable.len().min(MAX_MESSAGE as u64) as usize;
        let answer = self.server.answer(&self.request, room);
        let answer = answer.get(..answer.len().min(room)).unwrap_or_default();
        chain.writable.write(queue.memory(), 0, answer)?;
        Ok(answer.len() as u32)
    }
}

impl VirtioDevice for Fs {
    fn device_type(&self) -> u16 {
        crate::device_id::FS
    }

    fn class(&self) -> u32 {
        0x01_80_00 // other mass storage controller
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queues
    }

    fn config(&self) -> Vec<u8> {
        let mut config = self.tag.to_vec();
        let requests = self.queues.len() as u32 - 1;
        config.extend_from_slice(&requests.to_le_bytes());
        config
    }

    /// Forgets have no answer.
    fn is_patient(&self, index: usize) -> bool {
        index == 0
    }

    fn process(&mut self, index: usize, queue: &mut Queue) -> Result<(), RingError> {
        for _ in 0..TURN {
            let Some(chain) = queue.pop()? else { return Ok(()) };
            let written = self.serve(&chain, queue)?;
            queue.complete(chain, written)?;
            queue.tell_driver()?; // the next one may take long
        }
        // There may be more, after everybody else's turn.
        self.due = (index + 1..self.queues.len()).chain(0..=index).collect();
        Ok(())
    }

    fn take_due(&mut self) -> Option<usize> {
        self.due.pop_front()
    }
}
