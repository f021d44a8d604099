//! `ring3 trace`: the machine sends events, the client shows them.

use std::{
    ffi::OsString,
    fs::File,
    io::{self, BufRead, BufReader, BufWriter, Write},
    os::unix::net::UnixStream,
    path::PathBuf,
};

use clap::{Args, ValueEnum};
use inspect::trace::{Line, Request};
use vmm::Inspector;

use super::{
    Order, Target, client,
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
    let mut shown = shown(arguments)?;
    let follow = |target: &Target, wait| follow(arguments, target, wait, &mut *shown);
    watched::watch(arguments.machine.as_deref(), &arguments.command, "trace", follow)
}

/// Where events go.
fn shown(arguments: &TraceArguments) -> Result<Box<dyn Shown>, Failure> {
    let output: Box<dyn Write> = match &arguments.output {
        Some(path) => {
            let file = File::create(path);
            Box::new(BufWriter::new(file.map_err(|error| {
                Failure::usage(format!("--output {}: {error}", path.display()))
            })?))
        }
        None if arguments.machine.is_some() => Box::new(io::stdout()),
        None => Box::new(io::stderr()),
    };
    Ok(shown::new(arguments.format, output))
}

/// Shows what the machine sends until it ends, or a signal asks for an end.
fn follow(
    arguments: &TraceArguments,
    target: &Target,
    wait: bool,
    shown: &mut dyn Shown,
) -> Result<(), Failure> {
    let host = |error: io::Error| Failure::host(format!("machine {}: {error}", target.machine));
    let mut machine = client::connect(target, Order::Trace)?;
    let TraceArguments { events, comm, pid, .. } = arguments;
    let request = Request { events: events.clone(), comm: comm.clone(), pid: *pid, wait };
    let line = serde_json::to_string(&request).map_err(|error| Failure::host(error.to_string()))?;
    machine.get_mut().write_all(format!("{line}\n").as_bytes()).map_err(host)?;
    if !wait {
        watched::hang_up_on_signals(machine.get_ref().try_clone().map_err(host)?).map_err(host)?;
    }
    let told = tell(&mut machine, shown);
    shown.finish().map_err(host)?;
    told
}

fn tell(machine: &mut BufReader<UnixStream>, shown: &mut dyn Shown) -> Result<(), Failure> {
    let (mut lost, mut started) = (0, false);
    let mut line = String::new();
    loop {
        line.clear();
        // The connection ends with the machine.
        if machine.read_line(&mut line).unwrap_or(0) == 0 {
            break;
        }
        match serde_json::from_str(&line) {
            Ok(Line::Event(event)) => {
                shown.show(&event).map_err(|error| Failure::host(format!("output: {error}")))?
            }
            Ok(Line::Lost(count)) => lost += count,
            Ok(Line::Started { probes }) => {
                started = true;
                tracing::debug!(probes, "trace begins");
            }
            Ok(Line::Error(problem)) => return Err(Failure::host(problem)),
            Err(_) => break, // cut off
        }
    }
    if !started {
        return Err(Failure::host("the machine ended before it could be traced"));
    }
    if lost != 0 {
        output::complain(&format!("{lost} events were lost: more came than could be written"));
    }
    Ok(())
}
