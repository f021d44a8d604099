//! The controlling terminal in raw mode, and back, on every way out.
//!
//! Raw mode is a property of the terminal, not of the process: it outlives us unless undone.
//! So the saved settings are global, restoring is idempotent, and whoever ends the process
//! (normal return, panic hook, signal thread) calls [`restore`].

use std::sync::{Mutex, PoisonError};

use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcsetattr};

/// The settings before [`make_raw`], while they are not restored.
static SAVED: Mutex<Option<Termios>> = Mutex::new(None);

/// Whether standard input is a terminal.
pub fn stdin_is_terminal() -> bool {
    isatty(std::io::stdin())
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
    if let Some(settings) = saved {
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
