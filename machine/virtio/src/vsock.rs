//! Sockets between guest and host (virtio 1.2 section 5.10), stream type.
//!
//! The body carries packets; a [`VsockBackend`] keeps the connections. Packets of a type or for an
//! address nobody has are answered by a reset here, so that the backend sees sound ones only.

use crate::{Chain, Queue, RingError, VirtioDevice};

/// The queue the guest receives packets by.
pub const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;
/// Receive, transmit, and events, of which there are none without migration.
const QUEUES: [u16; 3] = [128, 128, 16];
/// Bytes of a packet's header.
const HEADER: usize = 44;
/// Bytes of data in a packet at most; Linux sends up to 64 KiB.
const MAX_DATA: usize = 64 << 10;
/// The host's address.
pub const HOST_CID: u64 = 2;
/// The type of stream sockets.
const STREAM: u16 = 1;

/// What a packet is for.
pub mod operation {
    /// A connection is asked for.
    pub const REQUEST: u16 = 1;
    /// It is accepted.
    pub const RESPONSE: u16 = 2;
    /// There is no such connection, or no more.
    pub const RESET: u16 = 3;
    /// The sender will not receive (flag 1) or send (flag 2) any more.
    pub const SHUTDOWN: u16 = 4;
    /// Data.
    pub const DATA: u16 = 5;
    /// The sender tells how much it can take.
    pub const CREDIT_UPDATE: u16 = 6;
    /// The sender asks how much it may send.
    pub const CREDIT_REQUEST: u16 = 7;
}

/// A packet's header, without what follows from who sends it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VsockHeader {
    /// The guest's port.
    pub guest_port: u32,
    /// The host's port.
    pub host_port: u32,
    /// See [`operation`].
    pub operation: u16,
    /// Flags of a shutdown.
    pub flags: u32,
    /// Bytes the sender has room for in all.
    pub buffer: u32,
    /// Bytes the sender's user has taken so far, wrapping.
    pub taken: u32,
}

/// Who keeps the connections of the host's side.
pub trait VsockBackend: Send {
    /// A packet of the guest with its data.
    fn packet(&mut self, header: &VsockHeader, data: &[u8]);
    /// The next packet for the guest, its data (at most `room` bytes) put into `data`. Whoever makes
    /// one available rings the doorbell of [`RECEIVE`].
    fn next(&mut self, room: usize, data: &mut Vec<u8>) -> Option<VsockHeader>;
    /// The guest's driver was reset: no connection is left.
    fn reset(&mut self);
}

/// The device body.
pub struct Vsock {
    backend: Box<dyn VsockBackend>,
    cid: u64,
    data: Vec<u8>,
    /// Resets owed for packets the backend did not see.
    refused: Vec<VsockHeader>,
}

impl Vsock {
    /// Sockets of a guest with this address (3 or more).
    pub fn new(backend: Box<dyn VsockBackend>, cid: u64) -> Self {
        Self { backend, cid, data: Vec::new(), refused: Vec::new() }
    }

    fn transmit(&mut self, queue: &mut Queue) -> Result<(), RingError> {
        while let Some(chain) = queue.pop()? {
            self.take(&chain, queue)?;
            queue.complete(chain, 0)?;
        }
        Ok(())
    }

    fn take(&mut self, chain: &Chain, queue: &Queue) -> Result<(), RingError> {
        let mut bytes = [0; HEADER];
        if chain.readable.read(queue.memory(), 0, &mut bytes).is_err() {
            return Ok(()); // no whole header: nobody to answer
        }
        let len = word(&bytes, 24) as usize;
        if len > MAX_DATA || chain.readable.len() < (HEADER + len) as u64 {
            return Ok(());
        }
        let header = parse(&bytes);
        let from = u64::from_le_bytes([0, 1, 2, 3, 4, 5, 6, 7].map(|i| bytes[i]));
        let to = u64::from_le_bytes([8, 9, 10, 11, 12, 13, 14, 15].map(|i| bytes[i]));
        let kind = u16::from_le_bytes([bytes[28], bytes[29]]);
        if (from, to, kind) != (self.cid, HOST_CID, STREAM) {
            self.refuse(header);
            return Ok(());
        }
        self.data.resize(len, 0);
        chain.readable.read(queue.memory(), HEADER as u64, &mut self.data)?;
        self.backend.packet(&header, &self.data);
        Ok(())
    }

    fn refuse(&mut self, header: VsockHeader) {
        if header.operation != operation::RESET && self.refused.len() < usize::from(QUEUES[0]) {
            let (guest_port, host_port) = (header.guest_port, header.host_port);
            let operation = operation::RESET;
            self.refused.push(VsockHeader { guest_port, host_port, operation, ..header });
        }
    }

    fn receive(&mut self, queue: &mut Queue) -> Result<(), RingError> {
        while let Some(chain) = queue.pop()? {
            let room = chain.writable.len() as usize;
            let room = room.checked_sub(HEADER).ok_or(RingError::NoRoom)?.min(MAX_DATA);
            self.data.clear();
            let refused = self.refused.pop();
            let Some(header) = refused.or_else(|| self.backend.next(room, &mut self.data)) else {
                queue.put_back(chain);
                return Ok(());
            };
            let bytes = self.emit(&header);
            chain.writable.write(queue.memory(), 0, &bytes)?;
            chain.writable.write(queue.memory(), HEADER as u64, &self.data)?;
            queue.complete(chain, (HEADER + self.data.len()) as u32)?;
        }
        Ok(())
    }

    fn emit(&self, header: &VsockHeader) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        let mut put = |at: usize, value: &[u8]| {
            bytes[at..at + value.len()].copy_from_slice(value);
        };
        put(0, &HOST_CID.to_le_bytes());
        put(8, &self.cid.to_le_bytes());
        put(16, &header.host_port.to_le_bytes());
        put(20, &header.guest_port.to_le_bytes());
        put(24, &(self.data.len() as u32).to_le_bytes());
        put(28, &STREAM.to_le_bytes());
        put(30, &header.operation.to_le_bytes());
        put(32, &header.flags.to_le_bytes());
        put(36, &header.buffer.to_le_bytes());
        put(40, &header.taken.to_le_bytes());
        bytes
    }
}

fn parse(bytes: &[u8; HEADER]) -> VsockHeader {
    VsockHeader {
        guest_port: word(bytes, 16),
        host_port: word(bytes, 20),
        operation: u16::from_le_bytes([bytes[30], bytes[31]]),
        flags: word(bytes, 32),
        buffer: word(bytes, 36),
        taken: word(bytes, 40),
    }
}

fn word(bytes: &[u8; HEADER], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

impl VirtioDevice for Vsock {
    fn device_type(&self) -> u16 {
        crate::device_id::VSOCK
    }

    fn class(&self) -> u32 {
        0x07_80_00 // other communication controller
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUES
    }

    fn config(&self) -> Vec<u8> {
        self.cid.to_le_bytes().to_vec()
    }

    fn process(&mut self, index: usize, queue: &mut Queue) -> Result<(), RingError> {
        match index {
            RECEIVE => self.receive(queue),
            TRANSMIT => self.transmit(queue),
            _ => Ok(()),
        }
    }

    fn reset(&mut self) {
        self.refused.clear();
        self.backend.reset();
    }
}
