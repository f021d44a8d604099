//! Changes of a wedge's mappings: what the monitor orders ([`MapCommand`]), and what a wedge has done by
//! itself ([`MapReport`]).
//!
//! Both cross the border in memory form ([`RawChange`]). Whoever reads one decodes it once; what does not
//! decode is nothing. A wedge belongs to the guest, so a report is decoded with the bounds of what there is:
//! every later line of the monitor may rely on them.

use crate::window::TOP;

/// Commands given at once.
pub const MAX_ORDERS: usize = 128;
/// Mappings a wedge makes by itself before it tells the monitor.
pub const MAX_MADE: usize = 200;
/// Bytes of small pages that a wedge maps at once at the most.
pub const MAX_RUN: u64 = 64 * PAGE;

/// Bytes of a page.
const PAGE: u64 = 4096;
/// Bytes of a large page.
const LARGE: u64 = 1 << 21;

/// What a mapping allows, as mmap takes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rights(u8);

impl Rights {
    /// Nothing: the mapping is closed.
    pub const NONE: Self = Self(0);
    /// Loads.
    pub const READ: Self = Self(1);
    /// Loads and stores.
    pub const READ_WRITE: Self = Self(3);
    /// Fetches only, where user code's loads can be told from them by a protection key.
    pub const EXECUTE: Self = Self(4);
    /// Loads and fetches.
    pub const READ_EXECUTE: Self = Self(5);

    /// From the bits of mmap's protection; others are dropped.
    #[inline]
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits as u8 & 7)
    }

    /// As mmap takes it.
    #[inline]
    pub const fn bits(self) -> u64 {
        self.0 as u64
    }

    /// Instructions may be fetched.
    #[inline]
    pub const fn executes(self) -> bool {
        self.0 & 4 != 0
    }
}

/// Whose memory a mapping shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// User code may get at it.
    User,
    /// Where there are protection keys, user code may not.
    Kernel,
}

/// What the monitor orders. Addresses are HVAs, lengths bytes; both are whole pages where nothing else is
/// said. Offsets are those of pages in guest RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapCommand {
    /// Nothing is mapped there.
    Unmap {
        /// Its first address.
        start: u64,
        /// Its bytes.
        len: u64,
    },
    /// RAM is mapped there.
    Map {
        /// Its first address.
        start: u64,
        /// Its bytes.
        len: u64,
        /// What of RAM.
        offset: u64,
        /// What may be done there.
        rights: Rights,
        /// By whom.
        owner: Owner,
    },
    /// A private copy of one page of RAM is mapped there for user code, to be changed by [`MapCommand::Poke`]
    /// and then protected.
    Copy {
        /// Its address.
        page: u64,
        /// What of RAM.
        offset: u64,
    },
    /// A shared copy of a page of code is mapped there for user code to execute.
    Code {
        /// Its address.
        page: u64,
        /// Offset of the copy in the memory object.
        offset: u64,
    },
    /// Bytes of a copy change.
    Poke {
        /// Any address in the copy.
        address: u64,
        /// 1 to 8 bytes.
        len: u64,
        /// Which, the first one lowest.
        bytes: u64,
    },
    /// What is mapped there for user code has these rights.
    Protect {
        /// Its first address.
        start: u64,
        /// Its bytes.
        len: u64,
        /// The rights. With none it is closed: the mapping stays, to be shown again.
        rights: Rights,
    },
    /// The monitor has looked at a page that is mapped for execution, and takes it away when its bytes change:
    /// once closed it may be shown again without being looked at.
    Keep {
        /// Its address.
        page: u64,
        /// What of RAM it shows, or is a copy of.
        offset: u64,
    },
    /// Something of a large page of the guest's is mapped there for user code: an INVLPG of any part takes all of it away.
    Large {
        /// Its first address.
        base: u64,
    },
    /// A kernel page of 4 KiB is mapped there, no part of a large page. If the kernel is a 32-bit one, the wedge may unmap the page.
    Small {
        /// Its address.
        page: u64,
        /// What may be done there.
        rights: Rights,
    },
    /// The table of patched system calls is open to user code.
    OpenSites,
    /// That table is closed.
    CloseSites,
}

