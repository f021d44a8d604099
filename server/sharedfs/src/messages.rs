//! Requests for fuse-backend-rs, and its answers.
//!
//! The library takes a request as a descriptor chain in guest memory of its own version of vm-memory.
//! It gets one: a small memory of ours with a ring of one chain, into which each request is copied.
//! The library thus never sees the guest's memory, and the guest cannot change a request
//! between check and use.

use fuse_backend_rs::{
    api::server::Server,
    transport::{Reader, VirtioFsWriter},
};
use virtio::FS_MAX_MESSAGE;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::answers::Answers;

/// Bytes of an answer that is an error: a header.
pub(crate) const REFUSAL: usize = 16;
const EINVAL: i32 = 22;
/// Where a request's header has the user and the group.
const WHO: usize = 24;
const RING: u16 = 4;
const DESCRIPTORS: GuestAddress = GuestAddress(0);
const AVAILABLE: GuestAddress = GuestAddress(0x1000);
const USED: GuestAddress = GuestAddress(0x2000);
const REQUEST: GuestAddress = GuestAddress(0x1_0000);
const ANSWER: GuestAddress =
    GuestAddress(REQUEST.0 + (FS_MAX_MESSAGE as u64).next_multiple_of(4096));
const SIZE: usize = (ANSWER.0 as usize) + FS_MAX_MESSAGE.next_multiple_of(4096);
/// Descriptor flags: another follows; the device writes.
const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// The library with its memory.
pub(crate) struct Messages {
    server: Server<Answers>,
    memory: GuestMemoryMmap,
    queue: Queue,
    /// The user and group we are, as a request names them, unless we may become others.
    own: Option<[u8; 8]>,
    /// Chains made available so far.
    count: u16,
    answer: Vec<u8>,
}

impl Messages {
    /// Makes the memory and the ring.
    pub(crate) fn new(answers: Answers, own: Option<[u8; 8]>) -> Result<Self, String> {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), SIZE)]);
        let memory = memory.map_err(|error| error.to_string())?;
        let mut queue = Queue::new(RING).map_err(|error| error.to_string())?;
        let low = |address: GuestAddress| Some(address.0 as u32);
        queue.set_desc_table_address(low(DESCRIPTORS), None);
        queue.set_avail_ring_address(low(AVAILABLE), None);
        queue.set_used_ring_address(low(USED), None);
        queue.set_ready(true);
        let server = Server::new(answers);
        Ok(Self { server, memory, queue, own, count: 0, answer: Vec::new() })
    }

    /// Has a request answered; damaged ones by an error.
    pub(crate) fn exchange(&mut self, request: &[u8], room: usize) -> &[u8] {
        self.answer.clear();
        if let Err(error) = self.try_exchange(request, room.min(FS_MAX_MESSAGE)) {
            tracing::debug!(error, "damaged file system request");
            self.answer = refusal(request, EINVAL).to_vec();
        }
        self.answer.get(..self.answer.len().min(room)).unwrap_or_default()
    }

    fn try_exchange(&mut self, request: &[u8], room: usize) -> Result<(), String> {
        let memory = &self.memory;
        memory.write_slice(request, REQUEST).map_err(|error| error.to_string())?;
        if self.own.is_some_and(|own| request.get(WHO..WHO + 8) == Some(&own)) {
            // To the library it is root's, which for it means as whoever we are. It could become who we are, but not "root" again.
            let who = GuestAddress(REQUEST.0 + WHO as u64);
            memory.write_slice(&[0; 8], who).map_err(|error| error.to_string())?;
        }
        offer(memory, self.count, request.len(), room).map_err(|error| error.to_string())?;
        self.count = self.count.wrapping_add(1);
        let chain = self.queue.pop_descriptor_chain(memory).ok_or("no chain")?;
        let reader = Reader::from_descriptor_chain(memory, chain.clone());
        let reader = reader.map_err(|error| error.to_string())?;
        let writer = VirtioFsWriter::new(memory, chain).map_err(|error| error.to_string())?;
        let written = self.server.handle_message(reader, writer.into(), None, None);
        let written = written.map_err(|error| error.to_string())?;
        self.answer.resize(written.min(room), 0);
        memory.read_slice(&mut self.answer, ANSWER).map_err(|error| error.to_string())
    }
}

/// An answer that is an error.
pub(crate) fn refusal(request: &[u8], error: i32) -> [u8; REFUSAL] {
    let mut answer = [0; REFUSAL];
    answer[..4].copy_from_slice(&(REFUSAL as u32).to_le_bytes());
    answer[4..8].copy_from_slice(&(-error).to_le_bytes());
    answer[8..].copy_from_slice(request.get(8..16).unwrap_or(&[0; 8]));
    answer
}

/// Makes chain number `count` available: the request, and room for the answer.
fn offer(
    memory: &GuestMemoryMmap,
    count: u16,
    request: usize,
    room: usize,
) -> Result<(), vm_memory::GuestMemoryError> {
    let next = if room > 0 { NEXT } else { 0 };
    memory.write_slice(&descriptor(REQUEST, request, next), DESCRIPTORS)?;
    memory.write_slice(&descriptor(ANSWER, room, WRITE), GuestAddress(DESCRIPTORS.0 + 16))?;
    let slot = AVAILABLE.0 + 4 + 2 * u64::from(count % RING);
    memory.write_slice(&[0; 2], GuestAddress(slot))?;
    let index = count.wrapping_add(1).to_le_bytes();
    memory.write_slice(&index, GuestAddress(AVAILABLE.0 + 2))
}

/// A descriptor whose chain continues, if it does, in the one after it.
fn descriptor(address: GuestAddress, len: usize, flags: u16) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&address.0.to_le_bytes());
    bytes[8..12].copy_from_slice(&(len as u32).to_le_bytes());
    bytes[12..14].copy_from_slice(&flags.to_le_bytes());
    bytes[14..].copy_from_slice(&1_u16.to_le_bytes());
    bytes
}
