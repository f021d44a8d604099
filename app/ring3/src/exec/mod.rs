//! `ring3 exec` and `ring3 shell`: one command under another kernel, with this host's files.
//!
//! The guest's root is the host's, read-only through virtio-fs below an overlay in the guest's memory; the
//! current folder is shared for real at the same path. The agent, its first process, runs the command;
//! four vsock connections carry its standard streams and what is said about it.
//!
//! - `arguments`: the command line.
//! - `caller`: as whom the machine runs.
//! - `kernel`: which kernel, and its modules.
//! - `guest`: what the guest is made of: the request, the first root file system, folders.
//! - `streams`: standard input and output, and the guest's console.
//! - `pace`: the guest's clock by the host's.
//! - `session`: from the first event to the command's end.

pub(crate) mod arguments;
mod caller;
mod guest;
mod kernel;
mod pace;
mod session;
mod streams;

use std::{
    io,
    os::unix::net::UnixStream,
    sync::mpsc::{Sender, channel},
    time::Instant,
};

use guest_agent::protocol;
use host_linux::{LinuxClock, limits};
use vmm::{Machine, RunningMachine};

use crate::{
    console::RawTerminal,
    control::{self, ControlListener, Hand, Status},
    failure::Failure,
    isolation,
    known_blocks::{KernelBlocks, StartedFor},
    machine, output, servers, spawner,
};
pub use crate::{
    net::NetArgument,
    values::{DevicesChoice, EngineArguments, MemorySize, SandboxChoice},
};
pub use arguments::Guest;
use arguments::{ExecArguments, ShellArguments};
pub use guest::GuestCommand;
use pace::Pace;
use session::{Session, SessionEvent};
use streams::{ConsoleTail, StreamPlan};

/// The exit status when there is no guest to run the command in.
const NO_GUEST: u8 = 125;

/// Runs a command in a guest of its own until it ends, and returns its exit status. The command has this process's standard streams,
/// its current folder, and what [`Guest`] says of its environment.
///
/// To be called in a program that is as the [library](crate) says. One that root runs by sudo is started anew, with the same arguments,
/// as the user who called sudo, unless [`Guest::as_root`] is set.
///
/// # Errors
/// There is no guest to run the command in, or it was lost; the exit code is 125.
pub fn run(guest: &Guest, command: GuestCommand<'_>) -> Result<u8, Failure> {
    limits::prepare();
    run_in_guest(guest, command).map_err(|failure| failure.with_code(NO_GUEST))
}

/// `ring3 exec`.
pub(crate) fn exec(arguments: &ExecArguments) -> Result<u8, Failure> {
    run(&arguments.guest, GuestCommand::Given(&arguments.command))
}

/// `ring3 shell`.
pub(crate) fn shell(arguments: &ShellArguments) -> Result<u8, Failure> {
    run(&arguments.guest, GuestCommand::Shell)
}

/// Our ends of the four connections, and the guest's.
struct Connections {
    ours: [UnixStream; 4],
    guests: Vec<(u32, UnixStream)>,
}

fn connections() -> io::Result<Connections> {
    let ports = [protocol::CONTROL, protocol::STDIN, protocol::STDOUT, protocol::STDERR];
    let mut guests = Vec::new();
    let mut pair = |port| {
        let (ours, theirs) = UnixStream::pair()?;
        guests.push((port, theirs));
        Ok::<_, io::Error>(ours)
    };
    let [control, stdin, stdout, stderr] = ports;
    let ours = [pair(control)?, pair(stdin)?, pair(stdout)?, pair(stderr)?];
    Ok(Connections { ours, guests })
}

