//! Looking into a machine that runs, from outside its guest.
//!
//! - [`code_map`]: which of its kernel's functions the host code is that runs in its place.
//! - [`core_file`]: all of its memory and registers as an ELF core, for crash and drgn.
//! - [`gdb`]: GDB's remote protocol.
//! - [`profile`]: where its time goes; [`top`]: what its vCPUs do.
//! - [`strike`]: registers and memory change as if something were broken.
//! - [`trace`]: what a Linux guest does; [`linux`]: its symbols and types.
//! - [`memory`]: guest memory by GVA; [`stopped`]: all vCPUs stopped meanwhile.
//! - [`vmcoreinfo`]: what a Linux kernel says of itself.
//!
//! The guest is read as it is: whatever its memory says may be garbage, and is looked at with bounds.

mod backing;
pub mod code_map;
pub mod core_file;
pub mod gdb;
mod lines;
pub mod linux;
pub mod memory;
pub mod profile;
pub mod stopped;
pub mod strike;
pub mod top;
pub mod trace;
pub mod vmcoreinfo;

#[cfg(test)]
host::choose!(host_linux::Linux);
