//! `cargo xtask test`: every check, and one line that counts.

use std::{
    collections::BTreeSet,
    fs,
    io::{BufRead, BufReader},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Mutex, PoisonError, mpsc},
    thread,
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

/// A check that cargo carries out: its name, and what cargo is asked for. One that is no test program (format, lints) counts as one.
///
/// Test programs show the output of passing tests: a skipped test says so there.
type Check = (&'static str, &'static str);

/// All that needs no guest and no kernel.
const CHECKS: [Check; 4] = [
    ("format", "fmt --all --check"),
    ("lints", "clippy --workspace --all-targets -- -D warnings"),
    (
        "unit tests",
        "test --workspace --exclude guests --exclude translator --no-fail-fast -- --show-output",
    ),
    ("the program to boot guests with", "build --release --package ring3"),
];
/// Builds the test programs. With the whole workspace at once, as for the unit tests: for one package alone cargo compiles
/// most libraries again, with other features.
const BUILD: &str = "test --workspace --no-run --message-format=json-render-diagnostics";
/// Those that take long and neither measure time nor depend on it: two of their guests run at a time, and of others one.
const TOGETHER: [&str; 8] =
    ["boot", "disk", "exec", "faults", "file_systems", "isolation", "protocol", "traps"];

/// The package whose programs have one long test each, since each needs a process of its own. So two programs run at a time.
const BESIDE: &str = "tests/translator";

/// A program of tests that has been built.
struct TestProgram {
    /// The package's folder, where it runs.
    folder: PathBuf,
    name: String,
    path: PathBuf,
}

impl TestProgram {
    /// What cargo says of it, if it says so on this line.
    fn of_line(line: &str) -> Option<Self> {
        let said: serde_json::Value = serde_json::from_str(line).ok()?;
        said["profile"]["test"].as_bool().filter(|test| *test)?;
        let manifest = Path::new(said["manifest_path"].as_str()?);
        Some(Self {
            folder: manifest.parent()?.to_owned(),
            name: said["target"]["name"].as_str()?.to_owned(),
            path: said["executable"].as_str()?.into(),
        })
    }

    fn is_beside(&self) -> bool {
        self.folder.ends_with(BESIDE)
    }

    fn is_together(&self) -> bool {
        self.folder.ends_with("tests/guests") && TOGETHER.contains(&self.name.as_str())
    }

    /// Prints how this program is going to be run. Returns the name of its check, and the command. `None`, with nothing printed, for a program
    /// that was run with the unit tests.
    fn command(&self) -> Option<(&'static str, Command)> {
        let (name, option) = self.check()?;
        println!("==> {name}: {} --show-output {option}", self.path.display());
        let mut command = Command::new(&self.path);
        command.args(["--show-output", option]).current_dir(&self.folder);
        Some((name, command))
    }

    /// The name of the check that this program belongs to, and the option that the program is run with; `None` for a program
    /// that was run with the unit tests.
    fn check(&self) -> Option<(&'static str, &'static str)> {
        match self.folder.strip_prefix(root()).ok()?.to_str()? {
            BESIDE => Some(("programs of tests, two at a time", "--test-threads=1")),
            "machine/boot" => Some(("loading of stock kernels", "--ignored")),
            "tests/guests" if self.is_together() => {
                Some(("boot tests, two at a time", "--test-threads=2"))
            }
            "tests/guests" => Some(("boot tests", "--test-threads=1")),
            _ => None,
        }
    }
}

/// All programs of tests, those that boot guests included.
fn test_programs() -> Result<Vec<TestProgram>> {
    let mut command = Command::new(env!("CARGO"));
    command.args(BUILD.split(' ')).current_dir(root()).stderr(Stdio::inherit());
    let built = command.output().context("cannot run cargo")?;
    ensure!(built.status.success(), "the test programs do not build");
    let lines = String::from_utf8_lossy(&built.stdout);
    let mut programs: Vec<_> = lines.lines().filter_map(TestProgram::of_line).collect();
    programs.sort_by(|a, b| (&a.folder, &a.name).cmp(&(&b.folder, &b.name)));
    let together = programs.iter().filter(|program| program.is_together()).count();
    ensure!(together == TOGETHER.len(), "of {TOGETHER:?} only {together} are there");
    Ok(programs)
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

/// Runs all checks; returns the names of those that failed.
fn run_checks(tally: &mut Tally) -> Result<Vec<&'static str>> {
    let mut failed_checks = Vec::new();
    for (name, words) in CHECKS {
        println!("==> {name}: cargo {words}");
        let mut command = Command::new(env!("CARGO"));
        let passed = tally.passed;
        let succeeded = run_check(command.args(words.split(' ')).current_dir(root()), tally)?;
        tally.passed += u64::from(succeeded && tally.passed == passed);
        failed_checks.extend((!succeeded).then_some(name));
    }
    let kernels = stock_kernels();
    if let Err(error) = &kernels {
        println!("there are no kernels to load: {error:#}");
    }
    println!("==> test programs: cargo {BUILD}");
    match test_programs() {
        Ok(programs) => {
            let kernels = kernels.as_ref().ok().map(TempDir::path);
            failed_checks.extend(run_programs(&programs, kernels, tally)?);
        }
        Err(error) => {
            println!("{error:#}");
            tally.failed += 1;
            failed_checks.push("test programs");
        }
    }
    Ok(failed_checks)
}

