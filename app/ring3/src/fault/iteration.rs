//! One run of a campaign's machine.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Instant,
};

use faults::{Effect, Record};
use images::{Creation, Format};
use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use super::{
    campaign::{Campaign, Check},
    verdict::Verdict,
};
use crate::{disk::DiskArgument, failure::Failure};

/// A run with these faults.
#[derive(Clone, Debug)]
pub struct Iteration {
    /// From 1; 0 is the run without faults.
    pub number: u64,
    /// Its scenario, as a file has it.
    pub faults: String,
}

/// What a run came to, as a line of the results.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Finished {
    /// The iteration's number.
    pub iteration: u64,
    /// What it came to.
    pub verdict: Verdict,
    /// Why it is that.
    pub reason: String,
    /// How long it took.
    pub seconds: f64,
    /// The faults that struck.
    pub records: Vec<Record>,
    /// The end of what the machines printed.
    pub console: String,
}

/// Bytes of console output in a result.
const TAIL: usize = 4000;
/// Options whose values begin with the name of a file, disks apart.
const FILES: [&str; 3] = ["kernel", "initrd", "module"];

impl Iteration {
    /// Runs it, with its disks in `scratch`.
    pub fn run(&self, campaign: &Campaign, scratch: &Path) -> Result<Finished, Failure> {
        let started = Instant::now();
        let disks = self.disks(campaign, scratch)?;
        let (mut console, mut code) =
            self.machine(&campaign.file.machine, &disks, campaign, scratch, true)?;
        let records = records(&scratch.join("records"))?;
        let cut = records.iter().any(|record| matches!(record.effect, Effect::PowerCut { .. }));
        if let Some(other) = campaign.file.verify.as_ref().filter(|_| cut || code == 0) {
            let mut options = campaign.file.machine.clone();
            options.extend(other.clone());
            let (more, verified) = self.machine(&options, &disks, campaign, scratch, false)?;
            (console, code) = (followed_by(console, &more), verified);
        }
        if let Some(check) = campaign.file.check.as_ref().filter(|_| cut || code == 0) {
            super::write(&scratch.join("console"), &console)?;
            let (more, checked) = look(check, &campaign.folder, scratch)?;
            (console, code) = (followed_by(console, &more), checked);
        }
        let judged = campaign.file.expect.judge(&console, code);
        let (verdict, reason) = match records.is_empty() && self.number > 0 {
            true => (Verdict::NotInjected, "no request met the fault's trigger".to_owned()),
            false => judged,
        };
        let seconds = started.elapsed().as_secs_f64();
        let console = tail(&console);
        Ok(Finished { iteration: self.number, verdict, reason, seconds, records, console })
    }

    /// Images over the campaign's disks, which stay as they are.
    fn disks(&self, campaign: &Campaign, scratch: &Path) -> Result<Vec<String>, Failure> {
        let disks = campaign.file.machine.get("disk").map(values).unwrap_or_default();
        let copy = |(number, text): (usize, &Value)| {
            let text = text.as_str().ok_or_else(|| Failure::usage("disk: not a file name"))?;
            let name = format!("disk{number}");
            match campaign.file.check {
                Some(_) => copy_of(text, &campaign.folder, scratch.join(name)),
                None => overlay(text, &campaign.folder, scratch.join(name + ".qcow2")),
            }
        };
        disks.iter().enumerate().map(copy).collect()
    }

    /// Runs a machine; returns what it printed and its exit code.
    fn machine(
        &self,
        options: &Table,
        disks: &[String],
        campaign: &Campaign,
        scratch: &Path,
        with_faults: bool,
    ) -> Result<(String, i32), Failure> {
        let mut command = Command::new("/proc/self/exe");
        command.arg("run").args(words(options, &campaign.folder)?);
        disks.iter().for_each(|disk| {
            command.args(["--disk", disk]);
        });
        command.args(["--timeout", &campaign.timeout().as_secs_f64().to_string()]);
        if with_faults && self.number > 0 {
            let (scenario, log) = (scratch.join("scenario.toml"), scratch.join("records"));
            super::write(&scenario, &self.faults)?;
            command.arg("--fault").arg(scenario).arg("--fault-log").arg(log);
        }
        run(command, scratch)
    }
}

impl Finished {
    /// One line for people.
    pub fn line(&self) -> String {
        let Self { iteration, verdict, reason, seconds, records, .. } = self;
        let struck = records.len();
        format!("{iteration}: {verdict} ({reason}; {struck} injected, {seconds:.1} s)")
    }
}

/// Exit codes of `ring3 run` that are about us and not about the guest.
const OURS: [i32; 2] = [1, 2];

