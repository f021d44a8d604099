//! Where things lie in guest-physical memory, and the firmware memory map that tells the guest.
//!
//! The fixed addresses are the ones every PC shares, plus the windows ring3's own chipset decodes.
//! Everything else is placed by `crate::place` in what `usable` calls usable, so the map and
//! the placements cannot contradict each other.

use ram::{HIGH_BASE, Ram};
use std::ops::Range;

/// Where the BIOS data area ends; the real-mode vector table and it are left alone.
pub(crate) const BIOS_DATA_END: u64 = 0x1000;
/// Base of the extended BIOS data area: conventional memory ends here, at 639 KiB.
pub(crate) const EBDA: u64 = 0x9_fc00;
/// End of conventional memory; the VGA hole follows.
pub(crate) const CONVENTIONAL_END: u64 = 0xa_0000;
/// The firmware area: the RSDP search (ACPI 6.5, 5.2.5.1) looks in it, all our tables lie in it.
pub(crate) const FIRMWARE: Range<u64> = 0xe_0000..0x10_0000;
/// Start of extended memory.
pub(crate) const EXTENDED: u64 = 0x10_0000;
/// PCI Express configuration space, which systems use only if the map reserves it.
const ECAM: Range<u64> = pci::ECAM_BASE..pci::ECAM_BASE + pci::ECAM_SIZE;
/// Least RAM that leaves anything above 1 MiB, in bytes.
pub(crate) const MIN_RAM: u64 = 2 << 20;

/// What the firmware memory map says of a range (ACPI 6.5, table 15.5; E820, PVH and multiboot
/// share the numbers).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum MemoryKind {
    /// The operating system's to use.
    Ram = 1,
    /// Never to be touched.
    Reserved = 2,
}

/// A line of the firmware memory map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MapEntry {
    /// GPAs.
    pub range: Range<u64>,
    /// What is there.
    pub kind: MemoryKind,
}

/// The firmware memory map of a machine with this RAM, sorted, without overlaps.
pub fn memory_map(memory: &Ram) -> Vec<MapEntry> {
    use MemoryKind::{Ram, Reserved};
    let entry = |range: Range<u64>, kind| MapEntry { range, kind };
    let map = [
        entry(0..EBDA, Ram),
        entry(EBDA..CONVENTIONAL_END, Reserved),
        entry(FIRMWARE, Reserved),
        entry(EXTENDED..memory.low_len(), Ram),
        entry(ECAM, Reserved),
        entry(HIGH_BASE..HIGH_BASE.saturating_add(memory.high_len()), Ram),
    ];
    map.into_iter().filter(|e| !e.range.is_empty()).collect()
}

/// The ranges the map gives to the operating system.
pub(crate) fn usable(memory: &Ram) -> Vec<Range<u64>> {
    memory_map(memory).into_iter().filter(|e| e.kind == MemoryKind::Ram).map(|e| e.range).collect()
}
