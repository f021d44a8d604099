//! Which faults happen, where and when: the scenario file.

use std::{collections::BTreeSet, fmt, ops::Range, path::PathBuf, str::FromStr, time::Duration};

use serde::{Deserialize, Deserializer, de};

use crate::schedule::Op;

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
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |digits: &str| digits.parse().ok();
        let disk = text.strip_prefix("disk").and_then(number).map(Self::Disk);
        let net = || text.strip_prefix("net").and_then(number).map(Self::Net);
        disk.or_else(net).ok_or_else(|| {
            format!("`{text}` is not a device: write disk0 for the first disk, net0 for the first network")
        })
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Disk(number) => write!(f, "disk{number}"),
            Self::Net(number) => write!(f, "net{number}"),
        }
    }
}

/// What goes wrong with a disk.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DiskAction {
    /// Reads fail.
    ReadError,
    /// Writes fail.
    WriteError,
    /// Writes fail for want of space.
    Full,
    /// Requests are answered later by this much.
    #[serde(deserialize_with = "duration")]
    Latency(Duration),
    /// Requests are never answered.
    Hang,
    /// Writes are acknowledged and dropped.
    Lost,
    /// Only the first sectors of a write are written; all is acknowledged.
    Torn,
    /// Writes go this many sectors further.
    Misdirected(i64),
    /// This many bits are flipped in what is read or written.
    Corrupt(u32),
    /// Flushes are acknowledged and not done.
    IgnoredFlush,
    /// From then on every request fails.
    Gone,
    /// The power goes: what was not flushed may be there or not, sector by sector. Nothing is answered any more.
    PowerCut,
}

impl DiskAction {
    /// The requests it can strike.
    fn ops(&self) -> &'static [Op] {
        match self {
            Self::ReadError => &[Op::Read],
            Self::WriteError | Self::Full | Self::Lost | Self::Torn | Self::Misdirected(_) => {
                &[Op::Write]
            }
            Self::Corrupt(_) => &[Op::Read, Op::Write],
            Self::IgnoredFlush => &[Op::Flush],
            Self::Latency(_) | Self::Hang | Self::Gone | Self::PowerCut => {
                &[Op::Read, Op::Write, Op::Flush, Op::Discard]
            }
        }
    }

    fn problem(&self) -> Option<&'static str> {
        match self {
            Self::Misdirected(0) => Some("misdirected = 0 is where the write belongs"),
            Self::Corrupt(0) => Some("corrupt = 0 flips no bit"),
            _ => None,
        }
    }
}

/// What goes wrong with a network.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NetAction {
    /// Frames are lost.
    Loss,
    /// Frames arrive later.
    Delay {
        /// By at least this much.
        #[serde(deserialize_with = "duration")]
        by: Duration,
        /// And up to this much more.
        #[serde(default, deserialize_with = "duration")]
        jitter: Duration,
    },
    /// Frames arrive twice.
    Duplicate,
    /// Frames are overtaken by the next one.
    Reorder,
    /// This many bits of a frame are flipped, behind its Ethernet header.
    Corrupt(u32),
    /// No more than so many bits a second pass; what waits longer than a second is lost.
    Rate(u64),
}

impl NetAction {
    fn problem(&self) -> Option<&'static str> {
        match self {
            Self::Corrupt(0) => Some("corrupt = 0 flips no bit"),
            Self::Rate(0) => Some("rate = 0 lets nothing pass: write do = \"loss\""),
            _ => None,
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
    /// It begins this long after the device was started.
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

/// Faults of a machine's devices.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scenario {
    /// Where random choices begin.
    pub seed: u64,
    disks: Vec<(usize, Fault<DiskAction>)>,
    nets: Vec<(usize, Fault<NetAction>)>,
}

impl Scenario {
    /// Reads a scenario.
    ///
    /// # Errors
    /// The first thing that is wrong with it: see [`ScenarioError`].
    pub fn parse(text: &str) -> Result<Self, ScenarioError> {
        let file: File =
            toml::from_str(text).map_err(|error| ScenarioError::Syntax(error.to_string()))?;
        let mut scenario = Self { seed: file.seed, ..Self::default() };
        let mut names = BTreeSet::new();
        for (index, entry) in file.fault.into_iter().enumerate() {
            let name = entry.name.clone().unwrap_or_else(|| format!("fault {}", index + 1));
            let unique = names.insert(name.clone());
            let added = if unique { scenario.add(&name, entry) } else { Err(TWICE.to_owned()) };
            added.map_err(|problem| ScenarioError::Fault { name, problem })?;
        }
        Ok(scenario)
    }

