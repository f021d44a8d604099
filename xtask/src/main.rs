//! Developers' tasks: `cargo xtask --help`.

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use xtask::{
    assets::{Assets, Kernel},
    bench, checks, demo,
    initramfs::{self, Purpose},
    layers, markdown,
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
    /// Pack a root file system for one of them, and say how to boot it
    Initramfs {
        /// The kernel whose modules it gets
        #[arg(long, value_enum, default_value_t = Kernel::BookwormCloud)]
        kernel: Kernel,
        /// Shell script to run instead of an interactive shell
        #[arg(long)]
        script: Option<PathBuf>,
        /// Where to write it
        #[arg(long)]
        output: PathBuf,
    },
    /// Boot an unmodified Debian kernel to a shell on this terminal
    Demo,
    /// Measure ring3 beside native and every peer on this machine
    Bench(Box<bench::Arguments>),
    /// Check that crates depend only on the layers they may
    Layers,
    /// Check that lines and table cells of documents are short
    Markdown,
    /// Run every check: format, lints, layers, unit and boot tests
    Test,
}

fn main() -> ExitCode {
    let result = match Arguments::parse().task {
        Task::Assets => assets().map(|()| 0),
        Task::Initramfs { kernel, script, output } => {
            pack(kernel, script.as_deref(), &output).map(|()| 0)
        }
        Task::Demo => demo::demo(),
        Task::Bench(arguments) => bench::bench(&arguments),
        Task::Layers => layers::check().map(|()| 0),
        Task::Markdown => markdown::check().map(|()| 0),
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

fn pack(kernel: Kernel, script: Option<&Path>, output: &Path) -> Result<()> {
    let assets = Assets::open()?;
    let files = assets.kernel(kernel)?;
    let read = |path: &Path| {
        fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
    };
    let script = script.map(read).transpose()?;
    let purpose = script.as_deref().map_or(Purpose::Shell, Purpose::Script);
    let archive = initramfs::build(&assets.busybox()?, &files.modules, purpose);
    fs::write(output, archive).with_context(|| format!("cannot write {}", output.display()))?;
    println!(
        "ring3 run --kernel {} --initrd {} --append console=ttyS0",
        files.image.display(),
        output.display()
    );
    Ok(())
}
