//! The reference x86-64 CPU: an interpreter with a software TLB and a decoded-block cache.
//!
//! It can execute everything the machine supports, in every mode, and it is what every faster
//! engine is compared with. Being right comes first; the caches only keep it from crawling.
//!
//! - [`Cpu::run`] executes blocks until something outside has to act; [`Cpu::step`] executes one
//!   instruction and reports its exception instead of delivering it (for tests and lock-step).
//! - `memory` turns linear addresses into RAM or MMIO accesses through `tlb`.
//! - `decode` turns bytes into [`op::Op`]s: a handler and its operands; `block` caches them.
//! - `exec` has the handlers, one file per instruction family.
//! - `interrupt` delivers exceptions and interrupts; `task` switches tasks; `descriptor` and
//!   `segmentation` are what they and the far transfers stand on; `debug` has the breakpoints, `probe` those that the guest
//!   does not know of.
//!
//! Why faults are precise: a handler commits registers only after its last access that can
//! fault, and RIP is set back by the caller when it returns an error.

mod at_once;
mod bare;
mod block;
mod cpu;
mod debug;
mod decode;
mod descriptor;
mod exec;
mod iced_flags;
mod interrupt;
mod memory;
mod observe;
mod op;
mod probe;
mod segmentation;
mod system;
mod task;
mod tlb;

pub use bare::BareMachine;
pub use contract::{CodeNews, Counters, Exit, GuestRam, Probes, RamPage, Reached, pending};
pub use cpu::Cpu;
pub use iced_flags::rflags;
pub use observe::{Flush, Leave, Record};
pub use system::{CpuidResult, System, UnitCode, VectorOperands, VectorUnit};
