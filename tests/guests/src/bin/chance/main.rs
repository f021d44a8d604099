//! Programs by chance on the host and in guests: `chance --help`.
//!
//! Says for each engine how many programs differ, and prints those that do, shrunk, as lines that
//! `--program` repeats.

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, Result};
use clap::Parser;
use guests::chance::{Difference, Place, Program, Runs, Scope, cases, shrink};

/// Compares what random programs see on this host with what they see in guests
#[derive(Debug, Parser)]
struct Arguments {
    /// How many programs to run
    #[arg(long, default_value_t = 1000)]
    count: u64,
    /// Seed of the list of programs
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Number of the first program in the list
    #[arg(long, default_value_t = 0)]
    first: u64,
    /// Programs that one boot of a guest runs
    #[arg(long, default_value_t = 500)]
    batch: u64,
    /// Engines to run them by, see `ring3 run --help`; can be repeated
    #[arg(long, default_values_t = ["fast".to_owned()])]
    engine: Vec<String>,
    /// Kernel of the guests, see `ring3 kernel list`
    #[arg(long, default_value = "debian-12")]
    kernel: String,
    /// Seconds each guest may take
    #[arg(long, default_value_t = 1200)]
    timeout: u64,
    /// Run this program instead (a line as this command prints it), and show what the two sides see
    #[arg(long, value_name = "LINE")]
    program: Option<String>,
    /// Run the programs of this file instead, a line each; # begins a remark
    #[arg(long, value_name = "FILE")]
    programs: Option<PathBuf>,
    /// Only steps of these kinds; can be repeated
    #[arg(long, value_name = "KIND")]
    only: Vec<String>,
    /// Also memory where the engine keeps its own, a known difference
    #[arg(long)]
    window: bool,
    /// Also code that reads its own system calls, a known difference
    #[arg(long)]
    sites: bool,
    /// How many of the oracle's cases there are to choose from
    #[arg(long, default_value_t = 4000)]
    cases: usize,
    /// Run nothing: put what would be run into this folder
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
    /// Do not shrink what differs
    #[arg(long)]
    no_shrink: bool,
}

fn main() -> Result<ExitCode> {
    let arguments = Arguments::parse();
    let cases = cases(17, arguments.cases)?;
    if let Some(folder) = &arguments.keep {
        return keep(&arguments, &cases, folder);
    }
    let runs = Runs::new(&cases)?;
    let mut failed = 0;
    for engine in &arguments.engine {
        let place = place(&arguments, engine);
        failed += match &arguments.program {
            Some(line) => show(&runs, &line.parse()?, &place)?,
            None => search(&arguments, &runs, engine, &place)?,
        };
    }
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Writes programs and cases for a `chance` that is run by hand.
fn keep(arguments: &Arguments, cases: &[u8], folder: &Path) -> Result<ExitCode> {
    let lines: String = programs(arguments, &arguments.engine[0])?
        .iter()
        .map(|program| format!("{program}\n"))
        .collect();
    fs::create_dir_all(folder)?;
    fs::write(folder.join("programs"), lines)?;
    fs::write(folder.join("cases"), cases)?;
    println!("{}: chance programs cases [trace]", folder.display());
    Ok(ExitCode::SUCCESS)
}

fn place(arguments: &Arguments, engine: &str) -> Place {
    let (kernel, timeout) = (arguments.kernel.clone(), arguments.timeout);
    Place::Guest { engine: engine.to_owned(), kernel, timeout }
}

/// The programs asked for.
fn programs(arguments: &Arguments, engine: &str) -> Result<Vec<Program>> {
    if let Some(file) = &arguments.programs {
        let text =
            fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        return text
            .lines()
            .filter(|line| !line.is_empty() && !line.starts_with('#'))
            .map(str::parse)
            .collect();
    }
    let open = matches!(engine, "auto" | "fast");
    let scope = Scope { window: arguments.window, sites: arguments.sites, open };
    let program = |number| {
        let mut program = Program::new(arguments.seed, number, scope);
        let only = &arguments.only;
        program.steps.retain(|(kind, _)| only.is_empty() || only.contains(kind));
        program
    };
    let numbers = arguments.first..arguments.first + arguments.count;
    Ok(numbers.map(program).filter(|program| !program.steps.is_empty()).collect())
}

/// Runs them all; how many differ.
fn search(arguments: &Arguments, runs: &Runs, engine: &str, place: &Place) -> Result<usize> {
    let programs = programs(arguments, engine)?;
    let mut failed = 0;
    for batch in programs.chunks(arguments.batch.max(1) as usize) {
        let differences = runs.compare(batch, place)?;
        failed += differences.len();
        for difference in differences {
            report(arguments, runs, &difference, place)?;
        }
    }
    println!("{engine}: {} programs, {failed} differ", programs.len());
    Ok(failed)
}

fn report(arguments: &Arguments, runs: &Runs, found: &Difference, place: &Place) -> Result<()> {
    let Difference { program, step, .. } = found;
    let kind = program.steps.get(*step).map_or("end", |(kind, _)| kind);
    println!("# program {} differs at its step {step}, {kind}", program.name);
    let program = if arguments.no_shrink { program.clone() } else { shrink(runs, program, place)? };
    println!("{program}");
    Ok(())
}

/// Runs one and shows where its two sides part; 1 if they do.
fn show(runs: &Runs, program: &Program, place: &Place) -> Result<usize> {
    let programs = [program.clone()];
    let host = runs.run(&programs, &Place::Host, true)?;
    let guest = runs.run(&programs, place, true)?;
    let same = host.lines().zip(guest.lines()).take_while(|(host, guest)| host == guest).count();
    host.lines().take(same).for_each(|line| println!("  {line}"));
    host.lines().skip(same).take(20).for_each(|line| println!("- {line}"));
    guest.lines().skip(same).take(20).for_each(|line| println!("+ {line}"));
    Ok(usize::from(host != guest))
}
