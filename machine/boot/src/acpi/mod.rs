//! The ACPI tables of the ring3 PC (ACPI 6.5).
//!
//! They describe hardware that `chipset` and `pci` build, by those crates' own constants, so the two
//! cannot disagree. All tables lie in the firmware area below 1 MiB, the root pointer first, where
//! both ways of finding it (a boot protocol's field, a search) lead to it.

mod dsdt;
mod fixed;
mod interrupts;
mod windows;

use crate::{Error, layout::FIRMWARE};
use acpi_tables::{Aml, rsdp::Rsdp, sdt::Sdt, xsdt::XSDT};
use ram::Ram;

/// Most CPUs the tables can describe and the firmware area holds.
pub const MAX_CPUS: u32 = 1024;

const OEM_ID: [u8; 6] = *b"RING3 ";
const OEM_TABLE_ID: [u8; 8] = *b"RING3PC ";
const OEM_REVISION: u32 = 1;

/// Writes the tables for a machine of `cpus` CPUs into the firmware area; returns the GPA of the
/// root pointer.
///
/// # Errors
/// More CPUs than [`MAX_CPUS`] or none, or RAM ends below 1 MiB.
pub fn place(memory: &Ram, cpus: u32) -> Result<u64, Error> {
    let tables = build(cpus)?;
    memory.write_gpa(FIRMWARE.start, &tables)?;
    Ok(FIRMWARE.start)
}

/// All tables as they lie in memory from the start of the firmware area.
fn build(cpus: u32) -> Result<Vec<u8>, Error> {
    if !(1..=MAX_CPUS).contains(&cpus) {
        return Err(Error::CpuCount(cpus));
    }
    let mut area = Area { bytes: vec![0; Rsdp::len().next_multiple_of(Area::ALIGN)] };
    let facs = area.add(&bytes_of(&acpi_tables::facs::FACS::new()));
    let dsdt = area.add(dsdt::table(cpus).as_slice());
    let mut xsdt = XSDT::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    xsdt.add_entry(area.add(&bytes_of(&fixed::table(dsdt, facs))));
    xsdt.add_entry(area.add(interrupts::table(cpus).as_slice()));
    xsdt.add_entry(area.add(&bytes_of(&windows::mcfg_table())));
    xsdt.add_entry(area.add(windows::hpet_table().as_slice()));
    let xsdt = area.add(&bytes_of(&xsdt));
    let rsdp = bytes_of(&Rsdp::new(OEM_ID, xsdt));
    area.bytes[..rsdp.len()].copy_from_slice(&rsdp);
    assert!(area.bytes.len() as u64 <= FIRMWARE.end - FIRMWARE.start, "MAX_CPUS is too large");
    Ok(area.bytes)
}

/// The firmware area being filled.
struct Area {
    bytes: Vec<u8>,
}

impl Area {
    /// The FACS wants 64 bytes (5.2.10), the others less.
    const ALIGN: usize = 64;

    /// Appends a table; returns its GPA.
    fn add(&mut self, table: &[u8]) -> u64 {
        let at = self.bytes.len().next_multiple_of(Self::ALIGN);
        self.bytes.resize(at, 0);
        self.bytes.extend_from_slice(table);
        FIRMWARE.start + at as u64
    }
}

/// An empty table with our header.
fn sdt(signature: [u8; 4], revision: u8) -> Sdt {
    const HEADER_LEN: u32 = 36;
    Sdt::new(signature, HEADER_LEN, revision, OEM_ID, OEM_TABLE_ID, OEM_REVISION)
}

fn bytes_of(table: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    table.to_aml_bytes(&mut bytes);
    bytes
}
