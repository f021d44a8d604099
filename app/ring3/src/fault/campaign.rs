//! The file of a campaign: a machine, what is expected of it, and faults that vary.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use faults::Scenario;
use serde::Deserialize;
use toml::{Table, Value};

use super::{
    iteration::{self, Iteration},
    verdict::Expect,
};
use crate::{
    failure::Failure,
    injection::{self, Extent},
    run_arguments::RunArguments,
};

/// Names in a campaign's folder.
const COPY: &str = "campaign.toml";
const ORIGIN: &str = "origin";
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(120);

/// A campaign.
#[derive(Clone, Debug)]
pub struct Campaign {
    /// What the file says.
    pub file: File,
    /// The file itself, for who repeats an iteration.
    text: String,
    /// What file names are relative to.
    pub folder: PathBuf,
}

/// The file as it is written.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct File {
    /// Where random choices begin.
    #[serde(default)]
    pub seed: u64,
    /// How often the machine runs; once for each value of `request` if not given.
    iterations: Option<u64>,
    /// It ends before when the share of each result is known to so much, up or down, with 95 % confidence.
    pub precision: Option<f64>,
    /// Seconds a machine may take.
    timeout: Option<f64>,
    /// Options of `ring3 run`.
    pub machine: Table,
    /// Options that are others for a second machine, which looks at the disks that the first one left.
    pub verify: Option<Table>,
    /// What looks at the disks and at what was printed, on this host.
    pub check: Option<Check>,
    /// What decides.
    pub expect: Expect,
    fault: Vec<Table>,
}

/// A program of this host that looks at what a run left. It runs in a folder with the disks (`disk0`) and with what the machines printed
/// (`console`), and what it prints decides as what they print does.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Check {
    /// Its name and arguments.
    pub command: Vec<String>,
}

/// Numbers of requests, one of which an iteration takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Span {
    from: u64,
    to: u64,
}

/// Whether a text is a campaign rather than a scenario.
pub fn is_campaign(text: &str) -> bool {
    text.parse::<Table>().is_ok_and(|table| table.contains_key("machine"))
}

/// Reads a file.
pub fn read(file: &Path) -> Result<String, Failure> {
    fs::read_to_string(file).map_err(|error| wrong(file, error))
}

fn wrong(file: &Path, problem: impl std::fmt::Display) -> Failure {
    Failure::usage(format!("{}: {problem}", file.display()))
}

impl Campaign {
    /// Reads a campaign and checks all of its iterations' scenarios that differ in kind.
    pub fn parse(path: &Path, seed: Option<u64>) -> Result<Self, Failure> {
        let folder = path.parent().unwrap_or(Path::new("")).to_owned();
        let folder = if folder.as_os_str().is_empty() { PathBuf::from(".") } else { folder };
        let folder = folder.canonicalize().map_err(|error| wrong(path, error))?;
        let campaign =
            Self::new(read(path)?, folder, seed).map_err(|problem| wrong(path, problem))?;
        let scenario = campaign.iteration(1).scenario().map_err(|problem| wrong(path, problem))?;
        let machine = campaign.arguments(None).map_err(|problem| wrong(path, problem))?;
        let extent = Extent { timeout: Some(campaign.timeout()), ..machine.extent() };
        injection::check(&scenario, &extent).map_err(|problem| wrong(path, problem))?;
        if let Some(verify) = &campaign.file.verify {
            campaign.arguments(Some(verify)).map_err(|problem| wrong(path, problem))?;
        }
        Ok(campaign)
    }

    /// What `ring3 run` understands of the machine, or of the one that verifies, which has some options of its own.
    fn arguments(&self, verify: Option<&Table>) -> Result<RunArguments, String> {
        let part = if verify.is_some() { "[verify]" } else { "[machine]" };
        let mut options = self.file.machine.clone();
        options.extend(verify.cloned().unwrap_or_default());
        let mut words =
            iteration::words(&options, &self.folder).map_err(|error| error.to_string())?;
        for disk in options.get("disk").map(iteration::values).unwrap_or_default() {
            let disk = disk.as_str().ok_or("disk: not a file name")?;
            words.push(format!("--disk={disk}"));
        }
        RunArguments::of_words(words).map_err(|problem| format!("{part}: {problem}"))
    }

