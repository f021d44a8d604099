//! A program of the guest that tries to get out (`programs/isolation.rs`) gets what a CPU would give it.

use std::{fs, os::unix::fs::PermissionsExt, path::PathBuf, process::Command};

use anyhow::{Context, Result, ensure};
use guests::{compile, ring3};
use tempfile::TempDir;

static PROGRAM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/isolation"));

fn program() -> Result<(TempDir, PathBuf)> {
    let directory = TempDir::new()?;
    let program = directory.path().join("isolation");
    fs::write(&program, PROGRAM)?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
    Ok((directory, program))
}

/// Runs the program in a guest; `closed` is what it must not get at.
fn attempts(engine: &str, closed: &[&str]) -> Result<String> {
    attempts_with(&["--engine", engine], closed)
}

/// What the program says.
fn attempts_with(options: &[&str], closed: &[&str]) -> Result<String> {
    let (directory, program) = program()?;
    let mut command = Command::new(ring3()?);
    command.arg("exec").args(options).args(["--memory", "512M", "--timeout", "400", "--"]);
    let output = command.arg(&program).args(closed).current_dir(directory.path()).output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    let messages = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{:?}: {messages}\n{said}", output.status);
    ensure!(said.ends_with("isolation: 0 failed\n"), "{messages}\n{said}");
    println!("{said}");
    Ok(said.into_owned())
}

/// The host closes memory of a process to parts of it (as the fast engine asks, `wedge::keys`).
fn has_keys() -> Result<bool> {
    let cpus = fs::read_to_string("/proc/cpuinfo")?;
    let flags = cpus.lines().find(|line| line.starts_with("flags")).context("no flags")?;
    let release = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let mut numbers = release.split(['.', '-']).map_while(|number| number.parse::<u32>().ok());
    let release = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    Ok(flags.split(' ').any(|flag| flag == "ospke") && release >= (6, 12))
}

/// What the host closes to user code, if it has the means; says so if it does not.
fn closed_by_keys(
    closed: &'static [&'static str],
    anyway: usize,
) -> Result<&'static [&'static str]> {
    if has_keys()? {
        return Ok(closed);
    }
    let (anyway, open) = closed.split_at(anyway);
    eprintln!(
        "SKIPPED IN PART: without protection keys nothing closes the memory of: {}",
        open.join(", ")
    );
    Ok(anyway)
}

/// Each attempt is a process of its own, and such are translated at first.
#[test]
fn user_code_beside_the_kernel() -> Result<()> {
    let closed = closed_by_keys(&["stack", "kernel", "wedge"], 1)?;
    stacks_were_tried(&attempts("fast", closed)?)?;
    stacks_were_tried(&attempts_with(&["--engine", "fast", "--young", "map"], closed)?)
}

/// With RSP anywhere a program's faults, calls and interrupts come back to the engine; none was left out.
fn stacks_were_tried(said: &str) -> Result<()> {
    let tried =
        said.lines().filter(|line| line.contains(": ok: ") && line.contains(" with RSP at "));
    ensure!(tried.count() >= STACKS, "{said}");
    Ok(())
}

/// Attempts to open keys, and those with odd stacks; the program makes at least so many.
const KEYS: usize = 46;
const STACKS: usize = 207;

/// Without any keys: the kernel's memory is in another process. Nothing is left out.
#[test]
fn user_code_in_a_process_of_its_own() -> Result<()> {
    let options = ["--engine", "fast", "--guest-isolation", "strict"];
    let said = attempts_with(&options, &["kernel", "wedge", "stack", "signals"])?;
    let made = |which: &dyn Fn(&str) -> bool| {
        said.lines().filter(|line| line.contains(": ok: ") && which(line)).count()
    };
    ensure!(!said.contains(": skipped: "), "{said}");
    ensure!(made(&|line| line.starts_with("wrpkru") || line.starts_with("xrstor")) >= KEYS);
    stacks_were_tried(&said)
}

/// A vCPU keeps fewer address spaces than there are processes here, and kicks come at all times. Each process finds its
/// memory as it has left it.
#[test]
fn a_thousand_processes_each_in_one_of_its_own() -> Result<()> {
    let directory = TempDir::new()?;
    // Bound late, the program keeps addresses on its stack that it must find again.
    compile(directory.path(), "many", include_str!("many.c"), "-O1 -Wl,-z,lazy")?;
    let mut guest = Command::new(ring3()?);
    guest.args(["exec", "--guest-isolation=strict", "--cpus=4", "--memory=1G", "--timeout=300"]);
    let output = guest.args(["--", "./many", "1000"]).current_dir(directory.path()).output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    let messages = String::from_utf8_lossy(&output.stderr);
    ensure!(said == "0 of 1000 went wrong\n", "{:?}: {said}{messages}", output.status);
    Ok(())
}

/// Where the kernel is interpreted, its memory is not in the program's process at all.
#[test]
fn user_code_by_itself() -> Result<()> {
    let said = attempts("direct", closed_by_keys(&["stack", "kernel", "wedge"], 2)?)?;
    stacks_were_tried(&said)
}

#[test]
fn user_code_interpreted() -> Result<()> {
    attempts("jit", &["kernel", "wedge", "stack", "signals"]).map(drop)
}

/// What the program expects is what this host's CPU gives it.
#[test]
fn the_cpu_itself() -> Result<()> {
    let (_directory, program) = program()?;
    let output = Command::new(&program).args(["kernel", "wedge", "stack", "signals"]).output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure!(said.contains("\nisolation: "), "it has not come to its end: {said}");
    // WRPKRU, and XRSTOR of what it writes, are instructions where there are keys.
    let keys = has_keys()?;
    let known = |line: &str| {
        keys && (line.starts_with("wrpkru ")
            || line.starts_with("wrpkru:")
            || line.starts_with("xrstor"))
    };
    let failed: Vec<_> =
        said.lines().filter(|line| line.contains(": FAILED: ") && !known(line)).collect();
    ensure!(failed.is_empty(), "{failed:#?}");
    Ok(())
}
