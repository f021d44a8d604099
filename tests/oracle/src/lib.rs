//! Differential tests: the host CPU is the oracle of the reference interpreter.
//!
//! A [`Case`] is a few instructions with registers and memory. The [`Generator`] makes random ones of
//! every instruction form the CPU model offers, and near misses of them. [`NativeRunner`] runs a
//! case on the host CPU, [`Interpreter`] in `x86_interp`; a [`Checker`] does both and compares
//! everything a program can see: registers, flags, memory, and the exception with its error code,
//! address and RIP.
//!
//! - `layout`, `state`, `field`: what a case is and what comes of it.
//! - `generate`, `values`, `background`, `random`, `forms`: where cases come from.
//! - `runner`: the native side. It knows nothing of the interpreter and will check faster engines too.
//! - `interp`, `undefined`: the other side, and what the architecture leaves open.
//! - `vendor`: where the host CPU's maker departs from Intel.
//! - `check`, `compare`, `campaign`, `shrink`, `case_file`, `table`: finding, shrinking, keeping and
//!   reporting differences.
//!
//! Not tested here: privileged state, interrupts, 32-bit and 16-bit code, self-modifying code, and
//! anything with a second CPU.

pub mod background;
pub mod campaign;
pub mod case_file;
pub mod check;
pub mod compare;
pub mod field;
pub mod forms;
pub mod generate;
pub mod interp;
pub mod layout;
pub mod random;
pub mod runner;
pub mod shrink;
pub mod state;
pub mod table;
pub mod undefined;
pub mod values;
pub mod vendor;

pub use case_file::{CaseError, CaseFile};
pub use check::{CheckError, Checker, Report};
pub use generate::Generator;
pub use interp::{Interpreted, Interpreter};
pub use runner::{NativeRunner, RunnerError};
pub use state::{Case, Outcome, Patch, State, Stop};
pub use vendor::Vendor;

#[cfg(test)]
host::choose!(host_linux::Linux);
