//! Programs by chance, run on the host and in guests: what they see must be the same.
//!
//! A program is a line of text: a name, the places in memory that it uses, and steps, each a kind and a number.
//! The line is all there is to it, so a failing one can be kept, repeated and shrunk. The guests' program
//! `chance` runs lines (`programs/chance`); whatever it notes does not depend on where and when it runs.

mod cases;
mod programs;
mod run;
mod shrink;

pub use cases::cases;
pub use programs::{Program, Scope};
pub use run::{Difference, Place, Runs};
pub use shrink::shrink;
