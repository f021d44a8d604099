//! The command: started with its streams, watched, and followed by everything it left behind.

use std::{
    ffi::OsStr,
    fs::File,
    io::{ErrorKind, Read},
    os::{
        fd::OwnedFd,
        unix::{ffi::OsStrExt, process::CommandExt},
    },
    process::{Command, Stdio},
    thread::{self, JoinHandle},
};

use crate::{
    protocol::{self, MESSAGE, Request, message},
    relay, sys,
};

/// A started command.
pub struct Running {
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
pub fn start(request: &Request) -> Result<Running, Failure> {
    match request.terminal {
        Some(size) => start_on_terminal(request, size),
        None => start_on_pipes(request),
    }
}

fn start_on_pipes(request: &Request) -> Result<Running, Failure> {
    let mut command = command(request, false)?;
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| not_started(request, &error))?;
    let input = port(protocol::STDIN)?;
    let missing = || failed("a standard stream is missing");
    let stdin = OwnedFd::from(child.stdin.take().ok_or_else(missing)?);
    thread::spawn(move || relay::copy(input, File::from(stdin)));
    let stdout = OwnedFd::from(child.stdout.take().ok_or_else(missing)?);
    let stderr = OwnedFd::from(child.stderr.take().ok_or_else(missing)?);
    let mut outputs = Vec::new();
    for (stream, number) in [(stdout, protocol::STDOUT), (stderr, protocol::STDERR)] {
        let to = port(number)?;
        outputs.push(thread::spawn(move || relay::copy(File::from(stream), to)));
    }
    Ok(Running { process: child.id() as i32, terminal: None, outputs })
}

fn start_on_terminal(request: &Request, (rows, columns): (u16, u16)) -> Result<Running, Failure> {
    let (master, slave) = sys::terminal().map_err(failed)?;
    sys::set_window(&master, rows, columns).map_err(failed)?;
    let mut command = command(request, true)?;
    command.stdin(slave.try_clone().map_err(failed)?);
    command.stdout(slave.try_clone().map_err(failed)?).stderr(slave);
    let child = command.spawn().map_err(|error| not_started(request, &error))?;
    drop(command); // with it goes our hold of the slave side
    let (input, output) = (port(protocol::STDIN)?, port(protocol::STDOUT)?);
    let (to, from) = (master.try_clone().map_err(failed)?, master.try_clone().map_err(failed)?);
    thread::spawn(move || relay::copy(input, to));
    let outputs = vec![thread::spawn(move || relay::copy(from, output))];
    Ok(Running { process: child.id() as i32, terminal: Some(master), outputs })
}

fn port(number: u32) -> Result<File, Failure> {
    sys::connect_to_host(number).map_err(failed)
}

fn command(request: &Request, terminal: bool) -> Result<Command, Failure> {
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
    // SAFETY: `become_user` neither allocates nor locks.
    unsafe { command.pre_exec(move || sys::become_user(user, &groups, terminal)) };
    Ok(command)
}

fn not_started(request: &Request, error: &std::io::Error) -> Failure {
    let name = String::from_utf8_lossy(request.arguments.first().map_or(&[], Vec::as_slice));
    match error.kind() {
        ErrorKind::NotFound => (message::NOT_FOUND, format!("{name}: command not found")),
        _ => (message::NOT_RUN, format!("{name}: {error}")),
    }
}

/// Passes signals and sizes on until the command ends; returns how it did, once all its output is
/// with the host and all it wrote is with the host's files.
pub fn finish(running: Running, control: File) -> (u8, u32) {
    let Running { process, terminal, outputs } = running;
    thread::spawn(move || obey(control, process, terminal.as_ref()));
    let status = loop {
        match sys::wait_any() {
            Some((ended, status)) if ended == process => break status,
            Some(_) => {}
            None => break 0,
        }
    };
    // What it left in the background has no terminal and no machine any more.
    sys::signal(-1, sys::SIGKILL);
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
            (message::SIGNAL, number) => sys::signal(-process, number as i32),
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
