//! `ring3 profile`: the machine sends samples of its vCPUs, the client adds them up.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    io::{self, BufReader, Write},
    net::Shutdown,
    os::unix::net::UnixStream,
    path::PathBuf,
    thread,
    time::Duration,
};

use clap::{Args, ValueEnum};
use inspect::profile::{Code, MOST_HERTZ, ProfileLine, ProfileRequest, Sample, StackFrame};
use vmm::Inspector;

use super::{ControlOrder, Target, flame, symbols::Files, watched};
use crate::{failure::Failure, output, values::seconds};

/// Functions that a table has.
const ROWS: usize = 40;

/// How a profile is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ProfileFormat {
    /// A table of functions: how much of the time was spent in each, and in each and what it called
    Text,
    /// A stack and its number of samples a line, for flame graphs
    Folded,
    /// A flame graph, as a page of its own
    Html,
    /// As `perf script` prints samples
    Perf,
    /// A JSON object a sample
    Json,
}

/// What to look at, and how to show it.
#[derive(Debug, Args)]
pub struct ProfileArguments {
    /// A running machine
    #[arg(required_unless_present = "command", conflicts_with = "command")]
    pub machine: Option<String>,
    /// For how long; without it until Ctrl-C, or the machine's end
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub seconds: Option<Duration>,
    /// Samples a second, of each vCPU
    #[arg(short = 'F', long, value_name = "N", default_value_t = 99,
        value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST_HERTZ)))]
    pub hertz: u32,
    /// Only threads of this name
    #[arg(long, value_name = "NAME")]
    pub comm: Option<String>,
    /// Only the process with this number in the guest
    #[arg(long, value_name = "N")]
    pub pid: Option<u32>,
    /// Show idle CPUs, too
    #[arg(long)]
    pub idle: bool,
    /// Folder with the guest's files, for the names of functions in programs; / for a machine of `ring3 exec` that is started here
    #[arg(long, value_name = "DIR")]
    pub symfs: Option<PathBuf>,
    /// Where to write; standard output if not given, or standard error with a command
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// How to show it
    #[arg(long, value_enum, default_value_t = ProfileFormat::Text)]
    pub format: ProfileFormat,
    /// Start this machine, and look at it from its kernel's start on: exec -- make test
    #[arg(last = true, value_name = "COMMAND OF RING3")]
    pub command: Vec<OsString>,
}

/// The machine's side: what is wanted is a line of the client's.
pub(super) fn serve(inspector: &Inspector, client: &UnixStream) -> io::Result<()> {
    watched::serve(client, |request: &ProfileRequest, writer, gone| {
        inspect::profile::serve(inspector, request, writer, gone)
    })
}

/// `ring3 profile`.
pub fn profile(arguments: &ProfileArguments) -> Result<u8, Failure> {
    let output = watched::output(arguments.output.as_deref(), arguments.machine.as_deref())?;
    let mut profile = Profile::new(arguments);
    let follow = |target: &Target, wait| follow(arguments, target, wait, &mut profile);
    let code = watched::watch(arguments.machine.as_deref(), &arguments.command, "profile", follow)?;
    let wrong = |error: io::Error| Failure::host(format!("output: {error}"));
    profile.print(output).map_err(wrong)?;
    Ok(code)
}

/// Adds up what the machine sends until it ends, the time is over, or a signal asks for an end.
fn follow(
    arguments: &ProfileArguments,
    target: &Target,
    wait: bool,
    profile: &mut Profile,
) -> Result<(), Failure> {
    let request = ProfileRequest { hertz: arguments.hertz, wait };
    let mut machine = watched::ask(target, ControlOrder::Profile, &request, wait)?;
    if let Some(time) = arguments.seconds {
        let connection = machine.get_ref().try_clone();
        let connection = connection
            .map_err(|error| Failure::host(format!("machine {}: {error}", target.machine)))?;
        thread::spawn(move || {
            thread::sleep(time);
            // One that has ended has hung up itself.
            let _ = connection.shutdown(Shutdown::Both);
        });
    }
    take(&mut machine, profile)
}

