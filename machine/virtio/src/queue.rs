//! A running virtqueue as a body sees it: take a request, give it back.
//!
//! Doorbell suppression is settled here: the driver is asked for a notification only when
//! [`Queue::pop`] found the ring empty, and the ring is looked at once more after asking, so no
//! request is left behind (virtio 1.2 sections 2.7.7 and 2.7.10).

use crate::{Chain, chain::MAX_CHAIN, request_log::RequestLog};
use ram::{DmaMemory, Ram};
use std::sync::{
    Arc,
    atomic::{Ordering, fence},
};
use virtio_bindings::virtio_ring::VRING_AVAIL_F_NO_INTERRUPT;
use virtio_queue::{Queue as Ring, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress};

/// How a driver broke the rules, so that only a reset helps.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum RingError {
    /// The size is zero, not a power of two, or more than the device offered.
    #[error("queue size {0}")]
    BadSize(u16),
    /// A ring is misaligned or not RAM.
    #[error("queue outside RAM or misaligned: descriptors {0:#x}, available {1:#x}, used {2:#x}")]
    BadAddress(u64, u64, u64),
    /// The available index is further ahead than the queue is long, or the ring is at GPA 0.
    #[error("available ring index jumped")]
    IndexJump,
    /// A chain does not end: a loop, an index outside the table, a table outside RAM, an indirect
    /// table of odd length or inside another, or more than 2^32 bytes in all.
    #[error("descriptor chain without an end")]
    BrokenChain,
    /// More than [`MAX_CHAIN`] descriptors.
    #[error("descriptor chain of more than {MAX_CHAIN} descriptors")]
    ChainTooLong,
    /// A descriptor of no bytes.
    #[error("descriptor of no bytes")]
    EmptyDescriptor,
    /// A device-readable descriptor after a device-writable one.
    #[error("device-readable descriptor after a device-writable one")]
    ReadableAfterWritable,
    /// A buffer is not all RAM.
    #[error("buffer outside RAM: {gpa:#x}+{len:#x}")]
    BufferOutsideRam {
        /// Where it starts.
        gpa: u64,
        /// Its bytes.
        len: u32,
    },
    /// The request has no room for what the device must say.
    #[error("request without room for an answer")]
    NoRoom,
    /// Queues were enabled before features were agreed on.
    #[error("queue enabled before FEATURES_OK")]
    NotNegotiated,
    /// Memory that was checked before is not accessible.
    #[error("guest memory not accessible")]
    Memory,
    /// Whoever serves the queue for us says so, or is gone.
    #[error("the queue is not served any more")]
    Elsewhere,
}

/// Where the driver put a queue and how long it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// Descriptors.
    pub size: u16,
    /// The descriptor table, a GPA.
    pub descriptors: u64,
    /// The ring of what the driver makes available, a GPA.
    pub available: u64,
    /// The ring of what the device has used, a GPA.
    pub used: u64,
}

/// How the driver is interrupted for one queue; this is all a queue knows of the transport.
pub type Interrupt = Arc<dyn Fn() + Send + Sync>;

/// What a request is given back with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The head of its chain: of which request it is.
    pub id: u32,
    /// Bytes written.
    pub len: u32,
    /// How far the used index is ahead of what was given back, until the next request is.
    pub ahead: u16,
    /// The driver is interrupted before there is anything for it.
    pub is_spurious: bool,
}

/// Changes an answer on purpose, before the driver is given it: so faults are injected.
pub type Tamper = Arc<dyn Fn(&Chain, &DmaMemory, &mut Answer) + Send + Sync>;

/// A virtqueue the driver enabled.
pub struct Queue {
    ring: Ring,
    shape: Shape,
    memory: DmaMemory,
    /// What the memory is of, if this program runs the guest.
    ram: Option<Ram>,
    interrupt: Interrupt,
    event_idx: bool,
    /// Something was given back since the driver was last told.
    used_something: bool,
    /// How many requests, modulo 2^16, had been given back then.
    told: u16,
    /// The driver is neither asked to notify nor told.
    is_quiet: bool,
    /// Where its requests are noted, and its number there.
    log: Option<(Arc<RequestLog>, u16)>,
    /// What falsifies its answers.
    tamper: Option<Tamper>,
}

/// Requests that a quiet queue's driver is not told of at the most: of 64, it must get some back.
const UNTOLD: u16 = 16;

impl Queue {
    /// Checks and starts a queue of at most `max_size`.
    ///
    /// # Errors
    /// The shape is none a queue can have.
    pub fn new(
        shape: Shape,
        max_size: u16,
        event_idx: bool,
        memory: Ram,
        interrupt: Interrupt,
    ) -> Result<Self, RingError> {
        let dma = memory.dma().clone();
        Ok(Self { ram: Some(memory), ..Self::foreign(shape, max_size, event_idx, dma, interrupt)? })
    }

