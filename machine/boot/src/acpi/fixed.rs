//! The FADT: fixed hardware (ACPI 6.5, 5.2.9).

use super::{OEM_ID, OEM_REVISION, OEM_TABLE_ID};
use acpi_tables::fadt::{FADT, FADTBuilder, Flags, PmProfile};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use chipset::power::{PM_TIMER, PM1A_CONTROL, PM1A_EVENT, RESET, RESET_VALUE, SCI_GSI};

/// IA-PC boot architecture flags (table 5.11): ISA devices exist; there is no VGA. The absent flags
/// say that there is no keyboard controller to probe, and that the CMOS clock is there.
const LEGACY_DEVICES: u16 = 1 << 0;
const VGA_NOT_PRESENT: u16 = 1 << 2;
/// Latencies above these say that there is no C2 and no C3.
const NO_C2: u16 = 101;
const NO_C3: u16 = 1001;
/// Where the century is in the clock's CMOS RAM.
const CMOS_CENTURY: u8 = 0x32;

/// The table, pointing to the other two, by the old fields and the extended ones. The power-management timer has 24 bits. The machine is in ACPI mode from the start: there is no
/// SMI command port to switch it by.
pub(super) fn table(dsdt: u64, facs: u64) -> FADT {
    let mut fadt = FADTBuilder::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION)
        .dsdt_64(dsdt)
        .firmware_ctrl_64(facs)
        .preferred_pm_profile(PmProfile::Unspecified);
    for flag in [Flags::Wbinvd, Flags::ProcC1, Flags::SlpButton, Flags::FixRtc, Flags::ResetRegSup]
    {
        fadt = fadt.flag(flag);
    }
    fadt.dsdt = (dsdt as u32).into();
    fadt.firmware_ctrl = (facs as u32).into();
    fadt.sci_int = (SCI_GSI as u16).into();
    fadt.p_lvl2_lat = NO_C2.into();
    fadt.p_lvl3_lat = NO_C3.into();
    fadt.iapc_boot_arch = (LEGACY_DEVICES | VGA_NOT_PRESENT).into();
    fadt.reset_reg = port(RESET, 1, AccessSize::ByteAccess);
    fadt.reset_value = RESET_VALUE;
    fadt.century = CMOS_CENTURY;
    power_management(&mut fadt);
    fadt.finalize()
}

/// The register blocks, once in the old fields and once in the extended ones.
fn power_management(fadt: &mut FADTBuilder) {
    fadt.pm1a_evt_blk = (PM1A_EVENT as u32).into();
    fadt.pm1a_cnt_blk = (PM1A_CONTROL as u32).into();
    fadt.pm_tmr_blk = (PM_TIMER as u32).into();
    (fadt.pm1_evt_len, fadt.pm1_cnt_len, fadt.pm_tmr_len) = (4, 2, 4);
    fadt.x_pm1a_evt_blk = port(PM1A_EVENT, 4, AccessSize::WordAccess);
    fadt.x_pm1a_cnt_blk = port(PM1A_CONTROL, 2, AccessSize::WordAccess);
    fadt.x_pm_tmr_blk = port(PM_TIMER, 4, AccessSize::DwordAccess);
}

/// `len` bytes of registers at a port.
fn port(port: u64, len: u8, access: AccessSize) -> GAS {
    GAS::new(AddressSpace::SystemIo, 8 * len, 0, access, port)
}
