//! Words that a monitor and a server share: a request and its answer need no call of the host's while both look at the words. The words
//! lie behind RAM ([`ram::words`]). A wedge maps them, too, and may wait for an answer there without the monitor.
//!
//! | word | written by | says |
//! |---|---|---|
//! | `WATCHED` | the server | it looks at its queues by itself, so that it needs no doorbell; whether it is serving one |
//! | `PATIENCE` | the monitor | for how many us the server may do so after a request |
//! | one a queue | both | whether a vCPU waits for an answer of this queue, and how; then, that there is one, or none that it is to be told of |
//!
//! At most one vCPU waits for the answers of a queue. A second vCPU that rings meanwhile does not wait. The driver hears of the second's answer
//! together with the first's, or by the queue's event if the first vCPU has gone on by then.
//!
//! A word that says nonsense is as good as one that says nothing: then there are the events.
// UNSAFETY: memory that another process writes cannot be expressed in safe Rust; it is accessed as atomics only.
#![allow(unsafe_code)]

use std::{
    fs::File,
    hint::spin_loop,
    io,
    os::fd::{AsFd, BorrowedFd},
    ptr::{self, NonNull},
    sync::atomic::{AtomicU32, Ordering, fence},
    time::{Duration, Instant},
};

use ram::words::{
    ANSWERED, ASLEEP, EARLY, FIRST_QUEUE, LOOKING, NOBODY, NOT_WATCHED, SILENT, STEP, WATCHED,
};
use rustix::{
    event::Timespec,
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create},
    mm::{MapFlags, ProtFlags, mmap, munmap},
    thread::futex,
};

/// Bytes in all.
pub(crate) const LEN: u64 = 4096;

const PATIENCE: usize = 1;

/// Values of the server's word: the server looks at its queues, or it serves a queue and will look again afterwards.
const WATCHING: u32 = 1;
const SERVING: u32 = 2;

/// The longest time for which a server looks at its queues after a request. A guest that has taken over its wedge can write any time
/// into the word.
const MOST_PATIENCE: Duration = Duration::from_millis(1);

/// How a vCPU waits for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waiting {
    /// It keeps its CPU.
    Looking,
    /// It leaves its CPU to the server.
    Asleep,
}

/// What a vCPU finds that comes to wait for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// The vCPU may wait.
    Ours,
    /// Another vCPU waits for an answer of this queue, or is about to take one.
    Others,
    /// There is an answer already.
    Answered,
}

/// What came of waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    /// There is an answer, of which the driver is to be told.
    Answer,
    /// All requests of the queue are answered, and the driver wants no interrupt for that.
    Silence,
    /// There is no answer yet.
    Nothing,
}

/// The page of words.
pub(crate) struct Words {
    file: File,
    /// Where the page is in the file.
    offset: u64,
    base: NonNull<u8>,
}

// SAFETY: the page is accessed as atomics only, from any thread.
unsafe impl Send for Words {}
// SAFETY: as above.
unsafe impl Sync for Words {}

