//! Benchmarks: the same static program natively, in ring3 and in every peer, side by side.
//!
//! We believe only what was measured together. All environments run at the same time and wait;
//! a batch goes to each in turn, so that a noisy machine hurts all alike, and every figure is a
//! multiple of the native one next to it.
//!
//! - [`program`] builds the guest program (`guest/*.c`), which checks its own results.
//! - [`peers`] are the environments it can run in, [`session`] is one that runs.
//! - [`protocol`] is what is said between the two.
//! - [`schedule`] takes turns among [`instance`]s of environments.
//! - [`startup`] measures starting and idling, by what [`processes`] take of the host, and
//!   [`density`] many at once, both in `rounds`. [`network`] measures servers inside from the host.
//! - [`record`] is what comes out, and `resume` goes on with what was ended. `forecast` spares what
//!   would take hours, `progress` tells how long the rest takes.
//! - [`stats`], [`table`] and [`page`] show it; [`compare`] tells changes from noise.

pub mod compare;
pub mod density;
mod forecast;
pub mod instance;
pub mod network;
pub mod page;
pub mod papers;
pub mod peers;
mod process_groups;
pub mod processes;
pub mod program;
mod progress;
pub mod protocol;
pub mod record;
mod resume;
mod rounds;
pub mod schedule;
pub mod session;
pub mod startup;
pub mod stats;
pub mod table;

use std::path::PathBuf;

/// What can go wrong before there is anything to measure.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The C compiler is missing.
    #[error("cannot run `cc`, which builds the benchmark's program: install the package gcc")]
    NoCompiler,
    /// The C compiler refused the program.
    #[error("the benchmark's program does not build:\n{0}")]
    DoesNotBuild(String),
    /// A file cannot be read or written.
    #[error("cannot use {}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file is not what `--json` writes.
    #[error("{} is not a result of the benchmark", path.display())]
    NotAResult {
        /// Which.
        path: PathBuf,
        /// Why.
        source: serde_json::Error,
    },
    /// A run cannot go on with another one's result.
    #[error(
        "{} is of a run with another {what}, which cannot be gone on with: leave out --resume",
        path.display()
    )]
    OtherRun {
        /// Its result.
        path: PathBuf,
        /// What is not the same.
        what: &'static str,
    },
    /// A name on the command line means nothing.
    #[error("there is no {kind} `{name}`; there are: {known}")]
    Unknown {
        /// What was named.
        kind: &'static str,
        /// As it was written.
        name: String,
        /// What would have been right.
        known: String,
    },
    /// The native run, to which all others are compared, failed.
    #[error("the native run failed: {0}")]
    Native(session::Failure),
}

impl Error {
    /// Names the file something went wrong with.
    pub fn file(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { path, source }
    }
}
