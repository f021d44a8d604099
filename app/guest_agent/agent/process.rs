//! The command: started with its streams, watched, and followed by everything it left behind.

use std::{
    ffi::OsStr,
    fs::File,
    io::{ErrorKind, Read, Write},
    os::{
        fd::OwnedFd,
        unix::{ffi::OsStrExt, fs::OpenOptionsExt, process::CommandExt},
    },
    process::{Child, Command, Stdio},
    thread::{self, JoinHandle},
};

use crate::{
    clock,
    protocol::{self, MESSAGE, AgentRequest, Stream, message},
    relay, sys,
};

/// A started command.
pub struct RunningProcess {
    process: i32,
    /// The terminal's master side, if there is one.
    terminal: Option<File>,
    /// What carries its output; each ends with it.
    outputs: Vec<JoinHandle<()>>,
}

type Failure = (u8, String);

fn failed(error: impl ToString) -> Failure {
    (message::FAILED, error.to_string())
}

/// Starts the command.
pub fn start(request: &AgentRequest) -> Result<RunningProcess, Failure> {
    match request.terminal {
        Some(size) => start_on_terminal(request, size),
        None => start_on_pipes(request),
    }
}

fn start_on_pipes(request: &AgentRequest) -> Result<RunningProcess, Failure> {
    let mut command = command(request, false)?;
    command.stdin(stream(request, 0)?).stdout(stream(request, 1)?).stderr(stream(request, 2)?);
    let mut child = command.spawn().map_err(|error| not_started(request, &error))?;
    if let Some(stdin) = child.stdin.take().map(OwnedFd::from) {
        let input = port(protocol::STDIN)?;
        thread::spawn(move || relay::copy(input, File::from(stdin)));
    }
    let stdout = child.stdout.take().map(|stream| (OwnedFd::from(stream), protocol::STDOUT));
    let mut outputs = Vec::new();
    for (stream, number) in stdout.into_iter().chain(errors(&mut child)) {
        outputs.push(carry(File::from(stream), port(number)?));
    }
    Ok(RunningProcess { process: child.id() as i32, terminal: None, outputs })
}

fn errors(child: &mut Child) -> Option<(OwnedFd, u32)> {
    child.stderr.take().map(|stream| (OwnedFd::from(stream), protocol::STDERR))
}

/// Carries output to the host; what nobody reads there breaks the command's pipe.
fn carry(from: File, to: File) -> JoinHandle<()> {
    thread::spawn(move || relay::copy_while_read(from, to))
}

/// A standard stream of the command: a pipe, unless it needs no connection.
fn stream(request: &AgentRequest, number: u8) -> Result<Stdio, Failure> {
    match request.streams.iter().find(|stream| stream.number == number) {
        None => Ok(Stdio::piped()),
        // It is closed in the command's process.
        Some(Stream { opened: None, .. }) => Ok(Stdio::null()),
        Some(Stream { opened: Some((access, path)), .. }) => {
            let (read, write) = (*access != 1, *access != 0);
            let mut options = File::options();
            let file = options.read(read).write(write).custom_flags(sys::O_NOCTTY).open(path);
            file.map(Stdio::from).map_err(|error| failed(format!("{path}: {error}")))
        }
    }
}

fn start_on_terminal(request: &AgentRequest, (rows, columns): (u16, u16)) -> Result<RunningProcess, Failure> {
    let (master, slave) = sys::terminal().map_err(failed)?;
    sys::set_window(&master, rows, columns).map_err(failed)?;
    let mut command = command(request, true)?;
    command.stdin(slave.try_clone().map_err(failed)?);
    command.stdout(slave.try_clone().map_err(failed)?);
    let apart = request.errors || request.streams.iter().any(|stream| stream.number == 2);
    command.stderr(if apart { stream(request, 2)? } else { slave.into() });
    let mut child = command.spawn().map_err(|error| not_started(request, &error))?;
    drop(command); // with it goes our hold of the slave side
    let (input, output) = (port(protocol::STDIN)?, port(protocol::STDOUT)?);
    let (to, from) = (master.try_clone().map_err(failed)?, master.try_clone().map_err(failed)?);
    thread::spawn(move || relay::copy(input, to));
    let mut outputs = vec![carry(from, output)];
    if let Some((stream, number)) = errors(&mut child) {
        outputs.push(carry(File::from(stream), port(number)?));
    }
    Ok(RunningProcess { process: child.id() as i32, terminal: Some(master), outputs })
}

