//! RAM as the rust-vmm device crates see it.
//!
//! A second mapping of the same memfd, in `vm-memory`'s types. Its dirty-bitmap hook is what tells
//! the code-page map of writes by devices, so no device can forget to.

use std::{fs::File, sync::Arc};

use vm_memory::bitmap::{Bitmap, BitmapSlice, WithBitmapSlice};
use vm_memory::mmap::{MmapRegionBuilder, MmapRegionError};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap};

use crate::code::PageMap;
use crate::{Layout, Mapping, RamError};

/// Guest RAM for `virtio-queue` and the like.
pub type DmaMemory = GuestMemoryMmap<WriteNotes>;

/// Tells the code-page map what a device wrote in one region of RAM, if there is a map.
pub struct WriteNotes {
    pages: Option<Arc<PageMap>>,
    /// Offset of the region in RAM.
    base: u64,
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
    pub file: File,
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
        // Beyond the end of a file is a bus error. Not by `File::metadata`, whose call a device's filter does not let through.
        let holds = rustix::fs::fstat(&file).map_err(|e| host(e.into()))?.st_size;
        if offset.checked_add(len).is_none_or(|end| end > holds.cast_unsigned()) {
            return Err(host(std::io::Error::other("the file is shorter than what it is to hold")));
        }
        region(gpa, len, FileOffset::new(file, offset), WriteNotes { pages: None, base: 0 })
    });
    let mut regions = regions.collect::<Result<Vec<_>, _>>()?;
    regions.sort_by_key(|region| region.start_addr());
    DmaMemory::from_regions(regions).map_err(|e| host(std::io::Error::other(e)))
}

/// Maps RAM once more, for devices.
pub(crate) fn map(
    mapping: &Mapping,
    layout: Layout,
    pages: &Arc<PageMap>,
) -> Result<DmaMemory, RamError> {
    let host = |error| RamError::Host { len: layout.len(), step: "map for devices", error };
    let regions = layout.ranges().map(|(gpa, base, len)| {
        let notes = WriteNotes { pages: Some(Arc::clone(pages)), base };
        let file = mapping.file().try_clone().map_err(host)?;
        region(gpa, len, FileOffset::new(file, base), notes)
    });
    let regions = regions.collect::<Result<Vec<_>, _>>()?;
    DmaMemory::from_regions(regions).map_err(|e| host(std::io::Error::other(e)))
}

fn region(
    gpa: u64,
    len: u64,
    place: FileOffset,
    notes: WriteNotes,
) -> Result<GuestRegionMmap<WriteNotes>, RamError> {
    let host = |error| RamError::Host { len, step: "map for devices", error };
    let region = MmapRegionBuilder::new_with_bitmap(len as usize, notes)
        .with_file_offset(place)
        .with_mmap_prot(PROT_READ_WRITE)
        .with_mmap_flags(MAP_SHARED_NORESERVE)
        .build()
        .map_err(|e| host(io_error(e)))?;
    GuestRegionMmap::new(region, GuestAddress(gpa)).ok_or(RamError::BadSize { len })
}

const PROT_READ_WRITE: i32 =
    (rustix::mm::ProtFlags::READ.bits() | rustix::mm::ProtFlags::WRITE.bits()) as i32;
const MAP_SHARED_NORESERVE: i32 =
    (rustix::mm::MapFlags::SHARED.bits() | rustix::mm::MapFlags::NORESERVE.bits()) as i32;

fn io_error(error: MmapRegionError) -> std::io::Error {
    match error {
        MmapRegionError::Mmap(error) => error,
        other => std::io::Error::other(other),
    }
}