/// What a wedge has done by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapReport {
    /// The user's translations there are dropped: what was mapped is unmapped or closed.
    Dropped {
        /// Its first address.
        start: u64,
        /// Its bytes: a page or a large one.
        len: u64,
    },
    /// The kernel's translation of a page is dropped, and nothing is mapped there.
    KernelDropped {
        /// Its address.
        page: u64,
    },
    /// RAM is mapped there.
    Mapped {
        /// Its first address.
        start: u64,
        /// Its bytes: up to [`MAX_RUN`], or a large page.
        len: u64,
        /// What of RAM.
        offset: u64,
        /// What may be done there.
        rights: Rights,
        /// By whom.
        owner: Owner,
        /// It is a piece of a large page of the guest's.
        piece: bool,
    },
    /// Shared copies of pages of code are mapped there for user code to execute.
    Code {
        /// Its first address.
        start: u64,
        /// Its bytes: up to [`MAX_RUN`].
        len: u64,
        /// Offset in RAM of the pages that were copied.
        offset: u64,
    },
    /// Memory without content, to be read, stands there for one page of RAM, which is empty.
    Empty {
        /// Its first address.
        start: u64,
        /// Its bytes: up to [`MAX_RUN`].
        len: u64,
        /// The page of RAM.
        offset: u64,
    },
    /// A page of the user's that was mapped already has these rights: its translation was loaded anew.
    Shown {
        /// Its address.
        page: u64,
        /// What of RAM.
        offset: u64,
        /// What may be done there.
        rights: Rights,
    },
    /// A shared copy that is mapped there, and was closed, may be executed again.
    ShownCode {
        /// Its address.
        page: u64,
        /// Offset in RAM of the page that was copied.
        offset: u64,
    },
    /// A page was to be executed, and has bytes that open protection keys: it is not mapped.
    Refused {
        /// Its address.
        page: u64,
    },
}

/// A command or a report in memory form. Any bytes are one; few decode.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RawChange {
    kind: u32,
    rights: u8,
    /// Not zero: the kernel's.
    kernel: u8,
    /// Not zero: a piece of a large page.
    piece: u8,
    unused: u8,
    start: u64,
    len: u64,
    /// Offset in RAM, or bytes to be written.
    data: u64,
}

/// What [`RawChange::kind`] may be in a command.
mod command_kind {
    pub const UNMAP: u32 = 1;
    pub const MAP: u32 = 2;
    pub const COPY: u32 = 3;
    pub const POKE: u32 = 4;
    pub const PROTECT: u32 = 5;
    pub const OPEN_SITES: u32 = 6;
    pub const CLOSE_SITES: u32 = 7;
    pub const KEEP: u32 = 8;
    pub const CODE: u32 = 9;
    pub const LARGE: u32 = 10;
    pub const SMALL: u32 = 11;
}

/// What it may be in a report.
mod report_kind {
    pub const DROPPED: u32 = 17;
    pub const MAPPED: u32 = 18;
    pub const EMPTY: u32 = 19;
    pub const SHOWN: u32 = 20;
    pub const REFUSED: u32 = 21;
    pub const CODE: u32 = 22;
    pub const SHOWN_CODE: u32 = 23;
    pub const KERNEL_DROPPED: u32 = 24;
}

