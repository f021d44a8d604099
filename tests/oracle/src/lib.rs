//! Differential tests: the host CPU is the oracle of the reference interpreter.

pub mod background;
pub mod forms;
pub mod generate;
pub mod layout;
pub mod random;
pub mod runner;
pub mod state;
pub mod values;

pub use runner::{NativeRunner, RunnerError};
pub use state::{Case, Outcome, Patch, State, Stop};
