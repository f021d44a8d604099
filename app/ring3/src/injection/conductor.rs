//! Faults that strike at a time, and cues: a thread of the monitor hears what the guest prints and which faults have struck.

use std::{
    collections::BTreeSet,
    io::{self, Write},
    sync::{
        Arc, OnceLock,
        mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender},
    },
    thread,
    time::{Duration, Instant},
};

use fastrand::Rng;
use faults::{
    Bit, Cue, Effect, FaultyClock, FaultyInterrupts, Flip, MachineAction, MachineError,
    MemoryError, Place, REGISTERS, Record, Recorder, Schedule, StuckBit, Target, Timed,
};
use inspect::{
    linux::LinuxKernel,
    strike::{self, Struck},
};
use ram::{HIGH_BASE, PAGE, Ram};
use vmm::{Host, Inspector};

use super::{FaultOrder, Injection, cues, host};
use crate::{failure::Failure, output};

/// How long disks may take to lose their power.
const LOSS: Duration = Duration::from_secs(1);
/// How often a stuck bit gets its value.
const STICKS: Duration = Duration::from_millis(1);
/// The rate of a clock that stands still, in millionths.
const STILL: i64 = -1_000_000;

/// What is heard of.
pub enum Message {
    /// A fault struck.
    Struck(Record),
    /// The guest printed this.
    Printed(Vec<u8>),
    /// A device has ended.
    Deaf(Target),
    /// A device has heard that the cue of this fault has come.
    Armed(String),
    /// A vCPU has come to what a fault waits for, and stands until this is dropped.
    Came {
        /// What was waited for.
        cue: Cue,
        /// Which vCPU.
        vcpu: usize,
        /// Dropped when the fault has struck.
        done: SyncSender<()>,
    },
}

/// What the monitor is asked to do to its machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// The power is gone.
    PowerCut,
    /// Reset.
    Reset,
    /// The vCPU stands still, or goes on.
    Pause(bool),
}

/// Parts of the machine that faults disturb.
#[derive(Default)]
pub struct ConductorParts {
    clock: Option<Arc<FaultyClock>>,
    interrupts: Arc<OnceLock<Arc<FaultyInterrupts>>>,
}

impl Injection {
    /// Puts what disturbs the machine's parts before them, where the scenario has faults of these.
    pub fn disturb(&self, host: &mut Host) -> ConductorParts {
        let (targets, mut parts) = (self.scenario().targets(), ConductorParts::default());
        if targets.contains(&Target::Clock) {
            let clock = Arc::new(FaultyClock::new(Arc::clone(&host.clock)));
            host.clock = clock.clone();
            parts.clock = Some(clock);
        }
        if targets.contains(&Target::Interrupts) {
            let (faults, seed) = (self.scenario().of_interrupts(), self.scenario().seed);
            let schedule = Schedule::new(Target::Interrupts, faults, seed, self.recorder());
            let slot = Arc::clone(&parts.interrupts);
            host.messages = Some(Box::new(move |below| {
                slot.get_or_init(|| Arc::new(FaultyInterrupts::new(below, schedule))).clone()
            }));
        }
        parts
    }

    /// `own` and, if a fault waits for words on the console, this.
    pub fn overhears(&self, own: Option<Box<dyn Write + Send>>) -> Option<Box<dyn Write + Send>> {
        let listens = |(_, _, cue): &(String, Target, Cue)| matches!(cue, Cue::Console(_));
        if !self.scenario().cues().iter().any(listens) {
            return own;
        }
        let own = own.unwrap_or_else(|| Box::new(io::sink()));
        Some(Box::new(Overheard { own, news: self.reporter() }))
    }

    /// Starts the thread, with the machine's.
    pub fn conduct(
        &self,
        parts: ConductorParts,
        inspector: &Inspector,
        act: impl Fn(Act) + Send + 'static,
    ) -> Result<(), Failure> {
        let Some(news) = self.news() else { return Ok(()) };
        let cues = self.scenario().cues().into_iter().map(|(.., cue)| cue);
        cues::watch(inspector, cues, self.reporter()).map_err(host)?;
        let conductor = Conductor::new(self.clone(), parts, inspector.clone(), Box::new(act));
        let run = move || conductor.run(&news);
        thread::Builder::new().name("conductor".into()).spawn(run).map(drop).map_err(host)
    }
}

