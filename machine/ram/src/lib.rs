//! Guest RAM: one memory object, its GPA layout, and the map of code pages.
//!
//! All of RAM is one memfd, so that every process that runs the guest or serves a device maps the
//! same bytes. Two kinds of address are used throughout: a *GPA* is what the guest says, an
//! *offset* counts bytes of the memfd. GPAs have a hole below 4 GiB for MMIO, offsets have none:
//!
//! ```text
//! GPA     0 ........ min(len, 3 GiB)   [hole: PCI, APICs, HPET]   4 GiB .... 4 GiB + rest
//! offset  0 ........ min(len, 3 GiB) = low_len ................................... len
//! ```
//!
//! Behind RAM the memfd has, on hosts that need them, a copy of each page of code, and last some pages of which the guest
//! knows nothing ([`Ram::take_words`]).
//!
//! Why it is right: every access is checked against the length once, against an invariant fixed
//! at creation (the memfd is sealed, so the mapping can never shrink under us). There are no
//! locks on loads, stores or the code-page checks; see the module `code` for the order of marks and
//! writes. Devices write through [`Ram::write_gpa`] or [`Ram::dma`], and both tell the code-page
//! map, so self-modifying code by DMA needs no care elsewhere.

mod code;
mod dma;
mod layout;
mod mapping;
mod news;
pub mod words;

/// Locks and atomics, for which others stand in `tests/models`.
mod sync {
    pub(crate) use std::sync::*;
}

#[cfg(test)]
host::choose!(host_linux::Linux);
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use bus::Kicker;
pub use code::{COPIED_PAGE, EMPTY_PAGE, MADE};
use contract::{CodeNews, GuestRam, RamPage};
pub use dma::{DmaMemory, ForeignRange, WriteNotes, foreign};
use host::{Access, MemoryObject};
pub use layout::{HIGH_BASE, LOW_MAX};
use x86::paging::WalkMemory;

use code::PageMap;
use layout::Layout;
use mapping::{Mapping, Marks, Notes};
use news::Inbox;

/// Bytes of a page.
pub const PAGE: u64 = 4096;
/// Name of the memory object that is RAM. `/proc/PID/fd` shows it behind `memfd:`.
pub const OBJECT: &str = "ring3-ram";
/// The least RAM a PC has, in bytes: everything below the 1 MiB line.
pub const MIN_LEN: u64 = 1 << 20;

/// Why there is no guest RAM.
#[derive(Debug, thiserror::Error)]
pub enum RamError {
    /// The user asked for an impossible amount.
    #[error("guest memory of {len} bytes: must be at least 1 MiB and a multiple of 4096 bytes")]
    BadSize {
        /// Bytes asked for.
        len: u64,
    },
    /// The host refused.
    #[error("the host cannot give the guest {} MiB of memory ({step}): {error}", len >> 20)]
    Host {
        /// Bytes asked for.
        len: u64,
        /// What was attempted.
        step: &'static str,
        /// The host's answer.
        error: std::io::Error,
    },
}

impl RamError {
    /// The same error, about so many bytes that the user has asked for.
    fn of(self, len: u64) -> Self {
        match self {
            Self::Host { step, error, .. } => Self::Host { len, step, error },
            Self::BadSize { .. } => Self::BadSize { len },
        }
    }
}

/// A range of GPAs is not all RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("guest physical range {gpa:#x}+{len:#x} is not RAM")]
pub struct OutOfRam {
    /// Start of the range.
    pub gpa: u64,
    /// Its length in bytes.
    pub len: u64,
}

/// Guest RAM. A clone is another handle to the same bytes.
#[derive(Clone)]
pub struct Ram {
    /// Where the mapping is, kept here so that loads and stores do not chase the `Arc`.
    view: mapping::View,
    /// A view of the copies of pages of code. A copy has the same offset here as its page has in RAM.
    copies: Option<mapping::View>,
    layout: Layout,
    pages: Arc<PageMap>,
    shared: Arc<Inner>,
    /// What the vCPU has to hear whose handle this is; the first one's, if it is nobody's.
    inbox: Arc<Inbox>,
    vcpu: Option<usize>,
}

