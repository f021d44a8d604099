//! The Linux host: the one crate that names libc and rustix for what [`host`] asks.
//!
//! It never opens `/dev/kvm`, and asks for no privilege an ordinary user lacks.

pub mod account;
mod affinity;
mod body;
mod cgroup;
mod child;
mod clock;
pub mod cpu;
mod cpuid_faults;
mod delays;
mod entropy;
mod facts;
pub mod inherited;
pub mod limits;
mod linux;
mod lock_file;
mod mapped_file;
mod memory;
mod narrow;
mod notifications;
pub mod probe;
pub mod process;
pub mod spawner;
pub mod streams;
pub mod terminal;
mod trace;
pub mod usage;
pub mod user;

pub use child::LinuxChild;
pub use clock::{LinuxClock, TscSource};
pub use entropy::LinuxEntropy;
pub use linux::Linux;
pub use lock_file::LockFile;
pub use mapped_file::MappedFile;
pub use memory::prepare_fences;
