//! Programs with much memory: scattered pages that outnumber the mappings that a host process may have, and large ones. Each page keeps
//! what the program wrote, with look-ups and without.

use std::{
    borrow::Cow,
    process::{Command, Output, Stdio},
};

use anyhow::{Result, ensure};
use guests::{KERNELS, compile, counter, ring3};
use tempfile::TempDir;

/// So many mappings, for 8,192 pages.
const MOST: &str = "3000";

/// A machine of one vCPU that counts what it does. A program and further options are to follow.
fn guest() -> Result<Command> {
    let mut guest = Command::new(ring3()?);
    guest.args(["exec", "--engine=fast", "--guest-isolation=fast", "--cpus=1"]);
    guest.args(["--timeout=120", "--stats"]).stdin(Stdio::null());
    Ok(guest)
}

/// What a program has said, and what its machine has.
fn texts(output: &Output) -> (Cow<'_, str>, Cow<'_, str>) {
    (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// Runs the program for some rounds; how many look-ups were filled by wedges. Without protection keys: where there are some, nothing
/// is looked up.
fn scattered(how: &str, rounds: u32) -> Result<u64> {
    let directory = TempDir::new()?;
    let program = compile(directory.path(), "scattered", include_str!("scattered.c"), "-O1")?;
    let mut guest = guest()?;
    guest.args(["--memory=512M", "--most-mappings", MOST, "--scattered", how, "--"]);
    guest.arg(&program).arg(rounds.to_string()).current_dir(directory.path());
    let output = guest.output()?;
    let (said, messages) = texts(&output);
    ensure!(said == format!("scattered {rounds}\n"), "{:?}: {said}{messages}", output.status);
    counter(&messages, "fast look-ups")
}

#[test]
fn pages_beyond_the_mappings_are_looked_up() -> Result<()> {
    let filled = scattered("lookup", 4)?;
    ensure!(filled > 20_000, "only {filled} look-ups were filled");
    Ok(())
}

#[test]
fn a_program_is_translated_with_look_ups_from_its_start() -> Result<()> {
    let filled = scattered("always", 4)?;
    ensure!(filled > 20_000, "only {filled} look-ups were filled");
    Ok(())
}

#[test]
fn look_ups_can_be_turned_off() -> Result<()> {
    let filled = scattered("map", 1)?;
    ensure!(filled == 0, "{filled} look-ups were filled");
    Ok(())
}

/// What is mapped of large pages stays when a program gives back other memory: some hundred mappings, where they were made anew each
/// time there were 14,900.
#[test]
fn large_pages_stay_mapped() -> Result<()> {
    let directory = TempDir::new()?;
    let program = compile(directory.path(), "huge", include_str!("huge.c"), "-O1")?;
    for kernel in KERNELS {
        let mut guest = guest()?;
        guest.args(["--kernel", kernel, "--memory=1G", "--"]).arg(&program);
        let output = guest.current_dir(directory.path()).output()?;
        let (said, messages) = texts(&output);
        ensure!(said == "3000 rounds\n", "{kernel}: {:?}: {said}{messages}", output.status);
        let mapped = counter(&messages, "pages mapped")?;
        ensure!(mapped < 6_000, "{kernel}: the monitor has mapped {mapped} times");
    }
    Ok(())
}
