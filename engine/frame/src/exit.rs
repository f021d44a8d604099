//! Why guest code stops, and how it goes on.

/// Why translated code exits, in [`crate::ExitState::kind`], and why the wedge gives the monitor its turn, in
/// [`crate::ExitState::reason`].
#[repr(u64)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitKind {
    /// Nothing has run.
    None = 0,
    /// The kernel instruction at RIP must be interpreted.
    CallOut = 1,
    /// The block at RIP is not translated yet; [`crate::ExitState::info`] is the link site that wants it,
    /// zero if none.
    Miss = 2,
    /// Interrupts were enabled while one is pending.
    InterruptWindow = 3,
    /// SYSRET to 64-bit code at RIP's instruction; the wedge does it unless it cannot.
    Sysret = 4,
    /// IRETQ at RIP's instruction; the wedge does it unless it cannot.
    Iret = 5,
    /// A signal in translated code: registers are the host's, and [`crate::ExitState::pc`] is where it was.
    KernelSignal = 6,
    /// A signal in user code: registers are the user's.
    UserSignal = 7,
    /// A kick before anything has run.
    Kicked = 8,
    /// XRSTOR from [`crate::ExitState::operand`] at RIP's instruction, going on at [`crate::ExitState::next`]; the wedge
    /// does it unless it cannot.
    LoadVectors = 9,
    /// INVLPG of [`crate::ExitState::operand`] at RIP's instruction, going on at [`crate::ExitState::next`]; the wedge does
    /// it unless it cannot.
    InvalidatePage = 10,
    /// A system call whose site is worth patching; RIP is behind it.
    HotSite = 11,
    /// MOV to CR3 of [`crate::ExitState::operand`] at RIP's instruction, going on at [`crate::ExitState::next`]; the wedge does it
    /// unless it cannot.
    LoadSpace = 12,
    /// User code's look-up of [`crate::ExitState::operand`] has missed at RIP's instruction, which begins again at [`crate::BlockState::jump`];
    /// the wedge fills it unless it cannot.
    Lookup = 13,
    /// SYSCALL of translated user code at RIP's instruction, going on at [`crate::ExitState::next`]; the wedge does it unless it
    /// cannot.
    SystemCall = 14,
}

/// How guest code goes on, in [`crate::RunControl::go`].
pub mod go {
    /// Only obey orders.
    pub const NOTHING: u64 = 0;
    /// User code at RIP.
    pub const USER: u64 = 1;
    /// The block at [`crate::BlockState::jump`], with guest registers.
    pub const BLOCK: u64 = 2;
    /// The host instruction at [`crate::ExitState::pc`], with host registers.
    pub const RAW: u64 = 3;
    /// The same, for one host instruction.
    pub const STEP: u64 = 4;
    /// The same, until translated code is left, and no further.
    pub const LEAVE: u64 = 5;
}

/// What the wedge is doing, in [`crate::RunControl::mode`].
pub mod mode {
    /// Its own work.
    pub const WEDGE: u64 = 0;
    /// User code, or the last steps to it.
    pub const USER: u64 = 1;
    /// Translated code, or the last steps to it.
    pub const KERNEL: u64 = 2;
}
