//! Which faults happen, where and when: the scenario file.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, iter,
    ops::Range,
    path::PathBuf,
    str::FromStr,
    time::Duration,
};

use serde::{Deserialize, de};

use crate::{
    actions::{
        DiskAction, InterruptAction, MachineAction, NetAction, ProtocolAction, duration,
        some_duration,
    },
    schedule::Op,
};

/// What is wrong with a scenario.
#[derive(Debug, thiserror::Error)]
pub enum ScenarioError {
    /// The file cannot be read.
    #[error("{0}: {1}")]
    Unreadable(PathBuf, std::io::Error),
    /// It is not a scenario.
    #[error("{0}")]
    Syntax(String),
    /// A fault that cannot be.
    #[error("fault `{name}`: {problem}")]
    Fault {
        /// Its name.
        name: String,
        /// What is wrong, and what to write instead.
        problem: String,
    },
}

/// A device that faults strike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Target {
    /// The machine's disk of this number, from 0.
    Disk(usize),
    /// Its network interface of this number, from 0.
    Net(usize),
    /// Its vCPU and its power.
    Machine,
    /// Its memory.
    Ram,
    /// The clock that its timers go by.
    Clock,
    /// Interrupts of its PCI devices.
    Interrupts,
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |digits: &str| digits.parse().ok();
        let disk = text.strip_prefix("disk").and_then(number).map(Self::Disk);
        let net = || text.strip_prefix("net").and_then(number).map(Self::Net);
        let part = || match text {
            "machine" => Some(Self::Machine),
            "ram" => Some(Self::Ram),
            "clock" => Some(Self::Clock),
            "interrupts" => Some(Self::Interrupts),
            _ => None,
        };
        disk.or_else(net).or_else(part).ok_or_else(|| {
            format!(
                "`{text}` is not there: write disk0 for the first disk, net0 for the first network, machine, ram, \
                 clock or interrupts"
            )
        })
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Disk(number) => write!(f, "disk{number}"),
            Self::Net(number) => write!(f, "net{number}"),
            Self::Machine => f.write_str("machine"),
            Self::Ram => f.write_str("ram"),
            Self::Clock => f.write_str("clock"),
            Self::Interrupts => f.write_str("interrupts"),
        }
    }
}

/// A fault and its trigger. All conditions given must hold.
#[derive(Clone, Debug, PartialEq)]
pub struct Fault<A> {
    /// What records call it.
    pub name: String,
    /// What happens.
    pub action: A,
    /// The requests it strikes.
    pub ops: Vec<Op>,
    /// Bytes of the disk it strikes; all if none are given.
    pub bytes: Option<Range<u64>>,
    /// What it waits for before all else.
    pub cue: Option<Cue>,
    /// It begins this long after its cue, or else after the device was started.
    pub after: Duration,
    /// It begins with the nth request that meets the other conditions, from 1.
    pub request: u64,
    /// It ends this long after it began.
    pub lasts: Option<Duration>,
    /// It strikes so often at most.
    pub times: u64,
    /// It strikes a request with this probability.
    pub probability: f64,
}

/// What a fault waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cue {
    /// The guest prints this.
    Console(String),
    /// The fault of this name strikes.
    Follows(String),
    /// The guest's kernel comes to this function.
    Reached(String),
    /// A program of the guest's makes this system call.
    Calls(String),
}

/// A fault that strikes at a time.
#[derive(Clone, Debug, PartialEq)]
pub struct Timed {
    /// What records call it.
    pub name: String,
    /// What is struck.
    pub on: Target,
    /// What happens.
    pub action: MachineAction,
    /// What it waits for.
    pub cue: Option<Cue>,
    /// It strikes this long after its cue, or else after the machine was started.
    pub after: Duration,
    /// How often.
    pub times: u64,
    /// How long after one another.
    pub every: Duration,
}

/// Faults of a machine.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scenario {
    /// Where random choices begin.
    pub seed: u64,
    disks: Vec<(usize, Fault<DiskAction>)>,
    nets: Vec<(usize, Fault<NetAction>)>,
    protocol: Vec<(Target, Fault<ProtocolAction>)>,
    interrupts: Vec<Fault<InterruptAction>>,
    timed: Vec<Timed>,
}

