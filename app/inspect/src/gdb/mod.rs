//! GDB's remote protocol, by the crate gdbstub.
//!
//! A session is a thread that has the packets, and a handler at each vCPU that has the breakpoints. The machine stands while GDB
//! looks at it. vCPUs are threads. Breakpoints and watched memory are [`vmm::Probes`]: the guest cannot see them.
//!
//! - `target`: what GDB may ask of a machine; `registers`: its registers; `monitor`: commands of ours.
//! - `session`: who talks when.

mod catch;
mod monitor;
mod registers;
mod session;
mod target;

pub use session::{SessionError, serve};
