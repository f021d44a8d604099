//! From a description to running parts.
//!
//! [`Machine::build`] turns a [`Description`] and a [`Host`] into a PC: RAM with a kernel in it,
//! the chipset, PCI devices, its vCPUs. [`Machine::start`] gives it threads:
//!
//! - a thread for each vCPU executes the guest and, inline, the devices it touches;
//! - the timer thread sleeps until a device's deadline and lets the device act on it;
//! - the console thread writes what the guest printed, so that a slow reader costs the guest
//!   nothing until the buffer is full;
//! - whoever has input for the guest pushes it from a thread of its own ([`ConsoleInput`]).
//!
//! This crate names no particular host: clocks, randomness and the output come in as traits.

mod apic;
mod console;
mod devices;
mod error;
mod events;
mod inspector;
mod machine;
mod panic;
mod paravirt;
mod running;
mod timer;

use std::{io::Write, sync::Arc};

pub use bus::MsiSink;

pub use boot::{BootProtocol, unpacked, unpacked_kernel};
pub use console::ConsoleInput;
pub use devices::LoggedDevice;
pub use engine::{
    Failure, ProbeHandler, Probes, Reached, Report, Statistics, VcpuAccess, Verdict, Watch, Whose,
};
pub use error::Error;
pub use events::Ended;
pub use fast::{
    FlushCounts, KnownBlocks, LockStep, Options as FastOptions, RunningKernel, Scattered, Switches,
    translate_noted, wedges,
};
pub use inspector::Inspector;
pub use machine::Machine;
pub use running::{RunningMachine, check_fast_engine};
pub use virtio::{Doorbell, Execution, LogReader, RequestNote, VirtioDevice, device_id};
pub use x86::{cpuid::CpuidResult, paravirt as kvm_features};

#[cfg(test)]
host::choose!(host_linux::Linux);

/// What to build.
#[derive(Clone, Debug)]
pub struct Description {
    /// Content of the kernel file.
    pub kernel: Vec<u8>,
    /// What the kernel file unpacks to, if it has been unpacked before.
    pub unpacked: Option<Arc<dyn unpacked::Unpacked>>,
    /// Files handed to the kernel: for Linux its initrd.
    pub modules: Vec<ModuleFile>,
    /// Arguments of the kernel.
    pub cmdline: String,
    /// How to start it.
    pub protocol: BootProtocol,
    /// Guest memory in bytes, a multiple of 4096.
    pub memory: u64,
    /// Number of vCPUs, at least one.
    pub cpus: u32,
    /// What executes guest code, and how.
    pub engine: EngineOptions,
    /// The devices kvm-unit-tests drive: echo ports, interrupt line ports, memory that is a device.
    pub test_devices: bool,
    /// How near to the host's the guest's time of day is.
    pub clock: GuestClock,
    /// What of KVM's interface the guest is offered beside the clock: bits of [`kvm_features::feature`]. If nothing is said, the guest is offered
    /// [`kvm_features::ALL`] where vCPUs outnumber the host's CPUs. Elsewhere one vCPU is offered `EOI`, and several are offered `EOI` and
    /// `DEDICATED`.
    pub paravirt: Option<u64>,
}

/// How near to the host's the guest's time of day is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GuestClock {
    /// Set by the CMOS clock, which counts whole seconds: up to half a second off.
    #[default]
    Rtc,
    /// Led by KVM's paravirtual clock, and put right when the guest has set it by the CMOS clock.
    Exact,
    /// Led by KVM's clock, too, and set by a program in the guest that knows what time it is.
    Led,
}

/// What executes guest code, and how.
#[derive(Clone, Copy, Debug, Default)]
pub struct EngineOptions {
    /// Which engine.
    pub kind: EngineKind,
    /// 64-bit user code is translated, too, where it would run directly.
    pub translate_user: bool,
    /// One of several vCPUs that halts sleeps at once, and does not look for a moment whether it is kicked.
    pub sleep_at_once: bool,
    /// How the fast engine does it, whichever of its parts are in use.
    pub fast: FastOptions,
}

/// What executes guest code.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineKind {
    /// The best this host can run.
    #[default]
    Auto,
    /// The reference interpreter.
    Interpreter,
    /// 64-bit user code directly on the CPU, kernel code translated.
    Fast,
    /// 64-bit user code directly on the CPU, everything else interpreted.
    Direct,
    /// Kernel code translated, everything else interpreted.
    Jit,
}

/// A file handed to the kernel.
#[derive(Clone, Debug)]
pub struct ModuleFile {
    /// Its content.
    pub data: Vec<u8>,
    /// Its command line, by convention beginning with its name.
    pub cmdline: String,
}

/// What the machine needs of its host.
pub struct Host {
    /// Time.
    pub clock: Arc<dyn host::Clock>,
    /// Randomness.
    pub entropy: Arc<dyn host::Entropy>,
    /// The host's CPUID.
    pub cpuid: fn(u32, u32) -> CpuidResult,
    /// Where the first serial port's output goes.
    pub console: Box<dyn Write + Send>,
    /// Devices whose other side the caller has made: disks, networks, shared folders, sockets.
    pub attachments: Vec<Attachment>,
    /// What stands between PCI's message-signalled interrupts and the interrupt controllers, if anything does.
    pub messages: Option<MessageFilter>,
    /// Blocks of the kernel's code that are known, or are to be noted.
    pub known_blocks: Arc<KnownBlocks>,
    /// Finds out where in its memory the guest's kernel counts the flushes of its TLBs.
    pub flush_counts: FlushCounts,
    /// For each vCPU the locks by which it takes turns with the vCPUs of other machines. A vCPU without locks takes no turns.
    pub turns: Vec<Box<dyn host::Locks>>,
    /// Called when the guest's kernel says that it has crashed; without it there is no device for that.
    pub on_panic: Option<Box<dyn Fn() + Send>>,
}

/// Puts something before what takes message-signalled interrupts.
pub type MessageFilter = Box<dyn FnOnce(Arc<dyn MsiSink>) -> Arc<dyn MsiSink>>;

/// A virtio device made by the caller.
pub struct Attachment {
    /// The device body.
    pub device: Box<dyn VirtioDevice>,
    /// Which thread serves it: one of its own, unless it only passes on what it is asked.
    pub execution: Execution,
    /// Told how to have the device look for what the host has for the guest.
    pub connect: Box<dyn FnOnce(Doorbell) + Send>,
    /// Called when the machine has come to rest.
    pub release: Box<dyn FnOnce() + Send>,
}

impl Attachment {
    /// A device with a thread of its own, of which nothing is left when the machine has come to rest.
    pub fn new(
        device: Box<dyn VirtioDevice>,
        connect: impl FnOnce(Doorbell) + Send + 'static,
    ) -> Self {
        let (connect, release) = (Box::new(connect), Box::new(|| {}));
        Self { device, execution: Execution::Worker, connect, release }
    }
}
