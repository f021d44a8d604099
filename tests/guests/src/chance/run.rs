//! Programs on the host and in guests.

use std::{
    collections::HashMap,
    fs,
    path::Path,
    process::{Command, Output, Stdio},
};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use super::Program;
use crate::ring3;

const CHANCE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/chance"));

/// Where programs run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// On this host.
    Host,
    /// In a guest, by this engine, on this of ring3's kernels.
    Guest {
        /// The engine's name.
        engine: String,
        /// The kernel's.
        kernel: String,
        /// Seconds it may take.
        timeout: u64,
    },
}

/// A folder from which programs are run.
#[derive(Debug)]
pub struct Runs {
    folder: TempDir,
}

/// A program whose two runs have seen different things.
#[derive(Clone, Debug)]
pub struct Difference {
    /// The program.
    pub program: Program,
    /// The first step that differs; as many as there are if only the end does.
    pub step: usize,
    /// What the host's run printed.
    pub host: String,
    /// What the guest's run printed.
    pub guest: String,
}

impl Runs {
    /// Puts what is needed into a folder.
    ///
    /// # Errors
    /// The host refuses.
    pub fn new(cases: &[u8]) -> Result<Self> {
        let folder = TempDir::new()?;
        let program = folder.path().join("chance");
        fs::write(&program, CHANCE)?;
        fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
        fs::write(folder.path().join("cases"), cases)?;
        Ok(Self { folder })
    }

    /// Runs programs; a line of digests for each, or with `all` everything they note.
    ///
    /// # Errors
    /// They cannot be run, or did not come to their end.
    pub fn run(&self, programs: &[Program], place: &Place, all: bool) -> Result<String> {
        let lines: String = programs.iter().map(|program| format!("{program}\n")).collect();
        fs::write(self.folder.path().join("programs"), lines)?;
        let output = self.command(place, all)?.output().context("cannot run the programs")?;
        succeeded(&output, place)
    }

    fn command(&self, place: &Place, all: bool) -> Result<Command> {
        let chance = Path::new("./chance");
        let mut command = match place {
            Place::Host => Command::new(chance),
            Place::Guest { engine, kernel, timeout } => {
                let mut command = Command::new(ring3()?);
                command.args(["exec", "--memory", "512M", "--kernel", kernel]);
                command.args(engine_arguments(engine));
                command.args(["--timeout", &timeout.to_string(), "--"]).arg(chance);
                command
            }
        };
        command.args(["programs", "cases"]).args(all.then_some("trace"));
        command.current_dir(self.folder.path()).stdin(Stdio::null());
        Ok(command)
    }

    /// Runs programs on the host and in a guest; those that differ.
    ///
    /// # Errors
    /// They cannot be run.
    pub fn compare(&self, programs: &[Program], guest: &Place) -> Result<Vec<Difference>> {
        let host = self.run(programs, &Place::Host, false)?;
        let guest = self.run(programs, guest, false)?;
        let (host, guest) = (by_name(&host), by_name(&guest));
        let mut differences = Vec::new();
        for program in programs {
            let line = |lines: &HashMap<&str, &str>| {
                lines.get(program.name.as_str()).map_or(String::new(), |&line| line.to_owned())
            };
            let (host, guest) = (line(&host), line(&guest));
            ensure!(!host.is_empty(), "the host did not run program {}", program.name);
            if host != guest {
                let step = first_difference(&host, &guest);
                differences.push(Difference { program: program.clone(), step, host, guest });
            }
        }
        Ok(differences)
    }
}

fn succeeded(output: &Output, place: &Place) -> Result<String> {
    let messages = String::from_utf8_lossy(&output.stderr);
    let said = String::from_utf8_lossy(&output.stdout);
    let last = said.lines().last().unwrap_or_default();
    ensure!(output.status.success(), "{place:?}: {}: {messages}after: {last}", output.status);
    Ok(said.into_owned())
}

/// The lines of digests by their programs' names.
fn by_name(text: &str) -> HashMap<&str, &str> {
    text.lines().filter_map(|line| line.split_once(' ')).collect()
}

fn first_difference(host: &str, guest: &str) -> usize {
    let (host, guest) = (host.split(' '), guest.split(' '));
    host.zip(guest).take_while(|(host, guest)| host == guest).count()
}

/// Options of `ring3` for an engine's name. On `fast` all programs run directly, on `young` those that are not new, and on `look-ups`
/// none.
fn engine_arguments(engine: &str) -> Vec<&str> {
    match engine {
        "fast" => vec!["--engine", "fast", "--young", "map"],
        "young" => vec!["--engine", "fast"],
        "look-ups" => vec!["--engine", "fast", "--scattered", "always"],
        other => vec!["--engine", other],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_step_that_differs_is_named() {
        assert_eq!(first_difference("map=1 copy=2 end=0", "map=1 copy=3 end=0"), 1);
        assert_eq!(first_difference("map=1 copy=2 end=0", "map=1 end=b"), 1);
        assert_eq!(first_difference("map=1 end=0", "map=1 end=b"), 1);
        assert_eq!(by_name("7 map=1 end=0\n")["7"], "map=1 end=0");
    }
}
