//! Faults on their way into devices and the machine, and records on their way out: `--fault` of `ring3 run` and `ring3 serve`.
//!
//! - [`extent`]: whether the machine has what is to be struck.
//! - [`conductor`]: faults at a time, and what waits for something to happen.
//! - [`cues`]: what the guest's own code comes to.
//!
//! The process of a device is told its scenario by `--fault`. It writes each record as a line of JSON to its standard output, behind the
//! line in which it introduces itself, and is given orders by the same socket: `arm NAME` (the cue of a fault has come) and `cut NAME`
//! (the power goes). To `arm NAME` it answers `armed NAME`: a vCPU may stand until then.

mod conductor;
mod cues;
mod extent;

use std::{
    collections::BTreeMap,
    fs::{File, OpenOptions},
    io::{self, BufRead, BufReader, Write},
    os::{fd::AsFd, unix::net::UnixStream},
    path::{Path, PathBuf},
    process,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, Sender, channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use clap::Args;
use faults::{
    DiskAction, Effect, Fault, FaultyDisk, FaultyNet, Plug, Record, Recorder, Rogue, Scenario,
    Schedule, Target,
};
use virtio::{BlockBackend, Doorbell, NetBackend};
use vmm::Attachment;

use conductor::Message;
pub use conductor::{Act, ConductorParts};
pub use extent::{Extent, check};

use crate::{failure::Failure, outcome::Outcome, output};

/// Faults to inject, as options.
#[derive(Clone, Debug, Default, Args)]
pub struct FaultOptions {
    /// Faults, injected on purpose: docs/faults.md has the file's format
    #[arg(long, value_name = "FILE")]
    pub fault: Option<PathBuf>,
    /// Where each injected fault is recorded as a line of JSON; standard error if not given
    #[arg(long, value_name = "FILE", requires = "fault")]
    pub fault_log: Option<PathBuf>,
}

/// A scenario's text, and what it says.
pub fn read(file: &Path) -> Result<(String, Scenario), Failure> {
    let wrong = |problem: String| Failure::usage(format!("--fault {}: {problem}", file.display()));
    let text = std::fs::read_to_string(file).map_err(|error| wrong(error.to_string()))?;
    let scenario = Scenario::parse(&text).map_err(|error| wrong(error.to_string()))?;
    Ok((text, scenario))
}

/// What a device with faults is told while it runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FaultOrder {
    /// The cue of this fault has come.
    Arm(String),
    /// This fault cuts the power.
    Cut(String),
    /// A network's link is up, or down.
    Link(bool),
}

/// What a device answers an order to arm, before the fault's name.
const ARMED: &str = "armed ";

impl FaultOrder {
    fn line(&self) -> String {
        match self {
            Self::Arm(fault) => format!("arm {fault}\n"),
            Self::Cut(fault) => format!("cut {fault}\n"),
            Self::Link(up) => format!("link {}\n", if *up { "up" } else { "down" }),
        }
    }

    fn of_line(line: &str) -> Option<Self> {
        match line.split_once(' ')? {
            ("arm", fault) => Some(Self::Arm(fault.to_owned())),
            ("cut", fault) => Some(Self::Cut(fault.to_owned())),
            ("link", state) => Some(Self::Link(state == "up")),
            _ => None,
        }
    }
}

/// Carries orders out.
type Obedient = Box<dyn FnMut(FaultOrder) + Send>;
/// Takes what carries orders out.
type Command = Box<dyn FnOnce(Obedient) -> io::Result<()> + Send>;

/// Faults for a device that is served in this process.
pub struct Faults {
    scenario: Scenario,
    recorder: Recorder,
    command: Command,
}

impl Faults {
    /// Those that the process of a device was told of.
    pub fn of_process(text: Option<&str>) -> Result<Option<Self>, Failure> {
        let Some(text) = text else { return Ok(None) };
        let scenario = Scenario::parse(text).map_err(|error| Failure::usage(error.to_string()))?;
        let recorder: Recorder = Box::new(|record| {
            let mut output = io::stdout().lock();
            // Nobody listening is no reason to stop.
            let _ = writeln!(output, "{}", json(record)).and_then(|()| output.flush());
        });
        Ok(Some(Self { scenario, recorder, command: Box::new(listen) }))
    }