fn port(number: u32) -> Result<File, Failure> {
    sys::connect_to_host(number).map_err(failed)
}

fn command(request: &AgentRequest, terminal: bool) -> Result<Command, Failure> {
    let mut arguments = request.arguments.iter().map(|bytes| OsStr::from_bytes(bytes));
    let mut command = Command::new(arguments.next().ok_or_else(|| failed("no command"))?);
    command.args(arguments).env_clear().current_dir(OsStr::from_bytes(&request.directory));
    for variable in &request.environment {
        if let Some(at) = variable.iter().position(|&byte| byte == b'=') {
            let (name, value) = (&variable[..at], &variable[at + 1..]);
            command.env(OsStr::from_bytes(name), OsStr::from_bytes(value));
        }
    }
    let (user, groups) = (request.user, request.groups.clone());
    let (umask, ignored, limits) = (request.umask, request.ignored, request.limits.clone());
    let closed = request.streams.iter().filter(|stream| stream.opened.is_none());
    let closed: Vec<_> = closed.map(|stream| i32::from(stream.number)).collect();
    let prepare = move || {
        sys::limit(&limits);
        sys::become_user(user, &groups, terminal)?;
        sys::inherit(umask, ignored, &closed);
        Ok(())
    };
    // SAFETY: `limit`, `become_user` and `inherit` neither allocate nor lock.
    unsafe { command.pre_exec(prepare) };
    Ok(command)
}

fn not_started(request: &AgentRequest, error: &std::io::Error) -> Failure {
    let name = String::from_utf8_lossy(request.arguments.first().map_or(&[], Vec::as_slice));
    match error.kind() {
        ErrorKind::NotFound => (message::NOT_FOUND, format!("{name}: command not found")),
        _ => (message::NOT_RUN, format!("{name}: {error}")),
    }
}

/// Passes signals and sizes on until the command ends; returns how it did, once all its output is
/// with the host and all it wrote is with the host's files.
pub fn finish(running: RunningProcess, control: File) -> (u8, u32) {
    let RunningProcess { process, terminal, outputs } = running;
    thread::spawn(move || obey(control, process, terminal.as_ref()));
    let status = loop {
        match sys::wait_any() {
            Some((ended, status)) if ended == process => break status,
            Some(_) => {}
            None => break 0,
        }
    };
    // What it left in the background has no terminal and no machine any more.
    sys::send_signal(-1, sys::SIGKILL);
    while sys::wait_any().is_some() {}
    for output in outputs {
        // It has told of its panic itself.
        let _ = output.join();
    }
    sys::sync_all();
    match status & 0x7f {
        0 => (message::EXITED, (status >> 8 & 0xff) as u32),
        signal => (message::KILLED, signal as u32),
    }
}

fn obey(mut control: File, process: i32, terminal: Option<&File>) {
    let mut bytes = [0; MESSAGE];
    while control.read_exact(&mut bytes).is_ok() {
        match protocol::decode(bytes) {
            (message::SIGNAL, number) => {
                sys::send_signal(-process, number as i32);
                // A host that is gone needs no answer.
                let _ = control.write_all(&protocol::encode(message::SENT, number));
            }
            (message::TIME, khz) => {
                // A clock that cannot be set goes as it does.
                let _ = clock::follow(&mut control, khz);
            }
            (message::WINDOW, size) => {
                if let Some(terminal) = terminal {
                    // A terminal that refuses keeps its size.
                    let _ = sys::set_window(terminal, (size >> 16) as u16, size as u16);
                }
            }
            _ => {}
        }
    }
}
