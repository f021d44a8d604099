//! What an x86-64 CPU *is*: registers, control bits, descriptors, exceptions and page tables.
//!
//! This crate holds data and laws, no behaviour that needs a machine around it. It has no host,
//! no I/O, no allocation and no `unsafe`, so the interpreter, the translator, the shadow MMU and
//! the wedge can all share it. References are to the Intel SDM (volume 3A unless said otherwise).
#![no_std]

pub mod bits;
pub mod control;
pub mod cpuid;
pub mod exception;
pub mod flags;
pub mod fpu;
pub mod kvm;
pub mod msr;
pub mod narrow;
pub mod paging;
pub mod paravirt;
pub mod segment;
pub mod tap;
mod vcpu;

pub use exception::{Fault, vector};
pub use segment::{Gate, Segment, TableRegister};
pub use vcpu::{Activity, Mtrr, Vcpu, reg, seg};
