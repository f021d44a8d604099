//! The pages of words behind RAM: what they say, and where.
//!
//! A device's server, the monitor and wedges tell each other of requests and answers there, without events. Each device has a page,
//! and on it a word of 32 bits for the server and one for each queue. The last page is the monitor's.

use crate::PAGE;

/// Pages of words.
pub const PAGES: u64 = 16;
/// Bytes of all of them.
pub const LEN: u64 = PAGES * PAGE;
/// Offset among all pages of a word of 64 bits that the monitor changes whenever what a doorbell does may have changed.
pub const EPOCH: u64 = LEN - PAGE;

/// Bytes from one word of a page to the next: each has a cache line of its own.
pub const STEP: usize = 64;
/// Number of the word that says whether the server looks at its queues by itself, so that it needs no doorbell.
pub const WATCHED: usize = 0;
/// Number of the first queue's word.
pub const FIRST_QUEUE: usize = 2;

/// The server sleeps.
pub const NOT_WATCHED: u32 = 0;

/// What a queue's word says: nobody waits for an answer.
pub const NOBODY: u32 = 0;
/// A vCPU waits for an answer and looks at the word.
pub const LOOKING: u32 = 1;
/// A vCPU waits for an answer and sleeps until the server wakes it.
pub const ASLEEP: u32 = 2;
/// There is an answer for whoever waits.
pub const ANSWERED: u32 = 3;
/// There is an answer for whoever is about to ring.
pub const EARLY: u32 = 4;
/// All requests of the queue are answered, and the driver wants no interrupt. A vCPU that waits for an answer goes on without one.
pub const SILENT: u32 = 5;
