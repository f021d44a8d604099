//! From the first event to the command's end: messages of the agent, signals, the machine itself.

use std::{
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    sync::mpsc::{Receiver, RecvTimeoutError, Sender},
    thread,
    time::{Duration, Instant},
};

use guest_agent::protocol::{self, MESSAGE, message};
use host_linux::{inherited, terminal};
use kernels::interrupt;
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGKILL, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH, SIGXCPU},
    iterator::Signals,
};
use vmm::Ended;

use super::{
    pace::Pace,
    streams::{Carried, ConsoleTail},
};
use crate::{control::Asked, failure::Failure, output};

/// The longest text an agent may send.
const MAX_TEXT: u32 = 64 << 10;
/// As many interrupts in a row end ring3 itself: the command may not heed them.
const INSISTED: u32 = 5;
/// Signals closer together are one: timeout(1) sends each to its command and once more to the command's group.
const ECHO: Duration = Duration::from_secs(1);
/// How long the guest may take to take a message.
const BRIEFLY: Duration = Duration::from_millis(100);
/// The exit status where the command succeeded and what it wrote is not all where it should be.
const LOST: u8 = 1;

/// What happens.
#[derive(Debug)]
pub enum SessionEvent {
    /// The machine ended by itself.
    Ended(Ended),
    /// The agent said something: kind, number, text.
    Said(u8, u32, String),
    /// The agent's connection ended.
    Hung,
    /// A signal arrived.
    Signal(i32),
    /// A standard stream is through.
    Carried(Carried),
    /// The control socket has an order.
    Control(Asked),
    /// The guest has lost what it cannot do without.
    Lost(String),
}

/// How the command ended.
#[derive(Debug, PartialEq, Eq)]
pub enum SessionOutcome {
    /// It exited.
    Exited(u8),
    /// A signal killed it.
    Killed(u8),
    /// It never ran.
    NotRun { status: u8, problem: String },
    /// The time was up.
    TimedOut,
    /// A signal ended ring3, with what is to be said about that.
    Signal(i32, Option<String>),
    /// `ring3 stop` did.
    Stopped,
}

impl SessionOutcome {
    /// Whether it ran to its end, so that all of its output is on its way.
    pub fn has_output(&self) -> bool {
        matches!(self, Self::Exited(_) | Self::Killed(_))
    }

    /// The exit status.
    fn status(&self) -> u8 {
        match self {
            Self::Exited(status) | Self::NotRun { status, .. } => *status,
            Self::Killed(signal) => 128 | signal & 0x7f,
            Self::Signal(signal, _) => 128 | (signal & 0x7f) as u8,
            Self::TimedOut => 124,
            Self::Stopped => 128 | SIGKILL as u8,
        }
    }

    /// What to tell the user.
    fn message(&self) -> Option<&str> {
        match self {
            Self::Exited(_) | Self::Killed(_) => None,
            Self::NotRun { problem, .. } => Some(problem),
            Self::TimedOut => Some("timeout: the command was still running"),
            Self::Signal(_, message) => message.as_deref(),
            Self::Stopped => Some("stopped by `ring3 stop`"),
        }
    }
}

/// How a session ended.
#[derive(Debug, PartialEq, Eq)]
pub struct Ending {
    pub outcome: SessionOutcome,
    /// What went wrong with its standard streams.
    pub problems: Vec<String>,
}

impl Ending {
    /// Tells the user, and returns the exit status.
    pub fn tell(&self) -> u8 {
        let lines = self.outcome.message().into_iter();
        lines.chain(self.problems.iter().map(String::as_str)).for_each(output::complain);
        let status = self.outcome.status();
        if status == 0 && !self.problems.is_empty() { LOST } else { status }
    }
}

/// A guest on its way.
pub struct Session<'a> {
    pub events: Receiver<SessionEvent>,
    pub control: UnixStream,
    pub tail: ConsoleTail,
    pub timeout: Option<Duration>,
    /// How long the command may go on after SIGTERM, and the guest without taking a signal.
    pub grace: Duration,
    /// How many outputs have not ended.
    pub outputs: usize,
    /// When the agent is told the time.
    pub pace: Pace,
    /// Obeys orders of the control socket; true from it ends the session.
    pub obey: Box<dyn FnMut(Asked) -> bool + 'a>,
}

/// A signal that asks the command to end.
#[derive(Clone, Copy)]
struct Urge {
    signal: i32,
    at: Instant,
    /// The agent has sent it.
    sent: bool,
}

impl Urge {
    /// Whether the machine is to be ended unless the command is soon. Of signals that a program may well go on after, only if the guest does not
    /// even take them.
    fn is_pressing(&self) -> bool {
        self.signal == SIGTERM || !self.sent
    }
}