fn take(machine: &mut BufReader<UnixStream>, profile: &mut Profile) -> Result<(), Failure> {
    watched::each_line(machine, |line| {
        match line {
            ProfileLine::Sample(sample) => profile.add(sample),
            ProfileLine::Late(count) => profile.late += count,
            ProfileLine::Started { vcpus } => profile.vcpus = vcpus,
            ProfileLine::Error(problem) => return Err(Failure::host(problem)),
        }
        Ok(())
    })?;
    if profile.vcpus == 0 {
        return Err(Failure::host("the machine ended before it could be looked at"));
    }
    if profile.late != 0 {
        let late = profile.late;
        output::complain(&format!("{late} samples came late: vCPUs had no CPU of this host's"));
    }
    Ok(())
}

/// Samples, and what they add up to.
struct Profile {
    format: ProfileFormat,
    comm: Option<String>,
    pid: Option<u32>,
    with_idle: bool,
    files: Files,
    vcpus: usize,
    late: u64,
    idle: u64,
    /// Where they are shown one by one.
    samples: Vec<Sample>,
    /// How many there were of each stack: the thread's name first, then functions, the innermost last.
    stacks: BTreeMap<Vec<String>, u64>,
}

impl Profile {
    fn new(arguments: &ProfileArguments) -> Self {
        let ProfileArguments { format, comm, pid, idle, symfs, command, .. } = arguments;
        let shares = command.first().is_some_and(|word| word == "exec" || word == "shell");
        let root = symfs.clone().or_else(|| shares.then(|| "/".into()));
        Self {
            format: *format,
            comm: comm.clone(),
            pid: *pid,
            with_idle: *idle,
            files: Files::new(root),
            vcpus: 0,
            late: 0,
            idle: 0,
            samples: Vec::new(),
            stacks: BTreeMap::new(),
        }
    }

    fn add(&mut self, sample: Sample) {
        let is_idle = sample.pid == 0 && sample.tid == 0;
        self.idle += u64::from(is_idle);
        let meant = self.comm.as_ref().is_none_or(|comm| *comm == sample.comm)
            && self.pid.is_none_or(|pid| pid == sample.pid);
        if (is_idle && !self.with_idle) || !meant {
            return;
        }
        match self.format {
            ProfileFormat::Json | ProfileFormat::Perf => self.samples.push(sample),
            ProfileFormat::Text | ProfileFormat::Folded | ProfileFormat::Html => {
                let names = sample.frames.iter().rev().map(|frame| self.files.named(frame));
                let comm = sample.comm.replace([';', ' '], "_");
                let stack = std::iter::once(comm).chain(names).collect();
                *self.stacks.entry(stack).or_default() += 1;
            }
        }
    }

    fn print(&mut self, mut output: Box<dyn Write>) -> io::Result<()> {
        match self.format {
            ProfileFormat::Text => output.write_all(self.table().as_bytes())?,
            ProfileFormat::Folded => {
                for (stack, count) in &self.stacks {
                    writeln!(output, "{} {count}", stack.join(";"))?;
                }
            }
            ProfileFormat::Html => output.write_all(flame::page(&self.stacks).as_bytes())?,
            ProfileFormat::Json => {
                for sample in &self.samples {
                    writeln!(output, "{}", serde_json::to_string(sample)?)?;
                }
            }
            ProfileFormat::Perf => {
                for sample in &self.samples {
                    self.files.perf(&mut output, sample)?;
                }
            }
        }
        output.flush()
    }

    /// Functions, those with the most time of their own first.
    fn table(&self) -> String {
        let mut functions: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
        let mut all = 0;
        for (stack, count) in &self.stacks {
            all += count;
            let mut names: Vec<&str> = stack.iter().skip(1).map(String::as_str).collect();
            if let Some(last) = names.last() {
                functions.entry(last).or_default().0 += count;
            }
            // One that calls itself counts once.
            names.sort_unstable();
            names.dedup();
            names.iter().for_each(|name| functions.entry(name).or_default().1 += count);
        }
        let mut rows: Vec<_> = functions.into_iter().collect();
        rows.sort_by_key(|(_, counts)| std::cmp::Reverse(*counts));
        let share = |count: u64| 100.0 * count as f64 / all.max(1) as f64;
        let lines = rows.iter().take(ROWS).map(|(name, (own, total))| {
            format!("{:6.1}% {:6.1}%  {name}\n", share(*own), share(*total))
        });
        let idle = if self.with_idle { String::new() } else { format!(", {} idle", self.idle) };
        let head = format!("{all} samples{idle}\n   self   total  function\n");
        head + &lines.collect::<String>()
    }
}