impl Scenario {
    /// Reads a scenario.
    ///
    /// # Errors
    /// The first thing that is wrong with it: see [`ScenarioError`].
    pub fn parse(text: &str) -> Result<Self, ScenarioError> {
        let file: File = toml::from_str(text)
            .map_err(|error| ScenarioError::Syntax(syntax_error(text, &error)))?;
        let mut scenario = Self { seed: file.seed, ..Self::default() };
        let mut names = BTreeSet::new();
        for (index, table) in file.fault.into_iter().enumerate() {
            let name = table.get("name").and_then(toml::Value::as_str).map(str::to_owned);
            let name = name.unwrap_or_else(|| format!("fault {}", index + 1));
            let unique = names.insert(name.clone());
            let entry =
                if unique { read(toml::Value::Table(table)) } else { Err(TWICE.to_owned()) };
            let added = entry.and_then(|entry| scenario.add(&name, entry));
            added.map_err(|problem| ScenarioError::Fault { name, problem })?;
        }
        scenario.check_cues(&names)?;
        Ok(scenario)
    }

    fn check_cues(&self, names: &BTreeSet<String>) -> Result<(), ScenarioError> {
        let followed: BTreeMap<_, _> = self.cues().into_iter().filter_map(followed).collect();
        for (name, other) in &followed {
            let chain = iter::successors(Some(other), |fault| followed.get(*fault));
            let problem = match () {
                () if !names.contains(other) || other == name => "no other fault has that name",
                () if chain.take(names.len()).any(|fault| fault == name) => {
                    "that one waits for this one"
                }
                () => continue,
            };
            let (name, problem) = (name.clone(), format!("follows = \"{other}\": {problem}"));
            return Err(ScenarioError::Fault { name, problem });
        }
        Ok(())
    }

    /// Faults that wait for a cue, with what they strike.
    pub fn cues(&self) -> Vec<(String, Target, Cue)> {
        fn of<A>(on: Target, fault: &Fault<A>) -> Option<(String, Target, Cue)> {
            Some((fault.name.clone(), on, fault.cue.clone()?))
        }
        let disks = self.disks.iter().filter_map(|(n, fault)| of(Target::Disk(*n), fault));
        let nets = self.nets.iter().filter_map(|(n, fault)| of(Target::Net(*n), fault));
        let protocol = self.protocol.iter().filter_map(|(on, fault)| of(*on, fault));
        let interrupts = self.interrupts.iter().filter_map(|fault| of(Target::Interrupts, fault));
        let timed = self.timed.iter();
        let timed = timed.filter_map(|it| Some((it.name.clone(), it.on, it.cue.clone()?)));
        disks.chain(nets).chain(protocol).chain(interrupts).chain(timed).collect()
    }

    /// Whether the power can go.
    pub fn loses_power(&self) -> bool {
        self.disks.iter().any(|(_, fault)| fault.action == DiskAction::PowerCut)
            || self.timed.iter().any(|fault| fault.action == MachineAction::PowerCut)
    }

    /// The faults of message-signalled interrupts.
    pub fn of_interrupts(&self) -> Vec<Fault<InterruptAction>> {
        self.interrupts.clone()
    }

    /// The names of all faults, and how long after the start or its cue each begins.
    pub fn begins(&self) -> Vec<(&str, Duration)> {
        fn of<A>(fault: &Fault<A>) -> (&str, Duration) {
            (&fault.name, fault.after)
        }
        let disks = self.disks.iter().map(|(_, fault)| of(fault));
        let nets = self.nets.iter().map(|(_, fault)| of(fault));
        let protocol = self.protocol.iter().map(|(_, fault)| of(fault));
        let interrupts = self.interrupts.iter().map(of);
        let timed = self.timed.iter().map(|fault| (&*fault.name, fault.after));
        disks.chain(nets).chain(protocol).chain(interrupts).chain(timed).collect()
    }

    /// The faults that strike at a time.
    pub fn timed(&self) -> &[Timed] {
        &self.timed
    }

    /// The devices that faults strike.
    pub fn targets(&self) -> BTreeSet<Target> {
        let disks = self.disks.iter().map(|(number, _)| Target::Disk(*number));
        let nets = self.nets.iter().map(|(number, _)| Target::Net(*number));
        let protocol = self.protocol.iter().map(|(on, _)| *on);
        let interrupts = self.interrupts.iter().map(|_| Target::Interrupts);
        let timed = self.timed.iter().map(|fault| fault.on);
        disks.chain(nets).chain(protocol).chain(interrupts).chain(timed).collect()
    }

    /// What a disk or network says to its driver against the rules.
    pub fn of_protocol(&self, on: Target) -> Vec<Fault<ProtocolAction>> {
        of(&self.protocol, on)
    }

    /// The faults of a disk.
    pub fn of_disk(&self, number: usize) -> Vec<Fault<DiskAction>> {
        of(&self.disks, number)
    }

    /// The faults of a network interface.
    pub fn of_net(&self, number: usize) -> Vec<Fault<NetAction>> {
        of(&self.nets, number)
    }