struct Inner {
    mapping: Mapping,
    dma: DmaMemory,
    /// How many pages of words have been given away.
    words: AtomicU64,
}

impl Inner {
    fn new(mapping: Mapping, dma: DmaMemory) -> Self {
        Self { mapping, dma, words: AtomicU64::new(0) }
    }

    /// Offset of the first page of words.
    fn words_start(&self) -> u64 {
        self.mapping.len() - words::LEN
    }
}

impl Ram {
    /// Allocates `len` bytes of zeroed RAM. Pages are taken from the host when first touched.
    ///
    /// # Errors
    /// `len` is under 1 MiB or not whole pages, or the host does not have that much.
    pub fn new(len: u64) -> Result<Self, RamError> {
        Self::with(len, has_copies())
    }

    /// As [`Ram::new`], with room for copies of pages of code ([`Ram::copy_code`]) on any host.
    ///
    /// # Errors
    /// As for [`Ram::new`].
    pub fn with_copies(len: u64) -> Result<Self, RamError> {
        Self::with(len, true)
    }

    fn with(len: u64, copies: bool) -> Result<Self, RamError> {
        if len < MIN_LEN || !len.is_multiple_of(PAGE) {
            return Err(RamError::BadSize { len });
        }
        let layout = Layout::new(len);
        let all = if copies { len.saturating_mul(2) } else { len };
        let mapping =
            Mapping::new(all.saturating_add(words::LEN)).map_err(|error| error.of(len))?;
        let pages = Arc::new(PageMap::new(len / PAGE)?);
        let dma = dma::view(&mapping, layout, &pages)?;
        let copies = copies.then(|| mapping.view(len, len));
        let ram = Self::of(layout, pages, Inner::new(mapping, dma));
        Ok(Self { copies, ..ram })
    }

    fn of(layout: Layout, pages: Arc<PageMap>, inner: Inner) -> Self {
        let inbox = pages.inboxes.of(0);
        let view = inner.mapping.view(0, layout.len());
        Self { view, copies: None, layout, pages, shared: Arc::new(inner), inbox, vcpu: None }
    }

    /// A handle for each vCPU, which the kickers make look up. With several vCPUs each must use its own; to be called
    /// once, before they run.
    pub fn for_vcpus(&self, kickers: Vec<Arc<dyn Kicker>>) -> Vec<Self> {
        let count = kickers.len();
        self.pages.inboxes.divide(kickers);
        let handle = |vcpu| {
            let inbox = self.pages.inboxes.of(vcpu);
            Self { inbox, vcpu: Some(vcpu), ..self.clone() }
        };
        (0..count).map(handle).collect()
    }

    /// The RAM of another process, for a device that is served in this one. What is written here is reported there.
    ///
    /// # Errors
    /// These are not what [`Ram::descriptors`] gave, or the host refuses.
    pub fn of_another(memory: OwnedFd, marks: OwnedFd, notes: OwnedFd) -> Result<Self, RamError> {
        let mapping = Mapping::of_another(memory, Access::Write)?;
        let all = mapping.len().saturating_sub(words::LEN);
        let len = if has_copies() { all / 2 } else { all };
        if len < MIN_LEN || !len.is_multiple_of(PAGE) {
            return Err(RamError::BadSize { len });
        }
        let layout = Layout::new(len);
        let marks = Marks::of_another(marks, len / PAGE)?;
        let notes = Notes::of_another(notes, len / PAGE)?;
        let pages = Arc::new(PageMap::of_another(marks, notes));
        let dma = dma::view(&mapping, layout, &pages)?;
        Ok(Self::of(layout, pages, Inner::new(mapping, dma)))
    }