    /// The campaign whose results are in a folder.
    pub fn stored(results: &Path) -> Result<Self, Failure> {
        let path = results.join(COPY);
        let origin = read(&results.join(ORIGIN))?;
        let (folder, seed) = origin.rsplit_once('\n').ok_or_else(|| wrong(&path, "no origin"))?;
        let seed = seed.parse().map_err(|_| wrong(&path, "its seed is not a number"))?;
        Self::new(read(&path)?, folder.into(), Some(seed)).map_err(|problem| wrong(&path, problem))
    }

    /// Leaves in a folder of results what [`Campaign::stored`] needs.
    pub fn store(&self, results: &Path) -> Result<(), Failure> {
        super::write(&results.join(COPY), &self.text)?;
        let origin = format!("{}\n{}", self.folder.display(), self.file.seed);
        super::write(&results.join(ORIGIN), &origin)
    }

    fn new(text: String, folder: PathBuf, seed: Option<u64>) -> Result<Self, String> {
        let mut file: File =
            toml::from_str(&text).map_err(|error| faults::syntax_error(&text, &error))?;
        file.seed = seed.unwrap_or(file.seed);
        let spans: Result<Vec<_>, _> = file.fault.iter().filter_map(span).collect();
        match (spans?.as_slice(), file.iterations) {
            _ if file.fault.is_empty() => Err("no [[fault]]: nothing to inject".to_owned()),
            (_, Some(0)) => Err("iterations = 0: nothing to run".to_owned()),
            _ if file.precision.is_some_and(|share| !(share > 0.0 && share < 1.0)) => {
                Err("precision: a share such as 0.05".to_owned())
            }
            _ if file.check.as_ref().is_some_and(|check| check.command.is_empty()) => {
                Err("check: the command is empty".to_owned())
            }
            ([_, _, ..], None) => {
                Err("several faults have a range of requests: say iterations = N".to_owned())
            }
            _ => Ok(Self { file, text, folder }),
        }
    }

    /// How often the machine runs with faults.
    pub fn iterations(&self) -> u64 {
        let values = |span: Span| span.to - span.from + 1;
        let exhaustive = self.file.fault.iter().filter_map(span).filter_map(Result::ok).next();
        self.file.iterations.unwrap_or_else(|| exhaustive.map_or(1, values))
    }

    /// How long a machine may take.
    pub fn timeout(&self) -> Duration {
        let seconds = self.file.timeout.map(Duration::try_from_secs_f64);
        seconds.and_then(Result::ok).unwrap_or(DEFAULT_TIMEOUT)
    }

    /// The run without faults.
    pub fn golden(&self) -> Iteration {
        Iteration { number: 0, faults: String::new() }
    }

    /// The iteration of this number, from 1. It is the same whenever it is asked for.
    pub fn iteration(&self, number: u64) -> Iteration {
        let seed = self.file.seed.wrapping_add(number);
        let mut random = fastrand::Rng::with_seed(seed);
        let mut faults = self.file.fault.clone();
        for fault in &mut faults {
            let Some(Ok(span)) = span(fault) else { continue };
            let request = match self.file.iterations {
                None => span.from + number - 1,
                Some(_) => random.u64(span.from..=span.to),
            };
            fault.insert("request".to_owned(), Value::Integer(request as i64));
        }
        let faults = Value::Array(faults.into_iter().map(Value::Table).collect());
        let mut scenario = Table::new();
        scenario.insert("seed".to_owned(), Value::Integer((seed & i64::MAX as u64) as i64));
        scenario.insert("fault".to_owned(), faults);
        Iteration { number, faults: scenario.to_string() }
    }
}

impl Iteration {
    /// Its faults.
    pub fn scenario(&self) -> Result<Scenario, String> {
        Scenario::parse(&self.faults).map_err(|error| error.to_string())
    }
}

