//! One test as one boot of the released program.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use tempfile::NamedTempFile;

use crate::{
    config::Test,
    outcome::{Ended, Outcome},
    scope,
};

/// Starts tests.
pub struct Runner {
    ring3: PathBuf,
    engine: String,
    patience: u64,
}

/// A test that was run, or found impossible to run.
pub struct Finished {
    /// The test.
    pub test: Test,
    /// What came of it.
    pub outcome: Outcome,
    /// What the guest and then ring3 printed.
    pub log: String,
    /// How long it took.
    pub duration: Duration,
}

impl Runner {
    /// Tests on the program `ring3`, with `patience` times the time they ask for.
    ///
    /// # Errors
    /// There is no such program.
    pub fn new(ring3: &Path, engine: &str, patience: u64) -> Result<Self> {
        ensure!(
            ring3.is_file(),
            "{} does not exist: run `cargo build --release -p ring3`, or say --ring3 PATH",
            ring3.display()
        );
        Ok(Self { ring3: ring3.into(), engine: engine.to_owned(), patience })
    }

    /// Runs a test, which is `program`, to its end.
    ///
    /// # Errors
    /// ring3 cannot be started. How the test ends is no error.
    pub fn run(&self, test: Test, program: &Path) -> Result<Finished> {
        let started = Instant::now();
        let finished =
            |test, outcome, log| Finished { test, outcome, log, duration: started.elapsed() };
        if !fs::exists(program).unwrap_or(false) {
            let outcome = Outcome::NotApplicable(format!("{} was not built", test.file));
            return Ok(finished(test, outcome, String::new()));
        }
        if let Some(reason) = scope::impossible(&test) {
            return Ok(finished(test, Outcome::NotApplicable(reason.to_owned()), String::new()));
        }
        let (ended, log) = self.boot(&test, program)?;
        let outcome = Outcome::of(&ended, &log, scope::reason(&test));
        Ok(finished(test, outcome, log))
    }

    fn boot(&self, test: &Test, program: &Path) -> Result<(Ended, String)> {
        let timeout = test.timeout.saturating_mul(self.patience).to_string();
        let memory = format!("{}M", test.memory);
        let mut command = Command::new(&self.ring3);
        command.arg("run").arg("--kernel").arg(program);
        // In one word: arguments of programs begin with dashes.
        command.arg(format!("--append={}", test.arguments));
        command.args([
            "--engine",
            &self.engine,
            "--memory",
            &memory,
            "--cpus",
            &test.cpus.to_string(),
            "--timeout",
            &timeout,
            "--test-devices",
            "--json",
        ]);
        let environment = NamedTempFile::new()?;
        if let Some(variables) = scope::environment(test) {
            fs::write(environment.path(), variables)?;
            command.arg("--module").arg(environment.path());
        }
        let output = command.stdin(Stdio::null()).output();
        let output = output.with_context(|| format!("cannot run {}", self.ring3.display()))?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).replace('\r', "");
        let (console, messages) = (text(&output.stdout), text(&output.stderr));
        Ok((Ended::of(output.status.code(), &messages), console + &messages))
    }
}
