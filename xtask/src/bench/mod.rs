//! `cargo xtask bench`: gets everything ready for the harness and shows what it measured.

mod files;
pub mod packages;
mod revisions;
mod userland;

use std::{path::PathBuf, time::Duration};

use anyhow::{Context, Result};
use clap::Args;
use harness::{
    compare::{self, Change, Verdict},
    instance::Pace,
    network, page,
    papers::{self, Ladder},
    peers::{self, Setup},
    program,
    record::{self, Machine, Report},
    schedule, table,
};

use self::files::Files;
use crate::{assets::Kernel, checks::root};

const EXAMPLES: &str = "\
Examples:
  Where ring3 stands, in three minutes:
    cargo xtask bench --quick

  Everything, in about an hour; what there is so far is in FILE after each row:
    cargo xtask bench --full --json FILE --html PAGE
  and to go on with it, should it be ended:
    cargo xtask bench --full --json FILE --html PAGE --resume

  Some rows, in some environments (native is always measured):
    cargo xtask bench --quick --peers ring3:direct,qemu --rows getppid,fork

  What changed since a revision, or between two results:
    cargo xtask bench --quick --ab HEAD~5
    cargo xtask bench --compare old.json new.json

  The papers' tables beside ours, from a result or measured:
    cargo xtask bench --papers --from FILE
    cargo xtask bench --papers

  A page with plots and history:
    cargo xtask bench --from old.json new.json --html bench.html

  The same guest by hand; type `run getppid 100` and `quit`:
    cargo xtask bench --initramfs bench.cpio
    ring3 run --kernel VMLINUZ --initrd bench.cpio --append 'console=ttyS0 quiet'
";

/// What to measure.
#[derive(Clone, Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    /// Environments to measure, separated by commas: ring3 (all engines), ring3:ENGINE, ring3:strict, ring3:ptrace, ring3:trap, ring3:unmap, qemu, uml, gvisor [default: all there are, of ring3 fast and strict]
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    peers: Vec<String>,
    /// Rows to measure, or groups of them, separated by commas; `programs` and `network`
    /// run Debian's, which are fetched [default: all; with --quick, those that need no others]
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    rows: Vec<String>,
    /// Under three minutes: short batches, five of each
    #[arg(long, conflicts_with = "full")]
    quick: bool,
    /// All rows in all environments, in about an hour: with --newest, seven batches of 50 ms
    #[arg(long)]
    full: bool,
    /// Show the tables of the papers beside ours, and measure what they need [default peers: ring3:fast]
    #[arg(long, conflicts_with_all = ["ab", "compare"])]
    papers: bool,
    /// Measure also the newest QEMU and UML, which are fetched from Debian unstable
    #[arg(long)]
    newest: bool,
    /// Write the result
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Go on with the run that wrote --json's file: measure the rows that it did not come to
    #[arg(long, requires = "json")]
    resume: bool,
    /// Write the result as one page, with plots
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// A ring3 that is built already [default: build the release]
    #[arg(long, value_name = "FILE")]
    ring3: Option<PathBuf>,
    /// Which revision --ring3 is, for the result [default: the tree's]
    #[arg(long, value_name = "REV", requires = "ring3")]
    revision: Option<String>,
    /// Take turns with ring3 as it was at another revision, and say what changed since
    #[arg(long, value_name = "REV")]
    ab: Option<String>,
    /// Measure nothing: say what changed between two results
    #[arg(long, num_args = 2, value_names = ["A.json", "B.json"])]
    compare: Vec<PathBuf>,
    /// Measure nothing: show these results, the last one with those before it as its history
    #[arg(long, num_args = 1.., value_name = "FILE")]
    from: Vec<PathBuf>,
    /// The kernel that machines boot
    #[arg(long, value_enum, default_value_t = Kernel::BookwormCloud)]
    kernel: Kernel,
    /// Further words of every machine's kernel command line
    #[arg(long, value_name = "STRING", default_value = "")]
    append: String,
    /// Only write the root file system that machines boot, and say how to boot it
    #[arg(long, value_name = "FILE")]
    initramfs: Option<PathBuf>,
}

/// Does what is asked. 1 if it was a comparison and something got slower.
///
/// # Errors
/// Something cannot be built or fetched, or the arguments name what is not there.
pub fn bench(arguments: &Arguments) -> Result<u8> {
    if let [before, after] = &arguments.compare[..] {
        let (before, after) = (Report::read(before)?, Report::read(after)?);
        return Ok(tell(&compare::reports(&before, &after)));
    }
    if !arguments.from.is_empty() {
        return show(arguments).map(|()| 0);
    }
    let files =
        Files::prepare(arguments.kernel, arguments.with_programs(), arguments.with_newest())?;
    if let Some(output) = &arguments.initramfs {
        return files.write_initramfs(output).map(|()| 0);
    }
    let ring3 = revisions::programs(arguments.ring3.as_deref(), arguments.ab.as_deref())?;
    let before = ring3.get(1).map(|ring3| ring3.suffix.clone());
    let directory = tempfile::Builder::new().prefix("ring3-bench-").tempdir()?;
    let setup = files.setup(directory.path(), &arguments.append, ring3)?;
    let report = measure(arguments, &setup)?;
    print!("{}", arguments.rendered(&report));
    for ladder in arguments.ladders() {
        print!("{}", papers::ladders(&measure(&ladder, &setup)?));
    }
    Ok(before.map_or(0, |suffix| tell(&compare::suffixed(&report, &suffix))))
}

