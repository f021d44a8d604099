//! The control socket of a running machine, and the commands that speak to it.
//!
//! Each machine listens on a Unix socket of its own in the user's runtime folder. A client sends
//! one JSON object a line, `{"command": "status"}`, and gets one a line back: the machine's status, or
//! `{"error": "..."}`. `docs/control.md` lists the commands.

mod client;
mod clients;
mod console;
mod drgn;
mod dump;
mod flame;
mod gdb;
mod handed;
mod orders;
mod perf_map;
mod profile;
mod server;
mod shown;
mod symbols;
mod top;
mod trace;
mod trace_dat;
mod watched;

use std::{
    env, fs, io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::PathBuf,
};

use host_linux::usage::Usage;
use serde::{Deserialize, Serialize};

use crate::spawner;

pub use client::{PsArguments, StatsArguments, Target, order, ps, stats};
pub use console::{Screen, console, serve as serve_console};
pub use drgn::{DrgnArguments, drgn};
pub use dump::{DumpArguments, dump, write_core};
pub use gdb::{GdbArguments, gdb};
pub use handed::{Hand, finish_telling};
pub use orders::obey;
pub use perf_map::{PerfMapArguments, perf_map};
pub use profile::{ProfileArguments, profile};
pub use server::{Asked, ControlListener, listen};
pub use top::{TopArguments, top};
pub use trace::{TraceArguments, trace};

/// What a machine can be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ControlOrder {
    /// Say how it is.
    Status,
    /// Say besides what it takes of the host.
    Stats,
    /// Stand still.
    Pause,
    /// Go on.
    Resume,
    /// End, as if switched off at the mains.
    Stop,
    /// From here on the connection carries the machine's core.
    Dump,
    /// From here on it carries GDB's remote protocol; the machine stands.
    Gdb,
    /// From here on it carries events: those that the client's next line asks for.
    Trace,
    /// From here on it carries what its vCPUs have done, again and again.
    Top,
    /// From here on it carries samples of its vCPUs, as often as the client's next line says.
    Profile,
    /// From here on it carries which host code stands for which function of the kernel.
    Code,
}

/// A line of a client.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    command: ControlOrder,
}

/// How a machine is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Its name.
    pub name: String,
    /// The process it runs in.
    pub pid: u32,
    /// `running`, `paused` or `stopping`.
    pub state: String,
    /// Seconds since it was switched on.
    pub seconds: f64,
    /// Bytes of memory it has.
    pub memory: u64,
    /// Its kernel's file.
    pub kernel: String,
    /// What it takes of the host, if that was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stats: Option<Stats>,
}

impl Status {
    /// A machine in this process, switched on now; its name is the process's number if it has no other.
    pub fn new(name: Option<String>, memory: u64, kernel: String) -> Self {
        let pid = std::process::id();
        let name = name.unwrap_or_else(|| pid.to_string());
        Self { name, pid, state: "running".to_owned(), seconds: 0.0, memory, kernel, stats: None }
    }
}

/// What all processes of a machine take of the host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stats {
    /// How many there are.
    pub processes: usize,
    /// Seconds of CPU time.
    pub cpu_seconds: f64,
    /// Bytes of memory, the guest's RAM as far as it was touched included.
    pub memory_used: u64,
}

impl Stats {
    /// This machine's, now; `None` if nobody can look.
    fn now() -> Option<Self> {
        let Usage { processes, cpu, memory } = spawner::usage().ok()?;
        Some(Self { processes, cpu_seconds: cpu.as_secs_f64(), memory_used: memory })
    }
}

/// A line of a server.
#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum Reply {
    Status(Status),
    Error { error: String },
}

/// The user's runtime folder of ring3, with sockets and locks. The folder is created if there is none, and refused if others may
/// write to it.
pub fn folder() -> io::Result<PathBuf> {
    let uid = host_linux::user::current().0;
    let runtime = env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty());
    let path = match runtime {
        Some(runtime) => PathBuf::from(runtime).join("ring3"),
        None => env::temp_dir().join(format!("ring3-{uid}")),
    };
    match fs::DirBuilder::new().mode(0o700).create(&path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let metadata = fs::symlink_metadata(&path)?;
    if !metadata.is_dir() || metadata.uid() != uid || metadata.mode() & 0o022 != 0 {
        let path = path.display();
        return Err(io::Error::other(format!("{path} is not a folder that only you may write to")));
    }
    Ok(path)
}
