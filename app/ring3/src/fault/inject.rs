//! Faults on their way into a device's process, and records on their way out.
//!
//! The device's process is told by `--fault FILE` which scenario to read, before it shuts itself in. It writes each record as a line
//! of JSON to its standard output, behind the line in which it introduces itself.

use std::{
    fs::{File, OpenOptions},
    io::{BufRead, BufReader, Read, Write},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    thread,
};

use clap::Args;
use faults::{Effect, FaultyDisk, FaultyNet, Record, Recorder, Scenario, Schedule, Target};
use virtio::{BlockBackend, NetBackend};

use crate::failure::Failure;

/// Faults to inject, as options.
#[derive(Clone, Debug, Default, Args)]
pub struct FaultOptions {
    /// Faults of disks and networks, injected on purpose: docs/faults.md has the file's format
    #[arg(long, value_name = "FILE")]
    pub fault: Option<PathBuf>,
    /// Where each injected fault is recorded as a line of JSON; standard error if not given
    #[arg(long, value_name = "FILE", requires = "fault")]
    pub fault_log: Option<PathBuf>,
}

/// Reads a scenario.
pub fn read(file: &Path) -> Result<Scenario, Failure> {
    let wrong = |problem: String| Failure::usage(format!("--fault {}: {problem}", file.display()));
    let text = std::fs::read_to_string(file).map_err(|error| wrong(error.to_string()))?;
    Scenario::parse(&text).map_err(|error| wrong(error.to_string()))
}

/// A scenario for the devices of a machine.
#[derive(Clone)]
pub struct Injection {
    file: PathBuf,
    scenario: Scenario,
    log: Log,
    power_cut: Arc<dyn Fn() + Send + Sync>,
}

impl Injection {
    /// What the options say, for a machine with so many disks and networks that ring3 serves itself.
    /// `power_cut` is called when a fault ends the machine.
    pub fn new(
        options: &FaultOptions,
        disks: &[bool],
        nets: &[bool],
        power_cut: impl Fn() + Send + Sync + 'static,
    ) -> Result<Option<Self>, Failure> {
        let Some(file) = &options.fault else { return Ok(None) };
        let scenario = read(file)?;
        for target in scenario.targets() {
            check(target, disks, nets).map_err(|problem| {
                Failure::usage(format!("--fault {}: {target}: {problem}", file.display()))
            })?;
        }
        let log = Log::open(options.fault_log.as_deref())?;
        Ok(Some(Self { file: file.clone(), scenario, log, power_cut: Arc::new(power_cut) }))
    }

    /// The words for the process of a device that has faults.
    pub fn words(&self, target: Target) -> Vec<String> {
        match self.scenario.targets().contains(&target) {
            true => vec!["--fault".to_owned(), self.file.display().to_string()],
            false => Vec::new(),
        }
    }

    /// Listens to the records of a device's process until it ends.
    pub fn listen(&self, from: impl Read + Send + 'static) -> std::io::Result<()> {
        let own = self.clone();
        let lines = BufReader::new(from).lines();
        let hear = move || lines.map_while(Result::ok).for_each(|line| own.hear(&line));
        thread::Builder::new().name("faults".into()).spawn(hear).map(drop)
    }

    fn hear(&self, line: &str) {
        self.log.add(line);
        let record: Option<Record> = serde_json::from_str(line).ok();
        if record.is_some_and(|record| matches!(record.effect, Effect::PowerCut { .. })) {
            (self.power_cut)();
        }
    }
}

fn check(target: Target, disks: &[bool], nets: &[bool]) -> Result<(), String> {
    let (all, number, option) = match target {
        Target::Disk(number) => (disks, number, "--disk"),
        Target::Net(number) => (nets, number, "--net"),
    };
    match all.get(number) {
        Some(true) => Ok(()),
        Some(false) => Err("another program serves it; faults need one that ring3 serves".to_owned()),
        None => Err(format!("the machine has {} {option}; the first is number 0", all.len())),
    }
}

/// Where records go.
#[derive(Clone)]
struct Log(Option<Arc<Mutex<File>>>);

impl Log {
    fn open(path: Option<&Path>) -> Result<Self, Failure> {
        let open = |path: &Path| {
            let opened = OpenOptions::new().create(true).append(true).open(path);
            opened.map_err(|error| {
                Failure::usage(format!("--fault-log {}: {error}", path.display()))
            })
        };
        let file = path.map(open).transpose()?;
        Ok(Self(file.map(|file| Arc::new(Mutex::new(file)))))
    }

    fn add(&self, line: &str) {
        let Some(file) = &self.0 else { return eprintln!("ring3: fault: {line}") };
        let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = writeln!(file, "{line}") {
            eprintln!("ring3: --fault-log: {error}; the record was {line}");
        }
    }
}

/// A disk with the faults a scenario has for it.
pub fn disk(
    backend: Box<dyn BlockBackend>,
    file: Option<&Path>,
    number: usize,
) -> Result<Box<dyn BlockBackend>, Failure> {
    let Some(scenario) = file.map(read).transpose()? else { return Ok(backend) };
    let (on, faults) = (Target::Disk(number), scenario.of_disk(number));
    let schedule = Schedule::new(on, faults, scenario.seed, recorder());
    Ok(Box::new(FaultyDisk::new(backend, schedule)))
}

/// A network with the faults a scenario has for it.
pub fn net(
    backend: Box<dyn NetBackend>,
    scenario: &Scenario,
    number: usize,
) -> Result<FaultyNet, Failure> {
    let (on, faults) = (Target::Net(number), scenario.of_net(number));
    let schedule = Schedule::new(on, faults, scenario.seed, recorder());
    FaultyNet::new(backend, schedule).map_err(|error| Failure::host(format!("--fault: {error}")))
}

/// Writes records to standard output. Nobody listening is no reason to stop.
fn recorder() -> Recorder {
    Box::new(|record| {
        let line = serde_json::to_string(record).unwrap_or_default();
        let mut output = std::io::stdout().lock();
        let _ = writeln!(output, "{line}").and_then(|()| output.flush());
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(text: &str, disks: &[bool], nets: &[bool]) -> String {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("faults.toml");
        std::fs::write(&file, text).expect("written");
        let options = FaultOptions { fault: Some(file), fault_log: None };
        let injection = Injection::new(&options, disks, nets, || {});
        injection.err().map_or_else(String::new, |failure| failure.to_string())
    }

    #[test]
    fn targets_must_be_there() {
        let text = "[[fault]]\non = 'disk1'\ndo = 'hang'";
        assert!(refusal(text, &[true], &[]).contains("disk1: the machine has 1 --disk"));
        assert!(refusal(text, &[true, false], &[]).contains("another program serves it"));
        assert_eq!(refusal(text, &[true, true], &[]), "");
        let missing = FaultOptions { fault: Some("/nowhere.toml".into()), fault_log: None };
        let failure = Injection::new(&missing, &[], &[], || {}).err().expect("refused");
        assert!(failure.to_string().starts_with("--fault /nowhere.toml: "), "{failure}");
    }
}
