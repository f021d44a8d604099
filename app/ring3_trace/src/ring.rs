//! Events in a ring of memory that a service shares with the machine: none of them costs a call of either's kernel.
//!
//! The machine makes the memory, whose size is sealed, and passes its descriptor with the first byte of its first answer. Only the
//! machine writes events. It trusts nothing that the service writes: how much it has written itself it keeps outside of the ring, and
//! where the service says that it has read what cannot be, the ring counts as full.
//!
//! | bytes from | hold | written by |
//! |---|---|---|
//! | 0 | `r3trace1`, and 8 bytes behind it how many bytes of events there can be, a power of two | the machine |
//! | 64 | how many bytes of events have been written | the machine |
//! | 128 | how many events were lost | the machine |
//! | 192 | how many bytes of events have been read | the service |
//! | 256 | 4 bytes, not zero while the service sleeps: the machine then sends it the line `"wake"` on the socket | both |
//! | 4096 | the events, each at a multiple of 8 bytes, none beyond the end | the machine |
//!
//! An event has 48 bytes, and then kind, name, comm, result and arguments, each with a zero byte behind it. The numbers are little-endian:
//! length of all of it, a multiple of 8, the highest bit if it only fills the rest (4 bytes); lengths of kind and name (2 each); `ns`;
//! `took`, all ones if there is none (8 each); `pid`, `tid`, `vcpu` (4 each); lengths of comm and result, all ones if there is none (2
//! each); length of arguments; zero (4 each).
// UNSAFETY: memory that another process writes cannot be expressed in safe Rust. It is accessed inside the mapping, by atomics and
// by copies.
#![allow(unsafe_code)]

use std::{
    fs::File,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    ptr::{self, NonNull},
    sync::atomic::{AtomicU32, AtomicU64, Ordering, fence},
};

use rustix::{
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create},
    mm::{MapFlags, ProtFlags, mmap, munmap},
};

use crate::Event;

const MAGIC: u64 = u64::from_le_bytes(*b"r3trace1");
const SIZE: usize = 8;
const WRITTEN: usize = 64;
const LOST: usize = 128;
const READ: usize = 192;
const SLEEPS: usize = 256;
const EVENTS: usize = 4096;
/// Bytes of an event before its text.
const HEAD: usize = 48;
/// A bit of the word with an event's length. It marks unused bytes between the last event and the ring's end.
const FILLS: u32 = 1 << 31;
/// Bytes of events that a ring can have.
const SIZES: [u64; 2] = [64 << 10, 64 << 20];
/// Bytes of a text at the most: an event is much shorter than the shortest ring.
const MOST_TEXT: usize = 8 << 10;

/// A ring that is mapped.
struct SharedRing {
    file: File,
    base: NonNull<u8>,
    /// Bytes of events: a power of two.
    size: u64,
}

// SAFETY: the memory is accessed by atomics and copies only, and each place written by one side.
unsafe impl Send for SharedRing {}

impl SharedRing {
    fn map(file: File, size: u64) -> io::Result<Self> {
        let len = EVENTS + size as usize;
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping at an address of the kernel's choice aliases nothing.
        let base = unsafe { mmap(ptr::null_mut(), len, access, flags, &file, 0)? };
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("no address"))?;
        Ok(Self { file, base, size })
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at < EVENTS);
        // SAFETY: aligned, in the first page, which is mapped for as long as `self`, and accessed as atomics only.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(at).cast()) }
    }

    fn sleeps(&self) -> &AtomicU32 {
        // SAFETY: as above.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(SLEEPS).cast()) }
    }

    /// Where the events have this byte, and how many bytes there are behind it.
    fn place(&self, written: u64) -> (*mut u8, usize) {
        let offset = (written & (self.size - 1)) as usize;
        // SAFETY: less than `size` bytes behind the first page.
        (unsafe { self.base.as_ptr().add(EVENTS + offset) }, self.size as usize - offset)
    }

    fn write(&self, at: u64, bytes: &[u8]) {
        let (place, room) = self.place(at);
        assert!(bytes.len() <= room);
        // SAFETY: there is room for all of them.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), place, bytes.len()) };
    }

    /// Copies what is there, as far as it is inside the ring.
    fn read(&self, at: u64, bytes: &mut [u8]) -> Option<()> {
        let (place, room) = self.place(at);
        (bytes.len() <= room).then_some(())?;
        // SAFETY: all of it is inside the mapping.
        unsafe { ptr::copy_nonoverlapping(place, bytes.as_mut_ptr(), bytes.len()) };
        Some(())
    }
}

