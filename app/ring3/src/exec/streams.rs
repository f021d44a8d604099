//! Standard input and output of the command, byte by byte, and what the guest's console said.

use std::{
    collections::VecDeque,
    fs::File,
    io::{self, ErrorKind, Read, Write},
    net::Shutdown,
    os::unix::net::UnixStream,
    sync::{Arc, Mutex, PoisonError},
    thread,
};

use guest_agent::protocol;
use host_linux::{
    streams::{self, Stream},
    terminal,
};

const PIECE: usize = 64 << 10;
/// How much of the console is kept to explain a failure.
const TAIL: usize = 4096;

/// Our ends of the connections that carry standard input, output and error.
pub type Ends = [UnixStream; 3];

/// What is said when a stream is through: for input only if something went wrong.
#[derive(Debug, PartialEq, Eq)]
pub enum Carried {
    /// Input could not be read.
    Input(String),
    /// An output has ended, with what went wrong.
    Output(Option<String>),
}

/// The standard streams of the command.
pub struct StreamPlan {
    /// Input and output are a terminal.
    pub on_terminal: bool,
    /// Those that the command has without us.
    elsewhere: Vec<protocol::Stream>,
    /// Standard error is carried apart.
    pub errors_apart: bool,
}

impl StreamPlan {
    /// By what ours are.
    pub fn new() -> Self {
        let on_terminal = terminal::stdin_is_terminal() && terminal::stdout_is_terminal();
        let replaced = if on_terminal { 2..3 } else { 0..3 };
        let elsewhere: Vec<_> = replaced.filter_map(elsewhere).collect();
        let errors_apart = !on_terminal || !terminal::stderr_is_terminal();
        Self { on_terminal, elsewhere, errors_apart }
    }

    /// Those that the command has without us.
    pub fn elsewhere(&self) -> &[protocol::Stream] {
        &self.elsewhere
    }

    fn carries(&self, number: u8) -> bool {
        (number != 2 || self.errors_apart)
            && self.elsewhere.iter().all(|stream| stream.number != number)
    }

    /// Starts carrying; returns how many outputs there are, of each of which `report` is told once.
    pub fn start(
        &self,
        [input, output, error]: Ends,
        report: impl Fn(Carried) + Clone + Send + 'static,
    ) -> io::Result<usize> {
        if self.carries(0) {
            let from = streams::again(io::stdin())?;
            let (report, terminal) = (report.clone(), self.on_terminal);
            let carry = move || {
                if let Some(problem) = carry_input(from, &input).filter(|_| !terminal) {
                    report(Carried::Input(problem));
                }
            };
            thread::Builder::new().name("stdin".into()).spawn(carry)?;
        }
        let mut outputs = Vec::new();
        if self.carries(1) {
            outputs.push(("standard output", output, streams::again(io::stdout())?));
        }
        if self.carries(2) {
            outputs.push(("standard error", error, streams::again(io::stderr())?));
        }
        let count = outputs.len();
        for (name, from, to) in outputs {
            let report = report.clone();
            let carry = move || report(Carried::Output(carry_output(name, &from, to)));
            thread::Builder::new().name(name.into()).spawn(carry)?;
        }
        Ok(count)
    }
}

/// A stream that the command has without us, if it can.
fn elsewhere(number: u8) -> Option<protocol::Stream> {
    let opened = match streams::stream(number) {
        Stream::Own => return None,
        Stream::Closed => None,
        Stream::Like(path, access) => Some((access as u8, path.to_owned())),
    };
    Some(protocol::Stream { number, opened })
}

/// Standard input to the guest; its end is the command's end of input. Returns what went wrong.
fn carry_input(mut from: File, to: &UnixStream) -> Option<String> {
    let mut buffer = vec![0; PIECE];
    let problem = loop {
        // A terminal that is another's now is not read: that would stop us.
        terminal::wait_for_foreground();
        match from.read(&mut buffer) {
            Ok(0) => break None,
            Ok(count) if (&*to).write_all(&buffer[..count]).is_err() => break None,
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => break Some(format!("standard input: {error}")),
        }
    };
    // A guest that is gone needs no end.
    let _ = to.shutdown(Shutdown::Write);
    problem
}

