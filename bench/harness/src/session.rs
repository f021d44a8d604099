//! An environment that runs: a child process, the guest program inside it, and lines between us.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    thread,
    time::{Duration, Instant},
};

use crate::{
    process_groups,
    protocol::{self, Batch, Message, Row},
};

/// How many console lines are kept to explain a failure.
const TAIL: usize = 12;

/// Why an environment did not answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// It could not be started.
    #[error("cannot be started: {0}")]
    Start(String),
    /// It took too long.
    #[error("no answer in {} s{}", .0.as_secs(), console(.1))]
    Timeout(Duration, String),
    /// It ended.
    #[error("ended{}", console(.0))]
    Ended(String),
    /// The guest program found a wrong result, or was refused something.
    #[error("{0}")]
    Wrong(String),
    /// It was not asked, for this reason.
    #[error("{0}")]
    NotAsked(String),
}

impl Failure {
    /// Whether the environment is of no further use.
    pub const fn is_fatal(&self) -> bool {
        !matches!(self, Self::Wrong(_) | Self::NotAsked(_))
    }
}

fn console(tail: &str) -> String {
    if tail.is_empty() { String::new() } else { format!("; its console: {tail}") }
}

/// The command in a session of its own. All its processes can then be ended together; and the
/// scheduler, which shares CPUs out among sessions first, treats environments alike on a busy
/// machine, however many processes they are.
fn in_own_session(command: &Command) -> Command {
    let mut own = Command::new("setsid");
    own.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        value.map(|value| own.env(name, value));
    }
    own
}

/// A line of the console and when it arrived.
type Line = (Instant, String);

/// An environment that runs.
#[derive(Debug)]
pub struct Session {
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<Line>,
    tail: Vec<String>,
    kernel: String,
    started: Instant,
    boot: Duration,
}

impl Session {
    /// Starts a command and waits until the guest program in it is ready.
    ///
    /// # Errors
    /// It cannot be started, ends, or is not ready in time.
    pub fn start(command: Command, timeout: Duration) -> Result<Self, Failure> {
        let mut session = Self::spawn(command)?;
        session.ready(timeout)?;
        Ok(session)
    }

    /// Waits until the guest program is ready.
    pub(crate) fn ready(&mut self, timeout: Duration) -> Result<(), Failure> {
        self.kernel = self.wait(timeout, |message| match message {
            Message::Ready { ready } => Some(ready),
            _ => None,
        })?;
        self.boot = self.started.elapsed();
        Ok(())
    }

    /// Starts a command without waiting.
    pub(crate) fn spawn(command: Command) -> Result<Self, Failure> {
        let program = command.get_program().to_string_lossy().into_owned();
        let started = Instant::now();
        let start = |error| Failure::Start(format!("{program}: {error}"));
        let mut command = in_own_session(&command);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(start)?;
        process_groups::add(child.id());
        let input = child.stdin.take();
        let (sender, lines) = channel();
        let streams: [Option<Box<dyn std::io::Read + Send>>; 2] = [
            child.stdout.take().map(|stream| Box::new(stream) as _),
            child.stderr.take().map(|stream| Box::new(stream) as _),
        ];
        for stream in streams.into_iter().flatten() {
            let sender = sender.clone();
            thread::spawn(move || {
                for line in BufReader::new(stream).split(b'\n').map_while(Result::ok) {
                    let line = String::from_utf8_lossy(&line).trim_end().to_owned();
                    if sender.send((Instant::now(), line)).is_err() {
                        break;
                    }
                }
            });
        }
        let (tail, kernel, boot) = (Vec::new(), String::new(), Duration::ZERO);
        Ok(Self { child, input, lines, tail, kernel, started, boot })
    }

    /// Name and release of the kernel inside.
    pub fn kernel(&self) -> &str {
        &self.kernel
    }

    /// From the start of the process until the guest program was ready.
    pub const fn boot(&self) -> Duration {
        self.boot
    }

    /// The child's process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// One batch of a row, of about this length; and when its answer arrived.
    ///
    /// # Errors
    /// See [`Failure`].
    pub fn batch(
        &mut self,
        row: &str,
        length: Duration,
        timeout: Duration,
    ) -> Result<(Batch, Instant), Failure> {
        self.say(&format!("run {row} {}\n", length.as_millis().max(1)))?;
        let answer = self.wait(timeout, |message| match message {
            Message::Batch(batch) if batch.row == row => Some(Ok(batch)),
            Message::Error { error } => Some(Err(error)),
            _ => None,
        })?;
        answer.map(|batch| (batch, Instant::now())).map_err(Failure::Wrong)
    }

