//! Faults of disks, networks and the machine, injected on purpose.
//!
//! A [`Scenario`] says which faults happen, where and when. [`FaultyDisk`] and [`FaultyNet`] are filters around a device's
//! backend, so they sit in the process that serves the device, and a machine without a scenario does not
//! contain them. Each injected fault is reported as a [`Record`].
//!
//! The idea is FAUmachine's (reproducible fault injection below an unmodified system); the trigger conditions follow what
//! `dm-flakey`, `dm-error` and `tc netem` offer.
//!
//! # Parts
//!
//! - `scenario`: the file format, checked completely before anything starts.
//! - `schedule`: decides for each request which faults strike it. One random generator per device, seeded by the scenario:
//!   the same requests in the same order meet the same faults.
//! - `disk`, `cache`: a faulty disk. For power cuts it remembers what the last flush left on the disk.
//! - `net`: a faulty cable; `plug`: one that is pulled.
//! - `rogue`: a device that breaks virtio's rules.
//! - `actions`: what can go wrong; `hardware`: what hardware finds and tells of. `clock`, `interrupts`: a faulty clock, and faulty
//!   interrupts of PCI devices. What else strikes at a time is for the monitor to do.
//! - `record`: what was injected; `contents`: what it leaves on a disk.

mod actions;
mod cache;
mod clock;
mod contents;
mod disk;
mod forward;
mod hardware;
mod interrupts;
mod net;
mod plug;
mod record;
mod rogue;
mod scenario;
mod schedule;

pub use actions::{
    Bit, DiskAction, Flip, InterruptAction, MachineAction, NetAction, Place, ProtocolAction,
    REGISTERS, StuckBit,
};
pub use chipset::{MachineError, Severity};
pub use clock::FaultyClock;
pub use contents::Contents;
pub use disk::{DiskControl, FaultyDisk};
pub use hardware::{MachineCheck, MemoryError};
pub use interrupts::FaultyInterrupts;
pub use net::{FaultyNet, NetControl};
pub use plug::{Plug, PluggedNet};
pub use record::{Effect, Record, Recorder, Struck};
pub use rogue::Rogue;
pub use scenario::{Cue, Fault, Scenario, ScenarioError, Target, Timed, syntax_error};
pub use schedule::{DeviceRequest, Op, Schedule};

#[cfg(test)]
host::choose!(host_linux::Linux);
