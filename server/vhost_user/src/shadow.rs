//! The driver's side of a queue, in memory of ours: the guest's requests are offered in it to a server that we know nothing of.
//!
//! Requests are copied: data for the device into this memory when they are offered, answers out of it when they are given back. So the server
//! has none of the guest's memory. What it writes reaches the guest by our hand, as the map of code pages needs, and once a queue is stopped
//! nothing reaches it. Two copies are the price.
//!
//! The server may give requests back in any order; one that it was not offered is its mistake.

use std::{
    collections::{BTreeMap, HashMap},
    sync::atomic::Ordering,
};

use ram::{DmaMemory, Ram, RamError};
use virtio::{Buffer, Chain, RingError, Shape};
use vm_memory::{Bytes, GuestAddress};

/// Descriptors, and places in the rings: what servers have room for.
pub(crate) const SIZE: u16 = 256;
/// Bytes for the rings of a queue, of which these begin at:
const RINGS: u64 = 64 << 10;
const AVAILABLE: u64 = 16 * SIZE as u64;
const USED: u64 = 2 * AVAILABLE;
/// Bytes for the requests that a server has at once.
const REQUESTS: u64 = 16 << 20;
const ROOM: u64 = RINGS + REQUESTS;
/// Parts of requests begin at multiples of a sector, which servers of disks like.
const ALIGN: u64 = 512;
/// Where a ring has its index and its first element.
const INDEX: u64 = 2;
const ELEMENTS: u64 = 4;
/// Descriptor flags: another follows; the device writes.
const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// A part of a request: where it is in our memory, and its bytes.
type Part = (u64, u32);

/// A request that the server has.
pub(crate) struct Taken {
    chain: Chain,
    descriptors: Vec<u16>,
    /// Where its copy begins.
    place: u64,
    /// Where the server writes its answer.
    answer: Vec<Part>,
}

/// A queue that we drive.
pub(crate) struct Shadow {
    memory: Ram,
    /// Where in the memory it is.
    at: u64,
    free: Vec<u16>,
    /// Places of requests: their beginnings and ends.
    places: BTreeMap<u64, u64>,
    /// By their first descriptors.
    under_way: HashMap<u16, Taken>,
    offered: u16,
    seen: u16,
}

impl Shadow {
    /// The memory of so many queues.
    pub(crate) fn memory(queues: usize) -> Result<Ram, RamError> {
        Ram::new(queues as u64 * ROOM)
    }

    /// An empty queue, the one of this number in the memory.
    pub(crate) fn new(memory: &Ram, index: usize) -> Result<Self, RingError> {
        let at = index as u64 * ROOM;
        let (memory, free) = (memory.clone(), (0..SIZE).collect());
        let (places, under_way) = Default::default();
        let shadow = Self { memory, at, free, places, under_way, offered: 0, seen: 0 };
        for index in [AVAILABLE, AVAILABLE + INDEX, USED, USED + INDEX] {
            shadow.store(index, 0)?;
        }
        Ok(shadow)
    }

    /// Where it is, if the server has the memory at `base`.
    pub(crate) fn shape(&self, base: u64) -> Shape {
        let at = base + self.at;
        Shape { size: SIZE, descriptors: at, available: at + AVAILABLE, used: at + USED }
    }

    /// Whether it could be offered if nothing else were.
    pub(crate) fn fits(chain: &Chain) -> bool {
        let (parts, len) = demand(chain);
        parts > 0 && parts <= SIZE.into() && len <= REQUESTS
    }

    /// Offers a request to a server that has the memory at `base`; gives it back if there is no room for it now.
    pub(crate) fn offer(
        &mut self,
        base: u64,
        chain: Chain,
        guest: &DmaMemory,
    ) -> Result<Option<Chain>, RingError> {
        let (parts, len) = demand(&chain);
        let Some(rest) = self.free.len().checked_sub(parts) else { return Ok(Some(chain)) };
        let Some(place) = self.reserve(len) else { return Ok(Some(chain)) };
        let question = parts_of(&chain.readable, place);
        let end = question.iter().fold(place, |at, part| at + aligned(part.1));
        let answer = parts_of(&chain.writable, end);
        self.copy_in(&chain.readable, &question, guest)?;
        let descriptors = self.free.split_off(rest);
        let reads = question.iter().map(|part| (part, 0));
        let all = reads.chain(answer.iter().map(|part| (part, WRITE)));
        for (number, (&(at, len), flags)) in all.enumerate() {
            let next = descriptors.get(number + 1).copied();
            self.describe(descriptors[number], (base + at, len), flags, next)?;
        }
        self.publish(descriptors[0])?;
        self.under_way.insert(descriptors[0], Taken { chain, descriptors, place, answer });
        Ok(None)
    }

    /// Finds a place for so many bytes: the first gap that holds them.
    fn reserve(&mut self, len: u64) -> Option<u64> {
        let (mut at, end) = (self.at + RINGS, self.at + ROOM);
        for (&from, &to) in &self.places {
            if from - at >= len {
                break;
            }
            at = to;
        }
        (len <= end - at).then(|| {
            self.places.insert(at, at + len);
            at
        })
    }

