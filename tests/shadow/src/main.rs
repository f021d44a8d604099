//! The shadow MMU against the model, for as many steps as asked for.

use anyhow::Result;
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use shadow::Run;

/// Compare the shadow MMU's host mappings with what a TLB may hold.
#[derive(Parser)]
#[command(
    version,
    after_help = "A violation ends the run with the seed that shows it again:\n  \
    shadow --seed SEED --runs 1"
)]
struct Arguments {
    /// Guests to run, each from a seed of its own.
    #[arg(long, default_value_t = 1000)]
    runs: u64,
    /// Steps of each.
    #[arg(long, default_value_t = 10_000)]
    steps: u64,
    /// Seed of the first; the others follow.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let bar = ProgressBar::new(arguments.runs * arguments.steps);
    bar.set_style(ProgressStyle::with_template("{bar:40} {pos}/{len} steps, {per_sec}")?);
    for seed in arguments.seed..arguments.seed + arguments.runs {
        Run::new(seed)?.steps(arguments.steps)?;
        bar.inc(arguments.steps);
    }
    bar.abandon();
    println!("{} steps, no violation", bar.position());
    Ok(())
}