impl Words {
    /// Words that say nothing yet.
    pub(crate) fn new() -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("ring3-words", flags)?;
        ftruncate(&file, LEN)?;
        // Who has the other end cannot take the page away under us.
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Self::map(file.into(), 0)
    }

    /// Maps the words at an offset in a memory object. The object is RAM's, or one that another process has passed.
    pub(crate) fn of_another(file: File, offset: u64) -> io::Result<Self> {
        let is_sealed = fcntl_get_seals(&file)?.contains(SealFlags::SHRINK);
        let end = fstat(&file)?.st_size.cast_unsigned();
        if !is_sealed || !offset.is_multiple_of(LEN) || offset.checked_add(LEN) > Some(end) {
            return Err(io::Error::other("the page of words is none"));
        }
        Self::map(file, offset)
    }

    fn map(file: File, offset: u64) -> io::Result<Self> {
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping at an address of the kernel's choice aliases nothing.
        let base = unsafe { mmap(ptr::null_mut(), LEN as usize, access, flags, &file, offset)? };
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("no address"))?;
        Ok(Self { file, offset, base })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Where the page is in the file.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    fn word(&self, number: usize) -> Option<&AtomicU32> {
        let offset = number.checked_mul(STEP).filter(|offset| *offset < LEN as usize)?;
        // SAFETY: inside the page, aligned, mapped for as long as `self`, and only ever accessed as atomics by us.
        Some(unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(offset).cast()) })
    }

    fn queue(&self, index: usize) -> Option<&AtomicU32> {
        self.word(index.checked_add(FIRST_QUEUE)?)
    }

    fn load(&self, number: usize) -> u32 {
        self.word(number).map_or(0, |word| word.load(Ordering::SeqCst))
    }

    fn store(&self, number: usize, value: u32) {
        self.word(number).into_iter().for_each(|word| word.store(value, Ordering::SeqCst));
    }

    // The monitor's part.

    /// Lets a server look at its queues for so long after a request, or not; one that has ended looks no more.
    pub(crate) fn set_patience(&self, patience: Duration) {
        self.store(PATIENCE, patience.as_micros() as u32);
        if patience.is_zero() {
            self.store(WATCHED, NOT_WATCHED);
        }
    }

    /// Whether the server serves a queue, as far as it says.
    pub(crate) fn is_serving(&self) -> bool {
        self.load(WATCHED) == SERVING
    }

    /// Whether a request that the guest has offered by now is seen without a doorbell.
    pub(crate) fn is_watched(&self) -> bool {
        // What the guest has offered is seen before this is read.
        fence(Ordering::SeqCst);
        self.load(WATCHED) != NOT_WATCHED
    }

    /// Makes a queue's word say that nobody waits. This is done before a server starts to serve the queue.
    pub(crate) fn clear(&self, index: usize) {
        self.queue(index).into_iter().for_each(|word| word.store(NOBODY, Ordering::SeqCst));
    }

    /// Begins to wait for an answer of this queue, unless another vCPU waits. An answer that is there already is taken. `None` if the queue
    /// has no word.
    pub(crate) fn expect(&self, index: usize, how: Waiting) -> Option<Turn> {
        let value = if how == Waiting::Looking { LOOKING } else { ASLEEP };
        // What another vCPU is about to find must stay: the server does not tell of it again.
        let next = |said| match said {
            NOBODY => Some(value),
            EARLY => Some(NOBODY),
            _ => None,
        };
        Some(match self.queue(index)?.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next) {
            Ok(EARLY) => Turn::Answered,
            Ok(_) => Turn::Ours,
            Err(_) => Turn::Others,
        })
    }

    /// Waits for an answer. From now on answers come by the queue's event again.
    pub(crate) fn wait(&self, index: usize, how: Waiting, time: Duration) -> Reply {
        let Some(word) = self.queue(index) else { return Reply::Nothing };
        match how {
            Waiting::Looking => look(word, time),
            Waiting::Asleep => sleep(word, time),
        }
        match word.swap(NOBODY, Ordering::SeqCst) {
            ANSWERED => Reply::Answer,
            SILENT => Reply::Silence,
            _ => Reply::Nothing,
        }
    }

    // The server's part.

    /// For how long it may look at its queues after a request.
    pub(crate) fn patience(&self) -> Duration {
        Duration::from_micros(self.load(PATIENCE).into()).min(MOST_PATIENCE)
    }

    /// Says that it looks at its queues by itself, or does not. What was offered before it said so it has to look for once more.
    pub(crate) fn set_watched(&self, is_watched: bool) {
        self.store(WATCHED, if is_watched { WATCHING } else { NOT_WATCHED });
        fence(Ordering::SeqCst);
    }

    /// Says that it serves a queue, or has, if it looks at its queues.
    pub(crate) fn set_serving(&self, is_serving: bool) {
        let (from, to) = if is_serving { (WATCHING, SERVING) } else { (SERVING, WATCHING) };
        let word = self.word(WATCHED);
        // The monitor may have said meanwhile that it is to sleep.
        word.map(|word| {
            word.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        });
    }

    /// Tells a vCPU that waits that there is an answer, or one that is about to, if we look at the queues by ourselves: then the request
    /// is answered while it is on its way to ring. False if it has to be told by an event.
    pub(crate) fn answer(&self, index: usize) -> bool {
        let Some(word) = self.queue(index) else { return false };
        let watched = self.load(WATCHED) != NOT_WATCHED;
        let next = |said| match said {
            LOOKING | ASLEEP => Some(ANSWERED),
            NOBODY if watched => Some(EARLY),
            _ => None,
        };
        match word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next) {
            Ok(ASLEEP) => {
                wake(word);
                true
            }
            Ok(_) => true,
            // What it will take is for this answer, too.
            Err(said) => matches!(said, ANSWERED | EARLY),
        }
    }

    /// Lets a vCPU that waits for an answer go on: all requests of the queue are answered, and the driver wants no interrupt for that.
    pub(crate) fn hush(&self, index: usize) {
        let Some(word) = self.queue(index) else { return };
        let next = |said| matches!(said, LOOKING | ASLEEP).then_some(SILENT);
        if word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next) == Ok(ASLEEP) {
            wake(word);
        }
    }

    /// Takes back an answer for which nobody has come; whether there was one. It has to be told by an event.
    pub(crate) fn take_back(&self, index: usize) -> bool {
        let taken = |word: &AtomicU32| {
            word.compare_exchange(EARLY, NOBODY, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        };
        self.queue(index).is_some_and(taken)
    }
}