/// The range of requests a fault varies over, if it has one.
fn span(fault: &Table) -> Option<Result<Span, String>> {
    let request = fault.get("request").filter(|request| request.is_table())?;
    let span = request.clone().try_into::<Span>();
    Some(match span {
        Ok(span) if (1..=span.to).contains(&span.from) => Ok(span),
        _ => Err("request: write a number, or { from = 1, to = 400 }".to_owned()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn campaign(more: &str, request: &str) -> Result<Campaign, String> {
        let text = format!(
            "{more}\n[machine]\nkernel = 'k'\n[expect]\nmasked = ['WELL']\n\
             [[fault]]\non = 'disk0'\ndo = 'power-cut'\nrequest = {request}\n"
        );
        Campaign::new(text, PathBuf::new(), None)
    }

    fn request(campaign: &Campaign, number: u64) -> u64 {
        campaign.iteration(number).scenario().expect("sound").of_disk(0)[0].request
    }

    #[test]
    fn a_range_is_tried_completely() {
        let cuts = campaign("", "{ from = 3, to = 6 }").expect("sound");
        assert_eq!(cuts.iterations(), 4);
        let all: Vec<_> = (1..=4).map(|number| request(&cuts, number)).collect();
        assert_eq!(all, [3, 4, 5, 6]);
    }

    #[test]
    fn or_at_random_and_repeatably() {
        let cuts = campaign("iterations = 50\nseed = 9", "{ from = 1, to = 1000 }").expect("sound");
        assert_eq!(cuts.iterations(), 50);
        let all: Vec<_> = (1..=50).map(|number| request(&cuts, number)).collect();
        assert_eq!(all, (1..=50).map(|number| request(&cuts, number)).collect::<Vec<_>>());
        assert!(all.iter().any(|n| *n > 500) && all.iter().any(|n| *n < 500), "{all:?}");
    }

    #[test]
    fn mistakes_are_named() {
        let error = |more, request| campaign(more, request).expect_err("wrong");
        assert!(error("", "{ from = 5, to = 4 }").contains("request"));
        assert!(error("iterations = 0", "1").contains("nothing to run"));
        assert!(error("colour = 1", "1").starts_with("line 1: unknown field `colour`"));
        assert_eq!(error("colour = 1", "1").lines().count(), 1);
        assert!(error("precision = 5", "1").contains("such as 0.05"));
    }

    #[test]
    fn mistakes_of_the_machine_are_named_before_it_starts() {
        let folder = tempfile::tempdir().expect("a folder");
        let problem = |machine: &str, fault: &str| {
            let text =
                format!("[machine]\n{machine}\n[expect]\nmasked = ['x']\n[[fault]]\n{fault}\n");
            let path = folder.path().join("it.toml");
            fs::write(&path, text).expect("written");
            Campaign::parse(&path, None).err().map(|failure| failure.to_string())
        };
        let (sound, cut) = ("kernel = 'k'\ndisk = ['d.img']", "on = 'disk0'\ndo = 'power-cut'");
        assert_eq!(problem(sound, cut), None);
        for (machine, fault, part) in [
            ("kernel = 'k'\ncolour = 'red'", cut, "[machine]: unexpected argument '--colour'"),
            ("disk = ['d.img']", cut, "[machine]: the following required arguments"),
            ("kernel = 'k'", cut, "disk0: the machine has 0 --disk"),
            ("kernel = 'k'\ndisk = ['vhost-user:s']", cut, "another program serves it"),
            (sound, "on = 'disk0'\ndo = 'explode'", "explode"),
            (sound, "on = 'disk0'\ndo = 'hang'\nafter = '120s'", "the timeout is 120 s"),
            (sound, "on = 'machine'\ndo = 'reset'\nafter = '1h'", "after 3600 s"),
        ] {
            let problem = problem(machine, fault).expect(part);
            assert!(problem.contains(part) && problem.lines().count() == 1, "{problem}");
        }
    }
}
