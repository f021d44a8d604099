//! `oracle`: random instruction sequences on the host CPU and in the reference interpreter.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use oracle::campaign::{self, Failure, Plan, Summary};
use oracle::{CaseFile, Checker, Generator, forms, shrink, table};

host::choose!(host_linux::Linux);

/// Compares the reference interpreter with the host CPU on random instruction sequences.
#[derive(Parser)]
struct Options {
    /// How many sequences to run.
    #[arg(long, default_value_t = 100_000)]
    sequences: u64,
    /// Seed of the list of sequences.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Number of the first sequence in the list.
    #[arg(long, default_value_t = 0)]
    first: u64,
    /// Only forms whose name matches (case-insensitive regular expression), such as "^Cmps".
    #[arg(long)]
    forms: Option<regex_lite::Regex>,
    /// 64 or 32: which mode the code is for.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(32..=64))]
    bits: u32,
    /// Threads.
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// Different failures after which to stop.
    #[arg(long, default_value_t = 100)]
    most_failures: usize,
    /// Run and print only the sequence of this number, as a case file.
    #[arg(long)]
    show: Option<u64>,
    /// Replay one case file instead.
    #[arg(long)]
    case: Option<PathBuf>,
    /// Directory to write the cases of failures to, shrunk.
    #[arg(long)]
    save: Option<PathBuf>,
    /// Write the table of forms here.
    #[arg(long)]
    table: Option<PathBuf>,
}

fn main() -> Result<ExitCode> {
    let options = Options::parse();
    let good = match (&options.case, options.show) {
        (Some(path), _) => replay(path)?,
        (None, Some(number)) => show(&options, number)?,
        (None, None) => run(&options)?,
    };
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn run(options: &Options) -> Result<bool> {
    let plan = plan(options)?;
    let bar = ProgressBar::new(plan.count).with_style(ProgressStyle::with_template(
        "{bar:40} {human_pos}/{human_len} {per_sec} {eta}",
    )?);
    let summary = campaign::run(&plan, &|done| bar.inc(done))?;
    bar.finish_and_clear();
    report(&summary);
    if let Some(directory) = &options.save {
        save(directory, &summary)?;
    }
    if let Some(path) = &options.table {
        std::fs::write(path, table::markdown(&plan, &summary))
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(summary.failed == 0)
}

fn plan(options: &Options) -> Result<Plan> {
    let bits = if options.bits < 64 { 32 } else { 64 };
    let matches = |code: &iced_x86::Code| {
        options.forms.as_ref().is_none_or(|regex| regex.is_match(&format!("{code:?}")))
    };
    let forms: Vec<_> = forms::tested(bits).into_iter().filter(matches).collect();
    if forms.is_empty() {
        bail!("no tested form matches");
    }
    Ok(Plan {
        seed: options.seed,
        first: options.first,
        count: options.sequences,
        bits,
        forms,
        jobs: options.jobs,
        most_failures: options.most_failures,
    })
}

fn report(summary: &Summary) {
    for (kind, failure) in &summary.failures {
        println!("{kind} (number {})", failure.number);
        print_failure(failure);
    }
    for (reason, count) in &summary.open {
        println!("{count} sequences not judged: {reason}");
    }
    let forms = summary.runs.len();
    println!("{} sequences, {forms} forms, {} differ", summary.cases, summary.failed);
}

fn print_failure(failure: &Failure) {
    let case = &failure.case;
    for insn in case.instructions() {
        println!("    {:#x} {insn}", insn.ip());
    }
    for line in failure.report.differences.iter().take(8) {
        println!("      {line}");
    }
}

/// Writes the smallest case found for each failure.
fn save(directory: &Path, summary: &Summary) -> Result<()> {
    std::fs::create_dir_all(directory)?;
    let mut checker = Checker::new()?;
    for (kind, failure) in &summary.failures {
        let fails = |case: &oracle::Case| {
            checker.check(case).is_ok_and(|report| !report.differences.is_empty())
        };
        let case = shrink::shrink(&failure.case, fails);
        let report = checker.check(&case)?;
        let file = CaseFile { case, expected: Some(report.native) };
        let name = kind.to_lowercase().replace(' ', "_") + ".case";
        std::fs::write(directory.join(name), file.write(&report.differences))?;
    }
    Ok(())
}

/// Runs one sequence of the list on both sides. False if the interpreter differs.
fn show(options: &Options, number: u64) -> Result<bool> {
    let plan = plan(options)?;
    let case = Generator::new(plan.seed, plan.bits, &plan.forms).case(number);
    compare(CaseFile { case, expected: None })
}

/// Runs a case file on both sides. False if the interpreter differs.
fn replay(path: &Path) -> Result<bool> {
    let text =
        std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let file = CaseFile::parse(&text).with_context(|| path.display().to_string())?;
    compare(file)
}

/// Prints a case with its outcome, headed by the differences. False if there are any.
fn compare(file: CaseFile) -> Result<bool> {
    let report = Checker::new()?.check(&file.case)?;
    let expected = Some(report.native.clone());
    if file.expected.is_some() && file.expected != expected {
        println!("the host CPU does not do what the file expects");
    }
    let remarks = &report.differences;
    print!("{}", CaseFile { case: file.case, expected }.write(remarks));
    Ok(remarks.is_empty())
}
