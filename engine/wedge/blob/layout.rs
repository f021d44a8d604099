// What the wedge and the monitor agree on. Included by both, so it names nothing but core.

/// The wedge's window: one aligned 4 GiB, so that a filter needs one comparison per half. User
/// programs do not map here; if one does, its pages are never installed.
pub const WINDOW: usize = 0x0180_0000_0000;
/// Bytes of the window.
pub const WINDOW_LEN: usize = 1 << 32;
/// The blob: text and constants, read-execute.
pub const BLOB: usize = WINDOW;
/// The shared pages.
pub const SHARED: usize = WINDOW + 0x10_0000;
/// The stack the wedge starts on.
pub const STACK: usize = WINDOW + 0x20_0000;
/// Bytes of that stack.
pub const STACK_LEN: usize = 0x4000;
/// The alternate signal stack.
pub const ALT_STACK: usize = WINDOW + 0x30_0000;
/// Bytes of it.
pub const ALT_STACK_LEN: usize = 0x8000;
/// End of the part of the window that stays mapped.
#[allow(dead_code, reason = "the blob's business")]
pub const WINDOW_END: usize = WINDOW + 0x40_0000;
/// End of user addresses.
pub const TOP: usize = 0x7fff_ffff_f000;
/// Orders taken at once.
pub const MAX_ORDERS: usize = 128;
/// `Shared::turn`: the monitor acts.
pub const MONITOR: u32 = 0;
/// `Shared::turn`: the wedge acts.
pub const WEDGE: u32 = 1;
/// The signal that makes running guest code come back.
pub const KICK: i32 = 10;

/// A change of the wedge's mappings.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Order {
    /// Page-aligned address (GVA and HVA alike).
    pub address: u64,
    /// Bytes, whole pages.
    pub len: u64,
    /// Offset in guest RAM, for a mapping.
    pub offset: u64,
    /// Protection as mmap takes it; zero unmaps.
    pub protection: u64,
}

/// A user program's registers.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registers {
    /// x87, SSE and AVX state in the standard XSAVE layout.
    pub vectors: [u8; 832],
    /// General registers in encoding order.
    pub gpr: [u64; 16],
    /// RIP.
    pub rip: u64,
    /// RFLAGS.
    pub rflags: u64,
    /// FS base.
    pub fs_base: u64,
    /// GS base.
    pub gs_base: u64,
}

/// Everything monitor and wedge tell each other; at most four pages.
#[repr(C, align(4096))]
pub struct Shared {
    /// The registers to run with, and those it came back with.
    pub registers: Registers,
    /// The secret a host call from the wedge must carry.
    pub secret: u64,
    /// Descriptor of guest RAM.
    pub ram: u64,
    /// One past the blob's last byte.
    pub blob_end: u64,
    /// Protection keys are in use.
    pub keys: u64,
    /// Offset of PKRU in a signal frame's XSAVE area, zero without keys.
    pub pkru_offset: u64,
    /// Guest code is running (or about to, or the wedge has just started).
    pub in_guest: u64,
    /// Whose turn it is.
    pub turn: core::sync::atomic::AtomicU32,
    /// Signal that ended guest code.
    pub signal: u32,
    /// Its `si_code`.
    pub code: u64,
    /// Its `si_addr`, or `si_call_addr`.
    pub address: u64,
    /// CPU exception, for those that are one.
    pub trap: u64,
    /// Its error code.
    pub error: u64,
    /// Not zero: run guest code after the orders; zero: only obey them.
    pub resume: u64,
    /// Negated error number of the first order that failed, zero if none.
    pub failed: i64,
    /// Orders given.
    pub order_count: u64,
    /// The orders.
    pub orders: [Order; MAX_ORDERS],
}