    /// As [`Queue::new`], in memory of another program's guest ([`ram::foreign`]).
    ///
    /// # Errors
    /// As for [`Queue::new`].
    pub fn foreign(
        shape: Shape,
        max_size: u16,
        event_idx: bool,
        memory: DmaMemory,
        interrupt: Interrupt,
    ) -> Result<Self, RingError> {
        let mut ring = Ring::new(max_size).map_err(|_| RingError::BadSize(max_size))?;
        ring.try_set_size(shape.size).map_err(|_| RingError::BadSize(shape.size))?;
        let Shape { descriptors, available, used, .. } = shape;
        let bad_address = || RingError::BadAddress(descriptors, available, used);
        ring.try_set_desc_table_address(GuestAddress(descriptors)).map_err(|_| bad_address())?;
        ring.try_set_avail_ring_address(GuestAddress(available)).map_err(|_| bad_address())?;
        ring.try_set_used_ring_address(GuestAddress(used)).map_err(|_| bad_address())?;
        ring.set_event_idx(event_idx);
        ring.set_ready(true);
        if !ring.is_valid(&memory) {
            return Err(bad_address());
        }
        Ok(Self {
            ring,
            shape,
            memory,
            ram: None,
            interrupt,
            event_idx,
            used_something: false,
            told: 0,
            is_quiet: false,
            log: None,
            tamper: None,
        })
    }

    /// Has its requests noted as those of a queue of this number.
    pub fn log_to(&mut self, log: Arc<RequestLog>, number: u16) {
        self.log = Some((log, number));
    }

    /// Has each answer changed before the driver is given it. `tamper` makes what changes them, once.
    pub fn tamper_with(&mut self, tamper: impl FnOnce() -> Tamper) {
        self.tamper.get_or_insert_with(tamper);
    }

    /// Where the driver put it.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// What interrupts the driver, whether it wants to be or not.
    pub fn interrupt(&self) -> Interrupt {
        Arc::clone(&self.interrupt)
    }

    /// How many requests, modulo 2^16, have been given back since the driver made the queue.
    ///
    /// # Errors
    /// The used ring is not accessible.
    pub fn given_back(&self) -> Result<u16, RingError> {
        let index = self.ring.used_idx(&self.memory, Ordering::Acquire);
        Ok(index.map_err(|_| RingError::Memory)?.0)
    }

    /// Makes a new queue go on where another, of the same shape, was: with this request, counted modulo 2^16, next.
    pub fn go_on_from(&mut self, next: u16) {
        self.ring.set_next_avail(next);
        self.ring.set_next_used(next);
        self.told = next;
    }

    /// The request, counted modulo 2^16, that is next.
    pub fn next(&self) -> u16 {
        self.ring.next_avail()
    }

    /// Whether the driver has offered a request that was not taken. An index that cannot be read is left to [`Queue::pop`].
    pub fn has_more(&self) -> bool {
        let index = self.ring.avail_idx(&self.memory, Ordering::Acquire);
        index.is_ok_and(|index| index.0 != self.ring.next_avail())
    }

    /// Whether the driver has offered a request that was not given back, by whoever serves the queue.
    pub fn is_awaited(&self) -> bool {
        let offered = self.ring.avail_idx(&self.memory, Ordering::Acquire);
        let used = self.ring.used_idx(&self.memory, Ordering::Acquire);
        offered.is_ok_and(|offered| used.is_ok_and(|used| offered != used))
    }

    /// Guest memory, to read and write requests' buffers with.
    pub fn memory(&self) -> &DmaMemory {
        &self.memory
    }

    /// The RAM it is in, if this program runs the guest.
    pub fn ram(&self) -> Option<&Ram> {
        self.ram.as_ref()
    }

    /// Takes the next request; `None` when there is none, after asking to be notified of more.
    ///
    /// # Errors
    /// The ring or the chain is broken.
    pub fn pop(&mut self) -> Result<Option<Chain>, RingError> {
        if let Some(chain) = self.take()? {
            return Ok(Some(chain));
        }
        if self.is_quiet {
            return Ok(None);
        }
        let more = self.ring.enable_notification(&self.memory);
        if more.map_err(|_| RingError::Memory)? { self.take() } else { Ok(None) }
    }

    /// From now on the driver need not notify, and is told only of many requests at once, or again of each. Who makes a queue quiet looks at it
    /// now and then, and when it has made it loud again. Not for queues without indices of events, whose drivers are not asked for less.
    pub fn set_quiet(&mut self, is_quiet: bool) {
        self.is_quiet = is_quiet && self.event_idx;
    }

    fn take(&mut self) -> Result<Option<Chain>, RingError> {
        let memory = &self.memory;
        let mut heads = self.ring.iter(memory).map_err(|_| RingError::IndexJump)?;
        let chain = heads.next().map(|chain| Chain::collect(memory, chain)).transpose()?;
        if let (Some(chain), Some((log, number))) = (&chain, &self.log) {
            log.note_begin(*number, chain, memory);
        }
        Ok(chain)
    }

    /// Undoes the last [`Queue::pop`]: the request will be taken again. Requests taken together are
    /// put back in the opposite order.
    pub fn put_back(&mut self, _last: Chain) {
        self.ring.go_to_previous_position();
    }