    /// Those of a device that another program's machine has. A power cut ends this process.
    pub fn of_server(options: &FaultOptions, own: Target) -> Result<Option<Self>, Failure> {
        let Some(file) = &options.fault else { return Ok(None) };
        let (_, scenario) = read(file)?;
        let wrong = |problem| Failure::usage(format!("--fault {}: {problem}", file.display()));
        if let Some(other) = scenario.targets().into_iter().find(|target| *target != own) {
            return Err(wrong(format!("{other}: `ring3 serve` has {own} only")));
        }
        if let Some((name, ..)) = scenario.cues().first() {
            return Err(wrong(format!(
                "fault `{name}`: `ring3 serve` hears no console and follows nothing"
            )));
        }
        if let Some(fault) = scenario.timed().first() {
            let name = &fault.name;
            return Err(wrong(format!(
                "fault `{name}`: `ring3 serve` strikes requests, not at times"
            )));
        }
        let log = Log::open(options.fault_log.as_deref())?;
        let recorder: Recorder = Box::new(move |record| {
            log.add(&json(record));
            if matches!(record.effect, Effect::PowerCut { .. }) {
                process::exit(Outcome::PowerCut.code().into());
            }
        });
        Ok(Some(Self { scenario, recorder, command: Box::new(|_| Ok(())) }))
    }

    /// Puts off what needs a thread. Returns what does it.
    pub fn postpone(&mut self) -> impl FnOnce() -> Result<(), Failure> + use<> {
        let (sender, kept) = channel();
        let later: Command = Box::new(move |obedient| {
            sender.send(obedient).map_err(|_| io::Error::other("the device is not wanted any more"))
        });
        let command = std::mem::replace(&mut self.command, later);
        move || {
            let obedient = kept.try_recv().map_err(|_| Failure::host("--fault: no device"))?;
            command(obedient).map_err(host)
        }
    }

    /// A disk with its faults.
    pub fn of_disk(
        self,
        backend: Box<dyn BlockBackend>,
        number: usize,
    ) -> Result<(Box<dyn BlockBackend>, Rogue), Failure> {
        let (on, faults) = (Target::Disk(number), self.scenario.of_disk(number));
        let end = backend.len();
        let begins = |fault: &Fault<DiskAction>| fault.bytes.as_ref().map(|bytes| bytes.start);
        if let Some(fault) = faults.iter().find(|fault| begins(fault) >= Some(end)) {
            let (name, end) = (&fault.name, end / virtio::SECTOR);
            let problem = format!("fault `{name}`: {on} has the sectors [0, {end}] only");
            return Err(Failure::usage(format!("--fault: {problem}")));
        }
        let [recorder, of_rogue] = for_two(self.recorder);
        let rogue = rogue(&self.scenario, on, of_rogue);
        let schedule = Schedule::new(on, faults, self.scenario.seed, recorder);
        let disk = FaultyDisk::new(backend, schedule, self.scenario.loses_power());
        let (control, spoiler) = (disk.control(), rogue.clone());
        let obedient = Box::new(move |order| match order {
            FaultOrder::Arm(fault) => {
                control.arm(&fault);
                spoiler.arm(&fault);
            }
            FaultOrder::Link(_) => {}
            FaultOrder::Cut(fault) => {
                if let Err(error) = control.cut(&fault) {
                    output::complain(&format!("--fault: {on}: the power cut: {error}"));
                }
            }
        });
        (self.command)(obedient).map_err(host)?;
        Ok((Box::new(disk), rogue))
    }

    /// A cable with its faults.
    pub fn of_net(
        self,
        cable: Box<dyn NetBackend>,
        number: usize,
    ) -> Result<(FaultyNet, Rogue), Failure> {
        let (on, faults) = (Target::Net(number), self.scenario.of_net(number));
        let [recorder, of_rogue] = for_two(self.recorder);
        let rogue = rogue(&self.scenario, on, of_rogue);
        let schedule = Schedule::new(on, faults, self.scenario.seed, recorder);
        let net = FaultyNet::new(cable, schedule).map_err(host)?;
        let (control, spoiler) = (net.control(), rogue.clone());
        let obedient = Box::new(move |order| match order {
            FaultOrder::Arm(fault) => {
                control.arm(&fault);
                spoiler.arm(&fault);
            }
            FaultOrder::Link(up) => control.set_link(up),
            // A network keeps nothing that it could lose.
            FaultOrder::Cut(_) => {}
        });
        (self.command)(obedient).map_err(host)?;
        Ok((net, rogue))
    }
}

