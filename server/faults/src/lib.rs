//! Faults of disks and networks, injected on purpose.
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
//! - `net`: a faulty cable.
//! - `record`: what was injected.

mod cache;
mod disk;
mod net;
mod record;
mod scenario;
mod schedule;

pub use disk::FaultyDisk;
pub use net::FaultyNet;
pub use record::{Effect, Record, Recorder};
pub use scenario::{DiskAction, Fault, NetAction, Scenario, ScenarioError, Target};
pub use schedule::{Op, Request, Schedule};
