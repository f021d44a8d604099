//! `cargo xtask test` and `cargo xtask ci`: every check, and one line that counts.

use std::{
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};

use crate::command::run;

/// How many tests passed and failed, over all test programs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    passed: u64,
    failed: u64,
}

impl Tally {
    /// Adds a line of output, if it is a test program's result.
    fn add(&mut self, line: &str) {
        let Some(result) = line.trim().strip_prefix("test result: ") else { return };
        let count = |what| {
            let parts = result.split([';', '.']);
            let part = parts.map(str::trim).find_map(|part| part.strip_suffix(what))?;
            part.trim().parse::<u64>().ok()
        };
        self.passed += count("passed").unwrap_or(0);
        self.failed += count("failed").unwrap_or(0);
    }
}

/// The top of the source tree.
pub fn root() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().unwrap_or(manifest).to_owned()
}

/// Runs every check and prints `N passed, N failed`. Checks that are not test programs (format,
/// lints) count as one each.
///
/// # Errors
/// A check failed, or cargo could not be run.
pub fn test() -> Result<()> {
    let mut tally = Tally::default();
    let mut broken = Vec::new();
    let checks: [(&str, &[&str]); 5] = [
        ("format", &["fmt", "--all", "--check"]),
        ("lints", &["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]),
        ("unit tests", &["test", "--workspace", "--exclude", "guests", "--no-fail-fast"]),
        ("the program to boot guests with", &["build", "--release", "--package", "ring3"]),
        // One guest at a time: a guest whose timer thread gets no CPU finds its timer broken.
        (
            "boot tests",
            &["test", "--package", "guests", "--no-fail-fast", "--", "--test-threads=1"],
        ),
    ];
    for (name, arguments) in checks {
        println!("==> {name}: cargo {}", arguments.join(" "));
        let before = tally;
        let succeeded = cargo(arguments, &mut tally)?;
        let counted = tally != before;
        match (succeeded, counted) {
            (true, false) => tally.passed += 1,
            (false, _) => {
                tally.failed += u64::from(tally.failed == before.failed);
                broken.push(name);
            }
            (true, true) => {}
        }
    }
    for name in &broken {
        println!("failed: {name}");
    }
    println!("{} passed, {} failed", tally.passed, tally.failed);
    if broken.is_empty() { Ok(()) } else { bail!("{} of the checks failed", broken.len()) }
}

/// Runs cargo, passing its output on and counting results; whether it succeeded.
fn cargo(arguments: &[&str], tally: &mut Tally) -> Result<bool> {
    let mut command = Command::new(env!("CARGO"));
    command.args(arguments).current_dir(root()).stdout(Stdio::piped());
    let mut child = command.spawn().context("cannot run cargo")?;
    let output = child.stdout.take().context("cargo has no output")?;
    for line in BufReader::new(output).lines() {
        let line = line?;
        println!("{line}");
        tally.add(&line);
    }
    Ok(child.wait()?.success())
}

/// Builds the release program and returns where it is.
///
/// # Errors
/// It does not build.
pub fn build_ring3() -> Result<PathBuf> {
    let mut command = Command::new(env!("CARGO"));
    command.args(["build", "--release", "--package", "ring3"]);
    run(command.current_dir(root()))?;
    Ok(ring3())
}

/// Where the release program is.
pub fn ring3() -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    target.unwrap_or_else(|| root().join("target")).join("release/ring3")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_summed() {
        let mut tally = Tally::default();
        for line in [
            "test result: ok. 11 passed; 0 failed; 0 ignored; 0 measured; finished in 0.01s",
            "test a::b ... ok",
            "test result: FAILED. 2 passed; 3 failed; 1 ignored; 0 measured; finished in 0.01s",
        ] {
            tally.add(line);
        }
        assert_eq!(tally, Tally { passed: 13, failed: 3 });
    }
}