    fn add(&mut self, name: &str, entry: Entry) -> Result<(), String> {
        if name.chars().any(char::is_control) {
            return Err("its name has control characters".to_owned());
        }
        match entry.on.parse()? {
            Target::Interrupts if entry.action.is_str() => {
                entry.refuses_sectors("interrupts have")?;
                let action: InterruptAction = action(entry.action.clone())?;
                self.interrupts.push(entry.fault(name, action, &[Op::Interrupt], None)?);
            }
            on @ (Target::Machine | Target::Ram | Target::Clock | Target::Interrupts) => {
                self.timed.push(entry.timed(name, on)?);
            }
            on @ (Target::Disk(_) | Target::Net(_))
                if MachineAction::is_of_device(&entry.action) =>
            {
                self.timed.push(entry.timed(name, on)?);
            }
            on @ (Target::Disk(_) | Target::Net(_)) if ProtocolAction::is_such(&entry.action) => {
                self.protocol.push((on, entry.of_protocol(name, on)?));
            }
            Target::Disk(number) => {
                let action: DiskAction = action(entry.action.clone())?;
                let (ops, problem) = (action.ops(), action.problem());
                self.disks.push((number, entry.fault(name, action, ops, problem)?));
            }
            Target::Net(number) => {
                entry.refuses_sectors("a network has")?;
                let action: NetAction = action(entry.action.clone())?;
                let problem = action.problem();
                let ops = &[Op::Send, Op::Receive];
                self.nets.push((number, entry.fault(name, action, ops, problem)?));
            }
        }
        Ok(())
    }
}

/// A fault's name, and that of the one it waits for.
fn followed((name, _, cue): (String, Target, Cue)) -> Option<(String, String)> {
    match cue {
        Cue::Follows(other) => Some((name, other)),
        _ => None,
    }
}

/// What is wrong with a file of TOML, in a line.
pub fn syntax_error(text: &str, error: &toml::de::Error) -> String {
    let message = error.message().lines().collect::<Vec<_>>().join("; ");
    let before = error.span().and_then(|span| text.get(..span.start));
    match before {
        Some(before) => format!("line {}: {message}", before.matches('\n').count() + 1),
        None => message,
    }
}

const TWICE: &str = "another fault has the same name; give each its own";
const SECTOR: u64 = virtio::SECTOR;

fn of<T: PartialEq, A: Clone>(all: &[(T, Fault<A>)], device: T) -> Vec<Fault<A>> {
    let of_it = all.iter().filter(|(of, _)| *of == device);
    of_it.map(|(_, fault)| fault.clone()).collect()
}

fn action<A: de::DeserializeOwned>(value: toml::Value) -> Result<A, String> {
    read(value).map_err(|problem| format!("do: {problem}"))
}

fn read<A: de::DeserializeOwned>(value: toml::Value) -> Result<A, String> {
    value.try_into().map_err(|error: toml::de::Error| error.message().to_owned())
}

/// The file as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    seed: u64,
    #[serde(default)]
    fault: Vec<toml::Table>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    #[serde(rename = "name")]
    _name: Option<String>,
    on: String,
    #[serde(rename = "do")]
    action: toml::Value,
    op: Option<Op>,
    sectors: Option<(u64, u64)>,
    #[serde(default, deserialize_with = "duration")]
    after: Duration,
    request: Option<u64>,
    #[serde(default, rename = "for", deserialize_with = "some_duration")]
    lasts: Option<Duration>,
    times: Option<u64>,
    probability: Option<f64>,
    console: Option<String>,
    follows: Option<String>,
    reached: Option<String>,
    syscall: Option<String>,
    #[serde(default, deserialize_with = "some_duration")]
    every: Option<Duration>,
}

impl Entry {
    fn refuses_sectors(&self, who: &str) -> Result<(), String> {
        match self.sectors {
            Some(_) => Err(format!("{who} no sectors")),
            None => Ok(()),
        }
    }

    fn cue(&self) -> Result<Option<Cue>, String> {
        type Make = fn(String) -> Cue;
        let keys: [(&str, &Option<String>, Make); 4] = [
            ("console", &self.console, Cue::Console),
            ("follows", &self.follows, Cue::Follows),
            ("reached", &self.reached, Cue::Reached),
            ("syscall", &self.syscall, Cue::Calls),
        ];
        let given = keys.into_iter();
        let given = given.filter_map(|(key, text, make)| Some((key, text.clone()?, make)));
        let mut given: Vec<_> = given.collect();
        let Some((key, text, make)) = given.pop() else { return Ok(None) };
        if let Some((other, ..)) = given.pop() {
            return Err(format!("{other} or {key}, not both"));
        }
        match make(text) {
            Cue::Console(words) if words.is_empty() => Err("console = \"\": no words".to_owned()),
            Cue::Reached(name) | Cue::Calls(name) if !is_name(&name) => {
                Err(format!("{key} = \"{name}\": not the name of a function"))
            }
            cue => Ok(Some(cue)),
        }
    }

