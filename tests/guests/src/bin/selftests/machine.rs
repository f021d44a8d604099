//! A guest whose console is read while it runs.

use std::{
    io::{Read, Write},
    ops::ControlFlow,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use xtask::checks;

/// How a guest is run.
#[derive(Clone, Copy, Debug)]
pub struct Limits<'a> {
    /// How long it may take.
    pub timeout: Duration,
    /// The engine, by the name ring3 has for it.
    pub engine: &'a str,
    /// What keeps programs from their kernel's memory, by the name ring3 has for it, unless ring3 is to choose.
    pub isolation: Option<&'a str>,
    /// How many virtual CPUs a guest has.
    pub cpus: u32,
    /// QEMU runs the machine instead, translating all of it.
    pub qemu: bool,
    /// Its console is copied to ours.
    pub verbose: bool,
}

/// A machine to switch on.
#[derive(Debug)]
pub struct Machine<'a> {
    /// The kernel's image.
    pub kernel: &'a Path,
    /// Its first root file system, if it wants one.
    pub initrd: Option<&'a Path>,
    /// What a multiboot kernel is given instead: files, each with its arguments after a space.
    pub modules: &'a [String],
    /// Its command line.
    pub cmdline: &'a str,
    /// Memory, in MiB.
    pub memory: u32,
}

impl Machine<'_> {
    /// Runs the machine and gives `each` what its console prints, as it comes, until the machine
    /// ends or `each` has seen enough. Returns what ring3 said.
    ///
    /// # Errors
    /// ring3 cannot be run, or the machine ended otherwise than by switching itself off.
    pub fn run(
        &self,
        limits: Limits<'_>,
        each: &mut dyn FnMut(&[u8]) -> ControlFlow<()>,
    ) -> Result<()> {
        let mut command = self.command(limits)?;
        let mut child = command.spawn().with_context(|| format!("cannot run {command:?}"))?;
        let mut console = child.stdout.take().context("no standard output")?;
        let mut chunk = [0; 4096];
        loop {
            let length = console.read(&mut chunk)?;
            let printed = chunk.get(..length).unwrap_or_default();
            if limits.verbose {
                std::io::stdout().write_all(printed)?;
            }
            if length == 0 {
                break;
            }
            if each(printed).is_break() {
                child.kill()?;
                child.wait()?;
                return Ok(());
            }
        }
        let status = child.wait()?;
        ensure!(status.success(), "{:?} ended with {status}", command.get_program());
        Ok(())
    }

    fn command(&self, limits: Limits<'_>) -> Result<Command> {
        let mut command = if limits.qemu { self.qemu(limits) } else { self.ring3(limits)? };
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        Ok(command)
    }

    fn ring3(&self, limits: Limits<'_>) -> Result<Command> {
        let mut command = Command::new(ring3()?);
        command.arg("run").arg("--kernel").arg(self.kernel).args(["--append", self.cmdline]);
        if let Some(initrd) = self.initrd {
            command.arg("--initrd").arg(initrd);
        }
        command.args(self.modules.iter().flat_map(|module| ["--module", module]));
        command.args(["--memory", &format!("{}M", self.memory)]);
        command.args(["--engine", limits.engine, "--cpus", &limits.cpus.to_string()]);
        command.args(["--timeout", &limits.timeout.as_secs().to_string()]);
        command
            .args(limits.isolation.iter().flat_map(|isolation| ["--guest-isolation", isolation]));
        Ok(command)
    }

    /// QEMU has no bound on its time: `timeout` gives it one.
    fn qemu(&self, limits: Limits<'_>) -> Command {
        let mut command = Command::new("timeout");
        command.arg(limits.timeout.as_secs().to_string()).arg("qemu-system-x86_64");
        command.args(["-accel", "tcg", "-cpu", "max", "-nodefaults", "-no-reboot"]);
        command.args(["-smp", &limits.cpus.to_string()]);
        command.args(["-display", "none", "-serial", "stdio", "-m", &format!("{}M", self.memory)]);
        command.arg("-kernel").arg(self.kernel).args(["-append", self.cmdline]);
        if let Some(initrd) = self.initrd {
            command.arg("-initrd").arg(initrd);
        }
        command
    }
}

/// The released program.
///
/// # Errors
/// It has not been built.
pub fn ring3() -> Result<PathBuf> {
    let ring3 = checks::ring3();
    let hint = "run `cargo build --release -p ring3`";
    ensure!(ring3.exists(), "{} does not exist: {hint}", ring3.display());
    Ok(ring3)
}
