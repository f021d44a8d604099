//! Translated code on the host CPU against the interpreter.
//!
//! A [`Case`] is a random stretch of a kernel's code, or a program's, with registers and memory. The [`rig`] maps its
//! memory (a kernel's in a biased window), a code cache and a vCPU page into a forked child, translates the code and runs
//! it to its first exit or fault; the interpreter starts from the same state and is stepped until it
//! stands at the same guest address. Registers, flags and memory must then agree.
//!
//! What is compared is the whole contract of a block: every instruction executed exactly once,
//! faults undone to the start of their instruction, no flag clobbered by a sequence. Some cases are also
//! run with an interrupt at each boundary between their instructions ([`check_interrupted`]).

pub mod case;
pub mod compare;
pub mod interp;
pub mod rig;

pub use case::Case;
pub use compare::{Difference, check, check_interrupted};

host::choose!(host_linux::Linux);
