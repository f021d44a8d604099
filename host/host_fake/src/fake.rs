//! The host as a whole.

use std::{
    io::{self, ErrorKind},
    os::fd::OwnedFd,
    sync::{
        Condvar, Mutex, PoisonError,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use host::{Body, Child, Delays, Entropy, Facts, Memory, MemoryObject, Processes, Processors};

use crate::memory;

/// A host in memory, as a program's host: `host::choose!(host_fake::Fake)`. It has memory objects and two CPUs, and no
/// processes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fake;

/// Whoever waits for a word looks again when anybody is woken.
static WAITING: (Mutex<()>, Condvar) = (Mutex::new(()), Condvar::new());

static UPTIME: AtomicU64 = AtomicU64::new(0);

static FACTS: Facts = Facts {
    keys: false,
    keys_load: false,
    bases: true,
    cpuid_faults: true,
    user_dispatch: false,
    more_vectors: false,
    max_mappings: 65_530,
    lowest_address: 0x1_0000,
};

#[derive(Debug)]
struct NoDelays;

impl Delays for NoDelays {
    fn waited_ns(&self) -> u64 {
        0
    }
}

impl Memory for Fake {
    fn object(&self, _: &str, len: u64) -> io::Result<Box<dyn MemoryObject>> {
        memory::object(len)
    }
    fn adopt(&self, passed: OwnedFd) -> io::Result<Box<dyn MemoryObject>> {
        memory::adopt(passed)
    }
    fn adopt_shrinkable(&self, passed: OwnedFd) -> io::Result<Box<dyn MemoryObject>> {
        memory::adopt(passed)
    }
    fn fence_all_threads(&self) -> bool {
        false
    }
}

impl Processes for Fake {
    fn start(&self, _: &Body<'_>) -> io::Result<Box<dyn Child>> {
        Err(ErrorKind::Unsupported.into())
    }
    fn become_body(&self, _: &Body<'_>) -> io::Error {
        ErrorKind::Unsupported.into()
    }
    fn wake(&self, _: &AtomicU32) {
        let _held = WAITING.0.lock().unwrap_or_else(PoisonError::into_inner);
        WAITING.1.notify_all();
    }
    fn wait(&self, word: &AtomicU32, value: u32, patience: Duration) {
        let held = WAITING.0.lock().unwrap_or_else(PoisonError::into_inner);
        if word.load(Ordering::SeqCst) == value {
            drop(WAITING.1.wait_timeout(held, patience));
        }
    }
}

impl Processors for Fake {
    fn allowed(&self) -> Vec<usize> {
        vec![0, 1]
    }
    fn current(&self) -> usize {
        0
    }
    fn pin(&self, _: i32, _: usize) {}
    fn share(&self, _: i32) {}
    /// As many as have been asked for.
    fn uptime_ns(&self) -> u64 {
        UPTIME.fetch_add(1, Ordering::Relaxed)
    }
    fn delays(&self) -> Box<dyn Delays> {
        Box::new(NoDelays)
    }
    fn facts(&self) -> &Facts {
        &FACTS
    }
    fn runs_32_bit(&self) -> bool {
        false
    }
    fn fault_cpuid(&self) {}
}

impl Entropy for Fake {
    /// Zeros: what is to repeat and differ is asked of a [`crate::FakeEntropy`].
    fn fill(&self, data: &mut [u8]) -> bool {
        data.fill(0);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_is_woken() {
        static WORD: AtomicU32 = AtomicU32::new(0);
        let waiting = std::thread::spawn(|| {
            while WORD.load(Ordering::SeqCst) == 0 {
                Fake.wait(&WORD, 0, Duration::from_secs(10));
            }
        });
        WORD.store(1, Ordering::SeqCst);
        Fake.wake(&WORD);
        waiting.join().expect("it goes on");
    }
}
