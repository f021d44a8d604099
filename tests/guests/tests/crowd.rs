//! Machines that share the host's CPUs take turns, and none depends on the others.

use std::{
    fs,
    io::{BufRead, BufReader, Lines},
    os::unix::fs::MetadataExt,
    path::Path,
    process::{Child, ChildStdout, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use guests::ring3;
use tempfile::TempDir;

/// How long the test waits until it sees all turns held.
const PATIENCE: Duration = Duration::from_secs(60);
/// Computes for ever, and prints a line now and then.
const SCRIPT: &str = "i=0; while :; do i=$((i+1)); [ $((i % 20000)) != 0 ] || echo $i; done";

/// A machine whose vCPU never halts.
struct Busy {
    process: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Busy {
    fn start(runtime: &Path, crowded: &str) -> Result<Self> {
        let mut command = Command::new(ring3()?);
        command.args(["exec", "--cpus", "1", "--memory", "256M", "--timeout", "300"]);
        command.args(["--crowded", crowded, "--", "sh", "-c", SCRIPT]);
        command.env("XDG_RUNTIME_DIR", runtime).current_dir(runtime);
        let mut process = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
        let lines = BufReader::new(process.stdout.take().context("no output")?).lines();
        Ok(Self { process, lines })
    }

    /// Reads so many lines.
    fn goes_on(&mut self, lines: usize) -> Result<()> {
        for _ in 0..lines {
            self.lines.next().context("it has ended")??;
        }
        Ok(())
    }

    fn signal(&self, signal: &str) -> Result<()> {
        let mut kill = Command::new("kill");
        ensure!(kill.args([signal, &self.process.id().to_string()]).status()?.success());
        Ok(())
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        // One that has ended cannot be killed.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// One machine more than there are CPUs.
fn crowd(runtime: &Path, crowded: &str) -> Result<Vec<Busy>> {
    let cpus = thread::available_parallelism()?.get();
    let machines = (0..=cpus).map(|_| Busy::start(runtime, crowded));
    let mut machines: Vec<_> = machines.collect::<Result<_>>()?;
    machines.iter_mut().try_for_each(|machine| machine.goes_on(1))?;
    Ok(machines)
}

/// How many CPUs have a vCPU that holds their turn, and whether a vCPU waits for a lock: by the host's list of locks (proc(5)).
fn held(file: &Path) -> Result<(usize, bool)> {
    let inode = format!(":{} ", fs::metadata(file)?.ino());
    let locks = fs::read_to_string("/proc/locks")?;
    let ours = || locks.lines().filter(|line| line.contains("OFDLCK") && line.contains(&inode));
    let byte = |line: &str| line.split_whitespace().last()?.parse::<u64>().ok();
    let held = ours().filter(|line| !line.contains("->")).filter_map(byte);
    Ok((held.filter(|byte| byte % 2 == 0).count(), ours().any(|line| line.contains("->"))))
}

#[test]
fn machines_take_turns_and_all_go_on() -> Result<()> {
    let runtime = TempDir::new()?;
    let mut machines = crowd(runtime.path(), "turns")?;
    let file = runtime.path().join("ring3/host-cpus");
    let all = (machines.len() - 1, true);
    let started = Instant::now();
    while held(&file)? != all {
        ensure!(started.elapsed() < PATIENCE, "{:?} of {all:?}", held(&file)?);
    }
    machines.iter_mut().try_for_each(|machine| machine.goes_on(5))
}

#[test]
fn one_that_is_stopped_does_not_hold_up_the_others() -> Result<()> {
    let runtime = TempDir::new()?;
    let mut machines = crowd(runtime.path(), "turns")?;
    let stopped = machines.pop().context("no machine")?;
    // Some of the times it has a turn then.
    for _ in 0..5 {
        stopped.signal("-STOP")?;
        machines.iter_mut().try_for_each(|machine| machine.goes_on(2))?;
        stopped.signal("-CONT")?;
        machines.iter_mut().try_for_each(|machine| machine.goes_on(1))?;
    }
    Ok(())
}

#[test]
fn they_need_not_take_turns() -> Result<()> {
    let runtime = TempDir::new()?;
    let mut machines = crowd(runtime.path(), "free")?;
    machines.iter_mut().try_for_each(|machine| machine.goes_on(2))?;
    ensure!(!runtime.path().join("ring3/host-cpus").exists(), "a file of locks that nobody uses");
    Ok(())
}
