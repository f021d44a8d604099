//! What developers' tasks are made of; boot tests use the same parts.
//!
//! - [`archive`] fetches packages from Debian's archive, as root or not, verified by apt.
//! - [`assets`] keeps what they contain in a cache and checks it before every use.
//! - [`modules`] finds kernel modules and the order to load them in.
//! - [`cpio`] and [`initramfs`] pack a root file system.

pub mod archive;
pub mod assets;
pub mod command;
pub mod cpio;
pub mod initramfs;
pub mod modules;
