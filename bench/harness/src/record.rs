//! What a run of the benchmark leaves behind: one JSON object.

use std::{collections::BTreeMap, fs, path::Path, process::Command, time::SystemTime};

use serde::{Deserialize, Serialize};

use crate::{Error, session::Failure, startup, stats};

/// Version of the format.
pub const SCHEMA: u32 = 1;
/// What all others are compared to.
pub const NATIVE: &str = "native";

/// A run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Version of this format.
    pub schema: u32,
    /// When it began, RFC 3339.
    pub date: String,
    /// ring3's revision; ends in `+` if there were changes that are not committed.
    pub revision: String,
    /// The machine it ran on.
    pub machine: Machine,
    /// How thorough it was.
    pub effort: Effort,
    /// Environments, in the order to show them.
    pub environments: Vec<Environment>,
    /// What could not be measured, and why.
    pub missing: Vec<Missing>,
    /// Rows, in the order to show them.
    pub rows: Vec<Row>,
    /// Rows that were still to be measured when this was written; none if the run went to its end.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub left: Vec<String>,
}

/// The machine that everything ran on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// As the CPU calls itself.
    pub cpu: String,
    /// How many there are.
    pub cpus: usize,
    /// Memory in MiB.
    pub memory: u64,
    /// Kernel release.
    pub kernel: String,
    /// Load averages over one minute, before and after. Above zero, the machine was not ours alone.
    pub load: (f64, f64),
}

/// How thorough a run was.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Effort {
    /// Batches of each row in each environment.
    pub batches: usize,
    /// Length of a batch, in milliseconds.
    pub batch: u64,
}

/// An environment that rows ran in.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Environment {
    /// As on the command line.
    pub name: String,
    /// What it says its version is.
    pub version: String,
    /// The kernel inside it; empty if it never came up.
    pub kernel: String,
}

/// An environment that was asked for and not measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Missing {
    /// As on the command line.
    pub name: String,
    /// Why.
    pub why: String,
}

/// A row.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// One word.
    pub name: String,
    /// What it stresses.
    pub group: String,
    /// What is measured.
    pub about: String,
    /// `ns`, or another unit of the samples.
    pub unit: String,
    /// By environment.
    pub results: BTreeMap<String, Measurement>,
}

/// A row in an environment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Measurement {
    /// One figure per batch, in the row's unit.
    pub samples: Vec<f64>,
    /// Operations in a batch.
    pub iterations: u64,
    /// Why there are no samples, or not all.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub error: Option<String>,
    /// Why it was not tried, where the environment cannot do it or would take too long.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub skipped: Option<String>,
}

impl Measurement {
    /// A figure of one operation.
    pub(crate) fn add(&mut self, sample: f64) {
        self.samples.push(sample);
        self.iterations = 1;
    }

    /// Has no figures, or no more.
    pub(crate) fn stop(&mut self, failure: &Failure) {
        match failure {
            Failure::NotAsked(why) => self.skipped = Some(why.clone()),
            failure => self.error = Some(failure.to_string()),
        }
    }

    /// Whether there will be no more figures.
    pub(crate) fn is_stopped(&self) -> bool {
        self.error.is_some() || self.skipped.is_some()
    }

    /// The median, if there is one.
    pub fn median(&self) -> Option<f64> {
        (!self.samples.is_empty()).then(|| stats::median(&self.samples))
    }
}

impl Row {
    /// Whether multiples of native mean anything: what a machine takes while idle has no native
    /// counterpart, and neither has its start.
    pub fn is_relative(&self) -> bool {
        self.group != startup::GROUP
    }

    /// An environment's median as a multiple of the native one.
    pub fn multiple(&self, environment: &str) -> Option<f64> {
        let native = self.results.get(NATIVE)?.median()?;
        Some(self.results.get(environment)?.median()? / native)
    }

    /// The environment with the smallest median, native aside.
    pub fn best(&self) -> Option<&str> {
        let others = self.results.iter().filter(|(name, _)| *name != NATIVE);
        let medians = others.filter_map(|(name, m)| Some((name.as_str(), m.median()?)));
        medians.min_by(|a, b| a.1.total_cmp(&b.1)).map(|(name, _)| name)
    }
}

impl Report {
    /// The row of this name, if it was measured.
    pub fn row(&self, name: &str) -> Option<&Row> {
        self.rows.iter().find(|row| row.name == name)
    }

    /// Reads what [`Report::write`] wrote.
    ///
    /// # Errors
    /// The file cannot be read, or is something else.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let text = fs::read(path).map_err(Error::file(path))?;
        serde_json::from_slice(&text)
            .map_err(|source| Error::NotAResult { path: path.into(), source })
    }

    /// Writes JSON.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), Error> {
        let mut text = serde_json::to_vec_pretty(self).unwrap_or_default();
        text.push(b'\n');
        fs::write(path, text).map_err(Error::file(path))
    }
}

impl Machine {
    /// Whether that is this one, whatever ran on it beside.
    pub fn is_same(&self, other: &Self) -> bool {
        Self { load: (0.0, 0.0), ..self.clone() } == Self { load: (0.0, 0.0), ..other.clone() }
    }

    /// This machine.
    pub fn here() -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let after = |text: &str, key: &str| {
            let line = text.lines().find(|line| line.starts_with(key));
            line.and_then(|line| Some(line.split_once(':')?.1.trim().to_owned()))
        };
        let memory = after(&read("/proc/meminfo"), "MemTotal").unwrap_or_default();
        let kib: u64 = memory.trim_end_matches(" kB").parse().unwrap_or(0);
        Self {
            cpu: after(&read("/proc/cpuinfo"), "model name").unwrap_or_default(),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            memory: kib / 1024,
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            load: (load(), load()),
        }
    }
}

/// The load average over one minute.
pub fn load() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().and_then(|first| first.parse().ok()).unwrap_or(0.0)
}

/// The time, RFC 3339.
pub fn now() -> String {
    humantime::format_rfc3339_seconds(SystemTime::now()).to_string()
}

/// The revision of the tree at `root`.
pub fn revision(root: &Path) -> String {
    let options = ["describe", "--always", "--dirty=+", "--exclude=*", "--abbrev=12"];
    let output = Command::new("git").arg("-C").arg(root).args(options).output();
    output.map(|done| String::from_utf8_lossy(&done.stdout).trim().to_owned()).unwrap_or_default()
}
