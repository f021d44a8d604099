//! Words by which a device's server tells of requests and answers, as far as a wedge knows them. The crate `ram` has the same.

/// Bytes from one word of a page of words to the next.
pub const STEP: usize = 64;
/// Number of the word that says whether the server looks at its queues.
pub const WATCHED: usize = 0;
/// Number of the first queue's word.
pub const FIRST_QUEUE: usize = 2;
/// What that word says: the server sleeps.
pub const NOT_WATCHED: u32 = 0;
/// What a queue's word says: nobody waits for an answer.
pub const NOBODY: u32 = 0;
/// A vCPU waits for an answer and looks at the word.
pub const LOOKING: u32 = 1;
/// There is an answer for whoever waits.
pub const ANSWERED: u32 = 3;
/// There is an answer for whoever is about to ring.
pub const EARLY: u32 = 4;
/// All requests of the queue are answered, and the driver wants no interrupt. A vCPU that waits for an answer goes on without one.
pub const SILENT: u32 = 5;

/// Bytes of all pages of words.
pub const LEN: usize = 16 << 12;
/// Offset among them of a word of 64 bits, see [`Bells::epoch`](crate::Bells::epoch).
pub const EPOCH: usize = LEN - (1 << 12);