    /// Takes a page of words, in which a device's server, the monitor and wedges tell each other of requests: its offset in the
    /// memory object, behind all that the guest has. `None` if all are taken.
    pub fn take_words(&self) -> Option<u64> {
        let number = self.shared.words.fetch_add(1, Ordering::Relaxed);
        (number < words::PAGES - 1).then(|| self.words_start() + number * PAGE)
    }

    /// Offset of the first page of words in the memory object.
    pub fn words_start(&self) -> u64 {
        self.shared.words_start()
    }

    /// What a doorbell does may have changed: wedges that were told of doorbells ring none by themselves any more.
    pub fn change_bells(&self) {
        self.epoch().fetch_add(1, Ordering::SeqCst);
    }

    /// A number that [`Ram::change_bells`] changes.
    pub fn bells_epoch(&self) -> u64 {
        self.epoch().load(Ordering::SeqCst)
    }

    fn epoch(&self) -> &AtomicU64 {
        self.shared.mapping.word(self.words_start() + words::EPOCH)
    }

    /// Bytes of RAM.
    #[allow(clippy::len_without_is_empty)] // there is always at least 1 MiB
    pub fn len(&self) -> u64 {
        self.layout.len()
    }

    /// Bytes of RAM below the hole: GPAs 0 to this.
    pub fn low_len(&self) -> u64 {
        self.layout.low_len()
    }

    /// Bytes of RAM from [`HIGH_BASE`] up.
    pub fn high_len(&self) -> u64 {
        self.layout.len() - self.layout.low_len()
    }

    /// The memory object behind RAM.
    pub fn object(&self) -> &dyn MemoryObject {
        self.shared.mapping.object()
    }

    /// Marks the page at an offset like code if it holds nothing but zeros, and as such ([`EMPTY_PAGE`]); false
    /// if it does not.
    pub fn mark_empty(&self, offset: u64) -> bool {
        let is_empty = || {
            let mut bytes = [0; PAGE as usize];
            self.view.read(offset & !(PAGE - 1), &mut bytes);
            bytes.iter().all(|byte| *byte == 0)
        };
        self.pages.mark_empty(offset, self.vcpu, is_empty)
    }

    /// Copies the page of code at an offset for programs to execute, if its bytes are `good`, and marks the page as copied until it is
    /// written ([`COPIED_PAGE`]). Returns the copy's offset in the memory object. `None` if the page is none of code, if its
    /// bytes are not good, or if there is no room for copies.
    pub fn copy_code(
        &self,
        offset: u64,
        good: impl FnOnce(&[u8; PAGE as usize]) -> bool,
    ) -> Option<u64> {
        let copies = self.copies?;
        let copy = || {
            let mut bytes = [0; PAGE as usize];
            self.view.read(offset, &mut bytes);
            let good = good(&bytes);
            if good {
                copies.write(offset, &bytes);
            }
            good
        };
        self.pages.copy_code(offset, copy).then(|| self.len() + offset)
    }

    /// Whether code may be made from the page at an offset: the page is marked, and no vCPU writes it unnoticed.
    pub fn is_settled(&self, offset: u64) -> bool {
        self.pages.is_settled(offset)
    }

    /// How many pages of code have been written so far. What is made of a page from now on is not concerned by news of
    /// these writes ([`CodeNews::writes`]), whenever a vCPU hears them.
    pub fn code_writes(&self) -> u64 {
        self.pages.writes()
    }

    /// Waits for something that another vCPU has to do: meanwhile this one counts as one that runs no guest code, and
    /// others do not wait for it. It takes its news before it goes on with guest code.
    pub fn wait_for<T>(&self, wait: impl FnOnce() -> T) -> T {
        self.pages.inboxes.wait_for(self.vcpu, wait)
    }

    /// The memory object of the marks that engines in other processes look at: a byte a page of RAM, zero if
    /// the page may be written at will.
    pub fn marks(&self) -> &dyn MemoryObject {
        self.pages.marks.object()
    }

    /// The memory object in which processes that serve devices report what they wrote ([`Ram::of_another`]).
    pub fn notes(&self) -> &dyn MemoryObject {
        self.pages.notes.object()
    }

