//! The register states boot protocols start a CPU in.
//!
//! No guest runs in real mode here: each protocol's firmware side has already switched modes. The
//! descriptors in the registers are decoded from the very table GDTR points to, so a kernel that
//! reloads a selector gets what it had.

use crate::{Error, place::Loader};
use ram::HIGH_BASE;
use x86::control::{cr0, cr4, efer};
use x86::paging::{P, PS, RW};
use x86::{Segment, TableRegister, Vcpu, seg, segment::attr};

/// Code selector of every protocol; Linux calls it `__BOOT_CS`.
const CODE: u16 = 0x10;
/// Data selector of every protocol; Linux calls it `__BOOT_DS`.
const DATA: u16 = 0x18;
/// Flat 4 GiB descriptors, DPL 0 (SDM 3.4.5).
const CODE32: u64 = 0x00cf_9b00_0000_ffff;
const CODE64: u64 = 0x00af_9b00_0000_ffff;
const DATA32: u64 = 0x00cf_9300_0000_ffff;

/// Bytes a 2 MiB page maps.
const LARGE_PAGE: u64 = 2 << 20;
/// Page directories that map 4 GiB.
const DIRECTORIES: u64 = HIGH_BASE / (512 * LARGE_PAGE);
/// Bytes of a page table of any level.
const TABLE: u64 = 4096;

/// 32-bit protected mode without paging, flat segments, interrupts off, at `entry` (a GPA).
pub(crate) fn protected_mode(loader: &mut Loader<'_>, entry: u32) -> Result<Vcpu, Error> {
    let mut vcpu = flat(loader, CODE32)?;
    vcpu.rip = entry.into();
    Ok(vcpu)
}

/// 64-bit mode with the first 4 GiB identity-mapped, flat segments, interrupts off, at `entry`.
pub(crate) fn long_mode(loader: &mut Loader<'_>, entry: u64) -> Result<Vcpu, Error> {
    let mut vcpu = flat(loader, CODE64)?;
    vcpu.rip = entry;
    vcpu.cr3 = identity_map(loader)?;
    vcpu.cr4 = cr4::PAE;
    vcpu.efer = efer::LME | efer::LMA;
    vcpu.cr0 |= cr0::PG;
    Ok(vcpu)
}

fn flat(loader: &mut Loader<'_>, code: u64) -> Result<Vcpu, Error> {
    let gdt = [0, 0, code, DATA32].map(u64::to_le_bytes).concat();
    let base = loader.place_info("GDT", &gdt)?;
    let mut segments = [Segment::from_descriptor(DATA, DATA32); 6];
    segments[seg::CS] = Segment::from_descriptor(CODE, code);
    Ok(Vcpu {
        cr0: cr0::PE | cr0::ET,
        gdtr: TableRegister { base, limit: gdt.len() as u16 - 1, ..TableRegister::default() },
        seg: segments,
        tr: Segment { selector: 0, attr: attr::P | 11, limit: 0x67, base: 0 },
        ..Vcpu::default()
    })
}

/// Builds 4-level tables that map the first 4 GiB to themselves; returns their root, a GPA.
fn identity_map(loader: &mut Loader<'_>) -> Result<u64, Error> {
    let root = loader.reserve_low("page tables", (2 + DIRECTORIES) * TABLE, TABLE, TABLE)?;
    let (pointers, directories) = (root + TABLE, root + 2 * TABLE);
    let mut tables = vec![0; TABLE as usize];
    tables[..8].copy_from_slice(&(pointers | P | RW).to_le_bytes());
    for i in 0..DIRECTORIES {
        tables.extend(((directories + i * TABLE) | P | RW).to_le_bytes());
    }
    tables.resize(2 * TABLE as usize, 0);
    for i in 0..DIRECTORIES * 512 {
        tables.extend(((i * LARGE_PAGE) | P | RW | PS).to_le_bytes());
    }
    loader.memory().write_gpa(root, &tables)?;
    Ok(root)
}

/// Sets general registers, by index.
pub(crate) fn with(mut vcpu: Vcpu, values: &[(usize, u64)]) -> Vcpu {
    for &(index, value) in values {
        vcpu.gpr[index] = value;
    }
    vcpu
}
