//! The DSDT: devices a system cannot discover by itself, in AML (ACPI 6.5, chapters 6 and 20).
//!
//! Little here runs: a system says which interrupt controllers it uses (`_PIC`), and `_PRT` depends on that. All else are names
//! and resources.

use acpi_tables::aml::{
    AddressSpace, AddressSpaceCacheable, Arg, Device, EISAName, IO, If, Interrupt, Memory32Fixed,
    Method, Name, Package, PackageBuilder, Path, ResourceTemplate, Return, Scope, Store,
};
use acpi_tables::{Aml, AmlSink, sdt::Sdt};
use chipset::{hpet, power, rtc, uart};

/// Device numbers of a PCI bus.
const SLOTS: u8 = 32;
/// INTA# to INTD#.
const PINS: u8 = 4;
/// Configuration mechanism #1: two 4-byte registers.
const CONFIG_PORTS: u16 = pci::CONFIG_PORTS as u16;
const CONFIG_LEN: u8 = 8;
/// ISA interrupt of the real-time clock.
const RTC_IRQ: u32 = 8;
/// What `_PIC` was told: 0 are the 8259s.
const CONTROLLERS: &str = "\\PICM";

/// The table for `cpus` CPUs.
pub(super) fn table(cpus: u32) -> Sdt {
    let mut devices = Vec::new();
    pci_root(&mut devices);
    motherboard(&mut devices);
    legacy_devices(&mut devices);
    (0..cpus).for_each(|id| cpu(id, &mut devices));
    let mut aml = Scope::raw("_SB_".into(), devices);
    interrupt_model(&mut aml);
    let soft_off = Package::new(vec![&power::S5, &power::S5, &0_u8, &0_u8]);
    Name::new("_S5_".into(), &soft_off).to_aml_bytes(&mut aml);
    let mut table = super::sdt(*b"DSDT", 2);
    table.append_slice(&aml);
    table
}

/// `_PIC` (5.8.1).
fn interrupt_model(out: &mut Vec<u8>) {
    let model = Path::new(CONTROLLERS);
    Name::new(CONTROLLERS.into(), &0_u8).to_aml_bytes(out);
    Method::new("_PIC".into(), 1, false, vec![&Store::new(&model, &Arg(0))]).to_aml_bytes(out);
}

/// The PCI Express root: what it decodes, and where INTx pins go.
fn pci_root(out: &mut Vec<u8>) {
    let (by_gsi, by_irq) = (Path::new("PRTA"), Path::new("PRTP"));
    let (by_gsi, by_irq) = (Return::new(&by_gsi), Return::new(&by_irq));
    let model = Path::new(CONTROLLERS);
    let apics = If::new(&model, vec![&by_gsi]);
    let names: [&dyn Aml; 9] = [
        &Name::new("_HID".into(), &EISAName::new("PNP0A08")),
        &Name::new("_CID".into(), &EISAName::new("PNP0A03")),
        &Name::new("_SEG".into(), &0_u8),
        &Name::new("_BBN".into(), &0_u8),
        &Name::new("_UID".into(), &0_u8),
        &Name::new("_CRS".into(), &Bytes(pci_resources())),
        &Name::new("PRTA".into(), &interrupt_routes(pci::interrupt_gsi)),
        &Name::new("PRTP".into(), &interrupt_routes(pci::interrupt_irq)),
        &Method::new("_PRT".into(), 0, false, vec![&apics, &by_irq]),
    ];
    Device::new("PCI0".into(), names.to_vec()).to_aml_bytes(out);
}

/// `_CRS` of the root: its one bus, its own configuration ports, and what it passes on.
fn pci_resources() -> Vec<u8> {
    let window_end = pci::WINDOW_BASE + pci::WINDOW_SIZE - 1;
    let cache = AddressSpaceCacheable::NotCacheable;
    let (base, end) = (pci::WINDOW_BASE as u32, window_end as u32);
    super::bytes_of(&ResourceTemplate::new(vec![
        &AddressSpace::<u16>::new_bus_number(0, 0),
        &IO::new(CONFIG_PORTS, CONFIG_PORTS, 1, CONFIG_LEN),
        &AddressSpace::<u16>::new_io(0, CONFIG_PORTS - 1, None),
        &AddressSpace::<u16>::new_io(CONFIG_PORTS + u16::from(CONFIG_LEN), 0xffff, None),
        &AddressSpace::<u32>::new_memory(cache, true, base, end, None),
    ]))
}

/// `_PRT` (6.2.13): for each pin of each slot, the GSI it is `wired` to. No link devices: the wires
/// cannot be moved.
fn interrupt_routes(wired: fn(u8, u8) -> u8) -> PackageBuilder {
    const ALL_FUNCTIONS: u32 = 0xffff;
    let mut routes = PackageBuilder::new();
    for slot in 0..SLOTS {
        for pin in 0..PINS {
            let address = u32::from(slot) << 16 | ALL_FUNCTIONS;
            let gsi = wired(slot, pin + 1);
            routes.add_element(&Package::new(vec![&address, &pin, &0_u8, &gsi]));
        }
    }
    routes
}

/// Addresses no driver may be given: configuration space and the power-management ports.
fn motherboard(out: &mut Vec<u8>) {
    let ecam = Memory32Fixed::new(true, pci::ECAM_BASE as u32, pci::ECAM_SIZE as u32);
    let power = ports(power::PM1A_EVENT, power::LEN);
    device("MBRD", "PNP0C02", &[&ecam, &power], out);
}

/// What every PC has at the same place. No keyboard controller: nothing is plugged into it.
fn legacy_devices(out: &mut Vec<u8>) {
    let serial = ports(uart::COM1, uart::LEN);
    device("COM1", "PNP0501", &[&serial, &isa_interrupt(uart::COM1_IRQ)], out);
    device("RTC_", "PNP0B00", &[&ports(rtc::BASE, 2), &isa_interrupt(RTC_IRQ)], out);
    let registers = Memory32Fixed::new(true, hpet::BASE as u32, hpet::LEN as u32);
    device("HPET", "PNP0103", &[&registers], out);
}

/// A processor device (8.4); its `_UID` is the one in the MADT.
fn cpu(id: u32, out: &mut Vec<u8>) {
    let name = format!("C{id:03X}");
    let hid = Name::new("_HID".into(), &"ACPI0007");
    let uid = Name::new("_UID".into(), &id);
    Device::new(name.as_str().into(), vec![&hid, &uid]).to_aml_bytes(out);
}

/// A device that is always there, with a plug-and-play ID and fixed resources.
fn device(name: &str, id: &str, resources: &[&dyn Aml], out: &mut Vec<u8>) {
    let hid = Name::new("_HID".into(), &EISAName::new(id));
    let uid = Name::new("_UID".into(), &0_u8);
    let resources = ResourceTemplate::new(resources.to_vec());
    let crs = Name::new("_CRS".into(), &resources);
    Device::new(name.into(), vec![&hid, &uid, &crs]).to_aml_bytes(out);
}

/// An ISA interrupt: edge, active high, not shared.
fn isa_interrupt(irq: u32) -> Interrupt {
    Interrupt::new(true, true, false, false, irq)
}

/// `len` fixed ports.
fn ports(base: u64, len: u64) -> IO {
    IO::new(base as u16, base as u16, 1, len as u8)
}

/// AML already made.
struct Bytes(Vec<u8>);

impl Aml for Bytes {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        sink.vec(&self.0);
    }
}
