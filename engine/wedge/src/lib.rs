//! Wedge processes: each holds one guest address space and runs guest user code directly.
//!
//! A wedge is a process that has unmapped everything but a small window (`blob/`) and maps guest
//! pages, from the guest's RAM object, at the guest's own user addresses. [`Wedge::run`] lets guest
//! code run there until it does anything but compute: a system call, a fault, a kick. The registers
//! then are exact, and the caller decides.
//!
//! Nothing is believed of what a wedge writes into the shared pages but that these are *some* user
//! registers and *some* exit: the guest could have produced any of them itself.

mod process;

#[allow(missing_docs, reason = "documented in the file, which the blob includes too")]
mod layout {
    include!("../blob/layout.rs");
}

pub use layout::{MAX_ORDERS, Order, Registers, TOP, WINDOW, WINDOW_LEN};
pub use process::{Error, Kick, Wedge};

/// Why guest code stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// [`Kick::kick`] was called.
    Kicked,
    /// A page fault at a GVA, with the CPU's error code; RIP is the instruction.
    PageFault {
        /// Faulting linear address.
        address: u64,
        /// Error code (SDM 4.7); its P bit is the host's, not the guest's.
        error: u32,
    },
    /// An instruction trapped; RIP is behind it by this many bytes (1 or 2), or at it (0).
    Trap {
        /// Exception vector.
        vector: u8,
    },
    /// SYSCALL or INT 0x80; RIP is behind it, RCX and R11 are lost.
    SystemCall,
    /// A call into the vsyscall page at this address; the return address has been popped into RIP.
    Vsyscall {
        /// The entry called.
        address: u64,
    },
    /// A single step or INT1, already complete.
    Step,
}
