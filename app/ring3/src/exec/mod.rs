//! `ring3 exec` and `ring3 shell`: one command under another kernel, with this host's files.
//!
//! The guest's root is the host's, read-only through virtio-fs below an overlay in the guest's memory; the
//! current folder is shared for real at the same path. The agent, its first process, runs the command;
//! four vsock connections carry its standard streams and what is said about it.
//!
//! - [`arguments`]: the command line.
//! - `kernel`: which kernel, and its modules.
//! - `guest`: what the guest is made of: the request, the first root file system, folders.
//! - `streams`: standard input and output, and the guest's console.
//! - `session`: from the first event to the command's end.

pub mod arguments;
mod guest;
mod kernel;
mod session;
mod streams;

use std::{os::unix::net::UnixStream, sync::mpsc::channel};

use guest_agent::protocol;
use host_linux::terminal;
use vmm::Machine;

use crate::{console::RawTerminal, failure::Failure, run};
use arguments::{ExecArguments, GuestArguments, ShellArguments};
use guest::Command;
use session::{Event, Session};
use streams::{ConsoleTail, Streams};

/// The exit status when there is no guest to run the command in.
const NO_GUEST: u8 = 125;

/// `ring3 exec`.
pub fn exec(arguments: &ExecArguments) -> Result<u8, Failure> {
    run_in_guest(&arguments.guest, Command::Given(&arguments.command))
        .map_err(|failure| failure.with_code(NO_GUEST))
}

/// `ring3 shell`.
pub fn shell(arguments: &ShellArguments) -> Result<u8, Failure> {
    run_in_guest(&arguments.guest, Command::Shell).map_err(|failure| failure.with_code(NO_GUEST))
}

/// Our ends of the four connections, and the guest's.
struct Connections {
    ours: [UnixStream; 4],
    guests: Vec<(u32, UnixStream)>,
}

fn connections() -> std::io::Result<Connections> {
    let ports = [protocol::CONTROL, protocol::STDIN, protocol::STDOUT, protocol::STDERR];
    let mut guests = Vec::new();
    let mut pair = |port| {
        let (ours, theirs) = UnixStream::pair()?;
        guests.push((port, theirs));
        Ok::<_, std::io::Error>(ours)
    };
    let [control, stdin, stdout, stderr] = ports;
    let ours = [pair(control)?, pair(stdin)?, pair(stdout)?, pair(stderr)?];
    Ok(Connections { ours, guests })
}

fn run_in_guest(arguments: &GuestArguments, command: Command<'_>) -> Result<u8, Failure> {
    let on_terminal = terminal::stdin_is_terminal() && terminal::stdout_is_terminal();
    let clock = run::start_clock();
    let made = guest::make(arguments, command, on_terminal)?;
    let host = |error: std::io::Error| Failure::host(error.to_string());
    let Connections { ours, guests } = connections().map_err(host)?;
    let mut attachments = made.attachments;
    attachments.push(guest::sockets(guests).map_err(host)?);
    let tail = ConsoleTail::new(arguments.verbose);
    let host_parts = run::host(clock, Box::new(tail.clone()), attachments);
    let machine = Machine::build(&made.description, host_parts).map_err(run::failure)?;
    drop(made.description);

    let (sender, events) = channel();
    let [control, stdin, stdout, stderr] = ours;
    let raw = if on_terminal { Some(RawTerminal::enter()?) } else { None };
    let streams = Streams::start(stdin, stdout, stderr, on_terminal).map_err(host)?;
    session::watch_signals(&sender).map_err(host)?;
    session::watch_control(control.try_clone().map_err(host)?, sender.clone());
    let on_end = move |ended| drop(sender.send(Event::Ended(ended)));
    let running = machine.start(on_end).map_err(run::failure)?;
    let session = Session { events, control, tail, timeout: arguments.timeout };
    let outcome = session.wait();
    if outcome.as_ref().is_ok_and(session::Outcome::has_output) {
        streams.drain();
    }
    let statistics = running.finish(run::PATIENCE);
    drop(raw);
    if let Some(statistics) = statistics.filter(|_| arguments.stats) {
        eprintln!("{statistics}");
    }
    outcome.and_then(session::Outcome::code)
}
