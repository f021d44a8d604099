//! Processes that have just begun are translated with look-ups, and share translations with others that have the same pages. Each has
//! memory and code of its own all the same.

use std::process::{Command, Stdio};

use anyhow::{Result, ensure};
use guests::{compile, counter, ring3};
use tempfile::TempDir;

/// Calls are bound when they are first made, in each child.
const FLAGS: &str = "-O1 -fno-builtin -Wl,-z,lazy";

/// Runs the program in a guest with these options: 200 children and as many grandchildren. Returns how many look-ups wedges have filled.
fn young(options: &[&str]) -> Result<u64> {
    let source = include_str!("young.c");
    filled(("young", source), options, &["200"], "young 200\n")
}

/// Runs a program, of this name and source, in a guest with these options, and with arguments of its own. Returns how many look-ups
/// wedges have filled. The program should say what is `expected`.
fn filled(
    (name, source): (&str, &str),
    options: &[&str],
    arguments: &[&str],
    expected: &str,
) -> Result<u64> {
    let directory = TempDir::new()?;
    let program = compile(directory.path(), name, source, FLAGS)?;
    let mut guest = Command::new(ring3()?);
    guest.args(["exec", "--engine=fast", "--timeout=120", "--stats"]);
    guest.args(["--guest-isolation", "fast"]).args(options).arg("--");
    guest.arg(&program).args(arguments).current_dir(directory.path());
    let output = guest.stdin(Stdio::null()).output()?;
    let (said, messages) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(said == expected, "{:?}: {said}{messages}", output.status);
    counter(&messages, "fast look-ups")
}

#[test]
fn each_has_pages_and_code_of_its_own() -> Result<()> {
    let filled = young(&["--cpus", "1"])?;
    ensure!(filled > 20_000, "only {filled} look-ups were filled");
    Ok(())
}

#[test]
fn so_it_is_on_two_cpus() -> Result<()> {
    let filled = young(&["--cpus", "2"])?;
    ensure!(filled > 10_000, "only {filled} look-ups were filled");
    Ok(())
}

#[test]
fn they_can_run_directly() -> Result<()> {
    let filled = young(&["--cpus", "1", "--young", "map"])?;
    ensure!(filled == 0, "{filled} look-ups were filled");
    Ok(())
}

/// Each program that is loaded lies elsewhere, and finds the translations of those before.
#[test]
fn so_it_is_wherever_they_are_loaded() -> Result<()> {
    let random = "sysctl.kernel.randomize_va_space=2";
    let filled = young(&["--cpus", "1", "--append", random])?;
    ensure!(filled > 20_000, "only {filled} look-ups were filled");
    Ok(())
}

#[test]
fn translations_can_be_for_one_address() -> Result<()> {
    let filled = young(&["--cpus", "1", "--program-code", "fixed"])?;
    ensure!(filled > 20_000, "only {filled} look-ups were filled");
    Ok(())
}

/// All programs begin in the dynamic linker. It is by their names that those are told which are started often.
#[test]
fn a_program_that_is_started_once_runs_directly() -> Result<()> {
    let [one, other] = ["one", "other"].map(|names| {
        let program = ("names", include_str!("names.c"));
        filled(program, &["--cpus", "1"], &[names, "40"], &format!("{names} names\n"))
    });
    let (one, other) = (one?, other?);
    ensure!(one > 1000 && other < one / 10, "{one} look-ups with one name, {other} with others");
    Ok(())
}
