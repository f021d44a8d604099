//! The program zoo: programs as they ship, run on the host and under `ring3 exec`. What they print and how they
//! end must be the same.
//!
//! A program is a shell script in `programs/zoo`, with facts about it in the comments at its top:
//!
//! - `program`: what it is; `does`: what it is made to do; `version`: a command that prints its version;
//! - `needs`: what must be there: commands, files, and modules of Python as `NAME.py`;
//! - `memory`: of the guest; `seconds`: what either run may take;
//! - `short`: it is run by the ordinary tests;
//! - `differs`: why the guest's output is another one, where that is known;
//! - `fails`: why it fails on some hosts, and not in their guests;
//! - `with`: a file of `programs/zoo_parts` that follows the script, and serves others too.
//!
//! A script runs in an empty folder, which a guest shares, and prints nothing that changes from run to run.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use crate::{counter, figure, ring3};

/// What the guest needs of time beyond the program's.
const START: u64 = 60;
const MEMORY: &str = "512M";
const SECONDS: u64 = 60;
/// Instructions a second of executing that a guest's machine may interpret: a thousandth of what a CPU does. Hosts do not all
/// count a program's instructions, so a CPU is taken to do a thousand million a second, which is less than any does.
const INTERPRETED: f64 = 1e6;

/// A program with what is known of it.
#[derive(Clone, Debug, Default)]
pub struct Program {
    /// Its name, for the command line.
    pub name: String,
    /// What it is.
    pub program: String,
    /// What it is made to do.
    pub does: String,
    /// A command that prints its version.
    pub version: String,
    /// What must be there.
    pub needs: Vec<String>,
    /// It is run by the ordinary tests.
    pub short: bool,
    /// Why it is known not to do the same in a guest.
    pub differs: Option<String>,
    /// Why it fails on some hosts, and not in a guest there.
    pub fails: Option<String>,
    memory: Option<String>,
    seconds: Option<u64>,
    with: Option<String>,
    script: String,
}

/// A run's end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Standard output.
    pub printed: String,
    /// Exit code.
    pub code: Option<i32>,
}

/// What became of a program.
#[derive(Clone, Debug)]
pub struct Compared {
    /// On the host.
    pub host: Ended,
    /// In a guest.
    pub guest: Ended,
    /// What the guest's run said on standard error.
    pub said: String,
    /// How long the two took.
    pub took: [Duration; 2],
}

impl Compared {
    /// The two did the same.
    pub fn is_same(&self) -> bool {
        self.host == self.guest
    }

    /// Instructions that the guest's machine interpreted for each second of executing. `None` if the machine was ended before it
    /// said so.
    pub fn interpreted(&self) -> Option<f64> {
        let seconds: f64 = figure(&self.said, "executing").ok()?;
        Some(counter(&self.said, "instructions").ok()? as f64 / seconds.max(1e-3))
    }

    /// The guest's machine interpreted less than a thousandth of what it executed.
    pub fn is_hardly_interpreted(&self) -> bool {
        self.interpreted().is_some_and(|rate| rate < INTERPRETED)
    }

    /// It failed on the host alone.
    pub fn fails_on_the_host(&self) -> bool {
        self.guest.code == Some(0) && self.host.code != Some(0)
    }

    /// The first line in which they differ, of both.
    pub fn difference(&self) -> String {
        let (host, guest) = (&self.host, &self.guest);
        let lines = |ended: &Ended| ended.printed.lines().map(str::to_owned).collect::<Vec<_>>();
        let (ours, theirs) = (lines(host), lines(guest));
        let count = ours.len().max(theirs.len());
        let line = |of: &[String], at: usize| of.get(at).cloned().unwrap_or("nothing".into());
        let first = (0..count).find(|at| ours.get(*at) != theirs.get(*at));
        let codes = format!("ended with {:?}, on the host {:?}", guest.code, host.code);
        first.map_or(codes.clone(), |at| {
            format!("`{}`, on the host `{}`; {codes}", line(&theirs, at), line(&ours, at))
        })
    }
}

/// All programs, by name.
///
/// # Errors
/// A script cannot be read, or says something unknown of itself.
pub fn programs() -> Result<Vec<Program>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs/zoo");
    let parts = folder.with_file_name("zoo_parts");
    let mut programs = Vec::new();
    for entry in fs::read_dir(&folder).with_context(|| format!("no {}", folder.display()))? {
        let path = entry?.path();
        let name = path.file_stem().and_then(|name| name.to_str()).context("a strange name")?;
        let script = fs::read_to_string(&path)?;
        let mut program = Program::parse(name, &script)?;
        if let Some(part) = &program.with {
            let part = parts.join(part);
            program.script += &fs::read_to_string(&part)
                .with_context(|| format!("{name}: no {}", part.display()))?;
        }
        programs.push(program);
    }
    programs.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(programs)
}