/// How far a session has come.
#[derive(Default)]
struct Course {
    /// The command runs.
    runs: bool,
    /// Interrupts in a row.
    interrupts: u32,
    urge: Option<Urge>,
    problems: Vec<String>,
    /// The command has ended.
    outcome: Option<SessionOutcome>,
}

/// Turns signals into events, but for those that were ignored when we started: the command ignores them, too.
pub fn watch_signals(events: &Sender<SessionEvent>) -> io::Result<()> {
    let watched = [SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGWINCH, SIGXCPU];
    let watched = watched.into_iter().filter(|&signal| !inherited::is_ignored(signal));
    let mut signals = Signals::new(watched)?;
    interrupt::leave_to_others();
    let events = events.clone();
    thread::Builder::new().name("signals".into()).spawn(move || {
        signals.forever().try_for_each(|signal| events.send(SessionEvent::Signal(signal)))
    })?;
    Ok(())
}

/// Turns the agent's messages into events. The agent is the guest's: one that says again and again that the command has started must
/// not fill memory.
pub fn watch_control(control: &UnixStream, events: Sender<SessionEvent>) -> io::Result<()> {
    // A guest that stands still takes nothing, and must not hold us up.
    control.set_write_timeout(Some(BRIEFLY))?;
    let mut control = control.try_clone()?;
    thread::Builder::new().name("agent".into()).spawn(move || {
        let mut started = false;
        while let Ok((kind, number, text)) = hear(&mut control) {
            if kind == message::STARTED && std::mem::replace(&mut started, true) {
                continue;
            }
            if events.send(SessionEvent::Said(kind, number, text)).is_err() {
                return;
            }
        }
        // Nobody listening means the command has ended.
        let _ = events.send(SessionEvent::Hung);
    })?;
    Ok(())
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

impl Session<'_> {
    /// Waits for the command's end and that of its output, passing signals on.
    pub fn wait(&mut self) -> Result<Ending, Failure> {
        let deadline = self.timeout.map(|timeout| Instant::now() + timeout);
        let mut course = Course::default();
        // It waits there for the agent.
        self.tell_time();
        let outcome = loop {
            if self.outputs == 0 && course.outcome.is_some() {
                break course.outcome.take();
            }
            let cut = match self.next(deadline, &course) {
                Ok(event) => self.heed(event, &mut course)?,
                Err(RecvTimeoutError::Timeout) => Some(self.late(deadline, &course)),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Failure::bug("the virtual CPU failed"));
                }
            };
            if cut.is_some() {
                break cut;
            }
        };
        let outcome = outcome.ok_or_else(|| Failure::bug("no outcome"))?;
        Ok(Ending { outcome, problems: course.problems })
    }

    /// The next event, unless it comes too late for the user or for a signal.
    fn next(
        &mut self,
        deadline: Option<Instant>,
        course: &Course,
    ) -> Result<SessionEvent, RecvTimeoutError> {
        let urge = course.urge.filter(|urge| course.outcome.is_none() && urge.is_pressing());
        let given_up = urge.and_then(|urge| urge.at.checked_add(self.grace));
        let last = deadline.into_iter().chain(given_up).min();
        loop {
            let until = last.map_or(self.pace.due, |last| last.min(self.pace.due));
            match self.events.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Err(RecvTimeoutError::Timeout) if last.is_none_or(|last| until < last) => {
                    self.tell_time();
                }
                other => return other,
            }
        }
    }

    /// Why the time is up.
    fn late(&self, deadline: Option<Instant>, course: &Course) -> SessionOutcome {
        match course.urge {
            Some(urge) if deadline.is_none_or(|deadline| Instant::now() < deadline) => {
                let what = if urge.sent {
                    "the command was"
                } else {
                    "the guest had not taken it and was"
                };
                let (signal, seconds) = (urge.signal, self.grace.as_secs_f64());
                let message =
                    format!("signal {signal}: {what} still running after {seconds} s (--grace)");
                SessionOutcome::Signal(signal, Some(message))
            }
            _ => SessionOutcome::TimedOut,
        }
    }

    /// Acts on an event; `Some` if it ends the session at once.
    fn heed(
        &mut self,
        event: SessionEvent,
        course: &mut Course,
    ) -> Result<Option<SessionOutcome>, Failure> {
        let interrupted = matches!(event, SessionEvent::Signal(SIGINT));
        course.interrupts = if interrupted { course.interrupts + 1 } else { 0 };
        let over = course.outcome.is_some();
        match event {
            SessionEvent::Signal(SIGWINCH) => self.resize(),
            // It is ring3's time that is over.
            SessionEvent::Signal(SIGXCPU) => {
                let message = format!("ended by signal {SIGXCPU}: its CPU time is used up");
                return Ok(Some(SessionOutcome::Signal(SIGXCPU, Some(message))));
            }
            SessionEvent::Signal(signal) => return Ok(self.signal(signal, course)),
            SessionEvent::Said(message::STARTED, ..) => {
                course.runs = true;
                self.resize();
            }
            SessionEvent::Said(message::SENT, ..) => {
                course.urge.iter_mut().for_each(|urge| urge.sent = true);
            }
            SessionEvent::Said(kind, number, text) => {
                let outcome = self.outcome(kind, number, text)?;
                // Of a command that never ran there is no output.
                if !outcome.has_output() {
                    return Ok(Some(outcome));
                }
                course.outcome = Some(outcome);
            }
            SessionEvent::Carried(carried) => self.note(carried, course),
            SessionEvent::Control(asked) => {
                let ends = (self.obey)(asked);
                // It may be one to go on after a pause.
                self.tell_time();
                return Ok(ends.then_some(SessionOutcome::Stopped));
            }
            // All it had to say has been said.
            SessionEvent::Hung | SessionEvent::Ended(_) | SessionEvent::Lost(_) if over => {}
            SessionEvent::Lost(what) => return Err(self.lost(&what)),
            SessionEvent::Hung => return Err(self.lost("the guest's agent is gone")),
            SessionEvent::Ended(ended) => return Err(self.lost(&why(&ended))),
        }
        Ok(None)
    }

    fn note(&mut self, carried: Carried, course: &mut Course) {
        let problem = match carried {
            Carried::Input(problem) => Some(problem),
            Carried::Output(problem) => {
                self.outputs = self.outputs.saturating_sub(1);
                problem
            }
        };
        course.problems.extend(problem);
    }

    /// Passes a signal on; ends the session if there is nobody to pass it to, or whoever sent it insists.
    fn signal(&mut self, signal: i32, course: &mut Course) -> Option<SessionOutcome> {
        let asks_to_end = matches!(signal, SIGINT | SIGTERM | SIGHUP | SIGQUIT);
        let alone = !course.runs || course.outcome.is_some();
        let pressed = course.urge.is_some_and(|urge| {
            urge.at.elapsed() >= ECHO && (!urge.sent || signal == SIGTERM && urge.signal == SIGTERM)
        });
        if alone || course.interrupts >= INSISTED || asks_to_end && pressed {
            return Some(SessionOutcome::Signal(signal, None));
        }
        if asks_to_end && course.urge.is_none_or(|urge| !urge.is_pressing()) {
            course.urge = Some(Urge { signal, at: Instant::now(), sent: false });
        }
        self.say(message::SIGNAL, signal as u32);
        None
    }

    fn outcome(&self, kind: u8, number: u32, text: String) -> Result<SessionOutcome, Failure> {
        match kind {
            message::EXITED => Ok(SessionOutcome::Exited(number as u8)),
            message::KILLED => Ok(SessionOutcome::Killed(number as u8)),
            message::NOT_FOUND => Ok(SessionOutcome::NotRun { status: 127, problem: text }),
            message::NOT_RUN => Ok(SessionOutcome::NotRun { status: 126, problem: text }),
            _ => Err(self.lost(&format!("the guest could not be set up: {text}"))),
        }
    }

    fn resize(&self) {
        let (rows, columns) = terminal::size();
        self.say(message::WINDOW, u32::from(rows) << 16 | u32::from(columns));
    }

    fn say(&self, kind: u8, number: u32) {
        self.send(&protocol::encode(kind, number));
    }

    fn tell_time(&mut self) {
        let message = self.pace.message();
        self.send(&message);
    }

    fn send(&self, message: &[u8]) {
        // An agent that is gone is noticed by its connection's end, and one that takes nothing by its silence.
        let _ = (&self.control).write(message);
    }

    fn lost(&self, problem: &str) -> Failure {
        Failure::host(format!("{problem}{}", self.tail.explanation()))
    }
}

fn why(ended: &Ended) -> String {
    match ended {
        Ended::TripleFault(report) => format!("triple fault: the guest's kernel crashed\n{report}"),
        Ended::Reset => "the guest's kernel gave up (a panic)".to_owned(),
        Ended::Failed(failure) => failure.to_string(),
        _ => "the guest ended before the command did".to_owned(),
    }
}

#[cfg(test)]
#[path = "session_tests.rs"]
mod tests;
