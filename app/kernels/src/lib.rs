//! Kernels to boot, from Debian's archive, and what packs a first root file system for them.
//!
//! - `alone` has processes that share a cache wait for each other.
//! - [`archive`] fetches packages from Debian's archive, as root or not, verified by apt.
//! - [`assets`] keeps what they contain in a cache and checks it before every use.
//! - [`modules`] finds kernel modules and the order to load them in.
//! - `package` unpacks packages, `lists` lists a kernel's modules where depmod is missing.
//! - [`cpio`] writes the archive Linux unpacks as its first root file system.
//! - [`command`] runs other programs, [`interrupt`] ends them when we are told to end.
//! - [`scratch`] is where things are made until they are complete.

mod alone;
pub mod archive;
pub mod assets;
pub mod command;
pub mod cpio;
pub mod interrupt;
mod lists;
pub mod modules;
mod package;
pub mod scratch;
