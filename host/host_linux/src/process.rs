//! This process among others.

use std::io;

use rustix::process::{Signal, set_parent_process_death_signal};

/// Has this process killed when the one that started it ends, however it does.
///
/// # Errors
/// The host refuses.
pub fn die_with_parent() -> io::Result<()> {
    Ok(set_parent_process_death_signal(Some(Signal::KILL))?)
}
