//! What a vCPU does beside executing instructions, for those who trace it.

use std::sync::Arc;

/// Something a vCPU has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VcpuEvent {
    /// IN or OUT.
    Port {
        /// The port.
        port: u16,
        /// Bytes.
        size: u8,
        /// OUT.
        write: bool,
        /// What was read or written.
        value: u32,
    },
    /// An access to memory that is no RAM.
    Mmio {
        /// Where (GPA).
        gpa: u64,
        /// Bytes.
        size: u8,
        /// A write.
        write: bool,
        /// What was read or written.
        value: u64,
    },
    /// RDMSR or WRMSR that did not fault.
    Msr {
        /// Which register.
        index: u32,
        /// WRMSR.
        write: bool,
        /// What was read or written.
        value: u64,
    },
    /// An interrupt is delivered.
    Vector(u8),
    /// Code has been translated, from this GVA on.
    Translate {
        /// Where the first block begins.
        gva: u64,
        /// How many blocks.
        blocks: u64,
    },
    /// Translations of pages of code were dropped: they were written.
    Drop {
        /// How many pages.
        pages: u64,
    },
    /// Translations of addresses were dropped: the guest asked for it.
    Flush {
        /// How many times.
        times: u64,
    },
    /// A page was mapped by the monitor.
    Map {
        /// The page (GVA).
        gva: u64,
    },
    /// A kick has stopped guest code.
    Kick,
}

/// Who is told of it, on the vCPU's own thread.
pub type Watcher = Arc<dyn Fn(VcpuEvent) + Send + Sync>;