/// The guest's output to ours. When ours takes no more, the command's pipe breaks. A reader that has gone is no failure of ours: the
/// command finds its pipe broken, as it would here.
fn carry_output(name: &str, from: &UnixStream, mut to: File) -> Option<String> {
    let outcome = copy_output(from, &mut to);
    let _ = from.shutdown(Shutdown::Both); // as above
    let error = outcome.err().filter(|error| error.kind() != ErrorKind::BrokenPipe)?;
    Some(format!("{name}: {error}; not all that the command wrote is there"))
}

fn copy_output(mut from: &UnixStream, to: &mut File) -> io::Result<()> {
    let mut buffer = vec![0; PIECE];
    while streams::wait(from, &*to)? {
        match from.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(count) => to.write_all(&buffer[..count])?,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            // The guest's end: who ended it says why.
            Err(_) => return Ok(()),
        }
    }
    Ok(())
}

/// The last of what the guest's console printed; clones share it.
#[derive(Clone, Default)]
pub struct ConsoleTail {
    bytes: Arc<Mutex<VecDeque<u8>>>,
    shown: bool,
}

impl ConsoleTail {
    /// An empty one; if `shown`, what is printed goes to standard error as well.
    pub fn new(shown: bool) -> Self {
        Self { shown, ..Self::default() }
    }

    /// The last lines, to explain a failure; nothing if they have been shown.
    pub fn explanation(&self) -> String {
        let bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        if self.shown || bytes.is_empty() {
            return String::new();
        }
        let bytes: Vec<u8> = bytes.iter().copied().collect();
        let text = String::from_utf8_lossy(&bytes).replace('\r', "");
        let lines: Vec<_> = text.lines().collect();
        let last = lines.get(lines.len().saturating_sub(12)..).unwrap_or_default();
        format!("; the guest's console said:\n{}", last.join("\n"))
    }
}

impl Write for ConsoleTail {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        if self.shown {
            // What is said at the end needs it all the same.
            let _ = io::stderr().write_all(data);
        }
        let mut bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        bytes.extend(data);
        let excess = bytes.len().saturating_sub(TAIL);
        bytes.drain(..excess);
        Ok(data.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn carried(to: File) -> (Option<String>, io::Result<usize>) {
        let (ours, mut guests) = UnixStream::pair().expect("a pair");
        let carrying = thread::spawn(move || carry_output("standard output", &ours, to));
        guests.write_all(b"lost\n").expect("taken");
        (carrying.join().expect("no panic"), guests.read(&mut [0]))
    }

    /// Either way the guest is told that nobody reads.
    #[test]
    fn a_full_disk_is_told_of_and_a_reader_that_went_is_not() {
        let full = File::options().write(true).open("/dev/full").expect("the host has it");
        let (problem, end) = carried(full);
        assert!(problem.expect("told").contains("No space left"));
        assert_eq!(end.expect("an end"), 0);
        let (reader, writer) = io::pipe().expect("a pipe");
        drop(reader);
        let (problem, end) = carried(std::os::fd::OwnedFd::from(writer).into());
        assert_eq!((problem, end.expect("an end")), (None, 0));
    }

    /// Before the guest has written anything.
    #[test]
    fn a_reader_that_goes_is_noticed_at_once() {
        let (ours, mut guests) = UnixStream::pair().expect("a pair");
        let (reader, writer) = io::pipe().expect("a pipe");
        let to = std::os::fd::OwnedFd::from(writer).into();
        thread::spawn(move || carry_output("standard output", &ours, to));
        drop(reader);
        assert_eq!(guests.read(&mut [0]).expect("an end"), 0);
    }

    #[test]
    fn the_tail_is_the_last_lines() {
        let mut tail = ConsoleTail::new(false);
        assert_eq!(tail.explanation(), "");
        (0..1000).for_each(|i| writeln!(tail, "line {i}\r").expect("kept"));
        let text = tail.explanation();
        assert!(text.ends_with("line 998\nline 999"), "{text}");
        assert!(!text.contains("line 900"), "{text}");
    }
}
