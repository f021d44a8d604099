//! What developers' tasks are made of; boot tests use the same parts.
//!
//! - [`kernels`] fetches and keeps guests; its modules are here too.
//! - [`self_tests`] keeps programs that test the machine they run on.
//! - [`initramfs`] packs a root file system.
//! - [`demo`], [`bench`], [`checks`], [`layers`] and [`markdown`] are the tasks themselves; [`tally`] counts tests, `cycles`,
//!   `names` and `spread` are parts of [`layers`].

pub use kernels::{archive, assets, command, cpio, modules, scratch};

pub mod bench;
pub mod checks;
pub(crate) mod cycles;
pub mod demo;
pub mod initramfs;
pub mod layers;
pub mod markdown;
pub(crate) mod names;
pub mod self_tests;
pub(crate) mod spread;
pub mod tally;
