//! What developers' tasks are made of; boot tests use the same parts.
//!
//! - [`archive`] fetches packages from Debian's archive, as root or not, verified by apt.
//! - [`assets`] keeps what they contain in a cache and checks it before every use.
//! - [`self_tests`] keeps programs that test the machine they run on.
//! - [`modules`] finds kernel modules and the order to load them in.
//! - [`cpio`] and [`initramfs`] pack a root file system.
//! - [`demo`], [`bench`], [`checks`] and [`layers`] are the tasks themselves.

pub mod archive;
pub mod assets;
pub mod bench;
pub mod checks;
pub mod command;
pub mod cpio;
pub mod demo;
pub mod initramfs;
pub mod layers;
pub mod modules;
pub mod self_tests;
