//! Targets for as long as is wanted: `cargo run --profile fuzz -p hostile -- --seconds 3600`.

use std::{fs, path::PathBuf, time::Duration};

use anyhow::{Context, Result, bail};
use clap::Parser;

/// Hostile inputs for every boundary
#[derive(Debug, Parser)]
struct Arguments {
    /// Targets; all of them if none is named
    targets: Vec<String>,
    /// Seconds that each has
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// What the inputs follow from; another number gives others
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// One input, which the one target is given
    #[arg(long, value_name = "FILE")]
    replay: Option<PathBuf>,
    /// Say which targets there are
    #[arg(long)]
    list: bool,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    if arguments.list {
        hostile::TARGETS.iter().for_each(|target| println!("{}", target.name));
        return Ok(());
    }
    let found = |name: &String| {
        hostile::find(name)
            .with_context(|| format!("no target is called {name}; --list names them"))
    };
    let mut targets = arguments.targets.iter().map(found).collect::<Result<Vec<_>>>()?;
    if let Some(file) = &arguments.replay {
        let [target] = targets[..] else { bail!("--replay: name the target") };
        let input = fs::read(file).with_context(|| file.display().to_string())?;
        (target.run)(&input);
        println!("{}: {} does not fail", target.name, file.display());
        return Ok(());
    }
    if targets.is_empty() {
        targets = hostile::TARGETS.to_vec();
    }
    let mut failed = 0;
    for target in targets {
        match fuzzer::spend(target, Duration::from_secs(arguments.seconds), arguments.seed) {
            Ok(report) => println!("{}: {} inputs", target.name, report.inputs),
            Err(failure) => {
                println!("FAILED {failure}");
                failed += 1;
            }
        }
    }
    if failed > 0 { bail!("{failed} targets failed") } else { Ok(()) }
}
