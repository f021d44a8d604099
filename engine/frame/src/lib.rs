//! The vCPU page and the window: what monitor, wedge and translated code share, and where.
//!
//! Translated code keeps all guest registers in the host's registers and reaches the [`Frame`] by
//! RIP-relative addressing for everything else: spill slots, the virtual interrupt flag, where to
//! jump. On an exit the registers are stored to it, and it is then all of the architectural state
//! that guest code can change without the monitor. The monitor believes nothing it reads here
//! without checking it.
#![no_std]

/// Bytes that let a program load the protection-key register.
pub mod keys;
mod layout;
mod lookups;

pub use layout::*;
pub use lookups::*;