/// What a device says to its driver against the rules.
fn rogue(scenario: &Scenario, on: Target, recorder: Recorder) -> Rogue {
    // Other choices than those of the device's other faults.
    let seed = scenario.seed.rotate_left(32);
    Rogue::new(Schedule::new(on, scenario.of_protocol(on), seed, recorder))
}

/// Two recorders that both hand records on to this one.
fn for_two(recorder: Recorder) -> [Recorder; 2] {
    let shared = Arc::new(Mutex::new(recorder));
    [(); 2].map(|()| {
        let shared = Arc::clone(&shared);
        Box::new(move |record: &Record| (lock(&shared))(record)) as Recorder
    })
}

/// Connects a plug to a device, so that the device's driver can be told of changes by it.
pub fn connect(attachment: Attachment, plug: Plug) -> Attachment {
    let Attachment { device, execution, connect, release } = attachment;
    let connect = Box::new(move |doorbell: Doorbell| {
        plug.connect(doorbell.clone());
        connect(doorbell);
    });
    Attachment { device, execution, connect, release }
}

fn host(error: io::Error) -> Failure {
    Failure::host(format!("--fault: {error}"))
}

/// Takes orders from where records go, and answers there.
fn listen(mut obedient: Obedient) -> io::Result<()> {
    let orders = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    let lines = BufReader::new(orders).lines();
    let hear = move || {
        for order in lines.map_while(Result::ok).filter_map(|line| FaultOrder::of_line(&line)) {
            obedient(order.clone());
            if let FaultOrder::Arm(fault) = order {
                let mut output = io::stdout().lock();
                // As with records.
                let _ = writeln!(output, "{ARMED}{fault}").and_then(|()| output.flush());
            }
        }
    };
    thread::Builder::new().name("orders".into()).spawn(hear).map(drop)
}

fn json(record: &Record) -> String {
    serde_json::to_string(record).unwrap_or_default()
}

/// Where records go.
#[derive(Clone)]
struct Log(Option<Arc<Mutex<File>>>);

impl Log {
    fn open(path: Option<&Path>) -> Result<Self, Failure> {
        let open = |path: &Path| {
            let opened = OpenOptions::new().create(true).append(true).open(path);
            opened
                .map_err(|error| Failure::usage(format!("--fault-log {}: {error}", path.display())))
        };
        let file = path.map(open).transpose()?;
        Ok(Self(file.map(|file| Arc::new(Mutex::new(file)))))
    }

