//! Our standard input and output as a guest's console.
//!
//! The terminal is raw while the guest runs. It is given back on every way out: when the
//! [`RawTerminal`] is dropped, in the panic hook, and by the main thread after a signal, which
//! the signal thread turns into an ordinary event.

use std::{io::Read, sync::mpsc::Sender, thread};

use crate::{
    escape::{self, Escapes, Key},
    failure::Failure,
    output,
};
use host_linux::terminal;
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM, SIGXCPU},
    iterator::Signals,
};

/// What ends the use of a console.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The user left.
    Left,
    /// A signal arrived.
    Signal(i32),
}

/// Standard input; if it is a terminal, it is in raw mode until this is dropped.
pub struct RawTerminal {
    is_terminal: bool,
}

impl RawTerminal {
    /// Makes the terminal at standard input raw, if it is one: at once, or when it is ours.
    pub fn enter() -> Result<Self, Failure> {
        let is_terminal = terminal::stdin_is_terminal();
        if is_terminal {
            restore_on_panic();
            terminal::make_raw_in_foreground()
                .map_err(|e| Failure::host(format!("terminal: {e}")))?;
        }
        Ok(Self { is_terminal })
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        terminal::restore();
    }
}

fn restore_on_panic() {
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        terminal::restore();
        default(panic);
    }));
}

/// Turns the signals that ask us to end into events.
pub fn watch_signals<E>(events: Sender<E>) -> Result<(), Failure>
where
    E: From<End> + Send + 'static,
{
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP, SIGXCPU])
        .map_err(|error| Failure::host(format!("signals: {error}")))?;
    let watch = move || {
        for signal in signals.forever() {
            if events.send(End::Signal(signal).into()).is_err() {
                return;
            }
        }
    };
    start("signals", watch)
}

/// Feeds standard input to the guest until it ends; escapes count on terminals only. A terminal that
/// ends has hung up, whether or not a signal tells so: only the session's leader gets one.
///
/// # Errors
/// The host gives no thread.
pub fn read_stdin<E>(
    terminal: &RawTerminal,
    input: impl Fn(&[u8]) + Send + 'static,
    events: Sender<E>,
) -> Result<(), Failure>
where
    E: From<End> + Send + 'static,
{
    // Not asked again: one that has hung up since is none any more.
    let interactive = terminal.is_terminal;
    let read = move || {
        let mut escapes = interactive.then(Escapes::default);
        let mut buffer = [0; 4096];
        while let Ok(count @ 1..) = read_in_foreground(&mut buffer) {
            let bytes = buffer.get(..count).unwrap_or_default();
            match &mut escapes {
                None => input(bytes),
                Some(escapes) => {
                    let keys: Vec<_> = bytes.iter().filter_map(|&b| escapes.key(b)).collect();
                    if !act(&keys, &input, &events) {
                        return;
                    }
                }
            }
        }
        if interactive {
            // Nobody listening means the machine has ended anyway.
            let _ = events.send(End::Signal(SIGHUP).into());
        }
    };
    start("stdin", read)
}

/// Starts a thread.
pub fn start(name: &str, run: impl FnOnce() + Send + 'static) -> Result<(), Failure> {
    let started = thread::Builder::new().name(name.to_owned()).spawn(run);
    started.map(drop).map_err(|error| Failure::host(format!("cannot start a thread: {error}")))
}

/// A terminal that is another's now is not read: that would stop us.
fn read_in_foreground(buffer: &mut [u8]) -> std::io::Result<usize> {
    terminal::wait_for_foreground();
    std::io::stdin().lock().read(buffer)
}

/// False once the user has left.
fn act<E: From<End>>(keys: &[Key], input: &impl Fn(&[u8]), events: &Sender<E>) -> bool {
    for key in keys {
        match key {
            Key::Guest(byte) => input(&[*byte]),
            Key::Help => output::say(&format!("\r\nring3: {}\r\n", escape::HELP)),
            Key::Leave => {
                // Nobody listening means the machine has ended anyway.
                let _ = events.send(End::Left.into());
                return false;
            }
        }
    }
    true
}