    /// A fault that strikes at a time, for which there are no requests.
    fn timed(&self, name: &str, on: Target) -> Result<Timed, String> {
        let action: MachineAction = action(self.action.clone())?;
        action.problem(on).map_or(Ok(()), |problem| Err(problem.to_owned()))?;
        let given = [
            ("op", self.op.is_some()),
            ("sectors", self.sectors.is_some()),
            ("request", self.request.is_some()),
            ("for", self.lasts.is_some()),
            ("probability", self.probability.is_some()),
        ];
        if let Some((key, _)) = given.into_iter().find(|(_, given)| *given) {
            return Err(format!("{key}: it strikes at a time, not a request"));
        }
        let (times, every) = (self.times.unwrap_or(1), self.every.unwrap_or_default());
        match (times, every.is_zero()) {
            (0, _) => Err("times = 0: it would never happen".to_owned()),
            (2.., true) => {
                Err("times: every = \"100ms\" says how long after one another".to_owned())
            }
            (1, false) => Err("every: times = N says how often".to_owned()),
            _ => {
                let (name, cue, after) = (name.to_owned(), self.cue()?, self.after);
                Ok(Timed { name, on, action, cue, after, times, every })
            }
        }
    }

    fn of_protocol(&self, name: &str, on: Target) -> Result<Fault<ProtocolAction>, String> {
        let action: ProtocolAction = action(self.action.clone())?;
        let ops: &[Op] = match on {
            Target::Disk(_) => &[Op::Read, Op::Write, Op::Flush, Op::Discard],
            _ => {
                self.refuses_sectors("a network has")?;
                &[Op::Send, Op::Receive]
            }
        };
        self.fault(name, action, ops, action.problem(on))
    }

    fn fault<A>(
        &self,
        name: &str,
        action: A,
        possible: &[Op],
        problem: Option<&str>,
    ) -> Result<Fault<A>, String> {
        self.check(problem)?;
        let ops = match self.op {
            Some(op) if possible.contains(&op) => vec![op],
            Some(op) => return Err(format!("op = \"{op}\" never meets it; {}", these(possible))),
            None => possible.to_vec(),
        };
        // One request that is named is one fault, unless more is said.
        let once = self.request.is_some() && self.lasts.is_none();
        Ok(Fault {
            name: name.to_owned(),
            action,
            ops,
            bytes: self.sectors.map(|(first, end)| first * SECTOR..end * SECTOR),
            cue: self.cue()?,
            after: self.after,
            request: self.request.unwrap_or(1),
            lasts: self.lasts,
            times: self.times.unwrap_or(if once { 1 } else { u64::MAX }),
            probability: self.probability.unwrap_or(1.0),
        })
    }

    fn check(&self, problem: Option<&str>) -> Result<(), String> {
        let probable = self.probability.is_none_or(|chance| chance > 0.0 && chance <= 1.0);
        let problem = match (self.sectors, self.request, self.times) {
            _ if problem.is_some() => problem,
            (Some((first, end)), ..) if first >= end => {
                Some("sectors = [first, end] must have first < end")
            }
            (Some((_, end)), ..) if end > u64::MAX / SECTOR => Some("sectors: beyond any disk"),
            (_, Some(0), _) => Some("request = 0: requests count from 1"),
            (.., Some(0)) => Some("times = 0: it would never happen"),
            _ if !probable => Some("probability: more than 0, at most 1"),
            _ if self.every.is_some() => Some("every: it strikes requests, not at times"),
            _ if self.lasts == Some(Duration::ZERO) => Some("for = 0: it would never happen"),
            _ => None,
        };
        problem.map_or(Ok(()), |problem| Err(problem.to_owned()))
    }
}

/// A function of a kernel can have this name.
fn is_name(text: &str) -> bool {
    let is_part = |byte: u8| byte.is_ascii_alphanumeric() || b"_.".contains(&byte);
    !text.is_empty() && text.bytes().all(is_part)
}

fn these(possible: &[Op]) -> String {
    let names: Vec<_> = possible.iter().map(|op| format!("\"{op}\"")).collect();
    format!("write op = {}", names.join(" or "))
}

#[cfg(test)]
mod tests;