    fn add(&self, line: &str) {
        let Some(file) = &self.0 else { return output::say(&format!("ring3: fault: {line}\n")) };
        if let Err(error) = writeln!(lock(file), "{line}") {
            output::complain(&format!("--fault-log: {error}; the record was {line}"));
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A scenario for a machine.
#[derive(Clone)]
pub struct Injection(Arc<Inner>);

struct Inner {
    text: String,
    scenario: Scenario,
    log: Log,
    news: Sender<Message>,
    heard: Mutex<Option<Receiver<Message>>>,
    devices: Mutex<BTreeMap<Target, Obedient>>,
    plugs: Mutex<BTreeMap<Target, Plug>>,
    listeners: Mutex<Vec<JoinHandle<()>>>,
}

impl Injection {
    /// What the options say, for a machine of this extent.
    pub fn new(options: &FaultOptions, extent: &Extent) -> Result<Option<Self>, Failure> {
        let Some(file) = &options.fault else { return Ok(None) };
        let (text, scenario) = read(file)?;
        let wrong = |problem| Failure::usage(format!("--fault {}: {problem}", file.display()));
        check(&scenario, extent).map_err(wrong)?;
        let log = Log::open(options.fault_log.as_deref())?;
        let (news, heard) = channel();
        let heard = Mutex::new(Some(heard));
        let (devices, plugs, listeners) = Default::default();
        let inner = Inner { text, scenario, log, news, heard, devices, plugs, listeners };
        Ok(Some(Self(Arc::new(inner))))
    }

    /// The scenario.
    pub fn scenario(&self) -> &Scenario {
        &self.0.scenario
    }

    /// What is heard of faults from now on; once.
    fn news(&self) -> Option<Receiver<Message>> {
        lock(&self.0.heard).take()
    }

    /// Takes news.
    fn reporter(&self) -> Sender<Message> {
        self.0.news.clone()
    }

    /// Takes a record, as whoever injects a fault in this process makes it.
    fn recorder(&self) -> Recorder {
        let (log, news) = (self.0.log.clone(), self.0.news.clone());
        Box::new(move |record| {
            log.add(&json(record));
            // Nobody hears it when the machine has ended.
            let _ = news.send(Message::Struck(record.clone()));
        })
    }

    fn concerns(&self, target: Target) -> bool {
        let loses_power = matches!(target, Target::Disk(_)) && self.0.scenario.loses_power();
        loses_power || self.0.scenario.targets().contains(&target)
    }

    /// The faults of a device that is served in this process.
    pub fn inline(&self, target: Target) -> Option<Faults> {
        let own = self.clone();
        let command: Command = Box::new(move |mut obedient| {
            let news = own.reporter();
            let obey = move |order: FaultOrder| {
                obedient(order.clone());
                if let FaultOrder::Arm(fault) = order {
                    // Nobody hears it when the machine has ended.
                    let _ = news.send(Message::Armed(fault));
                }
            };
            lock(&own.0.devices).insert(target, Box::new(obey));
            Ok(())
        });
        let (scenario, recorder) = (self.0.scenario.clone(), self.recorder());
        self.concerns(target).then_some(Faults { scenario, recorder, command })
    }

    /// The faults of a device that is served in a process of its own.
    pub fn elsewhere(&self, target: Target) -> Option<Elsewhere> {
        self.concerns(target).then(|| Elsewhere { target, injection: self.clone() })
    }

    /// Tells a device; whether there is one that listens.
    fn tell(&self, target: Target, order: FaultOrder) -> bool {
        let mut devices = lock(&self.0.devices);
        devices.get_mut(&target).map(|obedient| obedient(order)).is_some()
    }

    /// The plug of a device: by it a network's cable is pulled, and drivers are told of changes. `None` if no fault does that.
    pub fn plug(&self, target: Target) -> Option<Plug> {
        let pulls = self.0.scenario.timed().iter().any(|fault| fault.on == target);
        pulls.then(|| lock(&self.0.plugs).entry(target).or_default().clone())
    }

    /// A network's link is up from now on, or down.
    fn set_link(&self, target: Target, up: bool) {
        self.tell(target, FaultOrder::Link(up));
        lock(&self.0.plugs).get(&target).into_iter().for_each(|plug| plug.set_link(up));
    }

    /// Tells a device's driver that its configuration has changed, although it has not.
    fn announce(&self, target: Target) {
        lock(&self.0.plugs).get(&target).into_iter().for_each(Plug::announce);
    }

    /// Devices that listen.
    fn listening(&self) -> Vec<Target> {
        lock(&self.0.devices).keys().copied().collect()
    }

    /// Waits a moment for what devices that have ended said last.
    pub fn finish(&self) {
        let deadline = Instant::now() + Duration::from_millis(200);
        let listeners = std::mem::take(&mut *lock(&self.0.listeners));
        while Instant::now() < deadline && !listeners.iter().all(JoinHandle::is_finished) {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Faults of a device whose process the monitor starts.
pub struct Elsewhere {
    target: Target,
    injection: Injection,
}

impl Elsewhere {
    /// The words for that process.
    pub fn words(&self) -> [String; 2] {
        ["--fault".to_owned(), self.injection.0.text.clone()]
    }

    /// Listens to the process until it ends; sets `stands_still` if a fault has it answer nothing any more.
    pub fn attend(
        &self,
        records: impl BufRead + Send + 'static,
        mut orders: UnixStream,
        stands_still: Arc<AtomicBool>,
    ) -> io::Result<()> {
        let (target, inner) = (self.target, Arc::clone(&self.injection.0));
        let hear = move || {
            for line in records.lines().map_while(Result::ok) {
                inner.hear(&line, &stands_still);
            }
            // Nobody hears it when the machine has ended.
            let _ = inner.news.send(Message::Deaf(target));
        };
        let listener = thread::Builder::new().name("faults".into()).spawn(hear)?;
        let inner = &self.injection.0;
        lock(&inner.listeners).push(listener);
        let tell = move |order: FaultOrder| {
            // One that has ended is told nothing.
            let _ = orders.write_all(order.line().as_bytes());
        };
        lock(&inner.devices).insert(target, Box::new(tell));
        Ok(())
    }
}

impl Inner {
    fn hear(&self, line: &str, stands_still: &AtomicBool) {
        if let Some(fault) = line.strip_prefix(ARMED) {
            // As above.
            let _ = self.news.send(Message::Armed(fault.to_owned()));
            return;
        }
        self.log.add(line);
        let Ok(record) = serde_json::from_str::<Record>(line) else { return };
        if matches!(record.effect, Effect::PowerCut { .. } | Effect::Hung) {
            stands_still.store(true, Ordering::Release);
        }
        // As above.
        let _ = self.news.send(Message::Struck(record));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(text: &str, disks: &[bool], nets: &[bool]) -> String {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("faults.toml");
        std::fs::write(&file, text).expect("written");
        let options = FaultOptions { fault: Some(file), fault_log: None };
        let (disks, nets) = (disks.to_vec(), nets.to_vec());
        let extent = Extent { disks, nets, memory: 1 << 30, timeout: None };
        let injection = Injection::new(&options, &extent);
        injection.err().map_or_else(String::new, |failure| failure.to_string())
    }

    #[test]
    fn targets_must_be_there() {
        let text = "[[fault]]\non = 'disk1'\ndo = 'hang'";
        assert!(refusal(text, &[true], &[]).contains("disk1: the machine has 1 --disk"));
        assert!(refusal(text, &[true, false], &[]).contains("another program serves it"));
        assert_eq!(refusal(text, &[true, true], &[]), "");
        let far = "[[fault]]\non = 'ram'\ndo = { flip = { address = 0x40000000, bit = 0 } }";
        assert!(refusal(far, &[], &[]).contains("no memory at 0x40000000"));
        assert_eq!(refusal(&far.replace("0x4", "0x3"), &[], &[]), "");
        let wrong = |name: &str| format!("[[fault]]\non='machine'\ndo={{wrong-result='{name}'}}");
        assert!(refusal(&wrong("ad"), &[], &[]).contains("no instruction `ad`"));
        assert_eq!(refusal(&wrong("add"), &[], &[]), "");
        let missing = FaultOptions { fault: Some("/nowhere.toml".into()), fault_log: None };
        let extent = Extent { disks: Vec::new(), nets: Vec::new(), memory: 0, timeout: None };
        let failure = Injection::new(&missing, &extent).err().expect("refused");
        assert!(failure.to_string().starts_with("--fault /nowhere.toml: "), "{failure}");
    }

    #[test]
    fn a_server_has_its_own_device_only() {
        let folder = tempfile::tempdir().expect("a folder");
        let refusal = |text: &str| {
            let file = folder.path().join("faults.toml");
            std::fs::write(&file, text).expect("written");
            let options = FaultOptions { fault: Some(file), fault_log: None };
            Faults::of_server(&options, Target::Disk(0)).err().map(|failure| failure.to_string())
        };
        assert_eq!(refusal("[[fault]]\non = 'disk0'\ndo = 'hang'"), None);
        let other = refusal("[[fault]]\non = 'net0'\ndo = 'loss'").expect("refused");
        assert!(other.contains("has disk0 only"), "{other}");
        let link = refusal("[[fault]]\non = 'net0'\ndo = 'unplugged'").expect("refused");
        assert!(link.contains("has disk0 only"), "{link}");
        let cue = refusal("[[fault]]\non = 'disk0'\ndo = 'hang'\nconsole = 'x'").expect("refused");
        assert!(cue.contains("hears no console"), "{cue}");
    }

    #[test]
    fn orders_are_understood() {
        let named = [FaultOrder::Arm("worn sectors".to_owned()), FaultOrder::Cut("x".to_owned())];
        for order in named.into_iter().chain([true, false].map(FaultOrder::Link)) {
            assert_eq!(FaultOrder::of_line(order.line().trim_end()), Some(order));
        }
        assert_eq!([FaultOrder::of_line("obey"), FaultOrder::of_line("obey me")], [None, None]);
    }
}