    /// Descriptors of RAM, marks and notes, as another process needs them ([`Ram::of_another`]).
    ///
    /// # Errors
    /// The host has no way to pass memory on.
    pub fn descriptors(&self) -> std::io::Result<[BorrowedFd<'_>; 3]> {
        let all = [self.object(), self.marks(), self.notes()].map(MemoryObject::descriptor);
        let [Some(memory), Some(marks), Some(notes)] = all else {
            return Err(std::io::ErrorKind::Unsupported.into());
        };
        Ok([memory, marks, notes])
    }

    /// RAM as the rust-vmm crates want it: the same bytes at the same GPAs. Writes through it are
    /// noted as [`GuestRam::note_write`] does.
    pub fn dma(&self) -> &DmaMemory {
        &self.shared.dma
    }

    /// The offset of `len` bytes at `gpa`, if they are all RAM without a hole between.
    pub fn offset(&self, gpa: u64, len: u64) -> Result<u64, OutOfRam> {
        self.layout.offset(gpa, len).ok_or(OutOfRam { gpa, len })
    }

    /// Reads bytes at a GPA.
    ///
    /// # Errors
    /// Not all of the range is RAM; nothing was read.
    pub fn read_gpa(&self, gpa: u64, data: &mut [u8]) -> Result<(), OutOfRam> {
        let offset = self.offset(gpa, data.len() as u64)?;
        self.view.read(offset, data);
        Ok(())
    }

    /// Has the CPU load a part of RAM into its caches, because that part will be read soon. Nothing happens if not all of the GPAs are
    /// of RAM.
    pub fn prefetch(&self, gpas: Range<u64>) {
        let len = gpas.end - gpas.start;
        if let Ok(offset) = self.offset(gpas.start, len) {
            self.view.prefetch(offset, len as usize);
        }
    }

    /// Writes bytes at a GPA, ROM or not: this is how loaders fill ROM.
    ///
    /// # Errors
    /// Not all of the range is RAM; nothing was written.
    pub fn write_gpa(&self, gpa: u64, data: &[u8]) -> Result<(), OutOfRam> {
        let offset = self.offset(gpa, data.len() as u64)?;
        self.view.write(offset, data);
        self.pages.note_dma(offset, data.len() as u64);
        Ok(())
    }

    /// Like [`Ram::write_gpa`], and faster where nobody has touched the pages yet.
    ///
    /// # Errors
    /// Not all of the range is RAM; nothing was written.
    pub fn write_untouched(&self, gpa: u64, data: &[u8]) -> Result<(), OutOfRam> {
        let offset = self.offset(gpa, data.len() as u64)?;
        if self.shared.mapping.object().write(offset, data).is_err() {
            self.view.write(offset, data);
        }
        self.pages.note_dma(offset, data.len() as u64);
        Ok(())
    }

    /// Makes the pages that hold the range read-only for the guest: its stores are lost. To be
    /// done before the guest runs, since CPUs may cache the right to write.
    ///
    /// # Errors
    /// Not all of the range is RAM; nothing has changed.
    pub fn set_rom(&self, gpa: u64, len: u64) -> Result<(), OutOfRam> {
        let offset = self.offset(gpa, len)?;
        self.pages.set_rom(offset, len);
        Ok(())
    }

    /// The offset of an aligned word of the page walker.
    #[inline]
    fn word(&self, gpa: u64, len: u64) -> Option<u64> {
        self.layout.offset(gpa, len)
    }

    fn walk_cas(&self, gpa: u64, size: usize, old: u64, new: u64) -> bool {
        let Some(offset) = self.word(gpa, size as u64) else { return true };
        if self.pages.is_rom(offset) {
            return true;
        }
        let swapped = self.view.cas(offset, size, old, new) == old;
        self.note_write(offset, size as u64);
        swapped
    }
}

/// RAM has room for copies of its pages of code behind it: where user code could load protection keys, programs execute copies that
/// have been searched.
fn has_copies() -> bool {
    host::current().facts().keys_load
}

