//! What becomes of a device's requests, for whoever watches: a log in memory that two processes can share.
//!
//! The process that serves the device notes each request when it takes it and when it gives it back, if the watcher's word says so;
//! otherwise it reads that word and nothing else. The log is a ring of [`CAPACITY`] notes. Its writer never waits: a reader that is
//! too slow finds notes overwritten, and counts them. Whatever the log says is believed no further than that: it may be a hostile
//! process's.
//!
//! | bytes from | hold | written by |
//! |---|---|---|
//! | 0 | whether notes are wanted (4 bytes) | the reader |
//! | 64 | how many notes have been written (8 bytes) | the writer |
//! | 4096 | the notes, 64 bytes each | the writer |

use std::{
    fmt, io,
    os::fd::{BorrowedFd, OwnedFd},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use host::MemoryObject;
use ram::{DmaMemory, ForeignRange};
use vm_memory::{Bytes, GuestAddress};

use crate::{Buffer, Chain, lock};

/// Notes that are kept.
const CAPACITY: u64 = 1 << 14;
const NOTE: u64 = 64;
const WANTED: GuestAddress = GuestAddress(0);
const WRITTEN: GuestAddress = GuestAddress(64);
const NOTES: u64 = 4096;
/// Bytes of a log.
pub const REQUEST_LOG_LEN: u64 = NOTES + CAPACITY * NOTE;
/// Bytes of a request that are noted.
const BEGINNING: usize = 32;

/// What has become of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestNote {
    /// When, by the host's clock ([`host::Processors::uptime_ns`]).
    pub ns: u64,
    /// Which queue.
    pub queue: u16,
    /// Its first descriptor: no two requests that are under way in a queue have the same.
    pub head: u16,
    /// It was given back; otherwise taken.
    pub is_end: bool,
    /// Bytes that the device may read.
    pub readable: u32,
    /// Bytes that the device may write; at the end those that it has written.
    pub writable: u32,
    /// The first bytes that the device may read; at the end the first ones it may write.
    pub bytes: [u8; BEGINNING],
    /// How many of these there are.
    pub len: u8,
    /// At the end: the last byte that the device may write.
    pub last: u8,
}

impl RequestNote {
    fn encode(&self) -> [u8; NOTE as usize] {
        let mut note = [0; NOTE as usize];
        note[..8].copy_from_slice(&self.ns.to_le_bytes());
        note[8..10].copy_from_slice(&self.queue.to_le_bytes());
        note[10..12].copy_from_slice(&self.head.to_le_bytes());
        note[12..15].copy_from_slice(&[self.is_end.into(), self.len, self.last]);
        note[16..20].copy_from_slice(&self.readable.to_le_bytes());
        note[20..24].copy_from_slice(&self.writable.to_le_bytes());
        note[24..24 + BEGINNING].copy_from_slice(&self.bytes);
        note
    }

    fn decode(note: &[u8; NOTE as usize]) -> Self {
        let word =
            |at: usize| u32::from_le_bytes([note[at], note[at + 1], note[at + 2], note[at + 3]]);
        let half = |at: usize| u16::from_le_bytes([note[at], note[at + 1]]);
        let mut bytes = [0; BEGINNING];
        bytes.copy_from_slice(&note[24..24 + BEGINNING]);
        Self {
            ns: u64::from(word(0)) | u64::from(word(4)) << 32,
            queue: half(8),
            head: half(10),
            is_end: note[12] != 0,
            len: note[13].min(BEGINNING as u8),
            last: note[14],
            readable: word(16),
            writable: word(20),
            bytes,
        }
    }
}

/// The log of one device.
pub struct RequestLog {
    memory: DmaMemory,
    object: Box<dyn MemoryObject>,
    /// Readers that are there.
    readers: Mutex<usize>,
}

impl fmt::Debug for RequestLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RequestLog").finish_non_exhaustive()
    }
}

