//! The controlling terminal in raw mode, and back, on every way out.
//!
//! Raw mode is a property of the terminal, not of the process: it outlives us unless undone.
//! So the saved settings are global, restoring is idempotent, and whoever ends the process
//! (normal return, panic hook, signal thread) calls [`restore`].

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use rustix::{
    process::getpgrp,
    termios::{OptionalActions, Termios, isatty, tcgetattr, tcgetpgrp, tcsetattr},
};

/// The settings before [`make_raw`], while they are not restored.
static SAVED: Mutex<Option<Termios>> = Mutex::new(None);
/// The terminal is to be raw once we are in its foreground.
static AWAITED: AtomicBool = AtomicBool::new(false);
/// How often we look whether we are.
const GLANCE: Duration = Duration::from_millis(100);

/// Whether standard input is a terminal.
pub fn stdin_is_terminal() -> bool {
    isatty(std::io::stdin())
}

/// Whether standard error is a terminal.
pub fn stderr_is_terminal() -> bool {
    isatty(std::io::stderr())
}

/// Whether the terminal at standard input is for other processes now, as a shell has it for `command &`: whoever of us reads it
/// or changes its settings is stopped.
fn is_anothers() -> bool {
    // A terminal that is not ours to control stops nobody.
    tcgetpgrp(std::io::stdin()).is_ok_and(|foreground| foreground != getpgrp())
}

/// Puts the terminal at standard input into raw mode, once we are in its foreground.
///
/// # Errors
/// As [`make_raw`], if that is now.
pub fn make_raw_in_foreground() -> std::io::Result<()> {
    if is_anothers() {
        AWAITED.store(true, Ordering::Relaxed);
        return Ok(());
    }
    make_raw()
}

/// Waits until standard input, if it is a terminal, is ours to read, and makes it raw then if that was wanted.
pub fn wait_for_foreground() {
    while stdin_is_terminal() && is_anothers() {
        thread::sleep(GLANCE);
    }
    if AWAITED.swap(false, Ordering::Relaxed) {
        // One that refuses stays as it is; what is typed is the guest's all the same.
        let _ = make_raw();
    }
}

/// Puts the terminal at standard input into raw mode: every key reaches the guest. Output
/// processing stays on, so that our own messages keep their line ends.
///
/// # Errors
/// Standard input is not a terminal, or the terminal refused.
pub fn make_raw() -> std::io::Result<()> {
    let settings = tcgetattr(std::io::stdin())?;
    let mut raw = settings.clone();
    raw.make_raw();
    raw.output_modes = settings.output_modes;
    let mut saved = SAVED.lock().unwrap_or_else(PoisonError::into_inner);
    if saved.is_none() {
        *saved = Some(settings);
    }
    Ok(tcsetattr(std::io::stdin(), OptionalActions::Now, &raw)?)
}

/// Gives the terminal its settings back. Does nothing if it has them.
pub fn restore() {
    let saved = SAVED.lock().unwrap_or_else(PoisonError::into_inner).take();
    // Whoever has the terminal now has made it as they want it.
    if let Some(settings) = saved.filter(|_| !is_anothers()) {
        // A terminal that went away has nothing to restore.
        let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, &settings);
    }
}

/// Whether standard output is a terminal.
pub fn stdout_is_terminal() -> bool {
    isatty(std::io::stdout())
}

/// Rows and columns of the terminal at standard output; 24 by 80 where nobody knows.
pub fn size() -> (u16, u16) {
    match rustix::termios::tcgetwinsize(std::io::stdout()) {
        Ok(size) if size.ws_row > 0 && size.ws_col > 0 => (size.ws_row, size.ws_col),
        _ => (24, 80),
    }
}
