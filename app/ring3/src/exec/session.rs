//! From the first event to the command's end: messages of the agent, signals, the machine itself.

use std::{
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    sync::mpsc::{Receiver, RecvTimeoutError, Sender},
    thread,
    time::{Duration, Instant},
};

use guest_agent::protocol::{self, MESSAGE, message};
use host_linux::terminal;
use kernels::interrupt;
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH},
    iterator::Signals,
};
use vmm::Ended;

use super::streams::ConsoleTail;
use crate::failure::Failure;

/// The longest text an agent may send.
const MAX_TEXT: u32 = 64 << 10;
/// As many interrupts in a row end ring3 itself: the guest may not hear them.
const INSISTED: u32 = 5;

/// What happens.
#[derive(Debug)]
pub enum Event {
    /// The machine ended by itself.
    Ended(Ended),
    /// The agent said something: kind, number, text.
    Said(u8, u32, String),
    /// The agent's connection ended.
    Hung,
    /// A signal arrived.
    Signal(i32),
}

/// How the command ended.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It exited.
    Exited(u8),
    /// A signal killed it.
    Killed(u8),
    /// It never ran.
    NotRun { status: u8, problem: String },
    /// The time was up.
    TimedOut,
    /// A signal ended ring3.
    Signal(i32),
}

impl Outcome {
    /// Whether it ran to its end, so that all of its output is on its way.
    pub fn has_output(&self) -> bool {
        matches!(self, Self::Exited(_) | Self::Killed(_))
    }

    /// The exit status.
    pub fn code(self) -> Result<u8, Failure> {
        match self {
            Self::Exited(status) => Ok(status),
            Self::Killed(signal) => Ok(128 | signal & 0x7f),
            Self::Signal(signal) => Ok(128 | (signal & 0x7f) as u8),
            Self::NotRun { status, problem } => {
                eprintln!("ring3: {problem}");
                Ok(status)
            }
            Self::TimedOut => {
                eprintln!("ring3: timeout: the command was still running");
                Ok(124)
            }
        }
    }
}

/// A guest on its way.
pub struct Session {
    pub events: Receiver<Event>,
    pub control: UnixStream,
    pub tail: ConsoleTail,
    pub timeout: Option<Duration>,
}

/// Turns signals into events.
pub fn watch_signals(events: &Sender<Event>) -> io::Result<()> {
    let watched = [SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGWINCH];
    let mut signals = Signals::new(watched)?;
    interrupt::leave_to_others();
    let events = events.clone();
    thread::spawn(move || {
        signals.forever().try_for_each(|signal| events.send(Event::Signal(signal)))
    });
    Ok(())
}

/// Turns the agent's messages into events.
pub fn watch_control(mut control: UnixStream, events: Sender<Event>) {
    thread::spawn(move || {
        while let Ok((kind, number, text)) = hear(&mut control) {
            if events.send(Event::Said(kind, number, text)).is_err() {
                return;
            }
        }
        // Nobody listening means the command has ended.
        let _ = events.send(Event::Hung);
    });
}

fn hear(control: &mut UnixStream) -> io::Result<(u8, u32, String)> {
    let mut bytes = [0; MESSAGE];
    control.read_exact(&mut bytes)?;
    let (kind, number) = protocol::decode(bytes);
    let has_text = matches!(kind, message::FAILED | message::NOT_FOUND | message::NOT_RUN);
    let len = if has_text { number.min(MAX_TEXT) } else { 0 };
    let mut text = vec![0; len as usize];
    control.read_exact(&mut text)?;
    Ok((kind, number, String::from_utf8_lossy(&text).into_owned()))
}

