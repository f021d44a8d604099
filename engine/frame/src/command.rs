//! Changes of a wedge's mappings: what the monitor orders, and what a wedge has done by itself.

/// Orders taken at once.
pub const MAX_ORDERS: usize = 128;
/// Mappings a wedge makes by itself before it tells the monitor.
pub const MAX_MADE: usize = 200;
/// Bytes of small pages that a wedge maps at once at the most.
pub const MAX_RUN: u64 = 64 * 4096;

/// A change of the wedge's mappings.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Order {
    /// Page-aligned HVA.
    pub address: u64,
    /// Bytes, whole pages.
    pub len: u64,
    /// Offset in guest RAM, for a mapping.
    pub offset: u64,
    /// Protection as mmap takes it; zero unmaps. [`KERNEL_PAGE`] closes it to user code.
    pub protection: u64,
}

/// In [`Order::protection`]: user code must not get at it.
pub const KERNEL_PAGE: u64 = 1 << 16;
/// In [`Order::protection`]: a private copy of the page, to be changed by [`POKE`].
pub const COPY: u64 = 1 << 17;
/// In [`Order::protection`]: writes the [`Order::len`] bytes (1 to 8) in [`Order::offset`].
pub const POKE: u64 = 1 << 18;
/// In [`Order::protection`]: only the protection changes.
pub const PROTECT: u64 = 1 << 19;
/// In [`Order::protection`] of what a wedge has mapped by itself: the guest's page is a large one.
pub const PIECE: u64 = 1 << 20;
/// In [`Order::protection`] of what a wedge has mapped by itself: memory without content stands for the page
/// of RAM at [`Order::offset`], which is empty, in all of the range.
pub const EMPTY: u64 = 1 << 21;
/// In [`Order::protection`]: the table of patched system calls is open to user code again, nothing else.
pub const OPEN_SITES: u64 = 1 << 22;
/// In [`Order::protection`]: that table is to be closed, nothing else.
pub const CLOSE_SITES: u64 = 1 << 23;
/// In [`Order::protection`] of what a wedge says it has done: the page was to be executed, and has bytes that open
/// protection keys. It is not mapped.
pub const REFUSED: u64 = 1 << 24;
