//! Taps: programs that are run where translated code comes by a point, and the records they make.

/// Words of a step of a program: those of `x86::tap`.
pub const STEP_WORDS: usize = 3;
/// Steps of all programs at the most.
pub const TAP_STEPS: usize = 1 << 15;
/// Bytes of records at the most.
pub const TAP_BYTES: usize = 1 << 20;

/// What the monitor and the wedges of a vCPU tell each other of taps. The monitor takes the records whenever it has the turn.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct Taps {
    /// Bytes of records.
    pub used: u64,
    /// Where the last one begins.
    pub last: u64,
    /// The programs, one behind the other.
    pub steps: [[u64; STEP_WORDS]; TAP_STEPS],
    /// The records (`x86::tap::records`).
    pub records: Records,
}

/// Bytes of records, aligned as their words.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Records(pub [u8; TAP_BYTES]);

/// In [`crate::ExitState::info`] of an exit at a tap: the monitor is to look by itself.
pub const TAP_ODD: u64 = u32::MAX as u64;
