//! A conversation with a guest at its console.

use std::{
    io::{Read, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

use anyhow::{Context, Result, ensure};

/// A running machine. It is killed when forgotten.
pub struct Session {
    ring3: Child,
    keyboard: ChildStdin,
    screen: ChildStdout,
    text: String,
    /// Bytes of `text` that were waited for.
    seen: usize,
    verbose: bool,
}

impl Drop for Session {
    fn drop(&mut self) {
        // One that has ended needs no killing.
        let _ = self.ring3.kill();
        let _ = self.ring3.wait();
    }
}

impl Session {
    /// Switches a machine on.
    ///
    /// # Errors
    /// ring3 cannot be run.
    pub fn start(mut command: Command, verbose: bool) -> Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut ring3 = command.spawn().with_context(|| format!("cannot run {command:?}"))?;
        let keyboard = ring3.stdin.take().context("no keyboard")?;
        let screen = ring3.stdout.take().context("no screen")?;
        Ok(Self { ring3, keyboard, screen, text: String::new(), seen: 0, verbose })
    }

    /// Types a line.
    ///
    /// # Errors
    /// The machine has ended.
    pub fn types(&mut self, line: &str) -> Result<()> {
        Ok(self.keyboard.write_all(format!("{line}\n").as_bytes())?)
    }

    /// Reads until `mark` is printed.
    ///
    /// # Errors
    /// The machine ended before; the error shows the end of its console.
    pub fn reads_past(&mut self, mark: &str) -> Result<()> {
        self.reads_up_to(mark).map(drop)
    }

    /// As [`Session::reads_past`], and returns what is printed before the mark.
    ///
    /// # Errors
    /// As for [`Session::reads_past`].
    pub fn reads_up_to(&mut self, mark: &str) -> Result<String> {
        loop {
            if let Some((before, _)) = self.text[self.seen..].split_once(mark) {
                let before = before.to_owned();
                self.seen += before.len() + mark.len();
                return Ok(before);
            }
            let more = self.reads()?;
            ensure!(more, "it ended before it printed `{mark}`:\n{}", self.tail());
        }
    }

    /// Waits for the machine to switch itself off.
    ///
    /// # Errors
    /// It ended otherwise.
    pub fn ends(&mut self) -> Result<()> {
        while self.reads()? {}
        let status = self.ring3.wait()?;
        ensure!(status.success(), "ring3 ended with {status}:\n{}", self.tail());
        Ok(())
    }

    /// Reads what there is; false at the end.
    fn reads(&mut self) -> Result<bool> {
        let mut bytes = [0; 4096];
        let count = self.screen.read(&mut bytes)?;
        if self.verbose {
            std::io::stdout().write_all(&bytes[..count])?;
        }
        self.text += &String::from_utf8_lossy(&bytes[..count]).replace('\r', "");
        Ok(count > 0)
    }

    fn tail(&self) -> String {
        let lines: Vec<_> = self.text.lines().collect();
        lines[lines.len().saturating_sub(30)..].join("\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn echo(script: &str) -> Session {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Session::start(command, false).expect("a shell")
    }

    #[test]
    fn marks_are_found_one_after_the_other() {
        let mut shell = echo("read line; printf 'a: %s\\r\\nb: 2\\n' $line");
        shell.types("1").expect("it reads");
        shell.reads_past("a: ").expect("a");
        assert_eq!(shell.reads_up_to("\n").expect("a line"), "1");
        shell.reads_past("a: ").expect_err("only once");
        shell.ends().expect("its end");
    }

    #[test]
    fn a_machine_that_fails_is_no_success() {
        let error = echo("echo last words; exit 4").ends().expect_err("a status").to_string();
        assert!(error.contains("last words"), "{error}");
    }
}
