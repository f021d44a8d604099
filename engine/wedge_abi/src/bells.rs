//! Doorbells that a wedge may ring by itself, and the interrupts of their answers.
//!
//! A driver rings by a store to a device's page. While the device's server looks at its queues by itself, there is nothing to do for
//! that but to wait for the answer, and to interrupt the guest. The monitor tells the wedge of such stores and of what they do; whatever
//! is not ordinary is left to it.

/// Doorbells at the most.
pub const MAX_BELLS: usize = 8;
/// Instructions that ring at the most.
pub const MAX_RINGS: usize = 4;

/// Number of the last interrupt class: [`BellState::above`] if none may be taken.
pub const NO_CLASS: u64 = 15;

/// What the monitor tells of doorbells.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bells {
    /// What the monitor's word among the pages of words says while this holds.
    pub epoch: u64,
    /// How long an answer is waited for, in ticks of the time-stamp counter.
    pub patience: u64,
    /// The same if all requests have been answered.
    pub moment: u64,
    /// The doorbells; those behind the first with a GPA of zero mean nothing.
    pub bells: [Bell; MAX_BELLS],
    /// The instructions; those behind the first with a RIP of zero mean nothing.
    pub rings: [Ring; MAX_RINGS],
}

/// A doorbell.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bell {
    /// Its GPA.
    pub gpa: u64,
    /// Offset of the device's page among the pages of words.
    pub words: u64,
    /// The queue.
    pub queue: u64,
    /// Offset in RAM of the 16 bits that count the requests offered.
    pub offered: u64,
    /// The same of those given back.
    pub used: u64,
    /// Vector of the interrupt that tells of answers.
    pub vector: u64,
}

/// An instruction that rings: a store to where a register points.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ring {
    /// Its GVA.
    pub rip: u64,
    /// Its length, in bytes.
    pub len: u64,
    /// The register, by its encoding.
    pub base: u64,
    /// What is added to the register.
    pub displacement: u64,
}

/// What a wedge and the monitor tell each other of interrupts that the wedge takes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BellState {
    /// Vectors of a class (their upper four bits) above this may be taken: nothing of a higher one is served or waits.
    pub above: u64,
    /// Offset in RAM of the byte by which the guest tells the end of an interrupt.
    pub end: u64,
    /// The vector that was taken last without the monitor; zero for none.
    pub taken: u64,
    /// Not zero: an answer has not come in time, so that the monitor is to ring next and see why.
    pub late: u64,
}
