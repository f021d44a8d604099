//! The vCPU page: the one structure that the monitor, the wedge and translated code share.
//!
//! Translated code keeps all guest registers in the host's registers and reaches this page by
//! RIP-relative addressing for everything else: spill slots, the virtual interrupt flag, where to
//! jump. On an exit the registers are stored to [`Frame::vcpu`], which is then the whole
//! architectural state. The monitor believes nothing it reads here without checking it.
#![no_std]

use x86::Vcpu;

/// Why translated code gave up control.
#[repr(u64)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitKind {
    /// The instruction at RIP must be interpreted.
    CallOut = 1,
    /// The block at RIP is not translated yet; [`Frame::exit_info`] is the link site that wants it,
    /// zero if none.
    Miss = 2,
    /// Interrupts were enabled while one is pending.
    InterruptWindow = 3,
}

/// How a routine of the code cache was entered and left: offsets of slots translated code uses.
#[repr(C, align(4096))]
#[derive(Clone, Debug)]
pub struct Frame {
    /// Architectural state; registers are valid between an exit and the next entry.
    pub vcpu: Vcpu,
    /// Guest registers that a translated sequence put aside, in order of use.
    pub spill: [u64; 4],
    /// Where the next entry or indirect jump goes, a host address in the code cache.
    pub jump: u64,
    /// Virtual RFLAGS.IF: zero or `flags::IF`.
    pub interrupt_flag: u64,
    /// Virtual RFLAGS.AC: zero or `flags::AC`.
    pub alignment_flag: u64,
    /// Not zero: an interrupt waits for the virtual IF.
    pub pending: u64,
    /// What GS base is in translated code: the bias from GVA to HVA.
    pub bias: u64,
    /// What FS base is in translated code: the guest's GS base plus the bias.
    pub percpu: u64,
    /// The status flags, DF and ID as translated code starts and ends with them.
    pub host_flags: u64,
    /// An [`ExitKind`].
    pub exit_kind: u64,
    /// Detail of the exit.
    pub exit_info: u64,
    /// Stack pointer of whoever entered translated code.
    pub host_rsp: u64,
    /// FS and GS base of whoever entered translated code.
    pub host_fs: u64,
    /// See `host_fs`.
    pub host_gs: u64,
    /// Top of this is where translated code may push, when RSP is not the guest's.
    pub stack: [u64; 8],
}