fn run_in_guest(arguments: &Guest, command: GuestCommand<'_>) -> Result<u8, Failure> {
    caller::settle(arguments)?;
    machine::check_limits(arguments.memory.0)?;
    spawner::start()?;
    let streams = StreamPlan::new();
    let ready = make(arguments, command, &streams)?;
    let (sender, events) = channel();
    let [control, stdin, stdout, stderr] = ready.connections;
    let raw = if streams.on_terminal { Some(RawTerminal::enter()?) } else { None };
    let outputs = carry(&streams, [stdin, stdout, stderr], &sender)?;
    session::watch_signals(&sender).map_err(host)?;
    session::watch_control(&control, sender.clone()).map_err(host)?;
    let listener = listen(&ready.machine, arguments.watched, &sender);
    let running = start(arguments, ready.machine, sender)?;
    // What a command says on standard error is its own, but for who sits before it.
    isolation::tell(ready.told, &running);
    let mut status = status(arguments);
    let started = Instant::now();
    let obey = Box::new(|asked| {
        status.seconds = started.elapsed().as_secs_f64();
        control::obey(asked, &running, &mut status)
    });
    let (timeout, grace) = (arguments.timeout, arguments.grace);
    let (tail, pace) = (ready.tail, Pace::new(ready.clock));
    let mut session = Session { events, control, tail, timeout, grace, outputs, obey, pace };
    let ending = session.wait();
    drop((session, listener));
    if ending.is_ok() {
        ready.blocks.keep();
    }
    let statistics = running.finish(machine::PATIENCE);
    machine::finish_telling(ending.as_ref().is_ok_and(|ending| ending.outcome.has_output()));
    drop(raw);
    if let Some(statistics) = statistics.filter(|_| arguments.stats) {
        output::say(&format!("{statistics}\n"));
    }
    ending.map(|ending| ending.tell())
}

fn host(error: io::Error) -> Failure {
    Failure::host(error.to_string())
}

/// A machine that has not been started, and what goes with it.
struct Ready {
    machine: Machine,
    blocks: KernelBlocks,
    /// Our ends of the connections to the agent.
    connections: [UnixStream; 4],
    /// The end of what the guest's console has said.
    tail: ConsoleTail,
    clock: LinuxClock,
    /// What a user at a terminal is told about isolation.
    told: Option<&'static str>,
}

fn make(
    arguments: &Guest,
    command: GuestCommand<'_>,
    streams: &StreamPlan,
) -> Result<Ready, Failure> {
    let clock = machine::start_clock()?;
    let made = guest::make(arguments, command, streams)?;
    let Connections { ours, mut guests } = connections().map_err(host)?;
    guests.extend(made.listeners);
    let mut attachments = made.attachments;
    attachments.push(guest::sockets(guests).map_err(host)?);
    let tail = ConsoleTail::new(arguments.verbose);
    let clock = machine::ready(clock);
    let (kernel, cpus) = (&made.description.kernel, made.description.cpus);
    let blocks = arguments.engine.known_blocks.of(kernel, StartedFor::Exec, cpus);
    let (console, known) = (Box::new(tail.clone()), blocks.blocks());
    let turns = machine::turns(arguments.engine.crowded, made.description.cpus);
    let host_parts = machine::host(clock.clone(), console, attachments, known, turns);
    let machine = Machine::build(&made.description, host_parts)?;
    let told = streams.on_terminal.then(|| isolation::line(&made.description.engine)).flatten();
    Ok(Ready { machine, blocks, connections: ours, tail, clock, told })
}

/// Starts carrying the standard streams; returns how many outputs there are.
fn carry(
    streams: &StreamPlan,
    ends: [UnixStream; 3],
    sender: &Sender<SessionEvent>,
) -> Result<usize, Failure> {
    let sender = sender.clone();
    // Nobody listens once the session has ended.
    streams.start(ends, move |what| drop(sender.send(SessionEvent::Carried(what)))).map_err(host)
}

/// The control socket of a machine that stands until it is `watched`, or does not. One that cannot be controlled is still one that runs.
fn listen(
    machine: &Machine,
    watched: bool,
    sender: &Sender<SessionEvent>,
) -> Option<ControlListener> {
    let asked = sender.clone();
    let asked = move |order| asked.send(SessionEvent::Control(order)).is_ok();
    let listener = control::listen(asked, Hand::new(machine.inspector(), watched));
    listener.inspect_err(|error| tracing::warn!(%error, "no control socket")).ok()
}

/// Starts the machine in its box.
fn start(
    arguments: &Guest,
    machine: Machine,
    sender: Sender<SessionEvent>,
) -> Result<RunningMachine, Failure> {
    let lost = sender.clone();
    // Nobody listens once the session has ended.
    servers::tell_losses(move |what| drop(lost.send(SessionEvent::Lost(what))));
    let on_end = move |ended| drop(sender.send(SessionEvent::Ended(ended)));
    let sandbox = arguments.sandbox.with(arguments.devices);
    sandbox.permits(&arguments.engine)?;
    sandbox.prepare(&machine)?;
    sandbox.start(machine, on_end)
}

fn status(arguments: &Guest) -> Status {
    let (name, kernel) = (arguments.name.clone(), arguments.kernel.clone());
    Status::new(name, arguments.memory.0, kernel)
}
