//! Twenty-four processes take turns, on one CPU and on two. Linux has six identifiers of address spaces for a CPU, so most switches are
//! flushes. When a process has its turn, its memory is as its neighbours and the kernel have left it.

use std::process::{Command, Stdio};

use anyhow::{Result, ensure};
use guests::{KERNELS, compile, counter, ring3};
use tempfile::TempDir;

/// Linux has six identifiers for a CPU.
const PROCESSES: u64 = 24;

/// Has each of them take so many turns in a guest with these options. Returns how many flushes there were for a hundred turns.
fn flushes(rounds: u64, options: &[&str]) -> Result<u64> {
    let directory = TempDir::new()?;
    let program = compile(directory.path(), "circle", include_str!("circle.c"), "-O1")?;
    let mut guest = Command::new(ring3()?);
    guest.args(["exec", "--engine=fast", "--timeout=200", "--stats", "--rw"]);
    guest.arg(directory.path()).args(options).arg("--").arg(&program);
    guest.args([PROCESSES.to_string(), rounds.to_string()]).current_dir(directory.path());
    let output = guest.stdin(Stdio::null()).output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    let messages = String::from_utf8_lossy(&output.stderr);
    let expected = format!("{rounds} rounds of {PROCESSES}\n");
    ensure!(said == expected, "{options:?}: {:?}: {said}{messages}", output.status);
    Ok(counter(&messages, "flushes")? * 100 / (PROCESSES * rounds))
}

#[test]
fn they_find_their_memory_by_the_kernels_count() -> Result<()> {
    for kernel in KERNELS {
        let flushes = flushes(1000, &["--cpus=1", "--kernel", kernel])?;
        ensure!(flushes < 100, "{kernel}: {flushes} flushes: nobody has counted");
    }
    Ok(())
}

#[test]
fn so_they_do_on_two_cpus_and_with_processes_of_their_own() -> Result<()> {
    for options in
        [["--cpus=2", "--guest-isolation=fast"], ["--cpus=1", "--guest-isolation=strict"]]
    {
        let flushes = flushes(700, &options)?;
        ensure!(flushes < 110, "{options:?}: {flushes} flushes");
    }
    Ok(())
}

/// Each switch is a flush, and so is much that is done to memory.
#[test]
fn they_find_it_by_comparison() -> Result<()> {
    let flushes = flushes(700, &["--cpus=1", "--switches=compared"])?;
    ensure!(flushes > 120, "{flushes} flushes");
    Ok(())
}

/// The machine fails if a kernel has changed page tables and does not count it.
#[test]
fn each_kernel_counts_what_it_takes_back() -> Result<()> {
    for kernel in KERNELS {
        flushes(1000, &["--cpus=1", "--switches=checked", "--kernel", kernel])?;
    }
    flushes(500, &["--cpus=2", "--switches=checked"])?;
    Ok(())
}