fn look(word: &AtomicU32, time: Duration) {
    let start = Instant::now();
    while word.load(Ordering::Acquire) == LOOKING && start.elapsed() < time {
        spin_loop();
    }
}

fn wake(word: &AtomicU32) {
    // Nobody sleeping any more has seen the word.
    let _ = futex::wake(word, futex::Flags::empty(), 1);
}

fn sleep(word: &AtomicU32, time: Duration) {
    let (start, mut left) = (Instant::now(), time);
    while word.load(Ordering::Acquire) == ASLEEP && !left.is_zero() {
        let wait = Timespec { tv_sec: 0, tv_nsec: left.subsec_nanos().into() };
        // Woken, interrupted, in vain, or too late: the word and the clock tell.
        let _ = futex::wait(word, futex::Flags::empty(), ASLEEP, Some(&wait));
        left = time.saturating_sub(start.elapsed());
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: mapped in `map`, and nobody has the address any more. Failure would leak a page, no more.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), LEN as usize) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        os::unix::fs::FileExt,
        sync::{Arc, atomic::AtomicBool},
        thread,
    };

    const SHORT: Duration = Duration::from_millis(20);
    const LONG: Duration = Duration::from_millis(900);

    /// Both ends.
    fn pair() -> (Words, Words) {
        let ours = Words::new().expect("a page");
        let file = ours.file.try_clone().expect("a copy");
        let theirs = Words::of_another(file, ours.offset()).expect("the same");
        (ours, theirs)
    }

    #[test]
    fn an_answer_comes_to_whoever_waits_and_to_nobody_else() {
        for how in [Waiting::Looking, Waiting::Asleep] {
            let (ours, theirs) = pair();
            let theirs = Arc::new(theirs);
            assert!(!theirs.answer(3), "nobody waits");
            assert_eq!(ours.expect(3, how), Some(Turn::Ours));
            let start = Instant::now();
            assert_eq!(ours.wait(3, how, SHORT), Reply::Nothing, "nobody answers");
            assert!(start.elapsed() >= SHORT && !theirs.answer(3), "too late");
            assert_eq!(ours.expect(3, how), Some(Turn::Ours));
            assert!(!theirs.answer(2), "another queue");
            let other = Arc::clone(&theirs);
            let server = thread::spawn(move || {
                thread::sleep(SHORT);
                (other.answer(3), other.answer(3))
            });
            let start = Instant::now();
            assert_eq!(ours.wait(3, how, LONG), Reply::Answer, "{how:?}");
            assert!(start.elapsed() < LONG, "at once");
            let (first, _) = server.join().expect("answered");
            assert!(first);
        }
    }

    #[test]
    fn whoever_waits_for_an_answer_that_is_not_told_goes_on() {
        for how in [Waiting::Looking, Waiting::Asleep] {
            let (ours, theirs) = pair();
            theirs.hush(3);
            assert_eq!(ours.expect(3, how), Some(Turn::Ours), "nobody waited");
            let server = thread::spawn(move || {
                thread::sleep(SHORT);
                theirs.hush(3);
                theirs
            });
            let start = Instant::now();
            assert_eq!(ours.wait(3, how, LONG), Reply::Silence, "{how:?}");
            assert!(start.elapsed() < LONG, "at once");
            let theirs = server.join().expect("hushed");
            assert_eq!(ours.expect(3, how), Some(Turn::Ours));
            assert!(theirs.answer(3), "of which it is told after all");
            theirs.hush(3);
            assert_eq!(ours.wait(3, how, LONG), Reply::Answer);
        }
    }

    /// The host may keep a vCPU that waits from running for long after the answer has come.
    #[test]
    fn who_comes_while_another_waits_takes_nothing_from_it() {
        for how in [Waiting::Looking, Waiting::Asleep] {
            let (ours, theirs) = pair();
            assert_eq!(ours.expect(0, how), Some(Turn::Ours));
            assert_eq!(ours.expect(0, Waiting::Looking), Some(Turn::Others));
            assert!(theirs.answer(0));
            assert_eq!(ours.expect(0, Waiting::Looking), Some(Turn::Others));
            assert!(theirs.answer(0), "whoever waits hears of both");
            assert_eq!(ours.wait(0, how, Duration::ZERO), Reply::Answer);
            assert_eq!(ours.expect(0, how), Some(Turn::Ours), "it has gone on");
            ours.clear(0);
            assert!(!theirs.answer(0), "the queue is served from anew");
        }
    }

    #[test]
    fn two_answers_are_taken_as_one() {
        let (ours, theirs) = pair();
        assert_eq!(ours.expect(0, Waiting::Asleep), Some(Turn::Ours));
        assert!(theirs.answer(0) && theirs.answer(0));
        assert_eq!(ours.wait(0, Waiting::Asleep, LONG), Reply::Answer);
        assert!(!theirs.answer(0));
    }

    #[test]
    fn what_one_says_the_other_hears_and_queues_without_a_word_have_events() {
        let (ours, theirs) = pair();
        assert!(theirs.patience().is_zero() && !ours.is_watched());
        ours.set_patience(Duration::from_micros(50));
        theirs.set_watched(true);
        assert!(theirs.patience() == Duration::from_micros(50) && ours.is_watched());
        theirs.set_serving(true);
        assert!(ours.is_watched() && ours.is_serving());
        theirs.set_serving(false);
        assert!(ours.is_watched() && !ours.is_serving());
        ours.set_patience(Duration::ZERO);
        theirs.set_serving(true);
        assert!(!ours.is_watched(), "it has ended, or is about to look for the last time");
        assert!(ours.expect(62, Waiting::Looking).is_none() && !theirs.answer(usize::MAX));
        assert!(ours.expect(61, Waiting::Looking).is_some() && theirs.answer(61));
    }

    #[test]
    fn an_answer_that_is_there_before_anybody_rings_is_found_or_taken_back() {
        let (ours, theirs) = pair();
        theirs.set_watched(true);
        assert!(theirs.answer(1) && theirs.answer(1));
        assert_eq!(ours.expect(1, Waiting::Looking), Some(Turn::Answered));
        assert!(!theirs.take_back(1), "it was found");
        assert!(theirs.answer(1) && theirs.take_back(1) && !theirs.take_back(1));
        assert_eq!(ours.expect(1, Waiting::Looking), Some(Turn::Ours));
        assert!(!theirs.take_back(1) && theirs.answer(1));
        assert_eq!(ours.wait(1, Waiting::Looking, LONG), Reply::Answer);
        theirs.set_watched(false);
        assert!(!theirs.answer(1), "nobody is on the way");
    }

    /// Nobody waits for longer than without, or for ever, and all go on once the page is left alone.
    #[test]
    fn who_scribbles_on_the_words_harms_only_the_guest() {
        let (ours, theirs) = pair();
        let (page, over) =
            (ours.file.try_clone().expect("a copy"), Arc::new(AtomicBool::new(false)));
        let is_over = Arc::clone(&over);
        let scribbler = thread::spawn(move || {
            let mut random = 1_u32;
            while !is_over.load(Ordering::Relaxed) {
                random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let word = (random >> 10) % 8 * STEP as u32;
                let said = if random >> 31 == 0 { random >> 4 & 7 } else { random };
                page.write_all_at(&said.to_ne_bytes(), word.into()).expect("written");
            }
        });
        let start = Instant::now();
        for round in 0..400 {
            let how = [Waiting::Looking, Waiting::Asleep][round % 2];
            assert!(ours.expect(round % 4, how).is_some());
            ours.wait(round % 4, how, Duration::from_millis(1));
            theirs.set_watched(round % 3 == 0);
            theirs.set_serving(round % 5 == 0);
            theirs.answer(round % 4);
            theirs.take_back(round % 4);
            assert!(theirs.patience() <= MOST_PATIENCE);
        }
        assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
        over.store(true, Ordering::Relaxed);
        scribbler.join().expect("ended");
        theirs.set_watched(false);
        // Whatever was left there is taken.
        ours.wait(0, Waiting::Looking, Duration::ZERO);
        assert_eq!(ours.expect(0, Waiting::Looking), Some(Turn::Ours));
        assert!(theirs.answer(0));
        assert_eq!(ours.wait(0, Waiting::Looking, LONG), Reply::Answer);
    }

    #[test]
    fn a_server_looks_no_longer_than_it_may() {
        let (ours, theirs) = pair();
        ours.set_patience(Duration::from_secs(60));
        assert_eq!(theirs.patience(), MOST_PATIENCE);
    }

    #[test]
    fn a_file_that_can_shrink_is_refused() {
        let file = File::from(memfd_create("x", MemfdFlags::ALLOW_SEALING).expect("made"));
        let again = || file.try_clone().expect("a copy");
        assert!(Words::of_another(again(), 0).is_err(), "it is empty");
        file.set_len(2 * LEN).expect("longer");
        assert!(Words::of_another(again(), 0).is_err());
        fcntl_add_seals(&file, SealFlags::SHRINK).expect("sealed");
        assert!(Words::of_another(again(), LEN).is_ok());
        for odd in [LEN / 2, 2 * LEN, u64::MAX - (LEN - 1)] {
            assert!(Words::of_another(again(), odd).is_err(), "{odd:#x}");
        }
    }
}