/// Runs the programs that the unit tests have not run; returns the names of checks that failed.
fn run_programs(
    programs: &[TestProgram],
    kernels: Option<&Path>,
    tally: &mut Tally,
) -> Result<BTreeSet<&'static str>> {
    let mut failed_checks = BTreeSet::new();
    let (beside, others): (Vec<_>, Vec<_>) = programs.iter().partition(|one| one.is_beside());
    failed_checks.extend(run_two_at_a_time(&beside, tally)?);
    for program in others {
        let Some((name, mut command)) = program.command() else { continue };
        command.envs(kernels.map(|kernels| ("RING3_KERNELS", kernels)));
        failed_checks.extend((!run_check(&mut command, tally)?).then_some(name));
    }
    Ok(failed_checks)
}

/// Runs programs, two at a time, and shows the output of each when that program has ended. Returns the names of checks that failed.
fn run_two_at_a_time(
    programs: &[&TestProgram],
    tally: &mut Tally,
) -> Result<BTreeSet<&'static str>> {
    let next = Mutex::new(programs.iter());
    let (ended, outputs) = mpsc::channel();
    let take = || next.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = |ended: mpsc::Sender<_>| {
        // The lock is not held while a program runs.
        while let Some(program) = take() {
            let Some((name, mut command)) = program.command() else { continue };
            let output = command.stderr(Stdio::inherit()).output();
            if ended.send(output.map(|output| (name, output))).is_err() {
                // Nobody listens any more: another program could not be run.
                return;
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..2 {
            let ended = ended.clone();
            scope.spawn(|| work(ended));
        }
        drop(ended);
        let mut failed_checks = BTreeSet::new();
        for output in outputs {
            let (name, output) = output.context("a check cannot be run")?;
            let failed = tally.failed;
            take_output(&output.stdout[..], tally)?;
            let succeeded = counted(output.status.success(), failed, tally);
            failed_checks.extend((!succeeded).then_some(name));
        }
        Ok(failed_checks)
    })
}

/// Runs a command, passes its output on and counts the results of tests in it. Returns whether the command succeeded.
fn run_check(command: &mut Command, tally: &mut Tally) -> Result<bool> {
    let failed = tally.failed;
    let mut child = command.stdout(Stdio::piped()).spawn().context("a check cannot be run")?;
    take_output(BufReader::new(child.stdout.take().context("a check has no output")?), tally)?;
    Ok(counted(child.wait()?.success(), failed, tally))
}

/// Passes output on and counts the results of tests in it.
fn take_output(output: impl BufRead, tally: &mut Tally) -> Result<()> {
    for line in output.split(b'\n') {
        let line = line?;
        let line = String::from_utf8_lossy(&line);
        if tally.add(&line) {
            println!("{line}");
        }
    }
    Ok(())
}

/// Counts one failure if a check failed that has told of no failed test. Returns whether the check succeeded.
fn counted(succeeded: bool, failed_before: u64, tally: &mut Tally) -> bool {
    tally.failed += u64::from(!succeeded && tally.failed == failed_before);
    succeeded
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

#[cfg(test)]
mod tests {
    use super::*;

    fn check(folder: &str, name: &str) -> Option<&'static str> {
        let folder = root().join(folder);
        let line = format!(
            r#"{{"reason":"compiler-artifact","manifest_path":"{}/Cargo.toml","target":{{"name":"{name}"}},"profile":{{"test":true}},"executable":"/it"}}"#,
            folder.display()
        );
        let program = TestProgram::of_line(&line).expect("a program");
        assert_eq!((&program.folder, program.path.to_str()), (&folder, Some("/it")));
        program.check().map(|(_, option)| option)
    }

    #[test]
    fn programs_that_need_guests_or_kernels_are_found() {
        assert_eq!(check("tests/guests", "faults"), Some("--test-threads=2"));
        assert_eq!(check("tests/guests", "clocks"), Some("--test-threads=1"));
        assert_eq!(check("machine/boot", "stock_kernels"), Some("--ignored"));
        assert_eq!(check("tests/translator", "checks"), Some("--test-threads=1"));
        assert_eq!(check("server/faults", "faults"), None, "a unit test");
        let library = r#"{"reason":"compiler-artifact","profile":{"test":false}}"#;
        assert!(TestProgram::of_line(library).is_none() && TestProgram::of_line("text").is_none());
    }
}
