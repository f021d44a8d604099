//! `ring3 fault`: machines whose disks and networks fail on purpose.
//!
//! `campaign`: the file of a campaign. `iteration`: one run of its machine. `verdict`: what a run came to.
//! `report`: the results as files.

mod campaign;
mod iteration;
mod report;
mod verdict;

use std::{
    fs,
    num::NonZeroUsize,
    path::{Path, PathBuf},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use clap::{Args, Subcommand};

use crate::{failure::Failure, injection, output, run, run_arguments::RunArguments};
use campaign::Campaign;
use iteration::Finished;
use report::Report;
use verdict::Verdict;

const EXAMPLES: &str = r#"
Examples:
  A disk whose writes fail from the hundredth on:
    printf '[[fault]]\non = "disk0"\ndo = "write-error"\nrequest = 100\nfor = "1h"\n' > worn.toml
    ring3 fault run worn.toml -- --config debian.toml

  A campaign: the power goes at each of the first 400 writes, one after the other:
    cat > cuts.toml <<END
    [machine]
    kernel = "vmlinuz"
    initrd = "load.cpio"
    append = "console=ttyS0"
    disk = ["disk.img"]
    [verify]
    initrd = "check.cpio"
    [expect]
    wrong = ["LOST"]
    masked = ["ALL THERE"]
    [[fault]]
    on = "disk0"
    do = "power-cut"
    op = "write"
    request = { from = 1, to = 400 }
    END
    ring3 fault campaign cuts.toml --jobs 2 --output cuts
    ring3 fault replay cuts 17

docs/faults.md lists all faults, triggers and results.
"#;

/// What to do with faults.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct FaultArguments {
    /// What to do.
    #[command(subcommand)]
    action: Action,
}

/// What to do with faults.
#[derive(Debug, Subcommand)]
enum Action {
    /// Run a machine once with a scenario's faults, or a campaign's machine, and say what its faults came to
    Run {
        /// The campaign, or the scenario
        file: PathBuf,
        /// The seed of a campaign's random choices, instead of the one in its file
        #[arg(long, value_name = "N")]
        seed: Option<u64>,
        /// A scenario's machine, as ring3 run has it: -- --kernel vmlinuz --disk debian.img
        #[arg(last = true, value_name = "OPTIONS OF RING3 RUN")]
        machine: Vec<String>,
    },
    /// Run a machine again and again with other faults, and count what they came to
    Campaign {
        /// The campaign
        campaign: PathBuf,
        /// How many machines run at once
        #[arg(long, value_name = "N", default_value = "1")]
        jobs: NonZeroUsize,
        /// The seed of random choices, instead of the one in the file
        #[arg(long, value_name = "N")]
        seed: Option<u64>,
        /// A folder for the results, which must not exist yet; the campaign's name if not given
        #[arg(long, value_name = "DIR")]
        output: Option<PathBuf>,
    },
    /// Repeat an iteration of a campaign, and compare
    Replay {
        /// The campaign's folder
        folder: PathBuf,
        /// The iteration's number
        iteration: u64,
    },
    /// Read a scenario or a campaign, and say what is wrong with it
    Check {
        /// The file
        file: PathBuf,
    },
}

/// `ring3 fault`.
pub fn fault(arguments: &FaultArguments) -> Result<u8, Failure> {
    match &arguments.action {
        Action::Run { file, seed, machine } => run_once(file, *seed, machine),
        Action::Campaign { campaign, jobs, seed, output } => {
            let folder = output.clone().unwrap_or_else(|| campaign.with_extension(""));
            run_campaign(campaign, *seed, *jobs, &folder)
        }
        Action::Replay { folder, iteration } => replay(folder, *iteration),
        Action::Check { file } => check(file),
    }
}

fn check(file: &Path) -> Result<u8, Failure> {
    let text = campaign::read(file)?;
    if campaign::is_campaign(&text) {
        let campaign = Campaign::parse(file, None)?;
        output::print(&format!("{} iterations\n", campaign.iterations()))
    } else {
        let (_, scenario) = injection::read(file)?;
        let targets: Vec<_> = scenario.targets().iter().map(ToString::to_string).collect();
        output::print(&format!("faults of {}\n", targets.join(", ")))
    }
}