    /// Has the guest program start a server, and waits until it can be reached inside.
    ///
    /// # Errors
    /// See [`Failure`].
    pub fn serve(&mut self, name: &str, port: u16, timeout: Duration) -> Result<(), Failure> {
        self.say(&format!("serve {name} {port}\n"))?;
        let answer = self.wait(timeout, |message| match message {
            Message::Serving { serving } if serving == name => Some(Ok(())),
            Message::Error { error } => Some(Err(error)),
            _ => None,
        })?;
        answer.map_err(Failure::Wrong)
    }

    /// Has the guest program end its server.
    ///
    /// # Errors
    /// See [`Failure`].
    pub fn unserve(&mut self) -> Result<(), Failure> {
        self.say("unserve\n")
    }

    /// Every row the guest program has.
    ///
    /// # Errors
    /// See [`Failure`].
    pub fn rows(&mut self, timeout: Duration) -> Result<Vec<Row>, Failure> {
        self.say("list\n")?;
        let mut rows = Vec::new();
        self.wait(timeout, |message| match message {
            Message::Row(row) => {
                rows.push(row);
                None
            }
            Message::End { .. } => Some(()),
            _ => None,
        })?;
        Ok(rows)
    }

    /// Waits until the process has ended by itself, with exit code 0.
    ///
    /// # Errors
    /// It goes on, or ended otherwise.
    pub(crate) fn end(&mut self, timeout: Duration) -> Result<(), Failure> {
        match self.wait(timeout, |_| None::<()>) {
            Err(Failure::Ended(_)) if self.child.wait().is_ok_and(|status| status.success()) => {
                Ok(())
            }
            Err(failure) => Err(failure),
            Ok(()) => unreachable!("no message was to be an answer"),
        }
    }

    fn say(&mut self, line: &str) -> Result<(), Failure> {
        let input = self.input.as_mut();
        let said = input.is_some_and(|input| input.write_all(line.as_bytes()).is_ok());
        // A program that no longer reads has ended; its last words say why.
        if said { Ok(()) } else { self.wait(Duration::from_secs(2), |_| None::<()>) }
    }

    /// Reads messages until one is the answer.
    pub(crate) fn wait<T>(
        &mut self,
        timeout: Duration,
        mut answer: impl FnMut(Message) -> Option<T>,
    ) -> Result<T, Failure> {
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok((_, line)) => match protocol::parse(&line) {
                    Some(message) => {
                        if let Some(answer) = answer(message) {
                            return Ok(answer);
                        }
                    }
                    None => self.remember(line),
                },
                Err(RecvTimeoutError::Timeout) => {
                    return Err(Failure::Timeout(timeout, self.tail()));
                }
                Err(RecvTimeoutError::Disconnected) => return Err(Failure::Ended(self.tail())),
            }
        }
    }

    fn remember(&mut self, line: String) {
        if line.is_empty() {
            return;
        }
        if self.tail.len() == TAIL {
            self.tail.remove(0);
        }
        self.tail.push(line);
    }

    fn tail(&self) -> String {
        self.tail.join(" | ")
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        drop(self.input.take());
        process_groups::kill(self.child.id());
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_secs(10);

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_program_is_started_and_asked() {
        let script = r#"echo 'noise'; echo '@bench {"ready":"Linux 1","at":0}'; read line; echo "@bench {\"row\":\"x\",\"iterations\":2,\"ns\":6,\"at\":1}"; read line"#;
        let mut session = Session::start(shell(script), SOON).expect("ready");
        assert_eq!(session.kernel(), "Linux 1");
        let (batch, _) = session.batch("x", Duration::from_millis(5), SOON).expect("a batch");
        assert_eq!(batch.iterations, 2);
    }

    #[test]
    fn what_ends_says_so() {
        let failure = Session::start(shell("echo panic: no init; exit 3"), SOON);
        assert_eq!(failure.expect_err("ended"), Failure::Ended("panic: no init".to_owned()));
    }

    #[test]
    fn what_hangs_is_given_up() {
        let patience = Duration::from_millis(50);
        let failure = Session::start(shell("sleep 1000"), patience).expect_err("too slow");
        assert_eq!(failure, Failure::Timeout(patience, String::new()));
    }

    #[test]
    fn what_cannot_be_started_is_named() {
        let failure = Session::start(Command::new("/nonexistent/qemu"), SOON);
        let text = failure.expect_err("there is none").to_string();
        assert!(text.contains("/nonexistent/qemu"), "{text}");
    }
}
