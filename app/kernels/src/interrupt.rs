//! Interrupts while other programs work for us.
//!
//! Whoever is told to end while something is half made should leave nothing of it. So the programs that make it are ended; what they were to do
//! has failed then, and what there is of it goes on the way out, as after any failure. A second interrupt kills
//! programs that do not end.

use std::{
    io,
    os::unix::process::CommandExt,
    process::{Child, Command},
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
};

use rustix::process::{Pid, Signal, kill_process_group};
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    iterator::Signals,
    low_level::emulate_default_handler,
};

/// What the thread that hears signals knows.
struct State {
    /// It is there.
    listens: bool,
    /// How many [`Guard`]s there are.
    guards: usize,
    /// Programs that work for a guarded one; each is its group's leader.
    children: Vec<u32>,
    /// What ended them.
    signal: Option<i32>,
    /// Signals mean something else now.
    is_others: bool,
}

static STATE: Mutex<State> = Mutex::new(State {
    listens: false,
    guards: 0,
    children: Vec::new(),
    signal: None,
    is_others: false,
});

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// As long as there is one, SIGINT, SIGTERM and SIGHUP end the programs that run for us in place of us.
#[derive(Debug)]
pub struct Guard(());

impl Guard {
    /// From here on.
    ///
    /// # Errors
    /// The host gives no thread.
    pub fn new() -> io::Result<Self> {
        let mut state = state();
        if !state.listens {
            let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
            let hear = move || signals.forever().for_each(hear);
            thread::Builder::new().name("interrupts".into()).spawn(hear)?;
            state.listens = true;
        }
        state.guards += 1;
        Ok(Self(()))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        state().guards -= 1;
    }
}

fn hear(number: i32) {
    let mut state = state();
    if state.guards > 0 {
        let signal = if state.signal.is_none() { Signal::TERM } else { Signal::KILL };
        state.signal = Some(number);
        state.children.iter().for_each(|&child| end(child, signal));
    } else if !state.is_others {
        // As if nobody listened. It ends us, or we stay.
        let _ = emulate_default_handler(number);
    }
}

fn end(child: u32, signal: Signal) {
    if let Some(group) = Pid::from_raw(child as i32) {
        // One that has ended needs nothing.
        let _ = kill_process_group(group, signal);
    }
}

/// The signal that interrupted what was guarded, if one did.
pub fn signal() -> Option<i32> {
    state().signal
}

/// From here on somebody else says what signals mean.
pub fn leave_to_others() {
    state().is_others = true;
}

/// A program that works for us, and is ended by what interrupts us, if anything guards that.
pub(crate) struct Worker(pub Child);

impl Worker {
    /// Starts it.
    pub fn start(command: &mut Command) -> io::Result<Self> {
        // What comes between its start and its entry in the list would miss it.
        let mut state = state();
        if state.guards == 0 {
            return command.spawn().map(Self);
        }
        if state.signal.is_some() {
            return Err(io::Error::from(io::ErrorKind::Interrupted));
        }
        // A terminal's Ctrl-C is for us, who pass it on.
        let child = command.process_group(0).spawn()?;
        state.children.push(child.id());
        Ok(Self(child))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        state().children.retain(|&child| child != self.0.id());
    }
}