impl MapCommand {
    /// In memory form.
    #[inline]
    pub const fn encode(self) -> RawChange {
        match self {
            Self::Unmap { start, len } => RawChange::new(command_kind::UNMAP, start, len, 0),
            Self::Map { start, len, offset, rights, owner } => {
                RawChange::new(command_kind::MAP, start, len, offset).with(rights, owner)
            }
            Self::Copy { page, offset } => RawChange::new(command_kind::COPY, page, PAGE, offset),
            Self::Code { page, offset } => RawChange::new(command_kind::CODE, page, PAGE, offset),
            Self::Poke { address, len, bytes } => {
                RawChange::new(command_kind::POKE, address, len, bytes)
            }
            Self::Protect { start, len, rights } => {
                RawChange::new(command_kind::PROTECT, start, len, 0).with(rights, Owner::User)
            }
            Self::Keep { page, offset } => RawChange::new(command_kind::KEEP, page, PAGE, offset),
            Self::Large { base } => RawChange::new(command_kind::LARGE, base, LARGE, 0),
            Self::Small { page, rights } => {
                RawChange::new(command_kind::SMALL, page, PAGE, 0).with(rights, Owner::Kernel)
            }
            Self::OpenSites => RawChange::new(command_kind::OPEN_SITES, 0, 0, 0),
            Self::CloseSites => RawChange::new(command_kind::CLOSE_SITES, 0, 0, 0),
        }
    }

    /// From memory form; `None` if it is no command.
    #[inline]
    pub const fn decode(raw: RawChange) -> Option<Self> {
        let RawChange { kind, start, len, data, .. } = raw;
        let (Some(rights), Some(owner), Some(false)) = (raw.rights(), raw.owner(), raw.piece())
        else {
            return None;
        };
        match kind {
            command_kind::UNMAP => Some(Self::Unmap { start, len }),
            command_kind::MAP => Some(Self::Map { start, len, offset: data, rights, owner }),
            command_kind::COPY => Some(Self::Copy { page: start, offset: data }),
            command_kind::CODE => Some(Self::Code { page: start, offset: data }),
            command_kind::POKE if len >= 1 && len <= 8 => {
                Some(Self::Poke { address: start, len, bytes: data })
            }
            command_kind::PROTECT => Some(Self::Protect { start, len, rights }),
            command_kind::KEEP => Some(Self::Keep { page: start, offset: data }),
            command_kind::LARGE => Some(Self::Large { base: start }),
            command_kind::SMALL => Some(Self::Small { page: start, rights }),
            command_kind::OPEN_SITES => Some(Self::OpenSites),
            command_kind::CLOSE_SITES => Some(Self::CloseSites),
            _ => None,
        }
    }

    /// Addresses that it concerns: the first, and how many bytes.
    #[inline]
    pub const fn range(self) -> (u64, u64) {
        match self {
            Self::Unmap { start, len }
            | Self::Map { start, len, .. }
            | Self::Protect { start, len, .. } => (start, len),
            Self::Copy { page, .. }
            | Self::Code { page, .. }
            | Self::Keep { page, .. }
            | Self::Small { page, .. } => (page, PAGE),
            Self::Poke { address, len, .. } => (address, len),
            Self::Large { base } => (base, LARGE),
            Self::OpenSites | Self::CloseSites => (0, 0),
        }
    }
}

impl MapReport {
    /// In memory form.
    #[inline]
    pub const fn encode(self) -> RawChange {
        match self {
            Self::Dropped { start, len } => RawChange::new(report_kind::DROPPED, start, len, 0),
            Self::KernelDropped { page } => {
                RawChange::new(report_kind::KERNEL_DROPPED, page, PAGE, 0)
            }
            Self::Mapped { start, len, offset, rights, owner, piece } => {
                let raw =
                    RawChange::new(report_kind::MAPPED, start, len, offset).with(rights, owner);
                RawChange { piece: piece as u8, ..raw }
            }
            Self::Code { start, len, offset } => {
                RawChange::new(report_kind::CODE, start, len, offset)
                    .with(Rights::READ_EXECUTE, Owner::User)
            }
            Self::Empty { start, len, offset } => {
                RawChange::new(report_kind::EMPTY, start, len, offset)
                    .with(Rights::READ, Owner::User)
            }
            Self::Shown { page, offset, rights } => {
                RawChange::new(report_kind::SHOWN, page, PAGE, offset).with(rights, Owner::User)
            }
            Self::ShownCode { page, offset } => {
                RawChange::new(report_kind::SHOWN_CODE, page, PAGE, offset)
                    .with(Rights::READ_EXECUTE, Owner::User)
            }
            Self::Refused { page } => RawChange::new(report_kind::REFUSED, page, PAGE, 0),
        }
    }

