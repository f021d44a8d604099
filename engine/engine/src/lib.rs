//! How guest code runs: the loop that drives a vCPU with an engine.
//!
//! An [`Engine`] (of the crate `contract`) executes guest instructions until something outside has to act. [`VcpuLoop`] is
//! that outside: it delivers interrupts when the guest allows them, sleeps while the guest has
//! nothing to do, and ends when the machine stops. It is the same for every engine, so engines
//! differ in speed only.
//!
//! Debuggers and tracers reach a vCPU by work for its thread: `vcpu_work` says how.
//!
//! [`Board`] is the machine as the reference CPU sees it; [`VcpuRequests`] is how anybody, on any
//! thread, makes a vCPU look up.

mod board;
mod cpu_pool;
mod halt_poll;
mod host_turn;
mod interpreter;
mod log;
mod report;
mod requests;
mod vcpu_loop;
mod vcpu_work;

#[cfg(test)]
host::choose!(host_linux::Linux);

/// Locks and atomics, for which others stand in `tests/models`.
mod sync {
    pub(crate) use std::sync::*;
}

pub use board::{Board, BoardParts, LocalApic};
pub use contract::{Counters, Engine, Exit, Failure, Probes, Reached, Watch, Whose, pending};
pub use cpu_pool::{CpuPermit, CpuPool};
pub use host_turn::HostTurn;
pub use interpreter::Interpreter;
pub use log::{Event, EventLog};
pub use report::{Report, Statistics};
pub use requests::{Control, RunCommand, VcpuRequests};
pub use vcpu_loop::{Ended, VcpuLoop};
pub use vcpu_work::{ProbeHandler, VcpuAccess, VcpuWork, Verdict};
