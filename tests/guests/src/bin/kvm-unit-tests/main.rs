//! Runs kvm-unit-tests' x86 programs as guests of ring3.
//!
//! The programs are the user's: the directory given holds them and the `unittests.cfg` that says
//! with which arguments each is a test. Nothing of theirs is in this tree. Each test is one boot of
//! the released program, which tells by its exit code what the guest wrote to the debug exit port;
//! `--json` tells that code from one of ring3 itself. [`scope`] says which tests do not apply.

mod config;
mod outcome;
mod page;
mod run;
mod scope;

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, Result, ensure};
use clap::Parser;

use config::{Arch, Test};
use outcome::Tally;
use run::{Finished, Runner};

/// Run kvm-unit-tests' x86 programs as guests of ring3
#[derive(Debug, Parser)]
#[command(name = "kvm-unit-tests")]
struct Arguments {
    /// Directory with the built programs and their unittests.cfg: kvm-unit-tests' x86 folder
    directory: PathBuf,
    /// The same of a checkout configured for i386, to run the 32-bit programs too
    #[arg(long, value_name = "DIR")]
    i386: Option<PathBuf>,
    /// The program under test
    #[arg(long, value_name = "PATH", default_value = "target/release/ring3")]
    ring3: PathBuf,
    /// How ring3 runs guest code, see `ring3 run --help`
    #[arg(long, default_value = "auto")]
    engine: String,
    /// Run only the test of this name; can be repeated
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Give each test this many times the seconds it asks for
    #[arg(long, value_name = "FACTOR", default_value_t = 8)]
    patience: u64,
    /// Write the results as a page of documentation
    #[arg(long, value_name = "FILE")]
    table: Option<PathBuf>,
    /// Keep what each test prints, as NAME.log in this directory
    #[arg(long, value_name = "DIRECTORY")]
    logs: Option<PathBuf>,
}

fn main() -> Result<ExitCode> {
    let arguments = Arguments::parse();
    let runner = Runner::new(&arguments.ring3, &arguments.engine, arguments.patience)?;
    let mut results = Vec::new();
    for (test, program) in selected(&arguments)? {
        print!("{:<42} ", test.name);
        std::io::stdout().flush()?;
        let finished = runner.run(test, &program)?;
        println!("{}", page::line(&finished));
        keep_log(&arguments, &finished)?;
        results.push(finished);
    }
    let tally = Tally::of(results.iter().map(|finished| &finished.outcome));
    println!("{tally}");
    if let Some(path) = &arguments.table {
        let page = page::page(&results, &tally);
        fs::write(path, page).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(if tally.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The tests to run, each with its program.
fn selected(arguments: &Arguments) -> Result<Vec<(Test, PathBuf)>> {
    let mut tests = configured(&arguments.directory, Arch::X86_64)?;
    if let Some(directory) = &arguments.i386 {
        tests.extend(configured(directory, Arch::I386)?);
    }
    for name in &arguments.only {
        let known = tests.iter().any(|(test, _)| test.name == *name);
        ensure!(known, "there is no test `{name}`");
    }
    tests.retain(|(test, _)| arguments.only.is_empty() || arguments.only.contains(&test.name));
    Ok(tests)
}

/// The tests for programs in `directory`, built for `arch`, in the order of its configuration.
fn configured(directory: &Path, arch: Arch) -> Result<Vec<(Test, PathBuf)>> {
    let path = directory.join("unittests.cfg");
    let text = fs::read_to_string(&path);
    let text = text.with_context(|| format!("cannot read {}", path.display()))?;
    let mut tests = config::parse(&text)?;
    tests.retain(|test| test.is_for(arch));
    let mut with_programs = Vec::new();
    for mut test in tests {
        let program = directory.join(&test.file);
        if arch == Arch::I386 {
            test.name += "-i386";
        }
        with_programs.push((test, program));
    }
    Ok(with_programs)
}

fn keep_log(arguments: &Arguments, finished: &Finished) -> Result<()> {
    let Some(directory) = &arguments.logs else { return Ok(()) };
    let path = directory.join(format!("{}.log", finished.test.name));
    fs::create_dir_all(directory)
        .and_then(|()| fs::write(&path, &finished.log))
        .with_context(|| format!("cannot write {}", path.display()))
}
