//! Boots kernels with several virtual CPUs, again and again, alone and several machines at once: what
//! `tests/cpus.rs` does a few times.

use std::{
    path::PathBuf,
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use clap::Parser;
use guests::Guest;
use tempfile::TempDir;
use xtask::assets::Kernel;

/// Boots kernels with several virtual CPUs, again and again
#[derive(Debug, Parser)]
struct Arguments {
    /// Kernels
    #[arg(long, value_enum, value_delimiter = ',', default_values_t =
        [Kernel::BookwormCloud, Kernel::TrixieCloud, Kernel::SidCloud])]
    kernels: Vec<Kernel>,
    /// Numbers of virtual CPUs
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4, 8])]
    cpus: Vec<u32>,
    /// Boots of each kernel with each number
    #[arg(long, default_value_t = 25)]
    times: usize,
    /// Machines at the same time
    #[arg(long, default_value_t = 1)]
    at_once: usize,
    /// A further option of `ring3 run`; can be repeated
    #[arg(long = "option", allow_hyphen_values = true)]
    options: Vec<String>,
}

/// Runs programs on all CPUs at once, then powers off.
const SCRIPT: &str = "
echo cpus $(grep -c ^processor /proc/cpuinfo)
work() { for n in 1 2 3; do seq 300 | sort -n | sha256sum | cut -c1-8; done; }
for n in 1 2 3 4; do work & done | sort -u
wait
echo done
";

/// One kernel with one number of virtual CPUs.
#[derive(Clone, Copy)]
struct Kind {
    kernel: Kernel,
    cpus: u32,
}

/// Times of the boots that went well, and what the others said.
#[derive(Default)]
struct Boots {
    times: Vec<Duration>,
    failures: Vec<String>,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("boots: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Whether all went well.
fn run(arguments: &Arguments) -> Result<bool> {
    let folder = TempDir::new()?.keep();
    println!(
        "| kernel | vCPUs | at once | went well | median | longest |\n|---|---|---|---|---|---|"
    );
    let mut failed = 0;
    for &kernel in &arguments.kernels {
        for &cpus in &arguments.cpus {
            let kind = Kind { kernel, cpus };
            let boots = kind.boots(arguments)?;
            println!("{}", kind.row(arguments, &boots));
            failed += boots.failures.len();
            kind.keep(&boots, &folder)?;
        }
    }
    if failed == 0 {
        std::fs::remove_dir(&folder)?;
    } else {
        eprintln!("boots: {failed} failed; what they said is in {}", folder.display());
    }
    Ok(failed == 0)
}

impl Kind {
    /// As many boots as were asked for, some at a time.
    fn boots(self, arguments: &Arguments) -> Result<Boots> {
        let mut boots = Boots::default();
        let mut left = arguments.times;
        while left > 0 {
            let now = left.min(arguments.at_once);
            let ended = thread::scope(|scope| {
                let one = || scope.spawn(|| self.boot(&arguments.options));
                let machines: Vec<_> = (0..now).map(|_| one()).collect();
                machines.into_iter().map(|machine| machine.join()).collect::<Vec<_>>()
            });
            for end in ended {
                boots.note(end.ok().context("a thread panicked")?);
            }
            left -= now;
        }
        Ok(boots)
    }

    /// How long one boot took, to its power-off.
    fn boot(self, options: &[String]) -> Result<Duration> {
        let mut guest = Guest::new(self.kernel).runs(SCRIPT);
        for option in ["--cpus".to_owned(), self.cpus.to_string()].iter().chain(options) {
            guest = guest.with(option);
        }
        let start = Instant::now();
        let ended = guest.boots()?;
        let time = start.elapsed();
        ended.prints(&[&format!("cpus {}", self.cpus), "1255c394", "done"])?;
        ended.is_content()?;
        ended.powers_off()?;
        Ok(time)
    }

    fn row(self, arguments: &Arguments, boots: &Boots) -> String {
        let (good, all) = (boots.times.len(), arguments.times);
        let mut times = boots.times.clone();
        times.sort();
        let seconds = |time: Option<&Duration>| {
            time.map_or_else(|| "-".to_owned(), |time| format!("{:.1} s", time.as_secs_f64()))
        };
        let (median, longest) = (seconds(times.get(good / 2)), seconds(times.last()));
        let (kernel, cpus, at_once) = (self.name(), self.cpus, arguments.at_once);
        format!("| {kernel} | {cpus} | {at_once} | {good} of {all} | {median} | {longest} |")
    }

    fn keep(self, boots: &Boots, folder: &std::path::Path) -> Result<()> {
        for (number, failure) in boots.failures.iter().enumerate() {
            let name = format!("{}-{}-{number}", self.name(), self.cpus);
            std::fs::write(PathBuf::from(folder).join(name), failure)?;
        }
        Ok(())
    }

    fn name(self) -> &'static str {
        let named = xtask::assets::NAMED.iter().find(|(_, kernel)| *kernel == self.kernel);
        named.map_or("a kernel", |(name, _)| name)
    }
}

impl Boots {
    fn note(&mut self, end: Result<Duration>) {
        match end {
            Ok(time) => self.times.push(time),
            Err(error) => self.failures.push(format!("{error:#}")),
        }
    }
}
