//! Block device (virtio 1.2 section 5.2).

mod backend;
mod broken;
mod request;

pub use backend::{BlockBackend, SECTOR};
pub use broken::BrokenDisk;
pub use request::BlockRequest;

use crate::{Chain, Queue, RingError, VirtioDevice};
use ram::DmaMemory;
use request::{RangeLimits, Reply};
use virtio_bindings::virtio_blk as spec;

/// Entries of a queue.
const QUEUE: u16 = 256;
/// Data segments in a request: a chain less the header and the status.
const SEG_MAX: u32 = QUEUE as u32 - 2;
/// Discarding only frees space, so much can be asked for at once.
const DISCARD: RangeLimits = RangeLimits { ranges: 32, sectors: 1 << 21 };
/// Zeroes may have to be written byte by byte: 512 MiB in one request at most.
const WRITE_ZEROES: RangeLimits = RangeLimits { ranges: 8, sectors: 1 << 17 };
/// Bytes of the configuration structure up to write_zeroes_may_unmap and its padding.
const CONFIG_LEN: usize = 60;
/// Byte of the configuration structure that holds the cache mode.
const WRITEBACK: usize = 32;
/// Where it has the number of queues.
const NUM_QUEUES: usize = 34;
/// Bytes of a device ID.
const ID_LEN: usize = 20;
/// Bytes moved between guest and backend in one piece.
const PIECE: usize = 128 << 10;

const FEATURES: u64 = 1 << spec::VIRTIO_BLK_F_SEG_MAX
    | 1 << spec::VIRTIO_BLK_F_BLK_SIZE
    | 1 << spec::VIRTIO_BLK_F_FLUSH
    | 1 << spec::VIRTIO_BLK_F_CONFIG_WCE;
const WRITE_FEATURES: u64 = 1 << spec::VIRTIO_BLK_F_DISCARD | 1 << spec::VIRTIO_BLK_F_WRITE_ZEROES;

/// The device body.
///
/// A request is acknowledged with OK only after all of it is done; after an error the driver may
/// assume nothing about the sectors it named. Without a write-back cache (the driver turned it off,
/// or cannot flush) "done" means on stable storage.
pub struct Block {
    backend: Box<dyn BlockBackend>,
    id: [u8; ID_LEN],
    /// Features the driver accepted.
    features: u64,
    writeback: bool,
    piece: Vec<u8>,
    queues: Vec<u16>,
}

impl Block {
    /// A disk with what `backend` holds. `serial` is cut to 20 bytes.
    pub fn new(backend: Box<dyn BlockBackend>, serial: &str) -> Self {
        let mut id = [0; ID_LEN];
        id.iter_mut().zip(serial.bytes()).for_each(|(to, from)| *to = from);
        let (piece, queues) = (vec![0; PIECE], vec![QUEUE]);
        Self { backend, id, features: 0, writeback: true, piece, queues }
    }

    /// The same with so many queues, at least one. Requests of all are executed one after the other.
    pub fn with_queues(mut self, queues: u16) -> Self {
        self.queues = vec![QUEUE; queues.max(1).into()];
        self
    }

    /// How many queues there are by a configuration structure.
    pub fn queues_in(config: &[u8]) -> u16 {
        let queues = config.get(NUM_QUEUES..).and_then(<[u8]>::first_chunk).copied();
        queues.map_or(1, u16::from_le_bytes)
    }

    /// Answers one request that it failed; returns the bytes written.
    ///
    /// # Errors
    /// It has no room for a status.
    pub fn refuse(chain: &Chain, memory: &DmaMemory) -> Result<u32, RingError> {
        let status_at = chain.writable.len().checked_sub(1).ok_or(RingError::NoRoom)?;
        chain.writable.write(memory, status_at, &[Reply::FAILED.status])?;
        Ok(Reply::FAILED.written(status_at))
    }

    /// Executes the request in `chain`; says how the driver is told.
    fn execute(&mut self, chain: &Chain, queue: &Queue) -> Result<Reply, RingError> {
        match BlockRequest::parse(chain, queue.memory())? {
            BlockRequest::In { offset, len } => self.read(chain, queue, offset, len),
            BlockRequest::Out { offset, len } => self.write(chain, queue, offset, len),
            BlockRequest::Flush => Ok(Reply::of(&self.backend.flush())),
            BlockRequest::GetId => self.get_id(chain, queue),
            BlockRequest::Ranges { zeroes } => self.ranges(chain, queue, zeroes),
            BlockRequest::Unknown => Ok(Reply::UNSUPPORTED),
            BlockRequest::Malformed => Ok(Reply::FAILED),
        }
    }

    fn read(
        &mut self,
        chain: &Chain,
        queue: &Queue,
        offset: u64,
        len: u64,
    ) -> Result<Reply, RingError> {
        if !self.is_inside(offset, len) {
            return Ok(Reply::FAILED);
        }
        let mut done = 0;
        while done < len {
            let count = (len - done).min(PIECE as u64) as usize;
            let piece = &mut self.piece[..count];
            if let Err(error) = self.backend.read_at(offset + done, piece) {
                tracing::error!(%error, offset = offset + done, "disk read");
                return Ok(Reply::FAILED);
            }
            chain.writable.write(queue.memory(), done, piece)?;
            done += count as u64;
        }
        Ok(Reply::ok(len))
    }