    /// Gives a request back with `written` bytes of its writable buffer filled. The driver is told
    /// when the body is done with the queue, or by [`Queue::tell_driver`].
    ///
    /// # Errors
    /// The used ring is not accessible.
    pub fn complete(&mut self, chain: Chain, written: u32) -> Result<(), RingError> {
        self.note_end(&chain, written);
        if let Some(tamper) = self.tamper.clone() {
            return self.complete_falsely(&chain, written, &tamper);
        }
        let result = self.ring.add_used(&self.memory, chain.head, written);
        self.used_something = true;
        result.map_err(|_| RingError::Memory)
    }

    fn complete_falsely(
        &mut self,
        chain: &Chain,
        written: u32,
        tamper: &Tamper,
    ) -> Result<(), RingError> {
        let honest = Answer { id: chain.head.into(), len: written, ahead: 0, is_spurious: false };
        let mut answer = honest;
        tamper(chain, &self.memory, &mut answer);
        if answer.is_spurious {
            (self.interrupt)();
        }
        let used = self.ring.next_used();
        self.write_used(used, answer.id, answer.len)?;
        self.ring.set_next_used(used.wrapping_add(1));
        self.used_something = true;
        self.publish(used.wrapping_add(1).wrapping_add(answer.ahead))
    }

    /// Gives several requests back at once: a driver that looks at the ring meanwhile, as one that polls does,
    /// finds all of them or none. What belongs together must come so (virtio 1.2, 5.1.6.4).
    ///
    /// # Errors
    /// The used ring is not accessible.
    pub fn complete_together(&mut self, mut requests: Vec<(Chain, u32)>) -> Result<(), RingError> {
        if self.tamper.is_some() {
            let mut requests = requests.into_iter();
            return requests.try_for_each(|(chain, written)| self.complete(chain, written));
        }
        let Some((last, written)) = requests.pop() else { return Ok(()) };
        let mut next = self.ring.next_used();
        for (chain, written) in requests {
            self.note_end(&chain, written);
            self.write_used(next, chain.head.into(), written)?;
            next = next.wrapping_add(1);
        }
        self.ring.set_next_used(next);
        self.complete(last, written)
    }

    fn note_end(&self, chain: &Chain, written: u32) {
        if let Some((log, number)) = &self.log {
            log.note_end(*number, chain, written, &self.memory);
        }
    }

    /// Writes an element of the used ring, which the driver looks at once the index has passed it.
    fn write_used(&self, index: u16, head: u32, written: u32) -> Result<(), RingError> {
        let at = self.shape.used + 4 + u64::from(index % self.shape.size) * 8;
        let element = u64::from(head) | u64::from(written) << 32;
        let memory = &self.memory;
        memory.write_obj(element.to_le(), GuestAddress(at)).map_err(|_| RingError::Memory)
    }

    /// Writes the used ring's index. The driver then sees all elements before that index.
    fn publish(&self, index: u16) -> Result<(), RingError> {
        let at = GuestAddress(self.shape.used + 2);
        let stored = self.memory.store(index.to_le(), at, Ordering::Release);
        stored.map_err(|_| RingError::Memory)
    }

    /// Requests that were given back and of which the driver was not told.
    pub fn untold(&self) -> u16 {
        self.ring.next_used().wrapping_sub(self.told)
    }

    /// DeviceInterrupts the driver for what was given back since the last call, if it wants that. For
    /// bodies whose requests take long; the transport does it anyway at the end.
    ///
    /// # Errors
    /// The available ring is not accessible.
    pub fn tell_driver(&mut self) -> Result<(), RingError> {
        if self.is_quiet && self.untold() < UNTOLD.min(self.shape.size / 2) {
            return Ok(());
        }
        if std::mem::take(&mut self.used_something) && self.driver_wants_interrupt()? {
            (self.interrupt)();
        }
        Ok(())
    }

    /// By the index at which the driver wants to be told, or its flag (virtio 1.2, 2.7.7). Not asked of
    /// `virtio-queue`, which does not look at the flag and knows nothing of requests given back together.
    fn driver_wants_interrupt(&mut self) -> Result<bool, RingError> {
        // What was given back is seen before the driver's wish is read.
        fence(Ordering::SeqCst);
        let now = self.ring.next_used();
        let before = std::mem::replace(&mut self.told, now);
        if !self.event_idx {
            return Ok(u32::from(self.available(0)?) & VRING_AVAIL_F_NO_INTERRUPT == 0);
        }
        let event = self.available(4 + 2 * u64::from(self.shape.size))?;
        Ok(now.wrapping_sub(event).wrapping_sub(1) < now.wrapping_sub(before))
    }

    /// A word of the available ring.
    fn available(&self, offset: u64) -> Result<u16, RingError> {
        let at = GuestAddress(self.shape.available + offset);
        let word: Result<u16, _> = self.memory.load(at, Ordering::Relaxed);
        word.map(u16::from_le).map_err(|_| RingError::Memory)
    }
}