/// Prints what changed; 1 if something got slower.
fn tell(changes: &[Change]) -> u8 {
    print!("\n{}", compare::render(changes));
    u8::from(changes.iter().any(|change| change.verdict() == Verdict::Slower))
}

/// Shows results that are there already.
fn show(arguments: &Arguments) -> Result<()> {
    let reports = arguments.from.iter().map(|file| Report::read(file));
    let reports = reports.collect::<Result<Vec<_>, _>>()?;
    let last = reports.last().context("--from names no result")?;
    print!("{}", arguments.rendered(last));
    if let Some(file) = &arguments.html {
        page::write(&reports, file)?;
    }
    Ok(())
}

fn measure(arguments: &Arguments, setup: &Setup) -> Result<Report> {
    let date = record::now();
    let mut missing = Vec::new();
    let found = peers::find(&arguments.peers(), setup)?.into_iter();
    let peers: Vec<_> = found.filter_map(|found| found.map_err(|m| missing.push(m)).ok()).collect();
    let rows = schedule::rows(&peers[0], &arguments.rows(), setup.userland.is_some())?;
    let pace = arguments.pace();
    let revision = arguments.revision.clone().unwrap_or_else(|| record::revision(&root()));
    let effort = record::Effort { batches: pace.batches, batch: pace.batch.as_millis() as u64 };
    let (schema, machine) = (record::SCHEMA, Machine::here());
    let left = rows.iter().map(|row| row.name.clone()).collect();
    let (environments, measured) = (Vec::new(), Vec::new());
    let mut report = Report {
        schema,
        date,
        revision,
        machine,
        effort,
        environments,
        missing,
        rows: measured,
        left,
    };
    if let (true, Some(file)) = (arguments.resume, &arguments.json) {
        let names: Vec<_> = peers.iter().map(|peer| peer.name()).collect();
        report = report.resumed(file, &names)?;
    }
    // What cannot be written is better known before than after.
    arguments.write(&report)?;
    let (kept, mut rows) = (report.rows.len(), rows);
    rows.retain(|row| report.left.contains(&row.name));
    schedule::measure(&peers, &rows, &pace, |environments, measured| {
        report.add(kept, environments, measured, record::load());
        if let Err(error) = arguments.write(&report) {
            eprintln!("xtask: {error:#}");
        }
    });
    Ok(report)
}

impl Arguments {
    fn rendered(&self, report: &Report) -> String {
        match self.papers {
            true => papers::render(report) + &papers::ladders(report),
            false => table::render(report),
        }
    }

    /// What measures the slow stages, which would take hours for all rows: where the papers' tables are asked for and nothing else.
    fn ladders(&self) -> Vec<Self> {
        let all = self.papers && self.rows.is_empty() && self.peers.is_empty();
        let measures = |ladder: &Ladder| {
            let (rows, peers) = (ladder.rows(), ladder.peers());
            let (json, html, resume) = (None, None, false);
            Self { rows, peers, json, html, resume, ..self.clone() }
        };
        if all { papers::LADDERS.iter().map(measures).collect() } else { Vec::new() }
    }

    /// Rows to measure; none for all.
    fn rows(&self) -> Vec<String> {
        let of_papers = self.papers && self.rows.is_empty();
        if of_papers { papers::rows() } else { self.rows.clone() }
    }

    fn write(&self, report: &Report) -> Result<()> {
        if let Some(file) = &self.json {
            report.write(file)?;
        }
        if let Some(file) = &self.html {
            page::write(std::slice::from_ref(report), file)?;
        }
        Ok(())
    }

    /// Whether rows of whole programs are asked for; they need a download.
    fn with_programs(&self) -> bool {
        let of_programs = |name: &String| program::runs_programs(name);
        let of_network = |name: &String| {
            name == network::GROUP || network::rows().iter().any(|r| r.name == *name)
        };
        let named = self.rows().iter().any(|name| of_programs(name) || of_network(name));
        named || (!self.quick && self.rows.is_empty())
    }

    /// Whether the newest peers are asked for; they need a download.
    fn with_newest(&self) -> bool {
        self.newest || (self.full && self.peers.is_empty() && self.ab.is_none())
    }

    /// Environments to measure; of two revisions only ring3, unless more is asked for.
    fn peers(&self) -> Vec<String> {
        match (&self.ab, self.peers.is_empty()) {
            (Some(_), true) => vec!["ring3:fast".to_owned()],
            (None, true) if self.papers => vec!["ring3:fast".to_owned()],
            _ => self.peers.clone(),
        }
    }

    fn pace(&self) -> Pace {
        let (batches, batch, row, answer) = match (self.quick, self.full) {
            // What whole programs take cannot be made less.
            (true, _) if self.with_programs() => (5, 20, 3, 300),
            (true, _) => (5, 20, 3, 30),
            (_, true) => (7, 50, 8, 240),
            _ => (7, 50, 8, 300),
        };
        Pace {
            batches,
            batch: Duration::from_millis(batch),
            row: Duration::from_secs(row),
            answer: Duration::from_secs(answer),
            start: Duration::from_secs(120),
        }
    }
}
