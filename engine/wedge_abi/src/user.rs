//! What a wedge shares with the process of its user code, where user code has one of its own.

use crate::{Shares, Vectors};

/// The call by which that process says that it has stopped: `sched_yield`, which the wedge hears of and the host never carries out. A
/// call of no host's would not do: a container's filter answers those itself, and its answer goes before the wedge's.
pub const HAND_OVER: u64 = 24;
/// The prctl that sets syscall user dispatch.
pub const SYSCALL_USER_DISPATCH: u64 = 59;

/// Why the process of user code has stopped, in [`UserPage::event`].
pub mod event {
    /// It has done what it was to do.
    pub const DONE: u64 = 0;
    /// A patched system call.
    pub const CALL: u64 = 1;
    /// A signal.
    pub const SIGNAL: u64 = 2;
    /// A kick before user code has run.
    pub const KICKED: u64 = 3;
    /// It could not do what it was to do.
    pub const FAILED: u64 = 4;
    /// What the wedge writes before it answers: the process has said nothing since.
    pub const NOTHING: u64 = 5;
}

/// What a wedge and the process of its user code tell each other. User code can write it whenever it runs: so
/// it is read only while that stands still, and believed as far as user code could have set its registers.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct UserPage {
    /// General registers in encoding order.
    pub gpr: [u64; 16],
    /// GVA of the next instruction.
    pub rip: u64,
    /// RFLAGS.
    pub rflags: u64,
    /// FS base.
    pub fs_base: u64,
    /// GS base.
    pub gs_base: u64,
    /// Selectors of DS, ES, FS and GS.
    pub selectors: [u64; 4],
    /// See [`event`].
    pub event: u64,
    /// Not zero: a kick has come. It came before user code ran, or while the process waited for its wedge.
    pub kicked: u64,
    /// The signal.
    pub signal: u64,
    /// The first words of its `siginfo_t`.
    pub info: [u64; 4],
    /// The registers of its machine context.
    pub context: [u64; 23],
    /// The end of this is where the process pushes when RSP is user code's.
    pub stack: [u64; 8],
    /// Before user code has run: the secret of its host calls, one past the blob's last byte, and whether
    /// system calls come by dispatch.
    pub start: [u64; 3],
    /// x87, SSE and AVX state, as in [`VcpuPage::vectors`].
    pub vectors: Vectors,
    /// What a kick has interrupted on the way to the wedge, and is to go on: the registers of its machine
    /// context.
    pub interrupted: [u64; 23],
    /// For the IRET to that: RIP, CS, RFLAGS, RSP and SS.
    pub back: [u64; 5],
    /// Its vectors.
    pub interrupted_vectors: Vectors,
    /// See [`Shares`].
    pub shares: Shares,
}

/// Entries of [`Journal::orders`].
pub const MAX_JOURNAL: usize = 80;
/// In [`Journal::orders`]: bytes are to be written.
pub const JOURNAL_POKE: u64 = 0xffff;
/// SS_AUTODISARM. So it is never taken for a stack that is in use, and a signal finds room wherever RSP
/// points.
pub const SIGNAL_STACK_FLAGS: u64 = 1 << 31;

/// What the process of user code is to do.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct Journal {
    /// Not zero: user code is to go on then.
    pub enter: u64,
    /// How many orders there are.
    pub count: u64,
    /// Where its signals have their stack, as the host takes it: each signal takes that away
    /// ([`SIGNAL_STACK_FLAGS`]).
    pub signal_stack: [u64; 3],
    /// The signals that are to be blocked: none.
    pub mask: u64,
    /// Each a host call's number, its first to fourth argument, and its sixth.
    pub orders: [[u64; 6]; MAX_JOURNAL],
    /// See [`Shares`].
    pub shares: Shares,
}
