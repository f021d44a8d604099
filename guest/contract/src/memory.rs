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
    /// found. The swap happened if that equals `old`. The bytes need not be aligned.
    fn cas(&self, offset: u64, size: usize, old: u64, new: u64) -> u64;
    /// Like [`GuestRam::cas`], where the first bytes are the last of their page and the others the first of the page at
    /// `second`.
    fn cas_split(&self, offset: u64, second: u64, size: usize, old: u64, new: u64) -> u64;
    /// Like [`GuestRam::cas`] on 16 bytes, 16-byte aligned.
    fn cas128(&self, offset: u64, old: u128, new: u128) -> u128;

    /// Notes that decoded or translated code comes from the page at `offset`, so that writers
    /// report with [`GuestRam::note_write`]. The bytes are to be read afterwards. True if the page was not
    /// marked: the caller must give up its own ways of writing it unnoticed. Other vCPUs have given up theirs
    /// when this returns. It may wait for them; whatever they have told this one meanwhile is to be looked at
    /// ([`GuestRam::has_stale_code`]) before anything is written.
    fn mark_code(&self, offset: u64) -> bool;
    /// Whether the page at `offset` is marked by [`GuestRam::mark_code`].
    fn is_code(&self, offset: u64) -> bool;
    /// Reports a write to `len` bytes at `offset`, from the CPU or a device. Code pages it touches
    /// become stale.
    fn note_write(&self, offset: u64, len: u64);
    /// Whether [`GuestRam::take_code_news`] would return any news. Engines ask before every block, so the answer must be
    /// cheap.
    fn has_stale_code(&self) -> bool;
    /// Takes what this vCPU has to hear about code pages, and returns not before the other vCPUs have taken
    /// what it has to tell them. The caller must act on it before it runs or writes anything further.
    fn take_code_news(&self) -> CodeNews;
    /// Takes the offsets of stale code pages, where there is only one vCPU.
    fn take_stale_code(&self) -> Vec<u64> {
        self.take_code_news().stale
    }
    /// This vCPU runs guest code from now on: others wait until it has taken their news.
    fn enter(&self) {}
    /// It runs none until it enters again, and takes the news before it does anything else then.
    fn leave(&self) {}
}

/// What a vCPU has to hear about code pages: offsets in guest RAM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CodeNews {
    /// They were written: whatever was made from them is to be dropped.
    pub stale: Vec<u64>,
    /// The numbers of those writes, as far as they are known. What was made when there had been so many is made of what was
    /// written.
    pub writes: Vec<u64>,
    /// Another vCPU makes code from them: they may not be written unnoticed any more.
    pub closed: Vec<u64>,
}
