//! `cargo xtask test`: every check, and one line that counts.

use std::{
    fs,
    io::{BufRead, BufReader},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};
use tempfile::TempDir;

use crate::{
    assets::{Assets, Kernel},
    command::run,
    self_tests::SelfTestAssets,
    tally::{Allowed, Skip, Tally},
};

/// Skips that are allowed, and why.
const ALLOWED: &str = ".ci/skips";
/// Has test programs show the output of passing tests: a skipped test says so there.
const SHOW_OUTPUT: &str = "--show-output";

/// The top of the source tree.
pub fn root() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().unwrap_or(manifest).to_owned()
}

/// What cargo is asked for, in order. Checks that are not test programs (format, lints) count as one each.
const CHECKS: [(&str, &[&str]); 6] = [
    ("format", &["fmt", "--all", "--check"]),
    ("lints", &["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]),
    (
        "unit tests",
        &["test", "--workspace", "--exclude", "guests", "--no-fail-fast", "--", SHOW_OUTPUT],
    ),
    ("the program to boot guests with", &["build", "--release", "--package", "ring3"]),
    // One guest at a time: a guest whose timer thread gets no CPU finds its timer broken.
    (
        "boot tests",
        &["test", "--package", "guests", "--no-fail-fast", "--", SHOW_OUTPUT, "--test-threads=1"],
    ),
    ("loading of stock kernels", &["test", "--package", "boot", "--", SHOW_OUTPUT, "--ignored"]),
];

/// Runs every check and prints `N passed, N failed, N skipped`. A skip that [`ALLOWED`] does not hold counts as a failure.
///
/// # Errors
/// A check failed, or cargo could not be run.
pub fn test() -> Result<()> {
    let allowed = root().join(ALLOWED);
    let allowed = fs::read_to_string(&allowed).with_context(|| allowed.display().to_string())?;
    let allowed = Allowed::parse(&allowed);
    let mut tally = Tally::default();
    let mut failed_checks = run_checks(&mut tally)?;
    let skipped = skips(&mut tally, &allowed);
    if skipped < tally.skips.len() {
        failed_checks.push("skips");
    }
    for name in &failed_checks {
        println!("failed: {name}");
    }
    println!("{} passed, {} failed, {} skipped", tally.passed, tally.failed, skipped);
    if failed_checks.is_empty() {
        Ok(())
    } else {
        bail!("{} of the checks failed", failed_checks.len())
    }
}

/// Runs all of [`CHECKS`]; returns the names of those that failed.
fn run_checks(tally: &mut Tally) -> Result<Vec<&'static str>> {
    let kernels = stock_kernels();
    if let Err(error) = &kernels {
        println!("there are no kernels to load: {error:#}");
    }
    let kernels = kernels.as_ref().ok().map(TempDir::path);
    let mut failed_checks = Vec::new();
    for (name, arguments) in CHECKS {
        println!("==> {name}: cargo {}", arguments.join(" "));
        let (passed, failed) = (tally.passed, tally.failed);
        match (cargo(arguments, kernels, tally)?, tally.passed == passed) {
            (true, true) => tally.passed += 1,
            (true, false) => {}
            (false, _) => {
                tally.failed += u64::from(tally.failed == failed);
                failed_checks.push(name);
            }
        }
    }
    Ok(failed_checks)
}

/// Says what was skipped; returns how much of it may be, and counts the rest as failures.
fn skips(tally: &mut Tally, allowed: &Allowed) -> usize {
    let (fine, wrong): (Vec<&Skip>, Vec<_>) =
        tally.skips.iter().partition(|skip| allowed.has(skip));
    for (skips, whether) in [(&fine, "on"), (&wrong, "NOT on")] {
        if !skips.is_empty() {
            println!("==> skipped, and {whether} the list {ALLOWED}:");
        }
        for skip in skips {
            println!("    {skip}");
        }
    }
    tally.failed += wrong.len() as u64;
    fine.len()
}

/// A directory of the kernels that distributions ship, as the tests of `boot` want them.
fn stock_kernels() -> Result<TempDir> {
    let assets = Assets::open()?;
    let directory = tempfile::tempdir()?;
    for (name, file) in [
        ("vmlinuz-6.1", assets.kernel(Kernel::BookwormCloud)?.image),
        ("vmlinuz-6.12", assets.kernel(Kernel::TrixieCloud)?.image),
        ("memtest86+x64.bin", assets.memtest()?),
        ("xen-4.20-amd64.gz", assets.xen()?),
    ] {
        symlink(file, directory.path().join(name))?;
    }
    Ok(directory)
}

/// Runs cargo, passing its output on and counting results; whether it succeeded.
fn cargo(arguments: &[&str], kernels: Option<&Path>, tally: &mut Tally) -> Result<bool> {
    let mut command = Command::new(env!("CARGO"));
    command.args(arguments).current_dir(root()).stdout(Stdio::piped());
    command.envs(kernels.map(|kernels| ("RING3_KERNELS", kernels)));
    let mut child = command.spawn().context("cannot run cargo")?;
    let output = child.stdout.take().context("cargo has no output")?;
    for line in BufReader::new(output).split(b'\n') {
        let line = line?;
        let line = String::from_utf8_lossy(&line);
        if tally.add(&line) {
            println!("{line}");
        }
    }
    Ok(child.wait()?.success())
}

/// Builds the release program and returns where it is.
///
/// # Errors
/// It does not build.
pub fn build_ring3() -> Result<PathBuf> {
    let mut command = Command::new(env!("CARGO"));
    command.args(["build", "--release", "--package", "ring3"]);
    run(command.current_dir(root()))?;
    Ok(ring3())
}

/// Where the release program is.
pub fn ring3() -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    target.unwrap_or_else(|| root().join("target")).join("release/ring3")
}
