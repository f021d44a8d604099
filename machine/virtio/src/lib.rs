//! Virtio 1.2 devices and their PCI transport.
//!
//! Three parts that know as little of each other as they can:
//!
//! - **Bodies** ([`Rng`], [`Console`], [`Block`], [`Net`], [`Fs`], [`vsock::Vsock`]) implement [`VirtioDevice`]. A body sees device
//!   configuration bytes and queues of buffers. It knows neither PCI, nor which thread or process
//!   it runs in, nor how the driver is told.
//! - **Rings** ([`Queue`], [`Chain`]) take requests from guest memory and give them back. The ring
//!   format is `virtio-queue`'s; what is checked beyond that is listed in [`RingError`].
//! - **Transport** ([`VirtioPci`]): registers, status, interrupts. It decides where a queue runs
//!   ([`Execution`]): on the vCPU thread that rang the doorbell, or on a worker.
//!
//! # Hostile drivers
//!
//! Whatever the guest writes into rings or registers ends in one of two ways: the request gets an
//! error status the driver can read, or the device sets DEVICE_NEEDS_RESET (virtio 1.2 section
//! 2.1.2) and touches no queue until it is reset. Buffers are checked to be RAM before a body sees
//! them, and no allocation is larger than the longest chain allowed ([`MAX_CHAIN`]).
//!
//! # Wiring
//!
//! ```
//! # host::choose!(host_linux::Linux);
//! # use std::sync::Arc;
//! # struct Nothing;
//! # impl bus::InterruptLine for Nothing { fn set(&self, _: bool) {} }
//! # impl bus::MsiSink for Nothing { fn send(&self, _: u64, _: u32) {} }
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let lines: [Arc<dyn bus::InterruptLine>; 8] = std::array::from_fn(|_| Arc::new(Nothing) as _);
//! # let host = pci::PciHost::new(lines, Arc::new(Nothing));
//! # let ram = ram::Ram::new(1 << 20)?;
//! use virtio::{Console, Execution, InputBuffer, VirtioPci};
//!
//! let input = InputBuffer::default();
//! let console = Console::new(Box::new(input.clone()), Box::new(std::io::sink()));
//! let size = console.size();
//!
//! let slot = host.reserve()?;
//! let (msi, line) = (slot.msi(), slot.line());
//! let function = VirtioPci::new(Box::new(console), ram, msi, line, Execution::Inline)?;
//! let doorbell = function.doorbell();
//! host.add(slot, function)?;
//!
//! // From any host thread: keys pressed, terminal resized.
//! input.push(b"ls\n");
//! doorbell.ring(virtio::CONSOLE_RECEIVE);
//! size.set(80, 25);
//! doorbell.config_changed();
//! # Ok(()) }
//! ```
//!
//! # Lock order
//!
//! PCI function → device → interrupt state → PCI's locks. A worker takes only the device's lock and
//! those after it. Neither the ISR nor a doorbell given to a worker waits for a running request.

mod block;
mod chain;
mod common_config;
mod console;
mod device;
mod fs;
mod interrupts;
mod layout;
mod net;
mod queue;
mod request_log;
mod rng;
mod runner;
mod running;
mod transport;
pub mod vsock;

/// Device IDs (virtio 1.2 chapter 5).
pub mod device_id {
    use virtio_bindings::virtio_ids as ids;

    /// Network interface.
    pub const NET: u16 = ids::VIRTIO_ID_NET as u16;
    /// Disk.
    pub const BLOCK: u16 = ids::VIRTIO_ID_BLOCK as u16;
    /// Console.
    pub const CONSOLE: u16 = ids::VIRTIO_ID_CONSOLE as u16;
    /// Source of randomness.
    pub const RNG: u16 = ids::VIRTIO_ID_RNG as u16;
    /// Sockets to the host.
    pub const VSOCK: u16 = ids::VIRTIO_ID_VSOCK as u16;
    /// Shared folder.
    pub const FS: u16 = ids::VIRTIO_ID_FS as u16;
}

pub use block::{Block, BlockBackend, BlockRequest, BrokenDisk, SECTOR};
pub use chain::{Buffer, Chain, MAX_CHAIN};
pub use console::{
    Console, ConsoleInput, ConsoleSize, InputBuffer, RECEIVE as CONSOLE_RECEIVE,
    TRANSMIT as CONSOLE_TRANSMIT,
};
pub use device::{Telling, VirtioDevice};
pub use fs::{FileServer, Fs, MAX_MESSAGE as FS_MAX_MESSAGE};
pub use net::{Net, NetBackend, RECEIVE as NET_RECEIVE, TRANSMIT as NET_TRANSMIT};
pub use queue::{Answer, Interrupt, Queue, RingError, Shape, Tamper};
pub use request_log::{LogReader, REQUEST_LOG_LEN, RequestLog, RequestNote};
pub use rng::Rng;
pub use runner::{Doorbell, Execution};
pub use transport::{VirtioError, VirtioPci};

#[cfg(test)]
host::choose!(host_linux::Linux);

/// Has a device look for what has come for the guest. It may be called on any thread, the device's own too.
pub type Notify = std::sync::Arc<dyn Fn() + Send + Sync>;

/// Locks. A poisoned lock means a device panicked, which is our bug and has been reported; the
/// state is still the best there is.
fn lock<T: ?Sized>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
