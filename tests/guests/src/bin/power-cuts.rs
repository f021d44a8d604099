//! Many rounds of what `tests/power_cut.rs` does a few of.

use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use guests::power_cut::PowerCut;

/// Kills machines at random moments and checks that their disks lose nothing
#[derive(Parser)]
struct Arguments {
    /// Machines to kill on each kind of disk
    #[arg(long, default_value_t = 100)]
    rounds: u64,
    /// Seed of the moments
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Only disks of this format
    #[arg(long, value_parser = ["raw", "qcow2"])]
    format: Option<String>,
}

/// Kinds of disk: format, and further options.
const KINDS: [(&str, &str); 3] = [("raw", ""), ("raw", ",cache=none"), ("qcow2", "")];

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let cut = |(format, options)| match rounds(&arguments, format, options) {
        Ok(()) => true,
        Err(error) => {
            eprintln!("{format}{options}: {error:#}");
            false
        }
    };
    let wanted = arguments.format.as_deref();
    let kinds = KINDS.into_iter().filter(|(format, _)| wanted.is_none_or(|one| one == *format));
    let failed = kinds.map(cut).filter(|sound| !sound).count();
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn rounds(arguments: &Arguments, format: &str, options: &'static str) -> Result<()> {
    let mut machine = PowerCut::new(format, options, arguments.seed)?;
    for round in 1..=arguments.rounds {
        machine.round().with_context(|| format!("round {round}"))?;
    }
    let written = machine.finish()?;
    println!(
        "{format}{options}: {} machines killed, nothing lost of {} files and {} rows",
        arguments.rounds, written.files, written.rows
    );
    Ok(())
}
