//! Why guest code stops, and how it goes on.

use crate::vcpu::ExitState;

/// Why translated code exits: what it wants to be done. In [`ExitState::kind`].
#[repr(u64)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockExit {
    /// The kernel instruction at RIP must be interpreted.
    CallOut = 1,
    /// The block at RIP is not translated yet; [`ExitState::info`] is the link site that wants it, zero if
    /// none.
    Miss = 2,
    /// Interrupts were enabled while one is pending.
    InterruptWindow = 3,
    /// SYSRET to 64-bit code at RIP's instruction; the wedge does it unless it cannot.
    Sysret = 4,
    /// IRETQ at RIP's instruction; the wedge does it unless it cannot.
    Iret = 5,
    /// XRSTOR from [`ExitState::operand`] at RIP's instruction, going on at [`ExitState::next`]; the wedge
    /// does it unless it cannot.
    LoadVectors = 6,
    /// INVLPG of [`ExitState::operand`] at RIP's instruction, going on at [`ExitState::next`]; the wedge does
    /// it unless it cannot.
    InvalidatePage = 7,
    /// MOV to CR3 of [`ExitState::operand`] at RIP's instruction, going on at [`ExitState::next`]; the wedge
    /// does it unless it cannot.
    LoadSpace = 8,
    /// User code's look-up of [`ExitState::operand`] has missed at RIP's instruction, which begins again at
    /// [`crate::BlockState::jump`]; the wedge fills it unless it cannot.
    Lookup = 9,
    /// SYSCALL of translated user code at RIP's instruction, going on at [`ExitState::next`]; the wedge does
    /// it unless it cannot.
    SystemCall = 10,
    /// SYSRET to 32-bit code at RIP's instruction; the wedge does it unless it cannot.
    SysretNarrow = 11,
    /// RIP's instruction has a tap; it goes on at [`ExitState::operand`] (HVA). The wedge runs the tap's program, if this
    /// vCPU has one there, unless it cannot.
    Tap = 12,
    /// IRETD of a 32-bit kernel's at RIP's instruction; the wedge does it unless it cannot.
    IretNarrow = 13,
    /// A load of a data segment register by a 32-bit kernel's code, at RIP's instruction, going on at [`ExitState::next`].
    /// [`ExitState::operand`] is the selector and a [`SegmentLoad`]. The wedge does it unless it cannot.
    LoadSegment = 14,
    /// SYSENTER by a 32-bit guest's program at RIP's instruction; the wedge does it unless it cannot.
    EnterSystem = 15,
    /// INT [`ExitState::operand`] by such a program at RIP's instruction, behind which lies [`ExitState::next`]; the wedge does it
    /// unless it cannot.
    SoftwareInterrupt = 16,
    /// SYSEXIT by a 32-bit kernel at RIP's instruction; the wedge does it unless it cannot.
    ExitSystem = 17,
}

/// Which data segment register a 32-bit kernel's code loads, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentLoad {
    /// The register, by encoding.
    pub register: u64,
    /// The instruction is a POP. The selector is still on the stack.
    pub pops: bool,
}

impl SegmentLoad {
    const POPS: u64 = 1 << 24;

    /// The word that is added to the selector.
    pub const fn encode(self) -> u64 {
        self.register << 16 | if self.pops { Self::POPS } else { 0 }
    }

    /// Takes a selector and what has been added to the selector apart.
    pub const fn decode(word: u64) -> (u64, Self) {
        (word & 0xffff, Self { register: word >> 16 & 7, pops: word & Self::POPS != 0 })
    }
}

/// Why the wedge gives the monitor its turn. In [`ExitState::reason`].
#[repr(u64)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Something went wrong in the wedge itself.
    Lost = 0,
    /// Translated code has exited, and the wedge cannot do what it wants.
    Block = 1,
    /// A signal in user code: registers are the user's.
    UserSignal = 2,
    /// A signal in translated code: registers are the host's, and [`ExitState::pc`] is where it was.
    KernelSignal = 3,
    /// A kick before anything has run, or guest code goes no further than this.
    Kicked = 4,
    /// A system call whose site is worth patching; RIP is behind it.
    HotSite = 5,
    /// User code has not gone on: the instruction at RIP is to be interpreted.
    Interpret = 6,
}

/// Why guest code has stopped, as the monitor believes it: decoded once, from what a wedge says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WedgeExit {
    /// See [`Reason::Lost`]; or the wedge says what means nothing.
    Lost,
    /// See [`Reason::Block`].
    Block(BlockExit),
    /// See [`Reason::UserSignal`].
    UserSignal,
    /// See [`Reason::KernelSignal`].
    KernelSignal,
    /// See [`Reason::Kicked`].
    Kicked,
    /// See [`Reason::HotSite`].
    HotSite,
    /// See [`Reason::Interpret`].
    Interpret,
}