/// The last part of a path.
fn base(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

impl Files {
    /// A name for a frame's function. The kernel's are marked as flame graphs know it.
    fn named(&mut self, frame: &StackFrame) -> String {
        match &frame.code {
            Code::Kernel { symbol, .. } => format!("{symbol}_[k]"),
            Code::Module => "[module]_[k]".to_owned(),
            Code::Anonymous => "[anonymous]".to_owned(),
            Code::File { path, offset } => {
                let known = self.function(path, *offset).map(str::to_owned);
                known.unwrap_or_else(|| format!("[{}]", base(path)))
            }
        }
    }

    /// A sample as `perf script` prints it.
    fn perf(&mut self, output: &mut dyn Write, sample: &Sample) -> io::Result<()> {
        let Sample { ns, vcpu, tid, comm, frames, .. } = sample;
        let seconds = *ns as f64 / 1e9;
        writeln!(output, "{comm} {tid} [{vcpu:03}] {seconds:.6}: 1 cpu-clock: ")?;
        for StackFrame { address, code } in frames {
            let (name, file) = match code {
                Code::Kernel { symbol, offset } => {
                    (format!("{symbol}+{offset:#x}"), "[kernel.kallsyms]")
                }
                Code::Module => ("[unknown]".to_owned(), "[module]"),
                Code::Anonymous => ("[unknown]".to_owned(), "[unknown]"),
                Code::File { path, offset } => {
                    let known = self.function(path, *offset).map(str::to_owned);
                    (known.unwrap_or_else(|| "[unknown]".to_owned()), path.as_str())
                }
            };
            writeln!(output, "\t{address:16x} {name} ({file})")?;
        }
        writeln!(output)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile(format: ProfileFormat) -> Profile {
        Profile {
            format,
            comm: None,
            pid: None,
            with_idle: false,
            files: Files::new(None),
            vcpus: 1,
            late: 0,
            idle: 0,
            samples: Vec::new(),
            stacks: BTreeMap::new(),
        }
    }

    fn sample(pid: u32, symbols: &[&str]) -> Sample {
        let mut frames: Vec<StackFrame> = symbols
            .iter()
            .map(|symbol| {
                let code = Code::Kernel { symbol: (*symbol).to_owned(), offset: 2 };
                StackFrame { address: 0x1002, code }
            })
            .collect();
        let (path, offset) = ("/usr/bin/tool".to_owned(), 0x10);
        frames.push(StackFrame { address: 0x40_0010, code: Code::File { path, offset } });
        Sample { pid, tid: pid, comm: "a tool".to_owned(), frames, ..Sample::default() }
    }

    fn filled(format: ProfileFormat) -> Profile {
        let mut profile = profile(format);
        profile.add(sample(7, &["inner", "outer"]));
        profile.add(sample(7, &["outer", "outer"]));
        profile.add(sample(0, &["halt"]));
        profile
    }

    #[test]
    fn a_table_has_each_functions_own_time_and_all() {
        let table = filled(ProfileFormat::Text).table();
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines[0], "2 samples, 1 idle");
        assert_eq!(lines[2], "  50.0%  100.0%  outer_[k]", "and not twice where it calls itself");
        assert_eq!(lines[3], "  50.0%   50.0%  inner_[k]");
        assert_eq!(lines[4], "   0.0%  100.0%  [tool]");
    }

    #[test]
    fn stacks_are_folded_from_the_outside() {
        let profile = filled(ProfileFormat::Folded);
        let stacks: Vec<String> = profile.stacks.keys().map(|stack| stack.join(";")).collect();
        assert_eq!(stacks[0], "a_tool;[tool];outer_[k];inner_[k]");
    }

    #[test]
    fn perf_reads_a_line_a_frame() {
        let mut profile = filled(ProfileFormat::Perf);
        let (mut text, sample) = (Vec::new(), profile.samples[0].clone());
        profile.files.perf(&mut text, &sample).expect("written");
        let text = String::from_utf8(text).expect("text");
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "a tool 7 [000] 0.000000: 1 cpu-clock: ");
        assert_eq!(lines[1], "\t            1002 inner+0x2 ([kernel.kallsyms])");
        assert_eq!(lines[3], "\t          400010 [unknown] (/usr/bin/tool)");
    }
}
