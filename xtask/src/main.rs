//! Developers' tasks: `cargo xtask --help`.

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Developers' tasks of ring3")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Fetch the guests that the demo and the boot tests run
    Assets,
}

fn main() -> Result<()> {
    match Arguments::parse().task {
        Task::Assets => assets(),
    }
}

fn assets() -> Result<()> {
    use xtask::assets::{Assets, Kernel};
    let assets = Assets::open()?;
    assets.busybox()?;
    for kernel in [Kernel::BookwormCloud, Kernel::TrixieCloud, Kernel::TrixieFull] {
        let files = assets.kernel(kernel)?;
        println!("{} with {} modules", files.image.display(), files.modules.len());
    }
    Ok(())
}