impl WedgeExit {
    /// How many there are.
    pub const COUNT: usize = 6 + BlockExit::ALL.len();

    /// Its number, from zero.
    pub const fn number(self) -> usize {
        match self {
            Self::Lost => 0,
            Self::UserSignal => 1,
            Self::KernelSignal => 2,
            Self::Kicked => 3,
            Self::HotSite => 4,
            Self::Interpret => 5,
            Self::Block(kind) => 5 + kind as usize,
        }
    }
}

impl From<&ExitState> for WedgeExit {
    fn from(said: &ExitState) -> Self {
        const LOST: u64 = Reason::Lost as u64;
        const BLOCK: u64 = Reason::Block as u64;
        const USER_SIGNAL: u64 = Reason::UserSignal as u64;
        const KERNEL_SIGNAL: u64 = Reason::KernelSignal as u64;
        const KICKED: u64 = Reason::Kicked as u64;
        const HOT_SITE: u64 = Reason::HotSite as u64;
        const INTERPRET: u64 = Reason::Interpret as u64;
        match said.reason {
            BLOCK => BlockExit::decode(said.kind).map_or(Self::Lost, Self::Block),
            USER_SIGNAL => Self::UserSignal,
            KERNEL_SIGNAL => Self::KernelSignal,
            KICKED => Self::Kicked,
            HOT_SITE => Self::HotSite,
            INTERPRET => Self::Interpret,
            LOST.. => Self::Lost,
        }
    }
}

impl BlockExit {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 17] = [
        Self::CallOut,
        Self::Miss,
        Self::InterruptWindow,
        Self::Sysret,
        Self::Iret,
        Self::LoadVectors,
        Self::InvalidatePage,
        Self::LoadSpace,
        Self::Lookup,
        Self::SystemCall,
        Self::SysretNarrow,
        Self::Tap,
        Self::IretNarrow,
        Self::LoadSegment,
        Self::EnterSystem,
        Self::SoftwareInterrupt,
        Self::ExitSystem,
    ];

    /// The one with a number, if there is one.
    #[inline]
    pub fn decode(number: u64) -> Option<Self> {
        Self::ALL.get(usize::try_from(number).ok()?.checked_sub(1)?).copied()
    }
}

/// In [`ExitState::info`] of [`Reason::KernelSignal`]: a 32-bit kernel has faulted in a page that it maps only for a moment. The wedge tells
/// the monitor of some of these faults only.
pub const FLEETING: u64 = 1;

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

#[cfg(test)]
mod tests {
    use super::*;

    fn said(reason: u64, kind: u64) -> WedgeExit {
        WedgeExit::from(&ExitState { reason, kind, ..ExitState::default() })
    }

    #[test]
    fn what_is_said_is_what_is_meant() {
        for kind in BlockExit::ALL {
            assert_eq!(said(Reason::Block as u64, kind as u64), WedgeExit::Block(kind));
        }
        assert_eq!(said(Reason::UserSignal as u64, 99), WedgeExit::UserSignal);
        assert_eq!(said(Reason::KernelSignal as u64, 0), WedgeExit::KernelSignal);
        assert_eq!(said(Reason::Kicked as u64, 0), WedgeExit::Kicked);
        assert_eq!(said(Reason::HotSite as u64, 0), WedgeExit::HotSite);
        assert_eq!(said(Reason::Interpret as u64, 0), WedgeExit::Interpret);
    }

    #[test]
    fn what_means_nothing_is_lost() {
        for nonsense in [18, 19, 1 << 32, 1 << 63, u64::MAX] {
            assert_eq!(said(nonsense, BlockExit::Miss as u64), WedgeExit::Lost);
            assert_eq!(said(Reason::Block as u64, nonsense), WedgeExit::Lost);
        }
        assert_eq!(said(Reason::Block as u64, 0), WedgeExit::Lost);
        assert_eq!(said(Reason::Lost as u64, BlockExit::Miss as u64), WedgeExit::Lost);
    }

    #[test]
    fn numbers_are_their_own() {
        let others = [WedgeExit::Lost, WedgeExit::UserSignal, WedgeExit::KernelSignal];
        let more = [WedgeExit::Kicked, WedgeExit::HotSite, WedgeExit::Interpret];
        let all = others.into_iter().chain(more).chain(BlockExit::ALL.map(WedgeExit::Block));
        let mut seen = [false; WedgeExit::COUNT];
        all.for_each(|exit| assert!(!core::mem::replace(&mut seen[exit.number()], true)));
        assert_eq!(seen, [true; WedgeExit::COUNT]);
    }
}
