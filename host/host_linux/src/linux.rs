//! The host as a whole.

use std::{io, os::fd::OwnedFd, sync::atomic::AtomicU32, time::Duration};

use host::{Body, Child, Delays, Entropy, Facts, Memory, MemoryObject, Processes, Processors};

use crate::{LinuxEntropy, affinity, body, clock, cpuid_faults, delays, facts, memory, narrow};

/// Linux, as a program's host: `host::choose!(host_linux::Linux)`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Linux;

impl Memory for Linux {
    fn object(&self, name: &str, len: u64) -> io::Result<Box<dyn MemoryObject>> {
        memory::object(name, len)
    }
    fn adopt(&self, passed: OwnedFd) -> io::Result<Box<dyn MemoryObject>> {
        memory::adopt(passed)
    }
    fn adopt_shrinkable(&self, passed: OwnedFd) -> io::Result<Box<dyn MemoryObject>> {
        memory::adopt_shrinkable(passed)
    }
    fn fence_all_threads(&self) -> bool {
        memory::fence_all_threads()
    }
}

impl Processes for Linux {
    fn start(&self, body: &Body<'_>) -> io::Result<Box<dyn Child>> {
        body::start(body)
    }
    fn become_body(&self, body: &Body<'_>) -> io::Error {
        body::become_body(body)
    }
    fn wake(&self, word: &AtomicU32) {
        body::wake(word);
    }
    fn wait(&self, word: &AtomicU32, value: u32, patience: Duration) {
        body::wait(word, value, patience);
    }
}

impl Processors for Linux {
    fn allowed(&self) -> Vec<usize> {
        affinity::allowed()
    }
    fn current(&self) -> usize {
        affinity::current()
    }
    fn pin(&self, process: i32, processor: usize) {
        affinity::pin(process, processor);
    }
    fn share(&self, process: i32) {
        affinity::share(process);
    }
    fn uptime_ns(&self) -> u64 {
        clock::uptime_ns()
    }
    fn delays(&self) -> Box<dyn Delays> {
        Box::new(delays::LinuxDelays::of_this_thread())
    }
    fn facts(&self) -> &Facts {
        facts::facts()
    }
    fn runs_32_bit(&self) -> bool {
        narrow::runs_32_bit()
    }
    fn fault_cpuid(&self) {
        cpuid_faults::fault_as_in_bodies();
    }
}

impl Entropy for Linux {
    fn fill(&self, data: &mut [u8]) -> bool {
        LinuxEntropy.fill(data)
    }
}
