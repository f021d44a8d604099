//! Translated code against the interpreter, for as many random cases as asked for.

use anyhow::Result;
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use jit::Level;
use translator::{Case, check, check_interrupted, interp::Interpreter, rig::Rig};

/// Compare translated code with the interpreter.
#[derive(Parser)]
#[command(
    version,
    after_help = "A difference is printed with the seed that shows it again:\n  \
    translator --seed SEED --sequences 1 --interrupt-every 1"
)]
struct Arguments {
    /// Random sequences to run.
    #[arg(long, default_value_t = 100_000)]
    sequences: u64,
    /// Seed of the first; the others follow.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Interrupt one sequence of so many at each of its boundaries.
    #[arg(long, default_value_t = 100, value_name = "N")]
    interrupt_every: u64,
    /// Programs' code in place of a kernel's.
    #[arg(long)]
    programs: bool,
    /// Programs' code whose memory operands are looked up, for places.
    #[arg(long)]
    lookups: bool,
    /// The same, and whatever is not looked up is checked.
    #[arg(long)]
    checks: bool,
    /// Stop after this many differences.
    #[arg(long, default_value_t = 5)]
    differences: u64,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let programs = arguments.programs || arguments.lookups || arguments.checks;
    let level = if programs { Level::User } else { Level::Kernel };
    let mut rig = match arguments.checks || arguments.lookups {
        true => Rig::at_places(arguments.checks)?,
        false => Rig::new(level)?,
    };
    let mut interpreter = Interpreter::new(level)?;
    let bar = ProgressBar::new(arguments.sequences);
    bar.set_style(ProgressStyle::with_template("{bar:40} {pos}/{len} sequences, {per_sec}")?);
    let (mut differences, mut interrupts) = (0, 0);
    for seed in arguments.seed..arguments.seed + arguments.sequences {
        let case = Case::random(seed, level);
        let mut found = check(&mut rig, &mut interpreter, &case)?;
        if found.is_none() && seed % arguments.interrupt_every.max(1) == 0 {
            found = check_interrupted(&mut rig, &mut interpreter, &case, &mut interrupts)?;
        }
        if let Some(difference) = found {
            bar.suspend(|| println!("seed {seed}:\n{}{}\n", case.listing(), difference.0));
            differences += 1;
            if differences == arguments.differences {
                break;
            }
        }
        bar.inc(1);
    }
    bar.abandon();
    let sequences = bar.position();
    println!("{sequences} sequences, {interrupts} interrupts, {differences} differences");
    std::process::exit(i32::from(differences != 0));
}
