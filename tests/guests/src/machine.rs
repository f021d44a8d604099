//! A machine that a test watches while it runs.

use std::{
    fs,
    io::{BufRead, BufReader, Lines, Write},
    process::{Child, ChildStdout, Command, ExitStatus, Stdio},
};

use anyhow::{Context, Result, bail};
use tempfile::NamedTempFile;

use crate::{Guest, ring3};

/// A running machine. It is killed when forgotten; its first root file system is a file for as long.
pub struct Machine {
    ring3: Child,
    console: Lines<BufReader<ChildStdout>>,
    _initrd: NamedTempFile,
}

impl Drop for Machine {
    fn drop(&mut self) {
        // One that has ended needs no killing.
        let _ = self.ring3.kill();
        let _ = self.ring3.wait();
    }
}

impl Machine {
    /// Boots a guest.
    ///
    /// # Errors
    /// It cannot be fetched, packed or started.
    pub fn start(guest: &Guest) -> Result<Self> {
        let mut command = Command::new(ring3()?);
        let _initrd = guest.prepares(&mut command)?;
        let mut ring3 = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let console = BufReader::new(ring3.stdout.take().context("no console")?).lines();
        Ok(Self { ring3, console, _initrd })
    }

    /// The monitor's process.
    pub fn process(&self) -> u32 {
        self.ring3.id()
    }

    /// Reads the console up to this line; returns what came before it.
    ///
    /// # Errors
    /// It never comes.
    pub fn says(&mut self, expected: &str) -> Result<String> {
        let mut said = String::new();
        for line in &mut self.console {
            let line = line?;
            if line.trim_end() == expected {
                return Ok(said);
            }
            said = said + line.trim_end() + "\n";
        }
        bail!("the guest did not say `{expected}`:\n{said}")
    }

    /// Types a line at its console.
    ///
    /// # Errors
    /// The machine has ended.
    pub fn hears(&mut self, line: &str) -> Result<()> {
        let keyboard = self.ring3.stdin.as_mut().context("no keyboard")?;
        Ok(keyboard.write_all(format!("{line}\n").as_bytes())?)
    }

    /// Processes of the monitor whose command line has this word.
    ///
    /// # Errors
    /// /proc cannot be read.
    pub fn processes(&self, word: &str) -> Result<Vec<u32>> {
        let mut found = Vec::new();
        for task in fs::read_dir(format!("/proc/{}/task", self.process()))? {
            let children = fs::read_to_string(task?.path().join("children"))?;
            for process in children.split_whitespace() {
                // One that has just ended has no command line.
                let words = fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
                if words.split(|&byte| byte == 0).any(|other| other == word.as_bytes()) {
                    found.push(process.parse()?);
                }
            }
        }
        Ok(found)
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// The host refuses.
    pub fn ends(&mut self) -> Result<ExitStatus> {
        Ok(self.ring3.wait()?)
    }
}