    /// From memory form, of a wedge with so many bytes of RAM; `None` if it is no report, or if no wedge can
    /// have done that.
    pub fn decode(raw: RawChange, ram_len: u64) -> Option<Self> {
        let RawChange { kind, start, len, data: offset, .. } = raw;
        let (rights, owner, piece) = (raw.rights()?, raw.owner()?, raw.piece()?);
        let whole = [start, len, offset].iter().all(|n| n.is_multiple_of(PAGE));
        let fits = |start: u64, len: u64, end: u64| start <= end && len <= end - start;
        let shown = if kind == report_kind::EMPTY { PAGE } else { len };
        let sized = (PAGE..=MAX_RUN).contains(&len) || len == LARGE;
        if !whole || !sized || !fits(start, len, TOP as u64) || !fits(offset, shown, ram_len) {
            return None;
        }
        Some(match kind {
            report_kind::DROPPED => Self::Dropped { start, len },
            report_kind::KERNEL_DROPPED if len == PAGE => Self::KernelDropped { page: start },
            report_kind::MAPPED => Self::Mapped { start, len, offset, rights, owner, piece },
            report_kind::CODE if len <= MAX_RUN => Self::Code { start, len, offset },
            report_kind::EMPTY if len <= MAX_RUN => Self::Empty { start, len, offset },
            report_kind::SHOWN if len == PAGE => Self::Shown { page: start, offset, rights },
            report_kind::SHOWN_CODE if len == PAGE => Self::ShownCode { page: start, offset },
            report_kind::REFUSED if len == PAGE => Self::Refused { page: start },
            _ => return None,
        })
    }
}

impl RawChange {
    /// From words, as they lie in memory.
    pub const fn from_words([first, start, len, data]: [u64; 4]) -> Self {
        let [a, b, c, d, rights, kernel, piece, unused] = first.to_le_bytes();
        let kind = u32::from_le_bytes([a, b, c, d]);
        Self { kind, rights, kernel, piece, unused, start, len, data }
    }

    /// As it lies in memory.
    pub fn to_bytes(self) -> [u8; 32] {
        let Self { kind, rights, kernel, piece, unused, start, len, data } = self;
        let [a, b, c, d] = kind.to_le_bytes();
        let first = u64::from_le_bytes([a, b, c, d, rights, kernel, piece, unused]);
        let words = [first, start, len, data].map(u64::to_le_bytes);
        core::array::from_fn(|at| words[at / 8][at % 8])
    }

    const fn new(kind: u32, start: u64, len: u64, data: u64) -> Self {
        Self { kind, rights: 0, kernel: 0, piece: 0, unused: 0, start, len, data }
    }

    const fn with(self, rights: Rights, owner: Owner) -> Self {
        Self { rights: rights.0, kernel: matches!(owner, Owner::Kernel) as u8, ..self }
    }

    const fn rights(&self) -> Option<Rights> {
        if self.rights & !7 == 0 { Some(Rights(self.rights)) } else { None }
    }

    const fn owner(&self) -> Option<Owner> {
        match self.kernel {
            0 => Some(Owner::User),
            1 => Some(Owner::Kernel),
            _ => None,
        }
    }