    fn write(
        &mut self,
        chain: &Chain,
        queue: &Queue,
        offset: u64,
        len: u64,
    ) -> Result<Reply, RingError> {
        if !self.is_inside(offset, len) || self.backend.is_read_only() {
            return Ok(Reply::FAILED);
        }
        let mut done = 0;
        while done < len {
            let count = (len - done).min(PIECE as u64) as usize;
            let piece = &mut self.piece[..count];
            chain.readable.read(queue.memory(), request::HEADER + done, piece)?;
            if let Err(error) = self.backend.write_at(offset + done, piece) {
                tracing::error!(%error, offset = offset + done, "disk write");
                return Ok(Reply::FAILED);
            }
            done += count as u64;
        }
        Ok(self.settle())
    }

    /// The end of a request that changed the disk: without a cache to flush, it must be stable.
    fn settle(&mut self) -> Reply {
        if self.writes_back() { Reply::ok(0) } else { Reply::of(&self.backend.flush()) }
    }

    /// Section 5.2.5.2: the driver's choice if it can choose, else whether it can flush.
    fn writes_back(&self) -> bool {
        let has = |bit: u32| self.features & 1 << bit != 0;
        if has(spec::VIRTIO_BLK_F_CONFIG_WCE) {
            self.writeback
        } else {
            has(spec::VIRTIO_BLK_F_FLUSH)
        }
    }

    fn get_id(&mut self, chain: &Chain, queue: &Queue) -> Result<Reply, RingError> {
        let len = (chain.writable.len() - 1).min(ID_LEN as u64);
        chain.writable.write(queue.memory(), 0, &self.id[..len as usize])?;
        Ok(Reply::ok(len))
    }

    fn ranges(&mut self, chain: &Chain, queue: &Queue, zeroes: bool) -> Result<Reply, RingError> {
        let feature =
            if zeroes { spec::VIRTIO_BLK_F_WRITE_ZEROES } else { spec::VIRTIO_BLK_F_DISCARD };
        if self.features & 1 << feature == 0 {
            return Ok(Reply::UNSUPPORTED);
        }
        let ranges = match request::ranges(chain, queue.memory(), zeroes)? {
            Ok(ranges) => ranges,
            Err(reply) => return Ok(reply),
        };
        // All are checked before any is touched.
        if ranges.iter().any(|range| !self.is_inside(range.offset, range.len)) {
            return Ok(Reply::FAILED);
        }
        for range in ranges {
            let result = if zeroes {
                self.backend.write_zeroes(range.offset, range.len, range.unmap)
            } else {
                self.backend.discard(range.offset, range.len)
            };
            if let Err(error) = result {
                tracing::error!(%error, offset = range.offset, "disk discard or zeroes");
                return Ok(Reply::FAILED);
            }
        }
        Ok(self.settle())
    }

    fn is_inside(&self, offset: u64, len: u64) -> bool {
        offset.checked_add(len).is_some_and(|end| end <= self.backend.len())
    }
}

impl VirtioDevice for Block {
    fn device_type(&self) -> u16 {
        crate::device_id::BLOCK
    }

    fn class(&self) -> u32 {
        0x01_80_00 // other mass storage controller
    }

    fn features(&self) -> u64 {
        let several = u64::from(self.queues.len() > 1) << spec::VIRTIO_BLK_F_MQ;
        if self.backend.is_read_only() {
            FEATURES | several | 1 << spec::VIRTIO_BLK_F_RO
        } else {
            FEATURES | several | WRITE_FEATURES
        }
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queues
    }

    fn is_replaceable(&self) -> bool {
        self.backend.writes_through()
    }

    fn config(&self) -> Vec<u8> {
        let mut config = vec![0; CONFIG_LEN];
        let mut put = |offset: usize, bytes: &[u8]| {
            config[offset..offset + bytes.len()].copy_from_slice(bytes);
        };
        put(0, &(self.backend.len() / SECTOR).to_le_bytes());
        put(12, &SEG_MAX.to_le_bytes());
        put(20, &(SECTOR as u32).to_le_bytes());
        put(WRITEBACK, &[u8::from(self.writes_back())]);
        put(NUM_QUEUES, &(self.queues.len() as u16).to_le_bytes());
        put(36, &DISCARD.sectors.to_le_bytes());
        put(40, &DISCARD.ranges.to_le_bytes());
        put(44, &8_u32.to_le_bytes()); // discard alignment: 4096 bytes
        put(48, &WRITE_ZEROES.sectors.to_le_bytes());
        put(52, &WRITE_ZEROES.ranges.to_le_bytes());
        put(56, &[1]); // writing zeroes may unmap
        config
    }

    fn config_write(&mut self, offset: usize, data: &[u8]) {
        if let (WRITEBACK, [mode]) = (offset, data) {
            self.writeback = *mode != 0;
        }
    }

    fn negotiated(&mut self, features: u64) {
        self.features = features;
    }

    fn process(&mut self, _: usize, queue: &mut Queue) -> Result<(), RingError> {
        while let Some(chain) = queue.pop()? {
            let status_at = chain.writable.len().checked_sub(1).ok_or(RingError::NoRoom)?;
            let reply = self.execute(&chain, queue)?;
            chain.writable.write(queue.memory(), status_at, &[reply.status])?;
            let written = reply.written(status_at);
            queue.complete(chain, written)?;
            queue.tell_driver()?; // the next one may take long
        }
        Ok(())
    }

    fn reset(&mut self) {
        self.features = 0;
        self.writeback = true;
    }
}