impl RequestLog {
    /// A log that nobody reads.
    ///
    /// # Errors
    /// The host has no memory.
    pub fn new() -> io::Result<Self> {
        let object = host::current().object("ring3-requests", REQUEST_LOG_LEN)?;
        object.seal(host::Seal::Seals)?;
        Self::of(object)
    }

    /// Maps a log that another process has passed.
    ///
    /// # Errors
    /// It is none.
    pub fn of_another(passed: OwnedFd) -> io::Result<Self> {
        let object = host::current().adopt(passed)?;
        if object.len() != REQUEST_LOG_LEN {
            return Err(io::Error::other("the log of requests has another length"));
        }
        Self::of(object)
    }

    fn of(object: Box<dyn MemoryObject>) -> io::Result<Self> {
        let file = object.descriptor().ok_or(io::ErrorKind::Unsupported)?.try_clone_to_owned()?;
        let range = ForeignRange { gpa: 0, len: REQUEST_LOG_LEN, file, offset: 0 };
        let memory = ram::foreign(vec![range]).map_err(io::Error::other)?;
        Ok(Self { memory, object, readers: Mutex::new(0) })
    }

    /// What another process can be passed.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.object.descriptor()
    }

    /// Somebody reads the log.
    #[inline]
    fn is_wanted(&self) -> bool {
        self.memory.load::<u32>(WANTED, Ordering::Relaxed).is_ok_and(|wanted| wanted != 0)
    }

    fn written(&self) -> u64 {
        self.memory.load(WRITTEN, Ordering::Acquire).unwrap_or_default()
    }

    fn place(index: u64) -> GuestAddress {
        GuestAddress(NOTES + index % CAPACITY * NOTE)
    }

    fn write(&self, note: &RequestNote) {
        let index = self.written();
        // The log is as long as it was checked to be.
        let _ = self.memory.write_slice(&note.encode(), Self::place(index));
        let _ = self.memory.store(index.wrapping_add(1), WRITTEN, Ordering::Release);
    }

    /// A request was taken from a queue.
    #[inline]
    pub(crate) fn note_begin(&self, queue: u16, chain: &Chain, guest: &DmaMemory) {
        if self.is_wanted() {
            self.write(&note(false, queue, chain, &chain.readable, guest));
        }
    }

    /// A request is about to be given back, with so many bytes written.
    #[inline]
    pub(crate) fn note_end(&self, queue: u16, chain: &Chain, written: u32, guest: &DmaMemory) {
        if !self.is_wanted() {
            return;
        }
        let mut last = [0];
        if let Some(at) = chain.writable.len().checked_sub(1) {
            // Of memory that cannot be read there is nothing to note.
            let _ = chain.writable.read(guest, at, &mut last);
        }
        let note = note(true, queue, chain, &chain.writable, guest);
        self.write(&RequestNote { writable: written, last: last[0], ..note });
    }

    fn change_readers(&self, change: impl FnOnce(&mut usize)) {
        let mut readers = lock(&self.readers);
        change(&mut readers);
        // As above.
        let _ = self.memory.store(u32::from(*readers != 0), WANTED, Ordering::Relaxed);
    }
}

fn note(
    is_end: bool,
    queue: u16,
    chain: &Chain,
    buffer: &Buffer,
    guest: &DmaMemory,
) -> RequestNote {
    let len = buffer.len().min(BEGINNING as u64) as usize;
    let mut bytes = [0; BEGINNING];
    let known = buffer.read(guest, 0, &mut bytes[..len]).is_ok();
    RequestNote {
        ns: host::current().uptime_ns(),
        queue,
        head: chain.head,
        is_end,
        readable: chain.readable.len() as u32,
        writable: chain.writable.len() as u32,
        bytes,
        len: if known { len as u8 } else { 0 },
        last: 0,
    }
}

/// Reads a log from now on; notes are made for as long as there is a reader.
pub struct LogReader {
    log: Arc<RequestLog>,
    /// Notes that were read or lost.
    seen: AtomicU64,
}