/// A console that is listened to.
struct Overheard {
    own: Box<dyn Write + Send>,
    news: Sender<Message>,
}

impl Write for Overheard {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.own.write(bytes)?;
        // Nobody hears it when the machine has ended.
        let _ = self.news.send(Message::Printed(bytes[..written].to_vec()));
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.own.flush()
    }
}

struct Conductor {
    injection: Injection,
    parts: ConductorParts,
    inspector: Inspector,
    /// The guest's kernel, once somebody has asked for it.
    kernel: Option<LinuxKernel>,
    /// The vCPU that a fault of registers strikes: the one that came to what it waited for.
    vcpu: usize,
    act: Box<dyn Fn(Act) + Send>,
    record: Recorder,
    random: Rng,
    started: Instant,
    cues: Vec<(String, Target, Cue)>,
    due: Vec<(Instant, Due)>,
    /// The end of what the guest has printed, as far as a cue may have begun there.
    printed: Vec<u8>,
    /// The clock's rate beside what is asked for while it stands still.
    drift: i64,
    /// Disks that have yet to lose their power.
    losing: Option<BTreeSet<Target>>,
    /// vCPUs that stand, and the faults that devices have yet to arm before they go on.
    standing: Vec<(BTreeSet<String>, SyncSender<()>)>,
}

/// What is to be done at a time.
#[derive(Clone)]
enum Due {
    /// A fault strikes, and so many times more.
    Strike(Timed, u64),
    /// The vCPU goes on.
    GoOn,
    /// The clock goes on.
    ClockGoesOn,
    /// A network's link is up again.
    LinkUp(Target),
    /// A bit gets its value again.
    Stick(u64, StuckBit),
    /// The power is gone, whatever disks say.
    Dark,
    /// The machine starts over. Only once that has been recorded: it may end ring3.
    Restart,
}

impl Conductor {
    fn new(
        injection: Injection,
        parts: ConductorParts,
        inspector: Inspector,
        act: Box<dyn Fn(Act) + Send>,
    ) -> Self {
        let scenario = injection.scenario();
        let started = Instant::now();
        let first = scenario.timed().iter().filter(|fault| fault.cue.is_none());
        let due = first.map(|fault| (started + fault.after, Due::strike(fault))).collect();
        let (cues, random) = (scenario.cues(), Rng::with_seed(scenario.seed));
        let (record, printed) = (injection.recorder(), Vec::new());
        let (drift, losing, vcpu, standing) = (0, None, 0, Vec::new());
        Self {
            injection,
            parts,
            inspector,
            kernel: None,
            vcpu,
            act,
            record,
            random,
            started,
            cues,
            due,
            printed,
            drift,
            losing,
            standing,
        }
    }