/// Runs one machine: a campaign's own, or the one that is given for a scenario.
fn run_once(file: &Path, seed: Option<u64>, machine: &[String]) -> Result<u8, Failure> {
    let wrong = |problem: &str| Err(Failure::usage(format!("{}: {problem}", file.display())));
    match (campaign::is_campaign(&campaign::read(file)?), machine) {
        (true, []) => run_first(file, seed),
        (true, _) => wrong("a campaign has its own [machine]"),
        (false, []) => wrong("a scenario has no [machine]: say which behind --, as to ring3 run"),
        (false, _) if seed.is_some() => wrong("a scenario has its own seed"),
        (false, _) => run_scenario(file, machine),
    }
}

/// Runs the machine of these options of `ring3 run`, with the faults of a scenario's file.
fn run_scenario(file: &Path, machine: &[String]) -> Result<u8, Failure> {
    let words = [&[format!("--fault={}", file.display())], machine].concat();
    let run = RunArguments::of_words(words).map_err(Failure::usage)?;
    run::run(&run)
}

/// Runs the first iteration of a campaign.
fn run_first(file: &Path, seed: Option<u64>) -> Result<u8, Failure> {
    let campaign = Campaign::parse(file, seed)?;
    let folder = scratch()?;
    let finished = campaign.iteration(1).run(&campaign, folder.path())?;
    output::print(&format!("{}\n", finished.line()))
}

/// Machines' disks and consoles, until they have been looked at.
fn scratch() -> Result<tempfile::TempDir, Failure> {
    tempfile::tempdir().map_err(|error| Failure::host(format!("a folder for the run: {error}")))
}

fn run_campaign(
    file: &Path,
    seed: Option<u64>,
    jobs: NonZeroUsize,
    folder: &Path,
) -> Result<u8, Failure> {
    let campaign = Campaign::parse(file, seed)?;
    let golden = campaign.golden().run(&campaign, scratch()?.path())?;
    if golden.verdict != Verdict::Masked {
        return Err(Failure::usage(format!(
            "{}: without faults the machine's result is `{}`, not `masked`: {}",
            file.display(),
            golden.verdict,
            golden.reason
        )));
    }
    let report = Mutex::new(Report::create(folder, &campaign)?);
    let next = AtomicU64::new(1);
    let worked: Result<Vec<()>, Failure> = thread::scope(|scope| {
        let work = || work(&campaign, &next, &report);
        let workers: Vec<_> = (0..jobs.get()).map(|_| scope.spawn(work)).collect();
        let joined = workers
            .into_iter()
            .map(|worker| worker.join().unwrap_or_else(|_| Err(Failure::host("a worker failed"))));
        joined.collect()
    });
    worked?;
    let report = report.into_inner().unwrap_or_else(PoisonError::into_inner);
    output::print(&report.finish()?)
}

/// Takes iterations until there are no more, or one fails for a reason of the host's.
fn work(campaign: &Campaign, next: &AtomicU64, report: &Mutex<Report>) -> Result<(), Failure> {
    loop {
        let number = next.fetch_add(1, Ordering::Relaxed);
        if number > campaign.iterations() {
            return Ok(());
        }
        let finished = campaign.iteration(number).run(campaign, scratch()?.path());
        let finished = finished.inspect_err(|_| next.store(u64::MAX / 2, Ordering::Relaxed))?;
        let mut report = report.lock().unwrap_or_else(PoisonError::into_inner);
        report.add(&finished)?;
        if campaign.file.precision.is_some_and(|precision| report.is_precise(precision)) {
            next.store(u64::MAX / 2, Ordering::Relaxed);
        }
    }
}

fn replay(folder: &Path, number: u64) -> Result<u8, Failure> {
    let campaign = Campaign::stored(folder)?;
    let before = report::stored(folder, number)?;
    let again = campaign.iteration(number).run(&campaign, scratch()?.path())?;
    let same = before.verdict == again.verdict;
    let word = if same { "the same as before" } else { "before it was" };
    output::print(&format!("{}\n{word}: {}\n", again.line(), before.line()))?;
    Ok(u8::from(!same))
}

/// Writes a file of the results.
fn write(path: &Path, text: &str) -> Result<(), Failure> {
    fs::write(path, text).map_err(|error| Failure::host(format!("{}: {error}", path.display())))
}