impl Drop for SharedRing {
    fn drop(&mut self) {
        // SAFETY: nobody has a reference into the mapping any more. It was mapped, so it can be unmapped.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), EVENTS + self.size as usize) };
    }
}

/// The machine's end of a ring.
pub struct RingWriter {
    shared: SharedRing,
    written: u64,
    /// How far the service had read when that was looked at last.
    read: u64,
    lost: u64,
    /// An event on its way.
    event: Vec<u8>,
}

impl RingWriter {
    /// A ring of about so many bytes: at least 64 KiB, 64 MiB at the most.
    ///
    /// # Errors
    /// The host has no memory.
    pub fn new(bytes: u64) -> io::Result<Self> {
        let size = bytes.clamp(SIZES[0], SIZES[1]).next_power_of_two();
        let file = memfd_create("ring3-trace", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, EVENTS as u64 + size)?;
        // Who has the other end cannot take the memory away under us.
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let shared = SharedRing::map(file.into(), size)?;
        shared.word(SIZE).store(size, Ordering::Relaxed);
        shared.word(0).store(MAGIC, Ordering::Release);
        Ok(Self { shared, written: 0, read: 0, lost: 0, event: Vec::new() })
    }

    /// What the service is passed.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.shared.file.as_fd()
    }

    /// Bytes that the service had not read when that was looked at; all, if it says what cannot be.
    fn unread(&self) -> u64 {
        self.written.wrapping_sub(self.read).min(self.shared.size)
    }

    /// Whether there is room for so many bytes.
    fn has_room(&mut self, len: usize) -> bool {
        if len as u64 > self.shared.size - self.unread() {
            self.read = self.shared.word(READ).load(Ordering::Acquire);
        }
        len as u64 <= self.shared.size - self.unread()
    }

    /// Writes an event; false if there is no room for it now.
    pub fn put(&mut self, event: &Event) -> bool {
        encode(event, &mut self.event);
        let len = self.event.len();
        let (_, behind) = self.shared.place(self.written);
        let fill = if len > behind { behind } else { 0 };
        if !self.has_room(fill + len) {
            return false;
        }
        if fill != 0 {
            self.shared.write(self.written, &(fill as u32 | FILLS).to_le_bytes());
            self.written = self.written.wrapping_add(fill as u64);
        }
        self.shared.write(self.written, &self.event);
        self.written = self.written.wrapping_add(len as u64);
        self.shared.word(WRITTEN).store(self.written, Ordering::Release);
        true
    }

    /// Events were lost before they came here.
    pub fn lose(&mut self, count: u64) {
        self.lost = self.lost.saturating_add(count);
        self.shared.word(LOST).store(self.lost, Ordering::Release);
    }

    /// Half of the ring or more is full, as far as is known.
    pub fn is_filling(&self) -> bool {
        self.unread() >= self.shared.size / 2
    }

    /// The service sleeps beside events, and has to be woken. It is told once.
    pub fn take_sleeper(&mut self) -> bool {
        // What was written is seen before the sleeper is.
        fence(Ordering::SeqCst);
        self.read = self.shared.word(READ).load(Ordering::Acquire);
        self.unread() != 0 && self.shared.sleeps().swap(0, Ordering::SeqCst) != 0
    }
}

/// The service's end of a ring.
pub struct RingReader {
    shared: SharedRing,
    read: u64,
}

impl RingReader {
    /// The ring that a machine has passed.
    ///
    /// # Errors
    /// It is none.
    pub fn new(passed: OwnedFd) -> io::Result<Self> {
        let wrong = || io::Error::other("what the machine has passed is no ring");
        let size = fstat(&passed)?.st_size.cast_unsigned().saturating_sub(EVENTS as u64);
        let is_sealed = fcntl_get_seals(&passed)?.contains(SealFlags::SHRINK);
        let is_ring = size.is_power_of_two() && (SIZES[0]..=SIZES[1]).contains(&size);
        if !is_sealed || !is_ring {
            return Err(wrong());
        }
        let shared = SharedRing::map(passed.into(), size)?;
        let is_ours = shared.word(0).load(Ordering::Acquire) == MAGIC;
        let is_ours = is_ours && shared.word(SIZE).load(Ordering::Relaxed) == size;
        is_ours.then_some(Self { shared, read: 0 }).ok_or_else(wrong)
    }

