//! Boot tests: real kernels on the released program, from power-on to power-off.
//!
//! A test says which kernel boots with which script as its userland, and what must have been
//! printed. It sees of ring3 what a user sees: options, output, exit code.

pub mod campaign;
pub mod chance;
mod compiler;
pub mod file_systems;
mod guest;
mod machine;
mod modules;
pub mod postgres;
pub mod power_cut;
pub mod visits;
pub mod zoo;

pub use compiler::compile;
pub use guest::{BootFiles, Finished, Guest, LEASE, converse, counter, ring3};
pub use machine::Machine;
pub use modules::modules;

host::choose!(host_linux::Linux);
