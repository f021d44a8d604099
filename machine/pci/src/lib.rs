//! PCI: one bus of type-0 functions behind a host bridge.
//!
//! The guest finds functions through configuration space, reached by ports 0xcf8/0xcfc
//! ([`ConfigPorts`], mechanism #1) or memory ([`Ecam`]); it talks to them through memory BARs
//! inside one window of GPAs ([`MmioWindow`]) and hears from them by MSI-X ([`Msix`]) or INTx
//! ([`Intx`]). All of these are ordinary [`bus::Device`]s; nothing here knows a process or engine.
//!
//! There is no firmware: [`PciHost::add`] assigns BARs and the interrupt line register the way
//! firmware would. The guest may move BARs afterwards; the window follows their current values.
//!
//! # Wiring
//!
//! ```
//! # use std::sync::{Arc, Mutex};
//! # struct Nothing;
//! # impl bus::InterruptLine for Nothing { fn set(&self, _: bool) {} }
//! # impl bus::MsiSink for Nothing { fn send(&self, _: u64, _: u32) {} }
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // The I/O APIC's inputs 16 to 23 (and the 8259 inputs of `wire_irq`), and the local APICs.
//! let lines: [Arc<dyn bus::InterruptLine>; 8] = std::array::from_fn(|_| Arc::new(Nothing) as _);
//! let host = pci::PciHost::new(lines, Arc::new(Nothing));
//!
//! // For every device: reserve a slot, build the function on its wires, add it.
//! let slot = host.reserve()?;
//! // let function = virtio::VirtioPci::new(device, dma, slot.msi(), slot.line(), placement)?;
//! // host.add(slot, function)?;
//!
//! let (mut ports, mut mmio) = (bus::Bus::new(), bus::Bus::new());
//! ports.insert(pci::CONFIG_PORTS, 8, Arc::new(Mutex::new(host.config_ports())))?;
//! mmio.insert(pci::ECAM_BASE, pci::ECAM_SIZE, Arc::new(Mutex::new(host.ecam())))?;
//! mmio.insert(pci::WINDOW_BASE, pci::WINDOW_SIZE, Arc::new(Mutex::new(host.window())))?;
//! # Ok(()) }
//! ```
//!
//! ACPI must say the same: MCFG with [`ECAM_BASE`] (segment 0, bus 0), a PNP0A08 root with
//! the window in `_CRS`, and a `_PRT` from [`interrupt_gsi`] or, for systems that leave the I/O APIC
//! alone, [`interrupt_irq`].
//!
//! # Lock order
//!
//! bus window → function → { routes, MSI-X state, INTx state } → shared line → interrupt
//! controller. The locks in braces are never held together, and never while a function is called.

mod bar;
mod capability;
mod config;
mod function;
mod host;
mod intx;
mod msix;
mod ports;

pub use bar::{Bar, BarWidth};
pub use capability::Capability;
pub use config::{ConfigSpace, Identity};
pub use function::{Endpoint, Function};
pub use host::{PciHost, Slot, interrupt_gsi, interrupt_irq, wire_irq};
pub use intx::Intx;
pub use msix::{MsiTable, Msix};
pub use ports::{ConfigPorts, Ecam, MmioWindow};

/// First of the eight ports of configuration mechanism #1.
pub const CONFIG_PORTS: u64 = 0xcf8;
/// GPA of the enhanced configuration access window (PCIe 5.0 section 7.2.2).
pub const ECAM_BASE: u64 = 0xe000_0000;
/// Bytes of the enhanced configuration access window: that of the one bus there is. Systems look for something on every bus the
/// window could have, an exit for each look.
pub const ECAM_SIZE: u64 = 1 << 20;
/// GPA of the window that memory BARs are decoded in.
pub const WINDOW_BASE: u64 = 0xc000_0000;
/// Bytes of the window that memory BARs are decoded in.
pub const WINDOW_SIZE: u64 = 0x2000_0000;
/// Device numbers on a bus.
pub const SLOTS: usize = 32;

/// What the machine's builder got wrong. The guest cannot cause these.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum PciError {
    /// All 32 device numbers are taken.
    #[error("no free PCI slot")]
    NoSlot,
    /// The window has no room for a BAR.
    #[error("no room for a BAR of {0:#x} bytes in the PCI memory window")]
    NoRoom(u64),
    /// A BAR's size is not a power of two of at least 16 bytes, or its register does not exist or
    /// is taken.
    #[error("BAR {0} is malformed or taken")]
    BadBar(u8),
    /// Configuration space has no room for a capability.
    #[error("no room for a capability of {0} bytes")]
    NoCapabilityRoom(usize),
    /// A vector count MSI-X cannot express (1 to 2048).
    #[error("{0} MSI-X vectors")]
    BadVectorCount(usize),
}

/// Locks. A poisoned lock means a device panicked, which is our bug and has been reported; the
/// state is still the best there is.
fn lock<T: ?Sized>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
