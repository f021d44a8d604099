//! The same system natively: its systemd as the first process of a container of this host.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use xtask::command::output;

use super::session::Session;

const CONTAINER: &str = include_str!("../../../../programs/debian/container.sh");
/// What systemd says when it has started what asks for a name on the console.
const LOGIN: &str = "Reached target getty.target";

/// How long a container takes to a login, if this host lets us start one. `scratch` is for the script.
///
/// # Errors
/// systemd did not come so far.
pub fn container(scratch: &Path, disk: &Path) -> Result<Option<Duration>> {
    if output(Command::new("id").arg("-u"))?.trim() != "0" {
        return Ok(None);
    }
    let script = scratch.join("container.sh");
    fs::write(&script, CONTAINER)?;
    let number = scratch.join("container.pid");
    let (script, disk, file) = (script.display(), disk.display(), number.display());
    // systemd wants a terminal for a console; `script` is of the package bsdutils, which every Debian has.
    let mut command = Command::new("script");
    command
        .args(["-qec", &format!("sh '{script}' '{disk}' '{file}'"), "/dev/null"])
        .stderr(Stdio::null());
    let start = Instant::now();
    let mut container = Session::start(command, false)?;
    let came = container.reads_past(LOGIN).context("a container of this host");
    let elapsed = start.elapsed();
    // The terminal's end, at the latest, mostly ends it: then there is nothing to kill.
    let _ = output(Command::new("kill").args(["-KILL", fs::read_to_string(&number)?.trim()]));
    came?;
    Ok(Some(elapsed))
}