    /// The next event, if there is one.
    ///
    /// # Errors
    /// What is there is no event.
    pub fn take(&mut self) -> io::Result<Option<Event>> {
        let wrong = || io::Error::other("the machine's ring has what is no event");
        loop {
            let there = self.shared.word(WRITTEN).load(Ordering::Acquire).wrapping_sub(self.read);
            if there == 0 {
                return Ok(None);
            }
            let mut first = [0; 4];
            self.shared.read(self.read, &mut first).ok_or_else(wrong)?;
            let first = u32::from_le_bytes(first);
            let len = u64::from(first & !FILLS);
            if len == 0 || len % 8 != 0 || len > there {
                return Err(wrong());
            }
            let event = (first & FILLS == 0).then(|| self.decode(len as usize)).flatten();
            self.read = self.read.wrapping_add(len);
            self.shared.word(READ).store(self.read, Ordering::Release);
            if first & FILLS == 0 {
                return event.map(Some).ok_or_else(wrong);
            }
        }
    }

    fn decode(&self, len: usize) -> Option<Event> {
        let mut bytes = vec![0; len];
        self.shared.read(self.read, &mut bytes)?;
        decode(&bytes)
    }

    /// Events that were lost so far.
    pub fn lost(&self) -> u64 {
        self.shared.word(LOST).load(Ordering::Acquire)
    }

    /// The service is about to sleep until the machine wakes it; false if there is something already.
    pub fn may_sleep(&self) -> bool {
        self.shared.sleeps().store(1, Ordering::SeqCst);
        // That is seen before this looks again.
        fence(Ordering::SeqCst);
        let is_empty = self.shared.word(WRITTEN).load(Ordering::Acquire) == self.read;
        if !is_empty {
            self.shared.sleeps().store(0, Ordering::SeqCst);
        }
        is_empty
    }
}

/// A text's bytes, as many as an event may have of it.
fn cut(text: &str) -> &[u8] {
    &text.as_bytes()[..text.floor_char_boundary(MOST_TEXT)]
}

fn encode(event: &Event, to: &mut Vec<u8>) {
    let Event { ns, vcpu, pid, tid, comm, kind, name, arguments, result, took, .. } = event;
    let [comm, kind, name, arguments] = [comm, kind, name, arguments].map(|text| cut(text));
    let result = result.as_deref().map(cut);
    let half = |len: usize| (len as u16).to_le_bytes();
    to.clear();
    to.extend([0; 4]);
    to.extend([half(kind.len()), half(name.len())].as_flattened());
    to.extend([ns.to_le_bytes(), took.unwrap_or(u64::MAX).to_le_bytes()].as_flattened());
    to.extend([*pid, *tid, *vcpu as u32].map(u32::to_le_bytes).as_flattened());
    to.extend(
        [half(comm.len()), result.map_or([0xff; 2], |result| half(result.len()))].as_flattened(),
    );
    to.extend([arguments.len() as u32, 0].map(u32::to_le_bytes).as_flattened());
    for text in [kind, name, comm, result.unwrap_or_default(), arguments] {
        to.extend(text);
        to.push(0);
    }
    to.resize(to.len().next_multiple_of(8), 0);
    let len = (to.len() as u32).to_le_bytes();
    to[..4].copy_from_slice(&len);
}

