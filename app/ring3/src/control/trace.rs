//! `ring3 trace`: the machine sends events, the client shows them.

use std::{
    ffi::OsString,
    io::{self, BufReader},
    os::unix::net::UnixStream,
    path::PathBuf,
};

use clap::{Args, ValueEnum};
use inspect::trace::{Line, Request};
use vmm::Inspector;

use super::{
    Order, Target,
    shown::{self, Shown},
    watched,
};
use crate::{failure::Failure, output};

/// How events are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// A line each, system calls as strace prints them
    Text,
    /// A JSON object each
    Json,
    /// How much time each thread spent in what, at the end: for flame graphs
    Folded,
    /// A file for ui.perfetto.dev or chrome://tracing
    Perfetto,
}

/// What to trace, and how to show it.
#[derive(Debug, Args)]
pub struct TraceArguments {
    /// A running machine
    #[arg(required_unless_present = "command", conflicts_with = "command")]
    pub machine: Option<String>,
    /// What: syscall[:NAME], exec, exit, fork, switch, irq, exception, break:SYMBOL[+OFFSET], return:SYMBOL; repeated, or with
    /// commas
    #[arg(
        short = 'e',
        long = "event",
        value_name = "EVENTS",
        value_delimiter = ',',
        required = true
    )]
    pub events: Vec<String>,
    /// Only threads of this name
    #[arg(long, value_name = "NAME")]
    pub comm: Option<String>,
    /// Only the process with this number in the guest
    #[arg(long, value_name = "N")]
    pub pid: Option<u32>,
    /// Where to write; standard output if not given, or standard error with a command
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// How to show events
    #[arg(long, value_enum, default_value_t = Format::Text)]
    pub format: Format,
    /// Start this machine, and trace it from its kernel's start on: exec -- make test
    #[arg(last = true, value_name = "COMMAND OF RING3")]
    pub command: Vec<OsString>,
}

/// The machine's side: what is wanted is a line of the client's.
pub(super) fn serve(inspector: &Inspector, client: &UnixStream) -> io::Result<()> {
    watched::serve(client, |request: &Request, writer, gone| {
        inspect::trace::serve(inspector, request, writer, gone)
    })
}

/// `ring3 trace`.
pub fn trace(arguments: &TraceArguments) -> Result<u8, Failure> {
    let output = watched::output(arguments.output.as_deref(), arguments.machine.as_deref())?;
    let mut shown = shown::new(arguments.format, output);
    let follow = |target: &Target, wait| follow(arguments, target, wait, &mut *shown);
    watched::watch(arguments.machine.as_deref(), &arguments.command, "trace", follow)
}

/// Shows what the machine sends until it ends, or a signal asks for an end.
fn follow(
    arguments: &TraceArguments,
    target: &Target,
    wait: bool,
    shown: &mut dyn Shown,
) -> Result<(), Failure> {
    let TraceArguments { events, comm, pid, .. } = arguments;
    let request = Request { events: events.clone(), comm: comm.clone(), pid: *pid, wait };
    let mut machine = watched::ask(target, Order::Trace, &request, wait)?;
    let told = tell(&mut machine, shown);
    let finished = shown.finish();
    finished.map_err(|error| Failure::host(format!("machine {}: {error}", target.machine)))?;
    told
}

fn tell(machine: &mut BufReader<UnixStream>, shown: &mut dyn Shown) -> Result<(), Failure> {
    let (mut lost, mut started) = (0, false);
    watched::each_line(machine, |line| {
        match line {
            Line::Event(event) => {
                shown.show(&event).map_err(|error| Failure::host(format!("output: {error}")))?;
            }
            Line::Lost(count) => lost += count,
            Line::Started { probes } => {
                started = true;
                tracing::debug!(probes, "trace begins");
            }
            Line::Error(problem) => return Err(Failure::host(problem)),
        }
        Ok(())
    })?;
    if !started {
        return Err(Failure::host("the machine ended before it could be traced"));
    }
    if lost != 0 {
        output::complain(&format!("{lost} events were lost: more came than could be written"));
    }
    Ok(())
}
