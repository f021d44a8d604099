//! RAM as the rust-vmm device crates see it.
//!
//! The same mapping, in `vm-memory`'s types. Its dirty-bitmap hook is what tells
//! the code-page map of writes by devices, so no device can forget to.
// UNSAFETY: tells `vm-memory` of mappings that are not its own.
#![allow(unsafe_code)]

use std::{io, os::fd::OwnedFd, sync::Arc};

use host::{Access, Piece};
use vm_memory::bitmap::{Bitmap, BitmapSlice, WithBitmapSlice};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{GuestAddress, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap};

use crate::code::PageMap;
use crate::{Layout, Mapping, RamError};

/// Guest RAM for `virtio-queue` and the like.
pub type DmaMemory = GuestMemoryMmap<WriteNotes>;

/// Tells the code-page map what a device wrote in one region of RAM, if there is a map.
pub struct WriteNotes {
    pages: Option<Arc<PageMap>>,
    /// Offset of the region in RAM.
    base: u64,
    /// What the region is part of: it stays mapped for as long as anybody has the region.
    mapped: Arc<host::Mapping>,
}

/// [`WriteNotes`] from some offset on.
#[derive(Clone, Copy)]
pub struct NotesFrom<'a> {
    pages: Option<&'a PageMap>,
    base: u64,
}

impl std::fmt::Debug for WriteNotes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "WriteNotes from {:#x}", self.base)
    }
}

impl std::fmt::Debug for NotesFrom<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "NotesFrom {:#x}", self.base)
    }
}

impl<'a> WithBitmapSlice<'a> for WriteNotes {
    type S = NotesFrom<'a>;
}

impl Bitmap for WriteNotes {
    fn mark_dirty(&self, offset: usize, len: usize) {
        self.slice_at(0).mark_dirty(offset, len);
    }
    fn dirty_at(&self, _: usize) -> bool {
        false // no log is kept here: the map of code pages is not one of dirty pages
    }
    fn slice_at(&self, offset: usize) -> NotesFrom<'_> {
        NotesFrom { pages: self.pages.as_deref(), base: self.base + offset as u64 }
    }
}

impl<'a> WithBitmapSlice<'_> for NotesFrom<'a> {
    type S = NotesFrom<'a>;
}

impl BitmapSlice for NotesFrom<'_> {}

impl Bitmap for NotesFrom<'_> {
    fn mark_dirty(&self, offset: usize, len: usize) {
        if let Some(pages) = self.pages {
            pages.note_dma(self.base + offset as u64, len as u64);
        }
    }
    fn dirty_at(&self, _: usize) -> bool {
        false
    }
    fn slice_at(&self, offset: usize) -> Self {
        Self { pages: self.pages, base: self.base + offset as u64 }
    }
}

/// A run of guest RAM in a file of another program's monitor.
#[derive(Debug)]
pub struct ForeignRange {
    /// Where the guest has it.
    pub gpa: u64,
    /// Bytes.
    pub len: u64,
    /// What it is in, and from which byte on.
    pub file: OwnedFd,
    /// The first byte in the file.
    pub offset: u64,
}

/// The RAM of a guest that another program runs, for a device that is served here. Who writes to it is told to nobody: such a program
/// has no map of code pages.
///
/// # Errors
/// Ranges overlap, or the host cannot map them.
pub fn foreign(ranges: Vec<ForeignRange>) -> Result<DmaMemory, RamError> {
    let len = ranges.iter().fold(0, |sum: u64, range| sum.saturating_add(range.len));
    let host = |error| RamError::Host { len, step: "map for a device", error };
    let regions = ranges.into_iter().map(|ForeignRange { gpa, len, file, offset }| {
        let object = host::current().adopt_shrinkable(file).map_err(host)?;
        // Beyond the end of a file is a bus error.
        if offset.checked_add(len).is_none_or(|end| end > object.len()) {
            return Err(host(io::Error::other("the file is shorter than what it is to hold")));
        }
        let piece = Piece { offset, len: len as usize };
        let mapped = object.map(&[piece], Access::Write).map_err(host)?.into();
        region(gpa, len, 0, WriteNotes { pages: None, base: 0, mapped })
    });
    let mut regions = regions.collect::<Result<Vec<_>, _>>()?;
    regions.sort_by_key(|region| region.start_addr());
    DmaMemory::from_regions(regions).map_err(|e| host(io::Error::other(e)))
}

/// RAM for devices.
pub(crate) fn view(
    mapping: &Mapping,
    layout: Layout,
    pages: &Arc<PageMap>,
) -> Result<DmaMemory, RamError> {
    let host = |error| RamError::Host { len: layout.len(), step: "lend to devices", error };
    let regions = layout.ranges().map(|(gpa, base, len)| {
        let (pages, mapped) = (Some(Arc::clone(pages)), Arc::clone(mapping.mapped()));
        region(gpa, len, base, WriteNotes { pages, base, mapped })
    });
    let regions = regions.collect::<Result<Vec<_>, _>>()?;
    DmaMemory::from_regions(regions).map_err(|e| host(io::Error::other(e)))
}

/// The region of `len` bytes that begins at an offset into what `notes` keeps mapped.
fn region(
    gpa: u64,
    len: u64,
    offset: u64,
    notes: WriteNotes,
) -> Result<GuestRegionMmap<WriteNotes>, RamError> {
    let bad = RamError::BadSize { len };
    let all = notes.mapped.len() as u64;
    if offset.checked_add(len).is_none_or(|end| end > all) {
        return Err(bad);
    }
    let at = notes.mapped.base();
    // SAFETY: checked to be inside the mapping, which the region keeps by its notes, and which is only accessed by
    // raw pointers.
    let region = unsafe {
        let at = at.as_ptr().add(offset as usize);
        MmapRegionBuilder::new_with_bitmap(len as usize, notes).with_raw_mmap_pointer(at).build()
    };
    let host = |error| RamError::Host { len, step: "lend to devices", error };
    let region = region.map_err(|error| host(io::Error::other(error)))?;
    GuestRegionMmap::new(region, GuestAddress(gpa)).ok_or(bad)
}