impl Program {
    fn parse(name: &str, script: &str) -> Result<Self> {
        let mut program =
            Self { name: name.to_owned(), script: script.to_owned(), ..Self::default() };
        for line in script.lines().map_while(|line| line.strip_prefix("# ")) {
            let (fact, value) = line.split_once(": ").unwrap_or((line, ""));
            let value = value.to_owned();
            match fact {
                "program" => program.program = value,
                "does" => program.does = value,
                "version" => program.version = value,
                "needs" => program.needs = value.split_whitespace().map(str::to_owned).collect(),
                "memory" => program.memory = Some(value),
                "seconds" => program.seconds = Some(value.parse().context("seconds")?),
                "short" => program.short = true,
                "differs" => program.differs = Some(value),
                "fails" => program.fails = Some(value),
                "with" => program.with = Some(value),
                _ => anyhow::bail!("{name}: `{fact}` is no fact of a program"),
            }
        }
        let told = !program.program.is_empty() && !program.does.is_empty();
        ensure!(told, "{name}: it does not say what it is and does");
        Ok(program)
    }

    /// What it needs and is not there.
    pub fn missing(&self) -> Vec<&str> {
        self.needs.iter().map(String::as_str).filter(|need| !is_there(need)).collect()
    }

    /// What it says its version is.
    pub fn its_version(&self) -> String {
        let run = shell(&self.version).output();
        let said = run.map(|run| String::from_utf8_lossy(&run.stdout).into_owned());
        said.unwrap_or_default().lines().next().unwrap_or_default().trim().to_owned()
    }

    /// Runs it on the host and in a guest.
    ///
    /// # Errors
    /// It cannot be started. What it does is no error.
    pub fn compare(&self) -> Result<Compared> {
        let seconds = self.seconds.unwrap_or(SECONDS);
        let mut here = limited(seconds);
        here.args(["sh", "-c", &self.script]);
        let mut there = limited(seconds + START);
        let memory = self.memory.as_deref().unwrap_or(MEMORY);
        there.arg(ring3()?).args(["exec", "--stats", "--memory", memory, "--"]);
        there.args(["sh", "-c", &self.script]);
        let (host, on_host) = run_in_empty_folder(here)?;
        let (guest, in_guest) = run_in_empty_folder(there)?;
        let said = String::from_utf8_lossy(&guest.stderr).into_owned();
        Ok(Compared {
            host: Ended::of(&host),
            guest: Ended::of(&guest),
            said,
            took: [on_host, in_guest],
        })
    }
}

impl Ended {
    fn of(output: &Output) -> Self {
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        Self { printed, code: output.status.code() }
    }
}

fn limited(seconds: u64) -> Command {
    let mut command = Command::new("timeout");
    command.args(["--kill-after=10", &seconds.to_string()]);
    command
}

fn run_in_empty_folder(mut command: Command) -> Result<(Output, Duration)> {
    let folder = TempDir::new()?;
    let started = Instant::now();
    command.current_dir(folder.path()).stdin(Stdio::null());
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    Ok((output, started.elapsed()))
}

fn shell(command: &str) -> Command {
    let mut shell = Command::new("sh");
    shell.args(["-c", command]).stdin(Stdio::null());
    shell
}

fn is_there(need: &str) -> bool {
    match need.strip_suffix(".py") {
        Some(module) => {
            let import = format!("python3 -c 'import {module}' 2> /dev/null");
            shell(&import).status().is_ok_and(|status| status.success())
        }
        None if need.starts_with('/') => Path::new(need).exists(),
        None => {
            let path = env::var_os("PATH").unwrap_or_default();
            env::split_paths(&path).any(|folder: PathBuf| folder.join(need).exists())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(printed: &str, code: i32) -> Ended {
        Ended { printed: printed.into(), code: Some(code) }
    }

    /// The host's run has printed two lines.
    fn compared(guest: Ended, said: &str) -> Compared {
        let (host, said) = (ended("a\nb\n", 0), said.into());
        Compared { host, guest, said, took: [Duration::ZERO; 2] }
    }

    #[test]
    fn every_program_says_what_it_is() {
        let programs = programs().expect("they can be read");
        assert!(programs.len() > 30 && programs.iter().any(|program| program.short));
        assert!(programs.iter().all(|program| !program.version.is_empty()));
    }

    #[test]
    fn what_is_interpreted_is_seen() {
        let compared = |said: &str| compared(ended("", 0), said);
        let said = |count| format!("  instructions  {count}  1.0/s\n  executing  2.500 s\n");
        assert!(compared(&said("2400000")).is_hardly_interpreted());
        assert!(!compared(&said("2600000")).is_hardly_interpreted());
        assert!(!compared("Killed\n").is_hardly_interpreted());
    }

    #[test]
    fn unknown_facts_are_refused() {
        assert!(Program::parse("a", "# program: a\n# does: b\n# shrot\n").is_err());
        assert!(Program::parse("a", "# program: a\n").is_err());
        let program = Program::parse("a", "# program: a\n# does: b\n# seconds: 7\nx\n# y: z\n");
        assert_eq!(program.expect("right").seconds, Some(7));
    }

    #[test]
    fn the_first_difference_is_told() {
        let compared = |guest| compared(guest, "");
        assert!(compared(ended("a\nb\n", 0)).is_same());
        assert!(!compared(ended("a\nb\n", 1)).is_same());
        let told = compared(ended("a\n", 0)).difference();
        assert!(told.starts_with("`nothing`, on the host `b`"), "{told}");
    }
}
