//! Differential tests: the host CPU is the oracle of the reference interpreter.

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

pub use case_file::{CaseError, CaseFile};
pub use check::{CheckError, Checker, Report};
pub use generate::Generator;
pub use interp::{Interpreted, Interpreter};
pub use runner::{NativeRunner, RunnerError};
pub use state::{Case, Outcome, Patch, State, Stop};
