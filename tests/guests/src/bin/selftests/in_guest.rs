//! Commands of this host, run in a guest that has the host's files: `ring3 exec`.

use std::{
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context, Result};
use xtask::command::progress;

use crate::machine::{self, Limits};

/// Guest memory: enough for a compiler, or two Java machines.
const MEMORY: &str = "2G";

/// How a command ended, and what it said.
#[derive(Debug)]
pub struct Ended {
    /// Its exit status; `None` if a signal ended it or ring3.
    pub code: Option<i32>,
    /// Its standard output, then its standard error.
    pub said: String,
}

impl Ended {
    /// The last lines.
    pub fn tail(&self) -> String {
        let lines: Vec<_> = self.said.lines().collect();
        lines[lines.len().saturating_sub(30)..].join("\n")
    }
}

/// Runs a command in a guest, in a folder that both share for real.
///
/// # Errors
/// ring3 cannot be run. How the command ends is no error.
pub fn run(directory: &Path, limits: Limits<'_>, words: &[&str]) -> Result<Ended> {
    let mut command = Command::new(machine::ring3()?);
    command.args(["exec", "--engine", limits.engine, "--memory", MEMORY]);
    command.args(["--cpus", &limits.cpus.to_string()]);
    command.args(limits.isolation.iter().flat_map(|isolation| ["--guest-isolation", isolation]));
    command.args(["--timeout", &limits.timeout.as_secs().to_string(), "--"]).args(words);
    finish(directory, limits, &mut command)
}

/// Runs the same command on the host.
///
/// # Errors
/// It is not there. How it ends is no error.
pub fn on_the_host(directory: &Path, limits: Limits<'_>, words: &[&str]) -> Result<Ended> {
    let (program, arguments) = words.split_first().context("no command")?;
    finish(directory, limits, Command::new(program).args(arguments))
}

fn finish(directory: &Path, limits: Limits<'_>, command: &mut Command) -> Result<Ended> {
    let bar = progress(format!("{command:?}"));
    let output = command.current_dir(directory).stdin(Stdio::null()).output();
    bar.finish_and_clear();
    let output = output.with_context(|| format!("cannot run {command:?}"))?;
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    if limits.verbose {
        print!("{said}");
    }
    Ok(Ended { code: output.status.code(), said })
}
