//! The MADT: interrupt controllers and how ISA interrupts reach them (ACPI 6.5, 5.2.12).
//!
//! CPUs appear by local APIC up to ID 254 and by local x2APIC beyond, as the specification asks.

use acpi_tables::Aml;
use acpi_tables::madt::{EnabledStatus, IoApic, ProcessorLocalApic};
use acpi_tables::sdt::Sdt;
use chipset::{TIMER_GSI, ioapic, power::SCI_GSI};

/// Local APIC registers of each CPU, a GPA (SDM 11.4.1).
const LOCAL_APIC: u32 = 0xfee0_0000;
/// Flag: there are two 8259s as in every PC.
const PCAT_COMPAT: u32 = 1;
/// First APIC ID that needs an x2APIC structure.
const FIRST_X2APIC_ID: u32 = 255;
/// MPS INTI flags (table 5.26): as the bus has it; active high and level.
const CONFORMS: u16 = 0;
const HIGH_LEVEL: u16 = 0b1101;
/// Every CPU, in the structures that name one by UID.
const ALL_CPUS: u8 = 0xff;
const ALL_X2APIC_CPUS: u32 = 0xffff_ffff;

/// The table for `cpus` CPUs.
pub(super) fn table(cpus: u32) -> Sdt {
    let mut body = Vec::new();
    body.extend([LOCAL_APIC, PCAT_COMPAT].map(u32::to_le_bytes).concat());
    for id in 0..cpus {
        local_apic(id, &mut body);
    }
    IoApic::new(0, ioapic::BASE as u32, 0).to_aml_bytes(&mut body);
    interrupt_override(0, TIMER_GSI, CONFORMS, &mut body);
    interrupt_override(SCI_GSI as u8, SCI_GSI, HIGH_LEVEL, &mut body);
    local_nmi(cpus, &mut body);
    let mut table = super::sdt(*b"APIC", 5);
    table.append_slice(&body);
    table
}

fn local_apic(id: u32, body: &mut Vec<u8>) {
    match u8::try_from(id) {
        Ok(short) if id < FIRST_X2APIC_ID => {
            ProcessorLocalApic::new(short, short, EnabledStatus::Enabled).to_aml_bytes(body);
        }
        _ => {
            body.extend([9, 16, 0, 0]);
            body.extend([id, 1, id].map(u32::to_le_bytes).concat());
        }
    }
}

/// ISA interrupt `irq` arrives at `gsi`.
fn interrupt_override(irq: u8, gsi: u32, flags: u16, body: &mut Vec<u8>) {
    body.extend([2, 10, 0, irq]);
    body.extend(gsi.to_le_bytes());
    body.extend(flags.to_le_bytes());
}

/// NMI is local interrupt 1 of every CPU.
fn local_nmi(cpus: u32, body: &mut Vec<u8>) {
    let [low, high] = CONFORMS.to_le_bytes();
    body.extend([4, 6, ALL_CPUS, low, high, 1]);
    if cpus > FIRST_X2APIC_ID {
        body.extend([10, 12, low, high]);
        body.extend(ALL_X2APIC_CPUS.to_le_bytes());
        body.extend([1, 0, 0, 0]);
    }
}