    const fn piece(&self) -> Option<bool> {
        match self.piece {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RAM: u64 = 1 << 30;
    const MAPPED: MapReport = MapReport::Mapped {
        start: 0x40_0000,
        len: PAGE,
        offset: RAM - PAGE,
        rights: Rights::READ_WRITE,
        owner: Owner::User,
        piece: false,
    };

    #[test]
    fn commands_come_back_as_they_were() {
        let (start, len, rights) = (0x40_0000, 3 * PAGE, Rights::READ_EXECUTE);
        let commands = [
            MapCommand::Unmap { start, len },
            MapCommand::Map { start, len, offset: PAGE, rights, owner: Owner::User },
            MapCommand::Map { start, len, offset: 0, rights, owner: Owner::Kernel },
            MapCommand::Copy { page: start, offset: PAGE },
            MapCommand::Code { page: start, offset: RAM + PAGE },
            MapCommand::Poke { address: start + 17, len: 8, bytes: !0 },
            MapCommand::Protect { start, len, rights: Rights::NONE },
            MapCommand::Keep { page: start, offset: PAGE },
            MapCommand::Large { base: start },
            MapCommand::Small { page: start, rights: Rights::READ_WRITE },
            MapCommand::OpenSites,
            MapCommand::CloseSites,
        ];
        for command in commands {
            assert_eq!(MapCommand::decode(command.encode()), Some(command));
            assert_eq!(MapReport::decode(command.encode(), RAM), None, "{command:x?}");
        }
    }

    #[test]
    fn reports_come_back_as_they_were() {
        let (start, offset, rights) = (0x40_0000, RAM - LARGE, Rights::READ);
        let owner = Owner::Kernel;
        let reports = [
            MAPPED,
            MapReport::Mapped { start, len: LARGE, offset, rights, owner, piece: false },
            MapReport::Mapped { start, len: PAGE, offset, rights, owner: Owner::User, piece: true },
            MapReport::Dropped { start, len: LARGE },
            MapReport::KernelDropped { page: start },
            MapReport::Code { start, len: MAX_RUN, offset: RAM - MAX_RUN },
            MapReport::Empty { start, len: MAX_RUN, offset: RAM - PAGE },
            MapReport::Shown { page: start, offset, rights },
            MapReport::ShownCode { page: start, offset },
            MapReport::Refused { page: start },
        ];
        for report in reports {
            assert_eq!(MapReport::decode(report.encode(), RAM), Some(report));
            assert_eq!(MapCommand::decode(report.encode()), None, "{report:x?}");
        }
    }

    /// Guest code that owns its wedge can claim anything.
    #[test]
    fn what_no_wedge_can_have_done_does_not_decode() {
        let honest = MAPPED.encode();
        let lies = [
            RawChange { start: !0xfff, ..honest },
            RawChange { start: TOP as u64, ..honest },
            RawChange { start: 0x40_0001, ..honest },
            RawChange { len: 0, ..honest },
            RawChange { len: !0xfff, ..honest },
            RawChange { len: MAX_RUN + PAGE, data: 0, ..honest },
            RawChange { len: LARGE * 2, data: 0, ..honest },
            RawChange { data: RAM, ..honest },
            RawChange { data: !0xfff, ..honest },
            RawChange { data: 1, ..honest },
            RawChange { rights: 8, ..honest },
            RawChange { kernel: 2, ..honest },
            RawChange { piece: 2, ..honest },
            RawChange { kind: report_kind::SHOWN, len: 2 * PAGE, data: 0, ..honest },
            RawChange { kind: report_kind::SHOWN_CODE, len: 2 * PAGE, data: 0, ..honest },
            RawChange { kind: report_kind::REFUSED, len: LARGE, data: 0, ..honest },
            RawChange { kind: report_kind::KERNEL_DROPPED, len: LARGE, data: 0, ..honest },
            RawChange { kind: report_kind::CODE, len: LARGE, data: 0, ..honest },
            RawChange { kind: report_kind::EMPTY, len: LARGE, data: 0, ..honest },
            RawChange { kind: u32::MAX, ..honest },
            RawChange::default(),
        ];
        for lie in lies {
            assert_eq!(MapReport::decode(lie, RAM), None, "{lie:x?}");
        }
    }
}
