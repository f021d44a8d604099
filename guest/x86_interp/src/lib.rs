//! The reference x86-64 CPU.
mod system;
pub use system::{CpuidResult, GuestRam, RamPage, System, VectorOperands, VectorUnit};