impl std::fmt::Debug for Ram {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ram").field("len", &self.len()).finish_non_exhaustive()
    }
}

impl GuestRam for Ram {
    #[inline]
    fn page(&self, gpa: u64) -> Option<RamPage> {
        let offset = self.layout.offset(gpa & !(PAGE - 1), PAGE)?;
        Some(RamPage { offset, writable: !self.pages.is_rom(offset) })
    }

    #[inline]
    fn load8(&self, offset: u64) -> u8 {
        self.view.load8(offset)
    }
    #[inline]
    fn load16(&self, offset: u64) -> u16 {
        self.view.load16(offset)
    }
    #[inline]
    fn load32(&self, offset: u64) -> u32 {
        self.view.load32(offset)
    }
    #[inline]
    fn load64(&self, offset: u64) -> u64 {
        self.view.load64(offset)
    }
    #[inline]
    fn store8(&self, offset: u64, value: u8) {
        self.view.store8(offset, value);
    }
    #[inline]
    fn store16(&self, offset: u64, value: u16) {
        self.view.store16(offset, value);
    }
    #[inline]
    fn store32(&self, offset: u64, value: u32) {
        self.view.store32(offset, value);
    }
    #[inline]
    fn store64(&self, offset: u64, value: u64) {
        self.view.store64(offset, value);
    }

    fn read(&self, offset: u64, data: &mut [u8]) {
        self.view.read(offset, data);
    }
    fn write(&self, offset: u64, data: &[u8]) {
        self.view.write(offset, data);
    }

    fn cas(&self, offset: u64, size: usize, old: u64, new: u64) -> u64 {
        self.view.cas(offset, size, old, new)
    }
    fn cas_split(&self, offset: u64, second: u64, size: usize, old: u64, new: u64) -> u64 {
        if second == (offset & !(PAGE - 1)) + PAGE {
            return self.view.cas(offset, size, old, new);
        }
        self.shared.mapping.cas_split([offset, second], size, old, new)
    }
    fn cas128(&self, offset: u64, old: u128, new: u128) -> u128 {
        self.view.cas128(offset, old, new)
    }

    fn mark_code(&self, offset: u64) -> bool {
        self.pages.mark_code(offset, self.vcpu)
    }
    #[inline]
    fn is_code(&self, offset: u64) -> bool {
        self.pages.is_code(offset)
    }
    #[inline]
    fn note_write(&self, offset: u64, len: u64) {
        self.pages.note_write(offset, len, self.vcpu);
    }
    #[inline]
    fn has_stale_code(&self) -> bool {
        self.inbox.has_news() || self.pages.has_notes()
    }
    fn take_code_news(&self) -> CodeNews {
        self.pages.take_news(self.vcpu.unwrap_or(0))
    }
    fn enter(&self) {
        self.vcpu.into_iter().for_each(|vcpu| self.pages.inboxes.set_inside(vcpu, true));
    }
    fn leave(&self) {
        self.vcpu.into_iter().for_each(|vcpu| self.pages.inboxes.set_inside(vcpu, false));
    }
}

/// Outside RAM, and on ROM, a swap reports success: the write is lost and the walk goes on, as on
/// a real bus. A page table on a code page makes that code stale.
impl WalkMemory for &Ram {
    #[inline]
    fn read_u64(&mut self, gpa: u64) -> u64 {
        self.word(gpa, 8).map_or(u64::MAX, |offset| self.view.load64(offset))
    }
    #[inline]
    fn read_u32(&mut self, gpa: u64) -> u32 {
        self.word(gpa, 4).map_or(u32::MAX, |offset| self.view.load32(offset))
    }
    fn cas_u64(&mut self, gpa: u64, old: u64, new: u64) -> bool {
        self.walk_cas(gpa, 8, old, new)
    }
    fn cas_u32(&mut self, gpa: u64, old: u32, new: u32) -> bool {
        self.walk_cas(gpa, 4, old.into(), new.into())
    }
}
