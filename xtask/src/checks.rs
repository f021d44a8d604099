//! `cargo xtask test`: every check, and one line that counts.

use std::{
    fs,
    io::{BufRead, BufReader},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail, ensure};
use tempfile::TempDir;

use crate::{
    assets::{Assets, Kernel},
    command::run,
    self_tests::SelfTestAssets,
    tally::{Allowed, Skip, Tally},
};

/// Skips that are allowed, and why.
const ALLOWED: &str = ".ci/skips";

/// The top of the source tree.
pub fn root() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().unwrap_or(manifest).to_owned()
}

/// A check: its name, and what cargo is asked for. One that is no test program (format, lints) counts as one.
///
/// Test programs show the output of passing tests: a skipped test says so there.
type Check = (&'static str, Vec<String>);

/// All but the tests of `guests`.
const CHECKS: [(&str, &str); 5] = [
    ("format", "fmt --all --check"),
    ("lints", "clippy --workspace --all-targets -- -D warnings"),
    ("unit tests", "test --workspace --exclude guests --no-fail-fast -- --show-output"),
    ("loading of stock kernels", "test --package boot -- --show-output --ignored"),
    ("the program to boot guests with", "build --release --package ring3"),
];
/// Where the tests are that boot guests.
const GUESTS: &str = "tests/guests/tests";
/// Those that take long and neither measure time nor depend on it: two of their guests run at a time, and of others one.
const TOGETHER: [&str; 8] =
    ["boot", "disk", "exec", "faults", "file_systems", "isolation", "protocol", "traps"];

/// What cargo is asked for, in order.
fn checks() -> Result<Vec<Check>> {
    let words = |&(name, words): &(&'static str, &str)| -> Check {
        (name, words.split(' ').map(str::to_owned).collect())
    };
    let mut checks: Vec<Check> = CHECKS.iter().map(words).collect();
    let (together, alone): (Vec<_>, Vec<_>) =
        guests()?.into_iter().partition(|name| TOGETHER.contains(&name.as_str()));
    ensure!(together.len() == TOGETHER.len(), "of {TOGETHER:?} only {together:?} are there");
    checks.push(("boot tests, two at a time", boot_tests(&[], &together, 2)));
    checks.push(("boot tests", boot_tests(&["--lib", "--bins"], &alone, 1)));
    Ok(checks)
}

/// The names of the test programs that boot guests.
fn guests() -> Result<Vec<String>> {
    let files = fs::read_dir(root().join(GUESTS)).context(GUESTS)?;
    let files = files.map(|file| Ok(file?.file_name())).collect::<Result<Vec<_>>>()?;
    let names = files.iter().filter_map(|name| name.to_str()?.strip_suffix(".rs"));
    let mut names: Vec<_> = names.map(str::to_owned).collect();
    names.sort();
    Ok(names)
}

/// Runs these test programs one after the other, of each so many tests at once.
fn boot_tests(other: &[&str], programs: &[String], threads: usize) -> Vec<String> {
    let threads = format!("--test-threads={threads}");
    let mut words = ["test", "--package", "guests", "--no-fail-fast"].to_vec();
    words.extend(other);
    words.extend(programs.iter().flat_map(|name| ["--test", name]));
    words.extend(["--", "--show-output", &threads]);
    words.into_iter().map(str::to_owned).collect()
}

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

/// Runs all [`checks`]; returns the names of those that failed.
fn run_checks(tally: &mut Tally) -> Result<Vec<&'static str>> {
    let kernels = stock_kernels();
    if let Err(error) = &kernels {
        println!("there are no kernels to load: {error:#}");
    }
    let kernels = kernels.as_ref().ok().map(TempDir::path);
    let mut failed_checks = Vec::new();
    for (name, arguments) in checks()? {
        println!("==> {name}: cargo {}", arguments.join(" "));
        let (passed, failed) = (tally.passed, tally.failed);
        match (cargo(&arguments, kernels, tally)?, tally.passed == passed) {
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
fn cargo(arguments: &[String], kernels: Option<&Path>, tally: &mut Tally) -> Result<bool> {
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