    fn run(mut self, news: &Receiver<Message>) {
        loop {
            let next = self.due.iter().map(|(at, _)| *at).min();
            let wait = next.map_or(Duration::from_secs(3600), |at| {
                at.saturating_duration_since(Instant::now())
            });
            match news.recv_timeout(wait) {
                Ok(message) => self.hear(message),
                Err(RecvTimeoutError::Timeout) => self.advance(Instant::now()),
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn advance(&mut self, now: Instant) {
        let due: Vec<_> = self.due.extract_if(.., |(at, _)| *at <= now).collect();
        due.into_iter().for_each(|(at, due)| self.carry_out(at, due));
    }

    fn hear(&mut self, message: Message) {
        match message {
            Message::Struck(record) => {
                self.cue(|cue| *cue == Cue::Follows(record.fault.clone()));
                if matches!(record.effect, Effect::PowerCut { .. }) {
                    self.lose_power(&record);
                }
            }
            Message::Printed(bytes) => self.overhear(&bytes),
            Message::Deaf(target) => {
                // What it has not armed it never will.
                self.standing.clear();
                self.lost(target);
            }
            Message::Armed(fault) => self.armed(&fault),
            Message::Came { cue, vcpu, done } => {
                self.vcpu = vcpu;
                let asked = self.cue(|own| *own == cue);
                self.advance(Instant::now());
                if !asked.is_empty() {
                    self.standing.push((asked, done));
                }
            }
        }
    }

    /// A vCPU goes on when all is armed that it waits for.
    fn armed(&mut self, fault: &str) {
        self.standing.retain_mut(|(asked, _)| {
            asked.remove(fault);
            !asked.is_empty()
        });
    }

    fn overhear(&mut self, bytes: &[u8]) {
        self.printed.extend(bytes);
        let printed = std::mem::take(&mut self.printed);
        let heard = |words: &str| printed.windows(words.len()).any(|seen| seen == words.as_bytes());
        self.cue(|cue| matches!(cue, Cue::Console(words) if heard(words)));
        let longest = self.cues.iter().map(|(.., cue)| match cue {
            Cue::Console(words) => words.len() - 1,
            Cue::Follows(_) | Cue::Reached(_) | Cue::Calls(_) => 0,
        });
        let keep = longest.max().unwrap_or(0);
        self.printed = printed[printed.len().saturating_sub(keep)..].to_vec();
    }

    /// Begins the faults whose cue this is; each has one. Returns those that devices will say they have armed.
    fn cue(&mut self, is_it: impl Fn(&Cue) -> bool) -> BTreeSet<String> {
        let begun: Vec<_> = self.cues.extract_if(.., |(.., cue)| is_it(cue)).collect();
        let mut asked = BTreeSet::new();
        for (fault, target, _) in begun {
            let is_timed = self.injection.scenario().timed().iter().any(|it| it.name == fault);
            match target {
                Target::Disk(_) | Target::Net(_) if !is_timed => {
                    if self.injection.tell(target, FaultOrder::Arm(fault.clone())) {
                        asked.insert(fault);
                    }
                }
                _ => self.begin(&fault),
            }
        }
        asked
    }

    /// Begins a fault of the machine: at a time, or of requests for interrupts.
    fn begin(&mut self, fault: &str) {
        self.parts.interrupts.get().into_iter().for_each(|interrupts| interrupts.arm(fault));
        let timed = self.injection.scenario().timed().iter().find(|timed| timed.name == fault);
        let now = Instant::now();
        self.due.extend(timed.map(|timed| (now + timed.after, Due::strike(timed))));
    }

    fn carry_out(&mut self, at: Instant, due: Due) {
        match due {
            Due::Strike(fault, left) => {
                let effects = self.strike(&fault, at);
                effects.into_iter().for_each(|effect| self.report(&fault, effect));
                if left > 0 {
                    self.due.push((at + fault.every, Due::Strike(fault, left - 1)));
                }
            }
            Due::GoOn => (self.act)(Act::Pause(false)),
            Due::ClockGoesOn => self.parts.drift(self.drift),
            Due::LinkUp(network) => self.injection.set_link(network, true),
            Due::Dark => (self.act)(Act::PowerCut),
            Due::Restart => (self.act)(Act::Reset),
            Due::Stick(address, bit) => drop(self.stick(address, bit)),
        }
    }

    fn report(&mut self, fault: &Timed, effect: Effect) {
        let (name, on) = (fault.name.clone(), fault.on.to_string());
        let seconds = self.started.elapsed().as_secs_f64();
        let contents = Vec::new();
        (self.record)(&Record { fault: name, on, seconds, struck: None, effect, contents });
    }

    /// Carries a fault out; returns what is to be recorded of it.
    fn strike(&mut self, fault: &Timed, at: Instant) -> Option<Effect> {
        Some(match fault.action.clone() {
            MachineAction::PowerCut => Effect::PowerCut { unflushed: 0, reverted: 0 },
            MachineAction::Reset => {
                self.due.push((at, Due::Restart));
                Effect::Reset
            }
            MachineAction::Stuck => {
                (self.act)(Act::Pause(true));
                Effect::Paused(None)
            }
            MachineAction::Pause(time) => {
                (self.act)(Act::Pause(true));
                self.due.push((at + time, Due::GoOn));
                Effect::Paused(Some(time.as_millis() as u64))
            }
            MachineAction::Unplugged => {
                self.injection.set_link(fault.on, false);
                Effect::LinkDown(None)
            }
            MachineAction::LinkDown(time) => {
                self.injection.set_link(fault.on, false);
                self.due.push((at + time, Due::LinkUp(fault.on)));
                Effect::LinkDown(Some(time.as_millis() as u64))
            }
            MachineAction::ConfigChange => {
                self.injection.announce(fault.on);
                Effect::ConfigChange
            }
            MachineAction::Flip(flip) => Effect::Corrupted(self.flip(flip)),
            MachineAction::StuckBit(bit) => {
                let address = self.address_of(&bit.place())?;
                Effect::Corrupted(self.stick(address, bit).into_iter().collect())
            }
            MachineAction::Register(bit) => self.strike_register(&bit)?,
            MachineAction::MachineCheck(check) => self.machine_check(check.error())?,
            MachineAction::MemoryError(error) => {
                let address = self.place_of(&error)?;
                self.machine_check(error.error(address))?
            }
            MachineAction::WrongResult(name) => self.strike_result(fault, &name)?,
            MachineAction::Step(time) => {
                let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
                self.parts.clock.iter().for_each(|clock| clock.step(ns));
                Effect::Stepped(time.as_millis() as u64)
            }
            MachineAction::Drift(millionths) => {
                self.drift = millionths;
                self.parts.drift(millionths);
                Effect::Drifting(millionths)
            }
            MachineAction::Stop(time) => {
                self.parts.drift(STILL);
                self.due.push((at + time, Due::ClockGoesOn));
                Effect::Stopped(time.as_millis() as u64)
            }
            MachineAction::Spurious(vector) => {
                self.parts.interrupts.get()?.send_spurious(vector);
                Effect::Spurious(vector)
            }
        })
    }

    /// Flips bits; returns address, byte before and byte after of each.
    fn flip(&mut self, flip: Flip) -> Vec<(u64, u8, u8)> {
        let bits: Vec<_> = match flip {
            Flip::At(place) => {
                self.address_of(&place).into_iter().map(|address| (address, place.bit)).collect()
            }
            Flip::Random(count) => (0..count).map(|_| self.any_bit()).collect(),
            Flip::Of { process, bits } => {
                let ram = self.inspector.ram().clone();
                let pages = self.kernel().map(|kernel| strike::pages_of(kernel, &ram, &process));
                let pages = pages.unwrap_or_default();
                (0..bits).filter_map(|_| self.bit_in(&pages)).collect()
            }
        };
        let ram = self.inspector.ram();
        bits.into_iter().filter_map(|(address, bit)| flip_bit(ram, address, bit)).collect()
    }

    /// Where a bit of memory is (GPA). A symbol is looked for when the fault strikes: before, there is no kernel.
    fn address_of(&mut self, place: &Place) -> Option<u64> {
        let Some(name) = &place.symbol else { return place.address };
        let ram = self.inspector.ram().clone();
        let found = strike::symbol(self.kernel()?, &ram, name);
        if found.is_none() {
            output::complain(&format!("--fault: the guest has no symbol `{name}`"));
        }
        found
    }

    /// The guest's kernel. Reading all that it says of itself takes a while, so this is done once.
    fn kernel(&mut self) -> Option<&LinuxKernel> {
        if self.kernel.is_none() {
            let found = LinuxKernel::find(self.inspector.ram());
            let found =
                found.inspect_err(|unknown| output::complain(&format!("--fault: {unknown}")));
            self.kernel = found.ok();
        }
        self.kernel.as_ref()
    }

    fn bit_in(&mut self, pages: &[u64]) -> Option<(u64, u8)> {
        let page = pages.get(self.random.usize(..pages.len().max(1)))?;
        Some((page + self.random.u64(..PAGE), self.random.u8(..8)))
    }

    /// Gives a bit its value, now and again in a moment. Returns what it did, if anything.
    fn stick(&mut self, address: u64, bit: StuckBit) -> Option<(u64, u8, u8)> {
        let ram = self.inspector.ram();
        let mut byte = [0];
        ram.read_gpa(address, &mut byte).ok()?;
        let differs = byte[0] >> bit.bit & 1 != bit.value;
        let done = if differs { flip_bit(ram, address, bit.bit) } else { None };
        self.due.push((Instant::now() + STICKS, Due::Stick(address, bit)));
        done
    }

    /// Where a memory error is (GPA).
    fn place_of(&mut self, error: &MemoryError) -> Option<u64> {
        let Some(process) = &error.process else {
            let place = Place { address: error.address, symbol: error.symbol.clone(), bit: 0 };
            return self.address_of(&place);
        };
        let ram = self.inspector.ram().clone();
        let pages = strike::pages_of(self.kernel()?, &ram, process);
        Some(self.bit_in(&pages)?.0)
    }

    fn machine_check(&mut self, error: MachineError) -> Option<Effect> {
        let logged = self.inspector.machine_check(self.vcpu, error)?;
        let (vcpu, bank, status) = (self.vcpu, logged.bank, logged.status);
        let (address, exception) = (error.address, logged.raises);
        Some(Effect::MachineCheck { vcpu, bank, status, address, exception })
    }

    fn strike_register(&mut self, bit: &Bit) -> Option<Effect> {
        let named = bit.name.as_ref().map(|name| REGISTERS.iter().position(|known| known == name));
        let register = named.unwrap_or_else(|| Some(self.random.usize(..REGISTERS.len())))?;
        let bit = bit.bit.unwrap_or_else(|| self.random.u8(..64));
        strike::register(&self.inspector, self.vcpu, register, bit).map(told)
    }

    fn strike_result(&mut self, fault: &Timed, name: &str) -> Option<Effect> {
        let struck = strike::wrong_result(&self.inspector, self.vcpu, name, self.random.u8(..64));
        if struck.is_none() {
            let fault = &fault.name;
            output::complain(&format!(
                "--fault: fault `{fault}`: no {name} came that it could strike"
            ));
        }
        struck.map(told)
    }

    fn any_bit(&mut self) -> (u64, u8) {
        let offset = self.random.u64(..self.inspector.ram().len());
        let low = self.inspector.ram().low_len();
        let address = if offset < low { offset } else { HIGH_BASE + (offset - low) };
        (address, self.random.u8(..8))
    }

    /// The power is gone when all disks have lost it.
    fn lose_power(&mut self, record: &Record) {
        let from: Option<Target> = record.on.parse().ok();
        if self.losing.is_none() {
            let disks = self.injection.listening().into_iter();
            let disks: BTreeSet<_> = disks.filter(|it| matches!(it, Target::Disk(_))).collect();
            for disk in disks.iter().filter(|disk| Some(**disk) != from) {
                self.injection.tell(*disk, FaultOrder::Cut(record.fault.clone()));
            }
            self.due.push((Instant::now() + LOSS, Due::Dark));
            self.losing = Some(disks);
        }
        self.lost(from.unwrap_or(Target::Machine));
    }

    fn lost(&mut self, disk: Target) {
        let Some(losing) = &mut self.losing else { return };
        losing.remove(&disk);
        if losing.is_empty() {
            (self.act)(Act::PowerCut);
        }
    }
}

impl ConductorParts {
    fn drift(&self, millionths: i64) {
        self.clock.iter().for_each(|clock| clock.drift(millionths));
    }
}

impl Due {
    fn strike(fault: &Timed) -> Self {
        Self::Strike(fault.clone(), fault.times - 1)
    }
}

/// What is recorded of a register.
fn told(struck: Struck) -> Effect {
    let Struck { register, rip, instruction, before, after } = struck;
    let register = REGISTERS[register].to_owned();
    Effect::Register { register, rip, instruction, before, after }
}

/// As a particle would: nobody wrote it, but whoever reads it next sees it.
fn flip_bit(ram: &Ram, address: u64, bit: u8) -> Option<(u64, u8, u8)> {
    let mut byte = [0];
    ram.read_gpa(address, &mut byte).ok()?;
    let before = byte[0];
    byte[0] ^= 1 << bit;
    ram.write_gpa(address, &byte).ok()?;
    Some((address, before, byte[0]))
}
