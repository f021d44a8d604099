//! One request: the buffers of a descriptor chain, checked before anyone uses them.
//!
//! `virtio-queue` walks chains safely but ends silently at anything odd, so a broken chain would
//! look like a short one. Here a walk counts only if its last descriptor says it is the last: that
//! one rule catches loops, indices outside the table, tables outside RAM, indirect tables inside
//! indirect tables, and chains longer than the table.

use crate::RingError;
use ram::DmaMemory;
use virtio_queue::DescriptorChain;
use vm_memory::{Bytes, GuestAddress, GuestMemory, Permissions};

/// Descriptors in a chain. A queue has at most this many; an indirect table may not have more.
pub const MAX_CHAIN: usize = 1024;

/// Guest memory scattered over segments, seen as one run of bytes. All of it is RAM.
#[derive(Debug, Default)]
pub struct Buffer {
    segments: Vec<(GuestAddress, u32)>,
    len: u64,
}

/// A request: what the device may read, and what it may write after that.
#[derive(Debug)]
pub struct Chain {
    pub(crate) head: u16,
    /// What the driver wrote for the device.
    pub readable: Buffer,
    /// Where the device writes its answer.
    pub writable: Buffer,
}

impl Chain {
    /// Walks and checks a chain.
    pub(crate) fn collect(
        memory: &DmaMemory,
        descriptors: DescriptorChain<&DmaMemory>,
    ) -> Result<Self, RingError> {
        let head = descriptors.head_index();
        let mut chain = Self { head, readable: Buffer::default(), writable: Buffer::default() };
        let mut complete = false;
        for (count, descriptor) in descriptors.enumerate() {
            if count >= MAX_CHAIN {
                return Err(RingError::ChainTooLong);
            }
            let (address, len) = (descriptor.addr(), descriptor.len());
            chain.push(memory, descriptor.is_write_only(), address, len)?;
            complete = !descriptor.has_next();
        }
        if complete { Ok(chain) } else { Err(RingError::BrokenChain) }
    }

    fn push(
        &mut self,
        memory: &DmaMemory,
        writable: bool,
        address: GuestAddress,
        len: u32,
    ) -> Result<(), RingError> {
        if len == 0 {
            return Err(RingError::EmptyDescriptor);
        }
        let access = if writable { Permissions::Write } else { Permissions::Read };
        if !GuestMemory::check_range(memory, address, len as usize, access) {
            return Err(RingError::BufferOutsideRam { gpa: address.0, len });
        }
        let buffer = match (writable, self.writable.is_empty()) {
            (true, _) => &mut self.writable,
            (false, true) => &mut self.readable,
            (false, false) => return Err(RingError::ReadableAfterWritable),
        };
        buffer.segments.push((address, len));
        buffer.len += u64::from(len);
        Ok(())
    }
}

impl Buffer {
    /// Bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The lengths in bytes of the driver's parts.
    pub fn parts(&self) -> impl Iterator<Item = u32> + '_ {
        self.segments.iter().map(|(_, len)| *len)
    }

    /// Copies bytes from `offset` out of the buffer.
    ///
    /// # Errors
    /// The range is not inside the buffer.
    pub fn read(&self, memory: &DmaMemory, offset: u64, data: &mut [u8]) -> Result<(), RingError> {
        self.check(offset, data.len())?;
        let mut rest = data;
        for (address, len) in self.pieces(offset, rest.len()) {
            let (piece, tail) = rest.split_at_mut(len);
            memory.read_slice(piece, address).map_err(|_| RingError::Memory)?;
            rest = tail;
        }
        Ok(())
    }

    /// Copies bytes into the buffer at `offset`.
    ///
    /// # Errors
    /// The range is not inside the buffer.
    pub fn write(&self, memory: &DmaMemory, offset: u64, data: &[u8]) -> Result<(), RingError> {
        self.check(offset, data.len())?;
        let mut rest = data;
        for (address, len) in self.pieces(offset, rest.len()) {
            let (piece, tail) = rest.split_at(len);
            memory.write_slice(piece, address).map_err(|_| RingError::Memory)?;
            rest = tail;
        }
        Ok(())
    }

    fn check(&self, offset: u64, len: usize) -> Result<(), RingError> {
        let end = offset.checked_add(len as u64);
        if end.is_some_and(|end| end <= self.len) { Ok(()) } else { Err(RingError::Memory) }
    }

    /// The parts of segments that hold `len` bytes from `offset`.
    fn pieces(
        &self,
        offset: u64,
        mut len: usize,
    ) -> impl Iterator<Item = (GuestAddress, usize)> + '_ {
        let mut skip = offset;
        self.segments.iter().filter_map(move |&(address, size)| {
            let start = skip.min(u64::from(size));
            skip -= start;
            let piece = len.min((u64::from(size) - start) as usize);
            len -= piece;
            (piece > 0).then_some((GuestAddress(address.0 + start), piece))
        })
    }
}
