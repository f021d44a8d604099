//! 32-bit programs under a 64-bit kernel: one that does what differs for them (`narrow.c`) sees in a guest what it sees on this
//! host, and it is not interpreted.

use std::{iter, path::PathBuf, process::Command};

use anyhow::{Result, ensure};
use guests::{compile, counter, ring3};
use tempfile::TempDir;

/// Without a C library: there need not be one for 32-bit programs.
const OPTIONS: &str = "-m32 -O2 -static -nostdlib -ffreestanding -fno-pic -fno-pie -no-pie -fno-stack-protector \
     -fcf-protection=none -fno-asynchronous-unwind-tables -mstackrealign";

fn program() -> Result<(TempDir, PathBuf)> {
    let directory = TempDir::new()?;
    let program = compile(directory.path(), "narrow", include_str!("narrow.c"), OPTIONS)?;
    Ok((directory, program))
}

/// What it says with these arguments in a machine of these options, and what the machine says of itself.
fn says(options: &[&str], arguments: &[&str]) -> Result<(String, String)> {
    let (directory, program) = program()?;
    let mut command = Command::new(ring3()?);
    command.arg("exec").args(options).args(["--memory", "512M", "--timeout", "200", "--"]);
    let output = command.arg(&program).args(arguments).current_dir(directory.path()).output()?;
    let messages = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "{:?}: {messages}", output.status);
    Ok((String::from_utf8(output.stdout)?, messages))
}

/// What one attempt has come to on both sides. The guest's CPU is Intel's. Under a 64-bit kernel AMD's have SYSCALL for
/// 32-bit programs in place of SYSENTER.
fn are_the_same(name: &str, native: &str, said: &str) -> bool {
    let (undefined, fault) = ("  signal 4 ", "  signal b 1 e ");
    native == said
        || match name {
            "sysenter nowhere" => native.starts_with(undefined) && said.starts_with(fault),
            "syscall" => native.starts_with(fault) && said.starts_with(undefined),
            _ => false,
        }
}

fn is_as_on_the_host(options: &[&str]) -> Result<()> {
    let (_directory, program) = program()?;
    let native = String::from_utf8(Command::new(&program).output()?.stdout)?;
    ensure!(native.ends_with("wide 12345678\nsignals 19\n"), "{native}");
    ensure!(native.contains("\nthreads 4\nwrong 0\n"), "{native}");
    let (said, _) = says(options, &[])?;
    let pairs = || native.lines().zip(said.lines());
    let named = pairs().zip(iter::once("").chain(native.lines()));
    let different: Vec<_> =
        named.filter(|((native, said), name)| !are_the_same(name, native, said)).collect();
    let lines = [&native, &said].map(|text| text.lines().count());
    ensure!(different.is_empty() && lines[0] == lines[1], "{different:#?}\n{said}");
    Ok(())
}

#[test]
fn directly() -> Result<()> {
    is_as_on_the_host(&["--engine", "fast"])
}

#[test]
fn directly_with_user_dispatch() -> Result<()> {
    is_as_on_the_host(&["--engine", "fast", "--system-calls", "dispatch"])
}

#[test]
fn beside_an_interpreted_kernel() -> Result<()> {
    is_as_on_the_host(&["--engine", "direct"])
}

#[test]
fn interpreted() -> Result<()> {
    is_as_on_the_host(&["--engine", "fast", "--user32", "interpret"])
}

#[test]
fn interpreted_in_strict_isolation() -> Result<()> {
    is_as_on_the_host(&["--engine", "fast", "--guest-isolation", "strict"])
}

/// A hundred thousand system calls come to the guest's kernel without the monitor.
#[test]
fn nothing_common_is_interpreted() -> Result<()> {
    let (_, messages) = says(&["--engine", "fast", "--cpus", "1", "--stats"], &["calls"])?;
    ensure!(counter(&messages, "fast system calls")? > 90_000, "{messages}");
    ensure!(counter(&messages, "instructions")? < 1_000_000, "{messages}");
    Ok(())
}

/// Nor are segments that change while the program has memory near the wedge's table, which is closed then.
#[test]
fn segments_of_a_program_with_low_memory_are_its_own() -> Result<()> {
    let (said, messages) = says(&["--engine", "fast", "--cpus", "1", "--stats"], &["near"])?;
    ensure!(said == "near 1\nwrong 0\n", "{said}");
    ensure!(counter(&messages, "instructions")? < 1_000_000, "{messages}");
    Ok(())
}