fn decode(bytes: &[u8]) -> Option<Event> {
    let half = |at: usize| Some(u16::from_le_bytes(*bytes.get(at..)?.first_chunk()?));
    let word = |at: usize| Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?));
    let quad = |at: usize| Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?));
    let mut at = HEAD;
    let mut text = |len: usize| {
        let text = bytes.get(at..at.checked_add(len)?)?;
        at += len + 1;
        Some(String::from_utf8_lossy(text).into_owned())
    };
    let (kind, name) = (text(half(4)?.into())?, text(half(6)?.into())?);
    let comm = text(half(36)?.into())?;
    let result = half(38).filter(|len| *len != u16::MAX);
    let said = text(result.unwrap_or_default().into())?;
    Some(Event {
        ns: quad(8)?,
        took: quad(16).filter(|took| *took != u64::MAX),
        pid: word(24)?,
        tid: word(28)?,
        vcpu: word(32)? as usize,
        kind,
        name,
        comm,
        result: result.map(|_| said),
        arguments: text(word(40)? as usize)?,
        ..Event::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(bytes: u64) -> (RingWriter, RingReader) {
        let writer = RingWriter::new(bytes).expect("memory");
        let reader = RingReader::new(writer.fd().try_clone_to_owned().expect("a descriptor"));
        (writer, reader.expect("a ring"))
    }

    fn numbered(n: u64) -> Event {
        let text = |what: &str| format!("{what}{}", "x".repeat(n as usize % 90));
        let (result, took) =
            (n.is_multiple_of(3).then(|| text("")), n.is_multiple_of(2).then_some(n));
        let (kind, name, comm) = (text("kind"), text("n\u{e4}me"), text(""));
        let (vcpu, pid, tid) = (n as usize % 7, n as u32, 1 + n as u32);
        Event {
            ns: n,
            vcpu,
            pid,
            tid,
            comm,
            kind,
            name,
            arguments: text("a"),
            result,
            took,
            ..Event::default()
        }
    }

    #[test]
    fn events_come_as_they_were_many_times_around() {
        let (mut writer, mut reader) = pair(0);
        let (mut put, mut taken) = (0, 0);
        while taken < 5000 {
            while put < 5000 && writer.put(&numbered(put)) {
                put += 1;
            }
            // Not all of them, so that the ring ends somewhere else each time.
            for _ in 0..100 {
                let Some(event) = reader.take().expect("events") else { break };
                assert_eq!(event, numbered(taken));
                taken += 1;
            }
        }
        assert_eq!(reader.take().expect("none"), None);
        writer.lose(3);
        assert_eq!(reader.lost(), 3);
    }

    #[test]
    fn a_sleeper_is_woken_once_and_nobody_sleeps_beside_an_event() {
        let (mut writer, mut reader) = pair(0);
        assert!(!writer.take_sleeper() && reader.may_sleep());
        assert!(!writer.take_sleeper(), "for nothing");
        assert!(writer.put(&numbered(1)) && writer.take_sleeper() && !writer.take_sleeper());
        assert!(!reader.may_sleep() && !writer.take_sleeper());
        reader.take().expect("an event");
        assert!(reader.may_sleep());
    }

    #[test]
    fn a_text_without_end_is_cut() {
        let (mut writer, mut reader) = pair(0);
        assert!(writer.put(&Event { arguments: "\u{e4}".repeat(70_000), ..Event::default() }));
        let event = reader.take().expect("one").expect("an event");
        assert!((MOST_TEXT - 1..=MOST_TEXT).contains(&event.arguments.len()));
    }

    /// A service writes anything anywhere in the ring: the machine finds room or none.
    #[test]
    fn a_service_that_lies_harms_only_itself() {
        let (mut writer, reader) = pair(0);
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        for n in 0..20_000 {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            let lie =
                [0, u64::MAX, state, writer.written, writer.written.wrapping_sub(state >> 50)];
            let at = [READ, WRITTEN, SIZE, 0, LOST, SLEEPS][n % 6];
            reader.shared.word(at).store(lie[n % 5], Ordering::Relaxed);
            writer.put(&numbered(n as u64));
            writer.take_sleeper();
            assert!(writer.unread() <= writer.shared.size);
        }
    }

    /// What a machine says is looked at with bounds.
    #[test]
    fn a_ring_of_garbage_is_an_error() {
        for seed in 0..200_u64 {
            let (writer, mut reader) = pair(0);
            let bytes: Vec<u8> = (0..64_u64).map(|n| (seed * n * n + seed) as u8).collect();
            (0..1024).for_each(|n| writer.shared.write(n * 64, &bytes));
            writer.shared.word(WRITTEN).store(seed << (seed % 40), Ordering::Relaxed);
            while let Ok(Some(_)) = reader.take() {}
        }
        let ordinary = tempfile::tempfile().expect("a file");
        assert!(RingReader::new(ordinary.into()).is_err());
    }
}
