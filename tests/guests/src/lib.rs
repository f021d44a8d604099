//! Boot tests: real kernels on the released program, from power-on to power-off.
//!
//! A test says which kernel boots with which script as its userland, and what must have been
//! printed. It sees of ring3 what a user sees: options, output, exit code.

pub mod campaign;
pub mod chance;
mod compiler;
pub mod file_systems;
mod guest;
mod handed_over;
mod machine;
mod modules;
pub mod postgres;
pub mod power_cut;
pub mod visits;
pub mod zoo;

pub use compiler::compile;
pub use guest::{BootFiles, Finished, Guest, LEASE, converse, counter, figure, ring3};
pub use handed_over::hand_over;
pub use machine::Machine;
pub use modules::modules;

use xtask::assets::Kernel;

/// The kernels that what `ring3 exec` promises is tested with, by their names: Linux 6.1, 6.12 and the newest.
pub const KERNELS: [&str; 3] = ["debian-12", "debian-13", "debian-sid"];

/// The kernel that `ring3 exec` takes by itself.
pub const USUAL: Kernel = Kernel::TrixieCloud;

host::choose!(host_linux::Linux);