impl Session {
    /// Waits for the command's end, passing signals on.
    pub fn wait(&self) -> Result<Outcome, Failure> {
        let deadline = self.timeout.map(|timeout| Instant::now() + timeout);
        let (mut runs, mut interrupts) = (false, 0);
        loop {
            let event = match self.next(deadline) {
                Ok(event) => event,
                Err(RecvTimeoutError::Timeout) => return Ok(Outcome::TimedOut),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Failure::host("the virtual CPU failed; this is a bug in ring3"));
                }
            };
            interrupts = if matches!(event, Event::Signal(SIGINT)) { interrupts + 1 } else { 0 };
            match event {
                Event::Signal(SIGWINCH) => self.resize(),
                Event::Signal(signal) if runs && interrupts < INSISTED => {
                    self.say(message::SIGNAL, signal as u32);
                }
                Event::Signal(signal) => return Ok(Outcome::Signal(signal)),
                Event::Said(message::STARTED, ..) => {
                    runs = true;
                    self.resize();
                }
                Event::Said(kind, number, text) => return self.outcome(kind, number, text),
                Event::Hung => return Err(self.lost("the guest's agent is gone")),
                Event::Ended(ended) => return Err(self.lost(&why(&ended))),
            }
        }
    }

    fn next(&self, deadline: Option<Instant>) -> Result<Event, RecvTimeoutError> {
        match deadline {
            None => self.events.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(at) => self.events.recv_timeout(at.saturating_duration_since(Instant::now())),
        }
    }

    fn outcome(&self, kind: u8, number: u32, text: String) -> Result<Outcome, Failure> {
        match kind {
            message::EXITED => Ok(Outcome::Exited(number as u8)),
            message::KILLED => Ok(Outcome::Killed(number as u8)),
            message::NOT_FOUND => Ok(Outcome::NotRun { status: 127, problem: text }),
            message::NOT_RUN => Ok(Outcome::NotRun { status: 126, problem: text }),
            _ => Err(self.lost(&format!("the guest could not be set up: {text}"))),
        }
    }

    fn resize(&self) {
        let (rows, columns) = terminal::size();
        self.say(message::WINDOW, u32::from(rows) << 16 | u32::from(columns));
    }

    fn say(&self, kind: u8, number: u32) {
        // An agent that is gone is noticed by its connection's end.
        let _ = (&self.control).write_all(&protocol::encode(kind, number));
    }

    fn lost(&self, problem: &str) -> Failure {
        Failure::host(format!("{problem}{}", self.tail.explanation()))
    }
}

fn why(ended: &Ended) -> String {
    match ended {
        Ended::TripleFault(report) => format!("triple fault: the guest's kernel crashed\n{report}"),
        Ended::Reset => "the guest's kernel gave up (a panic)".to_owned(),
        Ended::Failed(failure) => failure.clone(),
        _ => "the guest ended before the command did".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    fn session(events: Vec<Event>) -> (Session, UnixStream) {
        let (sender, receiver) = channel();
        events.into_iter().for_each(|event| sender.send(event).expect("kept"));
        let (control, agent) = UnixStream::pair().expect("a pair");
        let (tail, timeout) = (ConsoleTail::new(false), Some(Duration::from_secs(5)));
        (Session { events: receiver, control, tail, timeout }, agent)
    }

    fn said(kind: u8, number: u32) -> Event {
        Event::Said(kind, number, String::new())
    }

    #[test]
    fn the_exit_status_is_the_commands() {
        let (session, _agent) = session(vec![said(message::STARTED, 0), said(message::EXITED, 7)]);
        assert_eq!(session.wait().and_then(Outcome::code), Ok(7));
        let (session, _agent) = self::session(vec![said(message::KILLED, 9)]);
        assert_eq!(session.wait().and_then(Outcome::code), Ok(137));
        let (session, _agent) = self::session(vec![said(message::NOT_FOUND, 0)]);
        assert_eq!(session.wait().and_then(Outcome::code), Ok(127));
    }

    #[test]
    fn signals_are_passed_on_once_the_command_runs() {
        let events =
            vec![said(message::STARTED, 0), Event::Signal(SIGTERM), said(message::KILLED, 15)];
        let (session, mut agent) = session(events);
        assert_eq!(session.wait(), Ok(Outcome::Killed(15)));
        let mut bytes = [0; 2 * MESSAGE];
        agent.read_exact(&mut bytes).expect("a size and a signal");
        assert_eq!(bytes[MESSAGE..], protocol::encode(message::SIGNAL, 15));
        let (session, _agent) = self::session(vec![Event::Signal(SIGINT)]);
        assert_eq!(session.wait(), Ok(Outcome::Signal(SIGINT)));
    }

    #[test]
    fn a_guest_that_ends_early_is_an_error_with_its_last_words() {
        let (mut session, _agent) = session(vec![Event::Ended(Ended::Reset)]);
        session.tail.write_all(b"Kernel panic - not syncing\n").expect("kept");
        let failure = session.wait().expect_err("no outcome").to_string();
        assert!(failure.contains("panic") && failure.contains("not syncing"), "{failure}");
    }
}
