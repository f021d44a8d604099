//! What monitor, wedge and translated code share, and where it lies.
//!
//! Translated code keeps all guest registers in the host's registers. For everything else it reaches the vCPU
//! page ([`VcpuPage`]) by RIP-relative addressing: spill slots, the virtual interrupt flag, where to jump. On
//! an exit the registers are stored to it, and it is then all of the architectural state that guest code can
//! change without the monitor. The monitor believes nothing it reads here without checking it.
//!
//! - [`VcpuPage`]: the state of a vCPU, shared by the monitor and all its wedges.
//! - [`Shared`]: what the monitor and one wedge tell each other: mapping commands, what is mapped.
//! - [`TurnsPage`]: which process runs the vCPU.
//! - [`UserPage`], [`Journal`]: what a wedge shares with the process of its user code, if there is one.
//! - [`area`]: thread-local segments of 32-bit programs.
//! - [`Lookups`]: a wedge's software TLB for translated user code.
//!
//! Assembly and the translator take offsets from these structures by `offset_of!`.
#![no_std]

mod areas;
mod bells;
mod claims;
mod command;
mod exit;
mod jumps;
/// Bytes that let a program load the protection-key register.
pub mod keys;
mod lookups;
mod places;
mod regions;
mod shared;
mod sites;
mod taps;
mod turns;
mod user;
mod vcpu;
mod window;
pub mod words;

pub use areas::*;
pub use bells::{Bell, BellState, Bells, MAX_BELLS, MAX_RINGS, NO_CLASS, Ring};
pub use claims::*;
pub use command::*;
pub use exit::*;
pub use jumps::*;
pub use lookups::*;
pub use places::*;
pub use regions::*;
pub use shared::*;
pub use sites::*;
pub use taps::*;
pub use turns::*;
pub use user::*;
pub use vcpu::*;
pub use window::*;

/// In what the wedge refers to from several places at a time, host code it calls included. It tells the
/// compiler that a mutable reference is not the only one: without it stores were left out before calls that
/// do not return.
pub type Shares = core::marker::PhantomPinned;
