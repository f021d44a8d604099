//! Guest RAM, as those who execute code see it.

/// A page of RAM behind a GPA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RamPage {
    /// Byte offset of the page within guest RAM (the memfd), a multiple of 4096. Not a GPA: RAM
    /// has holes, the memfd has none.
    pub offset: u64,
    /// False for ROM: stores are lost.
    pub writable: bool,
}

/// Guest RAM, addressed by byte offset into the memory object that backs it.
///
/// Offsets come from [`GuestRam::page`] plus an offset inside the page; accesses never cross
/// the page. Accesses are little-endian, may be unaligned, and are atomic with respect to other
/// threads when naturally aligned. An out-of-range offset is a bug of the caller and may panic.
pub trait GuestRam {
    /// The RAM page that holds `gpa`, or `None` where there is no RAM (MMIO or nothing).
    fn page(&self, gpa: u64) -> Option<RamPage>;
    /// Loads 1 byte.
    fn load8(&self, offset: u64) -> u8;
    /// Loads 2 bytes.
    fn load16(&self, offset: u64) -> u16;
    /// Loads 4 bytes.
    fn load32(&self, offset: u64) -> u32;
    /// Loads 8 bytes.
    fn load64(&self, offset: u64) -> u64;
    /// Stores 1 byte.
    fn store8(&self, offset: u64, value: u8);
    /// Stores 2 bytes.
    fn store16(&self, offset: u64, value: u16);
    /// Stores 4 bytes.
    fn store32(&self, offset: u64, value: u32);
    /// Stores 8 bytes.
    fn store64(&self, offset: u64, value: u64);
    /// Copies bytes out of RAM.
    fn read(&self, offset: u64, data: &mut [u8]);
    /// Copies bytes into RAM.
    fn write(&self, offset: u64, data: &[u8]);
    /// Atomic compare-and-swap of the `size` (1, 2, 4, 8) bytes at `offset`; returns the value
    /// found. The swap happened if that equals `old`. Unaligned: atomic for this CPU only.
    fn cas(&self, offset: u64, size: usize, old: u64, new: u64) -> u64;
    /// Like [`GuestRam::cas`] on 16 bytes, 16-byte aligned.
    fn cas128(&self, offset: u64, old: u128, new: u128) -> u128;

    /// Notes that decoded or translated code comes from the page at `offset`, so that writers
    /// report with [`GuestRam::note_write`].
    fn mark_code(&self, offset: u64);
    /// Whether the page at `offset` is marked by [`GuestRam::mark_code`].
    fn is_code(&self, offset: u64) -> bool;
    /// Reports a write to `len` bytes at `offset`, from the CPU or a device. Code pages it touches
    /// become stale.
    fn note_write(&self, offset: u64, len: u64);
    /// Whether any code page is stale: cheap, asked before every block.
    fn has_stale_code(&self) -> bool;
    /// Takes the offsets of stale code pages; their marks are gone and the caller must drop every
    /// block made from them before running further.
    fn take_stale_code(&self) -> Vec<u64>;
}
