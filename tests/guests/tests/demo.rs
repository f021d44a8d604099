//! `make demo`, the first command of the README.

use std::{env, fs, os::unix::fs::PermissionsExt as _, path::Path, process::Command};

use anyhow::{Result, ensure};
use guests::converse;
use tempfile::TempDir;
use xtask::{
    assets::{Assets, Kernel},
    checks::root,
};

/// A program of apt in place of the real one, for a machine without a network.
fn unreachable(program: &Path) -> Result<()> {
    fs::write(program, "#!/bin/sh\necho 'the network is unreachable' >&2\nexit 100\n")?;
    Ok(fs::set_permissions(program, fs::Permissions::from_mode(0o755))?)
}

/// The demo with a cache, or without one, on a machine that reaches no archive.
fn offline_demo(cache: Option<&Path>) -> Result<guests::Finished> {
    let directory = TempDir::new()?;
    for program in ["apt-get", "apt-cache"] {
        unreachable(&directory.path().join(program))?;
    }
    let path = env::var("PATH").unwrap_or_default();
    let mut make = Command::new("make");
    make.arg("demo").current_dir(root());
    make.env("PATH", format!("{}:{path}", directory.path().display()));
    make.env("CARGO_NET_OFFLINE", "true");
    make.envs(cache.map(|cache| ("XDG_CACHE_HOME", cache)));
    let typed = [("# ", "echo $((6 * 7))\n"), ("# ", "poweroff\n")];
    converse(&mut make, &typed.map(|(prompt, input)| (prompt.to_owned(), input.to_owned())))
}

#[test]
fn a_second_start_needs_no_network() -> Result<()> {
    let first = Assets::open()?;
    first.kernel(Kernel::BookwormCloud)?;
    first.busybox()?;
    let demo = offline_demo(None)?;
    demo.prints(&["42"])?;
    demo.powers_off()
}

#[test]
fn a_first_start_says_that_it_needs_one() -> Result<()> {
    let cache = TempDir::new()?;
    let demo = offline_demo(Some(cache.path()))?;
    ensure!(demo.code != Some(0), "it started: {}", demo.console);
    let line = demo.messages.lines().find(|line| line.starts_with("xtask: "));
    let line = line.unwrap_or_default();
    ensure!(line.contains("Debian's archive") && line.contains("unreachable"), "{}", demo.messages);
    Ok(())
}
