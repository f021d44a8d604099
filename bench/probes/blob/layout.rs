// What the wedge and its starter agree on. Included by both, so it names nothing but core.

/// The wedge's window: one aligned 4 GiB, so that a filter needs one comparison per half.
pub const WINDOW: usize = 0x0180_0000_0000;
/// The blob: text and constants, read-execute.
pub const BLOB: usize = WINDOW;
/// The shared page with orders and results.
pub const SHARED: usize = WINDOW + 0x10_0000;
/// The stack the wedge starts on.
pub const STACK: usize = WINDOW + 0x20_0000;
/// Bytes of that stack.
pub const STACK_LEN: usize = 0x4000;
/// The alternate signal stack.
pub const ALT_STACK: usize = WINDOW + 0x30_0000;
/// Bytes of it.
pub const ALT_STACK_LEN: usize = 0x4000;
/// End of the part of the window that stays mapped.
pub const WINDOW_END: usize = WINDOW + 0x40_0000;
/// Where the guest program is mapped, from the second page of RAM.
pub const GUEST_TEXT: usize = 0x40_0000;
/// Pages from here on appear when the guest touches them.
pub const GUEST_HEAP: usize = 0x1000_0000;
/// Bytes of guest heap.
pub const GUEST_HEAP_LEN: usize = 16 << 20;
/// The guest's initial stack pointer, in its heap.
pub const GUEST_STACK: usize = GUEST_HEAP + GUEST_HEAP_LEN - 4096;
/// Guest calls from here on store rdi in `results`.
pub const CALL_STORE: u64 = 1000;
/// The guest call that waits until the starter has looked at the process.
pub const CALL_WAIT: u64 = 2000;
/// The guest call that makes a second wedge out of this one, by fork.
pub const CALL_FORK: u64 = 3000;

/// Orders and results; one page, shared with the starter.
#[repr(C)]
pub struct Shared {
    /// The secret a host call from the wedge must carry.
    pub cookie: u64,
    /// Descriptor of the RAM memfd.
    pub ram: u64,
    /// One past the blob's last byte.
    pub blob_end: u64,
    /// 1 when the wedge waits to be looked at, 2 when it may go on.
    pub stage: core::sync::atomic::AtomicU32,
    /// Pages to map around a fault, a power of two.
    pub fill: u64,
    /// Guest calls answered.
    pub calls: u64,
    /// Guest faults answered with a page.
    pub faults: u64,
    /// What the guest stored.
    pub results: [u64; 16],
    /// How many odd exits there were, and the facts of each.
    pub odd: u64,
    /// (signal << 32 | trap), rip, address, call number.
    pub exits: [[u64; 4]; 16],
}
