//! What was injected, as one line of JSON for each fault that struck.

use serde::{Deserialize, Serialize};

use crate::{Contents, schedule::Op};

/// A fault that struck.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// The fault's name in the scenario.
    pub fault: String,
    /// What was struck, such as `disk0`.
    pub on: String,
    /// Seconds since the device was started.
    pub seconds: f64,
    /// The request it struck, if it was one.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub struck: Option<Struck>,
    /// What happened.
    pub effect: Effect,
    /// What of the disk is not as it should be, if a write or an answer was struck.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub contents: Vec<Contents>,
}

/// A request that was struck.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Struck {
    /// What the guest asked for.
    pub op: Op,
    /// Number of the request among those the fault could have struck, from 1.
    pub request: u64,
    /// First byte on the disk; 0 for a network; an interrupt's vector.
    pub offset: u64,
    /// Bytes of the request or frame.
    pub len: u64,
}

/// What a fault did.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Effect {
    /// The request failed.
    Failed,
    /// It was answered later, by so many milliseconds.
    Delayed(u64),
    /// It is never answered.
    Hung,
    /// A write or frame was acknowledged and dropped.
    Dropped,
    /// Only so many bytes from its beginning were written.
    Torn(u64),
    /// It was written at this byte instead.
    Misdirected(u64),
    /// Bits were flipped: byte within the request or address in memory, value before, value after.
    Corrupted(Vec<(u64, u8, u8)>),
    /// What was read was garbage.
    Garbage,
    /// The used ring's index was so far ahead.
    UsedIndex(u16),
    /// A request was given back as this one, but as that one in the used ring.
    UsedId(u32, u32),
    /// So many bytes were written, but so many by the used ring.
    UsedLength(u32, u32),
    /// The request's status was this.
    Status(u8),
    /// The driver was interrupted before there was anything for it.
    Interrupted,
    /// The driver was told of a configuration that had not changed.
    ConfigChange,
    /// A frame was sent twice.
    Duplicated,
    /// A frame was overtaken by the next one.
    Reordered,
    /// The machine was reset.
    Reset,
    /// The vCPU stood still for so many milliseconds; for ever if none are given.
    Paused(Option<u64>),
    /// A network's link was down for so many milliseconds; for ever if none are given.
    LinkDown(Option<u64>),
    /// The clock was set ahead by so many milliseconds.
    Stepped(u64),
    /// The clock goes faster by so many millionths.
    Drifting(i64),
    /// The clock stood still for so many milliseconds.
    Stopped(u64),
    /// A register was changed.
    Register {
        /// Which.
        register: String,
        /// Where the vCPU was (GVA).
        rip: u64,
        /// The instruction whose result it was, if it was one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        instruction: Option<String>,
        /// Its value.
        before: u64,
        /// Its value now.
        after: u64,
    },
    /// Hardware told of an error.
    MachineCheck {
        /// The vCPU that met it.
        vcpu: usize,
        /// The bank that has it.
        bank: usize,
        /// What the bank's status register says now.
        status: u64,
        /// Where it was (GPA), if that is known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        address: Option<u64>,
        /// All vCPUs took the exception; else it waits in its bank, and interrupts where the guest asked for that.
        exception: bool,
    },
    /// An interrupt that nobody asked for, with this vector.
    Spurious(u8),
    /// The power went. Of the sectors written since the last flush, so many were left with older contents.
    PowerCut {
        /// Sectors written since the last flush.
        unflushed: u64,
        /// Sectors of these that show older contents now.
        reverted: u64,
    },
}

/// Takes records. Called on the device's thread.
pub type Recorder = Box<dyn FnMut(&Record) + Send>;