impl LogReader {
    /// Has the device's requests noted.
    pub fn new(log: Arc<RequestLog>) -> Self {
        let seen = AtomicU64::new(log.written());
        log.change_readers(|readers| *readers += 1);
        Self { log, seen }
    }

    /// Hands on what was noted since the last call. Returns how many notes were lost meanwhile.
    pub fn read(&self, mut hand_on: impl FnMut(RequestNote)) -> u64 {
        let (mut seen, written) = (self.seen.load(Ordering::Relaxed), self.log.written());
        let mut lost = 0;
        // Less than that were written, or the log lies.
        if written.wrapping_sub(seen) > CAPACITY {
            let first = written.wrapping_sub(CAPACITY);
            lost = first.wrapping_sub(seen);
            seen = first;
        }
        while seen != written {
            let mut bytes = [0; NOTE as usize];
            let read = self.log.memory.read_slice(&mut bytes, RequestLog::place(seen));
            seen = seen.wrapping_add(1);
            // One that is overwritten while it is read is none.
            if read.is_ok() && self.log.written().wrapping_sub(seen) < CAPACITY {
                hand_on(RequestNote::decode(&bytes));
            } else {
                lost += 1;
            }
        }
        self.seen.store(seen, Ordering::Relaxed);
        lost
    }
}

impl Drop for LogReader {
    fn drop(&mut self) {
        self.log.change_readers(|readers| *readers -= 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn numbered(n: u64) -> RequestNote {
        let (queue, head) = (n as u16, n as u16 ^ 7);
        RequestNote {
            ns: n,
            queue,
            head,
            is_end: n.is_multiple_of(2),
            len: 3,
            ..RequestNote::default()
        }
    }

    fn read(reader: &LogReader) -> (Vec<RequestNote>, u64) {
        let mut all = Vec::new();
        let lost = reader.read(|note| all.push(note));
        (all, lost)
    }

    #[test]
    fn what_another_process_notes_is_read() {
        let log = Arc::new(RequestLog::new().expect("memory"));
        let passed = log.descriptor().expect("a descriptor").try_clone_to_owned().expect("another");
        let other = RequestLog::of_another(passed).expect("a log");
        assert!(!other.is_wanted());
        let reader = LogReader::new(Arc::clone(&log));
        assert!(other.is_wanted());
        let notes: Vec<_> = (0..5).map(numbered).collect();
        notes.iter().for_each(|note| other.write(note));
        assert_eq!(read(&reader), (notes, 0));
        let second = LogReader::new(Arc::clone(&log));
        drop(reader);
        assert!(other.is_wanted(), "there is another reader");
        assert_eq!(read(&second), (Vec::new(), 0), "it has begun later");
        drop(second);
        assert!(!other.is_wanted());
    }

    #[test]
    fn what_a_slow_reader_has_missed_is_counted() {
        let log = Arc::new(RequestLog::new().expect("memory"));
        let reader = LogReader::new(Arc::clone(&log));
        let all = CAPACITY + 100;
        (0..all).for_each(|n| log.write(&numbered(n)));
        let (notes, lost) = read(&reader);
        assert_eq!(notes.len() as u64 + lost, all);
        assert!((100..=101).contains(&lost), "{lost}");
        assert_eq!(notes.last(), Some(&numbered(all - 1)));
        assert_eq!(read(&reader), (Vec::new(), 0));
    }

    /// A server that was taken over writes what it likes.
    #[test]
    fn a_log_that_lies_costs_no_more_than_its_length() {
        let log = Arc::new(RequestLog::new().expect("memory"));
        let reader = LogReader::new(Arc::clone(&log));
        for lie in [u64::MAX, 1, 1 << 63, 0, CAPACITY] {
            log.memory.store(lie, WRITTEN, Ordering::Relaxed).expect("stored");
            let (notes, _) = read(&reader);
            assert!(notes.len() as u64 <= CAPACITY, "{lie}: {}", notes.len());
        }
    }
}
