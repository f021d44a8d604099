//! Developers' tasks: `cargo xtask --help`.

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use xtask::{
    assets::{Assets, Kernel},
    checks, demo, layers,
};

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
    /// Boot an unmodified Debian kernel to a shell on this terminal
    Demo,
    /// Check that crates depend only on the layers they may
    Layers,
    /// Run every check: format, lints, layers, unit and boot tests
    Test,
}

fn main() -> ExitCode {
    let result = match Arguments::parse().task {
        Task::Assets => assets().map(|()| 0),
        Task::Demo => demo::demo(),
        Task::Layers => layers::check().map(|()| 0),
        Task::Test => checks::test().map(|()| 0),
    };
    match result {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn assets() -> Result<()> {
    let assets = Assets::open()?;
    assets.busybox()?;
    for kernel in [Kernel::BookwormCloud, Kernel::TrixieCloud, Kernel::TrixieFull] {
        let files = assets.kernel(kernel)?;
        println!("{} with {} modules", files.image.display(), files.modules.len());
    }
    Ok(())
}