fn run(mut command: Command, scratch: &Path) -> Result<(String, i32), Failure> {
    let host = |error: std::io::Error| Failure::host(format!("a machine: {error}"));
    let (output, errors) = (scratch.join("console"), scratch.join("errors"));
    command.stdin(Stdio::null()).stdout(File::create(&output).map_err(host)?);
    command.stderr(File::create(&errors).map_err(host)?);
    let status = command.status().map_err(host)?;
    let text =
        |path: &Path| fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    let (console, errors) = (text(&output).map_err(host)?, text(&errors).map_err(host)?);
    match status.code() {
        Some(code) if !OURS.contains(&code) => Ok((console, code)),
        Some(code) => {
            Err(Failure::host(format!("a machine: {}", errors.trim())).with_code(code as u8))
        }
        None => Err(Failure::host(format!("a machine ended by {status}"))),
    }
}

/// Options as words; disks are given otherwise.
pub(super) fn words(options: &Table, folder: &Path) -> Result<Vec<String>, Failure> {
    let mut words = Vec::new();
    for (key, value) in options.iter().filter(|(key, _)| *key != "disk") {
        for value in values(value) {
            match value {
                Value::Boolean(true) => words.push(format!("--{key}")),
                Value::Boolean(false) => {}
                Value::String(text) if FILES.contains(&key.as_str()) => {
                    words.push(format!("--{key}={}", folder.join(text).display()));
                }
                Value::String(text) => words.push(format!("--{key}={text}")),
                Value::Integer(number) => words.push(format!("--{key}={number}")),
                other => {
                    let kind = other.type_str();
                    return Err(Failure::usage(format!("{key}: a {kind} is no option's value")));
                }
            }
        }
    }
    Ok(words)
}

pub(super) fn values(value: &Value) -> Vec<Value> {
    match value {
        Value::Array(values) => values.clone(),
        value => vec![value.clone()],
    }
}

/// Runs what looks at a run's disks and console; returns what it printed and its exit code.
fn look(check: &Check, folder: &Path, scratch: &Path) -> Result<(String, i32), Failure> {
    let name = &check.command[0];
    // A name with a slash is a file, from where the campaign is.
    let program = if name.contains('/') { folder.join(name) } else { PathBuf::from(name) };
    let output = Command::new(program).args(&check.command[1..]).current_dir(scratch).output();
    let output = output.map_err(|error| Failure::usage(format!("check: {name}: {error}")))?;
    let said = [output.stdout, output.stderr].concat();
    let code = output.status.code().unwrap_or(1);
    Ok((String::from_utf8_lossy(&said).into_owned(), code))
}

/// A copy of a raw disk, for programs that know nothing of images; other formats get an image over them.
fn copy_of(text: &str, folder: &Path, path: PathBuf) -> Result<String, Failure> {
    let disk: DiskArgument = text.parse().map_err(Failure::usage)?;
    let below = folder.join(&disk.image.path);
    if disk.image.format.unwrap_or_else(|| Format::of_name(&below)) != Format::Raw {
        return overlay(text, folder, path.with_extension("qcow2"));
    }
    let mut command = Command::new("cp");
    let copied = command.args(["--sparse=auto", "--reflink=auto", "--"]).arg(below).arg(&path);
    let output = copied.output().map_err(|error| Failure::host(format!("cp: {error}")))?;
    match output.status.success() {
        true => Ok(format!("{},format=raw", path.display())),
        false => Err(Failure::usage(String::from_utf8_lossy(&output.stderr).trim().to_owned())),
    }
}

/// An image over the disk that `text` names; returns what to say to `--disk`.
fn overlay(text: &str, folder: &Path, path: PathBuf) -> Result<String, Failure> {
    let disk: DiskArgument = text.parse().map_err(Failure::usage)?;
    let below = folder.join(&disk.image.path);
    let format = disk.image.format.unwrap_or_else(|| Format::of_name(&below));
    let named = path.display().to_string();
    let creation =
        Creation { path, format: Format::Qcow2, size: None, backing: Some((below, format)) };
    images::create(&creation).map_err(|error| Failure::usage(format!("disk: {error}")))?;
    Ok(named)
}

fn records(log: &Path) -> Result<Vec<Record>, Failure> {
    let text = fs::read_to_string(log).unwrap_or_default();
    let records: Result<_, _> = text.lines().map(serde_json::from_str).collect();
    records.map_err(|error| Failure::host(format!("a record of a fault: {error}")))
}

/// What was printed before and what is printed now. A machine that lost its power may have stopped within a line.
fn followed_by(mut console: String, more: &str) -> String {
    if !console.is_empty() && !console.ends_with('\n') {
        console.push('\n');
    }
    console + more
}

fn tail(console: &str) -> String {
    let from = console.ceil_char_boundary(console.len().saturating_sub(TAIL));
    console[from..].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_another_machine_prints_begins_a_line() {
        let join = |console: &str| followed_by(console.to_owned(), "found 20\n");
        assert_eq!(join("done 20"), "done 20\nfound 20\n");
        assert_eq!(join("done 20\n"), "done 20\nfound 20\n");
        assert_eq!(join(""), "found 20\n");
    }
}