    /// The devices that faults strike.
    pub fn targets(&self) -> BTreeSet<Target> {
        let disks = self.disks.iter().map(|(number, _)| Target::Disk(*number));
        disks.chain(self.nets.iter().map(|(number, _)| Target::Net(*number))).collect()
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
        match entry.on.parse()? {
            Target::Disk(number) => {
                let action: DiskAction = action(entry.action.clone())?;
                let (ops, problem) = (action.ops(), action.problem());
                self.disks.push((number, entry.fault(name, action, ops, problem)?));
            }
            Target::Net(number) => {
                if entry.sectors.is_some() {
                    return Err("a network has no sectors".to_owned());
                }
                let action: NetAction = action(entry.action.clone())?;
                let problem = action.problem();
                let ops = &[Op::Send, Op::Receive];
                self.nets.push((number, entry.fault(name, action, ops, problem)?));
            }
        }
        Ok(())
    }
}

const TWICE: &str = "another fault has the same name; give each its own";
const SECTOR: u64 = virtio::SECTOR;

fn of<A: Clone>(all: &[(usize, Fault<A>)], number: usize) -> Vec<Fault<A>> {
    let of_it = all.iter().filter(|(of, _)| *of == number);
    of_it.map(|(_, fault)| fault.clone()).collect()
}

fn action<A: de::DeserializeOwned>(value: toml::Value) -> Result<A, String> {
    value.try_into().map_err(|error: toml::de::Error| format!("do: {}", error.message()))
}

/// The file as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    seed: u64,
    #[serde(default)]
    fault: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: Option<String>,
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
}

impl Entry {
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
            _ if self.lasts == Some(Duration::ZERO) => Some("for = 0: it would never happen"),
            _ => None,
        };
        problem.map_or(Ok(()), |problem| Err(problem.to_owned()))
    }
}

fn these(possible: &[Op]) -> String {
    let names: Vec<_> = possible.iter().map(|op| format!("\"{op}\"")).collect();
    format!("write op = {}", names.join(" or "))
}

fn duration<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(from)?;
    humantime::parse_duration(&text)
        .map_err(|_| de::Error::custom(format!("`{text}` is not a time such as 50ms or 2s")))
}

fn some_duration<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
    duration(from).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: &str = r#"
        seed = 7
        [[fault]]
        name = "worn"
        on = "disk0"
        do = "read-error"
        sectors = [2048, 4096]
        times = 3
        [[fault]]
        on = "disk1"
        do = { latency = "50ms" }
        op = "flush"
        after = "5s"
        for = "10s"
        [[fault]]
        on = "net0"
        do = { delay = { by = "10ms", jitter = "5ms" } }
        probability = 0.1
        [[fault]]
        on = "disk0"
        do = "power-cut"
        request = 120
    "#;

    #[test]
    fn a_scenario_is_understood() {
        let scenario = Scenario::parse(ALL).expect("sound");
        assert_eq!(scenario.seed, 7);
        let targets: Vec<_> = scenario.targets().iter().map(Target::to_string).collect();
        assert_eq!(targets, ["disk0", "disk1", "net0"]);
        let [worn, cut] = scenario.of_disk(0).try_into().expect("two");
        assert_eq!(
            (worn.bytes, worn.times, &*worn.ops),
            (Some(1 << 20..2 << 20), 3, &[Op::Read][..])
        );
        assert_eq!((cut.request, cut.times, &*cut.name), (120, 1, "fault 4"));
        let slow = &scenario.of_disk(1)[0];
        assert_eq!(slow.action, DiskAction::Latency(Duration::from_millis(50)));
        assert_eq!((slow.after.as_secs(), slow.lasts), (5, Some(Duration::from_secs(10))));
        assert_eq!(scenario.of_net(0)[0].probability, 0.1);
        assert!(scenario.of_net(1).is_empty());
    }

    #[test]
    fn mistakes_are_named() {
        for (text, part) in [
            ("colour = 1", "colour"),
            ("[[fault]]\non = 'disk0'\ndo = 'explode'", "explode"),
            ("[[fault]]\non = 'disk0'\ndo = 'loss'", "loss"),
            ("[[fault]]\non = 'tape0'\ndo = 'hang'", "`tape0` is not a device"),
            ("[[fault]]\non = 'disk0'\ndo = 'hang'\nwhen = 1", "when"),
            ("[[fault]]\non = 'disk0'\ndo = 'lost'\nop = 'read'", "write op = \"write\""),
            ("[[fault]]\non = 'disk0'\ndo = 'lost'\nop = 'send'", "never meets it"),
            ("[[fault]]\non = 'disk0'\ndo = { latency = 'soon' }", "`soon` is not a time"),
            ("[[fault]]\non = 'disk0'\ndo = { corrupt = 0 }", "flips no bit"),
            ("[[fault]]\non = 'disk0'\ndo = 'lost'\nsectors = [9, 9]", "first < end"),
            ("[[fault]]\non = 'disk0'\ndo = 'lost'\nrequest = 0", "count from 1"),
            ("[[fault]]\non = 'disk0'\ndo = 'lost'\nprobability = 1.5", "at most 1"),
            ("[[fault]]\non = 'net0'\ndo = 'loss'\nsectors = [1, 2]", "no sectors"),
            (
                "[[fault]]\nname='a'\non='disk0'\ndo='hang'\n[[fault]]\nname='a'\non='disk0'\ndo='hang'",
                "same name",
            ),
        ] {
            let error = Scenario::parse(text).expect_err(text).to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
