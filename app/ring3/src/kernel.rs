//! `ring3 kernel`: the kernels that can be had, and those that are here.

use clap::{Args, Subcommand};
use kernels::{
    assets::{Assets, Kernel, NAMED},
    interrupt::Guard,
};
use serde::Serialize;

use crate::{failure::Failure, output};

const EXAMPLES: &str = "\
Examples:
  ring3 kernel list
  ring3 kernel install debian-13
  ring3 exec --kernel debian-13 -- uname -r
";

/// What to do with kernels.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct KernelArguments {
    /// What to do.
    #[command(subcommand)]
    pub action: Action,
}

/// What to do with kernels.
#[derive(Debug, Subcommand)]
pub enum Action {
    /// List the kernels by name, and which are installed
    List {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Fetch kernels from Debian's archive, verified by apt, into the user's cache
    Install {
        /// Names, as listed
        #[arg(required = true, value_parser = known)]
        names: Vec<Named>,
    },
    /// Remove kernels from the cache
    Remove {
        /// Names, as listed
        #[arg(required = true, value_parser = known)]
        names: Vec<Named>,
    },
}

/// A kernel and what it is called.
#[derive(Clone, Copy, Debug)]
pub struct Named {
    name: &'static str,
    kernel: Kernel,
}

fn known(text: &str) -> Result<Named, String> {
    let found = NAMED.iter().find(|(name, _)| *name == text);
    found.map(|&(name, kernel)| Named { name, kernel }).ok_or_else(|| {
        let names = NAMED.map(|(name, _)| name).join(", ");
        format!("there is no such kernel; there are {names}")
    })
}

/// Does it.
pub fn kernel(arguments: &KernelArguments) -> Result<u8, Failure> {
    let assets = Assets::open().map_err(host)?;
    match &arguments.action {
        Action::List { json } => return output::print(&list(&assets, *json)),
        Action::Install { names } => {
            let _guard = Guard::new().map_err(|error| host(error.into()))?;
            names.iter().try_for_each(|named| install(&assets, *named))?;
        }
        Action::Remove { names } => {
            names.iter().try_for_each(|named| remove(&assets, *named))?;
        }
    }
    Ok(0)
}

/// A line of the list.
#[derive(Serialize)]
struct Line {
    name: &'static str,
    suite: &'static str,
    /// Its release, if it is here.
    installed: Option<String>,
}

fn list(assets: &Assets, json: bool) -> String {
    let line = |(name, kernel): (&'static str, Kernel)| Line {
        name,
        suite: kernel.suite().name(),
        installed: assets.installed(kernel),
    };
    let lines = NAMED.map(line);
    if json {
        return serde_json::to_string_pretty(&lines).unwrap_or_default() + "\n";
    }
    let text = |Line { name, suite, installed }: &Line| {
        format!("{name:<16}{suite:<10}{}\n", installed.as_deref().unwrap_or("not installed"))
    };
    lines.iter().map(text).collect()
}

fn install(assets: &Assets, Named { name, kernel }: Named) -> Result<(), Failure> {
    assets.tree(kernel).map_err(host)?;
    let files = assets.kernel(kernel).map_err(host)?;
    output::print(&format!("{name}: {}\n", files.image.display())).map(drop)
}

fn remove(assets: &Assets, Named { name, kernel }: Named) -> Result<(), Failure> {
    match assets.remove(kernel) {
        Ok(true) => output::print(&format!("{name}: removed\n")).map(drop),
        Ok(false) => Err(Failure::usage(format!("{name} is not installed"))),
        Err(error) => Err(host(error)),
    }
}

fn host(error: anyhow::Error) -> Failure {
    Failure::host(format!("{error:#}"))
}
