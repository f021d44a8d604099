//! Tables that only say where a memory window is: MCFG (PCI Firmware 3.3, 4.1.2) and HPET (IA-PC
//! HPET 1.0a, 3.2.4).

use super::{OEM_ID, OEM_REVISION, OEM_TABLE_ID};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::{Aml, mcfg::MCFG, sdt::Sdt};
use chipset::hpet;

/// Least period of the HPET's periodic mode without lost ticks, in ticks.
const MIN_TICK: u16 = 0x80;

/// PCI Express configuration space of segment 0, bus 0.
pub(super) fn mcfg_table() -> MCFG {
    let mut mcfg = MCFG::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    mcfg.add_ecam(pci::ECAM_BASE, 0, 0, 0);
    mcfg
}

/// The one HPET.
pub(super) fn hpet_table() -> Sdt {
    let mut body = hpet::ID.to_le_bytes().to_vec();
    let registers = GAS::new(AddressSpace::SystemMemory, 64, 0, AccessSize::Undefined, hpet::BASE);
    registers.to_aml_bytes(&mut body);
    body.push(0);
    body.extend(MIN_TICK.to_le_bytes());
    body.push(0);
    let mut table = super::sdt(*b"HPET", 1);
    table.append_slice(&body);
    table
}