    fn copy_in(&self, from: &Buffer, to: &[Part], guest: &DmaMemory) -> Result<(), RingError> {
        let mut offset = 0;
        for &(at, len) in to {
            let mut bytes = vec![0; len as usize];
            from.read(guest, offset, &mut bytes)?;
            let written = self.memory.dma().write_slice(&bytes, GuestAddress(at));
            written.map_err(|_| RingError::Memory)?;
            offset += u64::from(len);
        }
        Ok(())
    }

    fn describe(
        &self,
        index: u16,
        (address, len): (u64, u32),
        flags: u16,
        next: Option<u16>,
    ) -> Result<(), RingError> {
        let flags = flags | next.map_or(0, |_| NEXT);
        let next = u64::from(next.unwrap_or_default());
        let second = u64::from(len) | u64::from(flags) << 32 | next << 48;
        let at = GuestAddress(self.at + 16 * u64::from(index));
        let written = self.memory.dma().write_obj([address.to_le(), second.to_le()], at);
        written.map_err(|_| RingError::Memory)
    }

    fn publish(&mut self, head: u16) -> Result<(), RingError> {
        self.store(AVAILABLE + ELEMENTS + 2 * u64::from(self.offered % SIZE), head)?;
        self.offered = self.offered.wrapping_add(1);
        self.store(AVAILABLE + INDEX, self.offered)
    }

    /// How many requests, modulo 2^16, have been offered.
    pub(crate) fn offered(&self) -> u16 {
        self.offered
    }

    /// Whether the server has no request.
    pub(crate) fn is_idle(&self) -> bool {
        self.under_way.is_empty()
    }

    /// How many requests the server says it has given back that have not been taken.
    pub(crate) fn waiting(&self) -> Result<u16, RingError> {
        Ok(self.load(USED + INDEX)?.wrapping_sub(self.seen))
    }

    /// A request that the server has given back, with its answer where the guest wants it, and how many bytes the server says it has written.
    /// If `whole`, all of the answer is copied whatever it says: a disk's status is behind what may be missing.
    pub(crate) fn take(
        &mut self,
        guest: &DmaMemory,
        whole: bool,
    ) -> Result<Option<(Chain, u32)>, RingError> {
        let Some((taken, written)) = self.returned()? else { return Ok(None) };
        let len = taken.chain.writable.len();
        let written = u64::from(written).min(len);
        self.copy_out(&taken, guest, if whole { len } else { written })?;
        Ok(Some((taken.chain, written as u32)))
    }

    /// A request that the server has given back, its answer where the server put it, and how many bytes it says that is.
    pub(crate) fn returned(&mut self) -> Result<Option<(Taken, u32)>, RingError> {
        if self.waiting()? == 0 {
            return Ok(None);
        }
        let at = self.at + USED + ELEMENTS + 8 * u64::from(self.seen % SIZE);
        let element: Result<[u32; 2], _> = self.memory.dma().read_obj(GuestAddress(at));
        let [id, len] = element.map_err(|_| RingError::Memory)?.map(u32::from_le);
        self.seen = self.seen.wrapping_add(1);
        let taken = u16::try_from(id).ok().and_then(|id| self.under_way.remove(&id));
        let taken = taken.ok_or(RingError::Elsewhere)?;
        self.free.extend(&taken.descriptors);
        self.places.remove(&taken.place);
        Ok(Some((taken, len)))
    }

    fn copy_out(&self, taken: &Taken, guest: &DmaMemory, len: u64) -> Result<(), RingError> {
        let mut offset = 0;
        for &(at, part) in &taken.answer {
            let mut bytes = vec![0; (len - offset).min(part.into()) as usize];
            let read = self.memory.dma().read_slice(&mut bytes, GuestAddress(at));
            read.map_err(|_| RingError::Memory)?;
            taken.chain.writable.write(guest, offset, &bytes)?;
            offset += bytes.len() as u64;
        }
        Ok(())
    }

    /// Takes back everything that the server has.
    pub(crate) fn take_all(&mut self) -> Vec<Chain> {
        self.places.clear();
        self.under_way.drain().map(|(_, taken)| taken.chain).collect()
    }

    fn store(&self, offset: u64, word: u16) -> Result<(), RingError> {
        let at = GuestAddress(self.at + offset);
        self.memory.dma().store(word.to_le(), at, Ordering::Release).map_err(|_| RingError::Memory)
    }

    fn load(&self, offset: u64) -> Result<u16, RingError> {
        let at = GuestAddress(self.at + offset);
        let word: Result<u16, _> = self.memory.dma().load(at, Ordering::Acquire);
        word.map(u16::from_le).map_err(|_| RingError::Memory)
    }
}

fn aligned(len: u32) -> u64 {
    u64::from(len).next_multiple_of(ALIGN)
}

/// The descriptors and bytes that a request takes here.
fn demand(chain: &Chain) -> (usize, u64) {
    let all = chain.readable.parts().chain(chain.writable.parts());
    all.fold((0, 0), |(count, sum), len| (count + 1, sum + aligned(len)))
}

/// A buffer's parts, one behind the other.
fn parts_of(buffer: &Buffer, mut at: u64) -> Vec<Part> {
    let place = |len| {
        let part = (at, len);
        at += aligned(len);
        part
    };
    buffer.parts().map(place).collect()
}
