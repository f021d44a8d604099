//! A machine with its threads.

use std::{
    mem::ManuallyDrop,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        mpsc::{Receiver, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

use engine::{Control, Engine, Failure, HostTurn, Interpreter, RunCommand, Statistics, VcpuLoop};
use fast::{Fast, LockStep, Modes, Placement, User};
use ram::Ram;
use x86_interp::System;

use crate::{
    Ended, EngineKind, EngineOptions, Error, FastOptions, Machine,
    console::ConsoleOutlet,
    devices::Release,
    events::Events,
    machine::{MachineParts, VcpuParts},
    timer::{self, Alarm, Punctual},
};

/// After so many PAUSEs a vCPU that waits for another one lets others have its CPU: about 20 us.
const PAUSES: u64 = 600;
/// RAM of a machine that is only tried, in bytes.
const TRIAL_RAM: u64 = 1 << 20;

/// A machine that runs.
pub struct RunningMachine {
    control: Control,
    alarm: Arc<Alarm>,
    outlet: ConsoleOutlet,
    releases: Vec<Release>,
    /// The vCPU threads' last words.
    statistics: Receiver<Statistics>,
    vcpus: usize,
    fallback: Option<String>,
}

/// Starts the timer and vCPU threads.
pub(crate) fn start(
    machine: Machine,
    on_end: impl FnOnce(Ended) + Send + 'static,
) -> Result<RunningMachine, Error> {
    let Machine { vcpus, engine, mut parts, timers, alarm, events, control, .. } = machine;
    let Machine { outlet, releases, known_blocks, flush_counts, is_last, .. } = machine;
    timer::start(timers.clone(), Arc::clone(&alarm), Arc::clone(&parts.clock))?;
    parts.clock = Arc::new(Punctual::new(timers, Arc::clone(&alarm), parts.clock));
    let (sender, statistics) = channel();
    let count = vcpus.len();
    if let Some(most) = engine.fast.most_mappings {
        fast::wedges::limit_mappings(most as usize);
    }
    let shared = Arc::new(Vm {
        parts,
        options: engine,
        choice: OnceLock::new(),
        placement: Placement::default(),
        guest: fast::Machine::with(count, known_blocks, flush_counts, &engine.fast),
        vcpus: count,
        is_last,
        control: control.clone(),
        events,
        on_end: Mutex::new(Some(Box::new(on_end))),
        statistics: Mutex::new(sender),
    });
    let fallback = start_vcpus(vcpus, &shared).inspect_err(|_| shared.give_up())?;
    Ok(RunningMachine { control, alarm, outlet, releases, statistics, vcpus: count, fallback })
}

/// A vCPU's thread that makes its engine, and then waits.
struct StartingVcpu {
    /// Receives one message, when the thread has made its engine or failed. The text says why the engine is the interpreter
    /// although nobody asked for the interpreter.
    made: Receiver<Result<Option<String>, Error>>,
    /// Lets the thread go on. Without it the thread ends.
    go: Sender<()>,
}

/// Starts the vCPUs' threads, which make their engines at the same time. None runs before all are made. Returns why guest code
/// is interpreted, if nobody asked for that.
fn start_vcpus(vcpus: Vec<VcpuParts>, vm: &Arc<Vm>) -> Result<Option<String>, Error> {
    let all = vcpus.into_iter().map(|vcpu| start_vcpu(vcpu, vm));
    let all = all.collect::<Result<Vec<_>, _>>()?;
    let failed = |_| Error::Assembly("a vCPU's thread did not start".to_owned());
    let made = |vcpu: &StartingVcpu| vcpu.made.recv().map_err(failed)?;
    let fallbacks = all.iter().map(made).collect::<Result<Vec<_>, _>>()?;
    // One that has ended meanwhile has said why.
    all.iter().for_each(|vcpu| vcpu.go.send(()).unwrap_or_default());
    Ok(fallbacks.into_iter().flatten().next())
}

fn start_vcpu(vcpu: VcpuParts, vm: &Arc<Vm>) -> Result<StartingVcpu, Error> {
    let (sender, made) = channel();
    let (go, wait) = channel();
    let (name, vm) = (format!("vcpu{}", vcpu.number), Arc::clone(vm));
    let run = move || {
        let (engine, fallback) = match vm.engine_of(&vcpu) {
            Ok(made) => made,
            // Nobody listening means the machine was given up already.
            Err(error) => return drop(sender.send(Err(error))),
        };
        // As above.
        let _ = sender.send(Ok(fallback));
        if wait.recv().is_ok() {
            vm.run(vcpu, engine);
        }
    };
    thread::Builder::new().name(name).spawn(run).map_err(Error::Thread)?;
    Ok(StartingVcpu { made, go })
}

/// What is to be done when a machine has ended.
type OnEnd = Box<dyn FnOnce(Ended) + Send>;

/// What the threads of a machine's vCPUs share.
struct Vm {
    parts: MachineParts,
    options: EngineOptions,
    /// The engine, once the first thread has settled on one.
    choice: OnceLock<Result<EngineKind, String>>,
    placement: Placement,
    /// What the vCPUs of the fast engine share.
    guest: Arc<fast::Machine>,
    vcpus: usize,
    /// This process ends when the machine has ended.
    is_last: bool,
    control: Control,
    events: Arc<Events>,
    /// For the first vCPU that ends.
    on_end: Mutex<Option<OnEnd>>,
    statistics: Mutex<Sender<Statistics>>,
}

impl Vm {
    fn take_on_end(&self) -> Option<OnEnd> {
        self.on_end.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// The machine does not start: what has been started ends, and nobody is told.
    fn give_up(&self) {
        drop(self.take_on_end());
        self.control.order(RunCommand::Stop);
    }

    /// Drives a vCPU to its end, which is the machine's.
    fn run(&self, vcpu: VcpuParts, engine: Box<dyn Engine>) {
        let VcpuParts { apic, requests, permit, turns, .. } = vcpu;
        let turn = turns.map(|locks| HostTurn::new(locks, self.placement.cpus()));
        let (control, clock) = (self.control.clone(), Arc::clone(&self.parts.clock));
        let vcpu = VcpuLoop::new(engine, apic, requests, control, clock);
        let looks = self.vcpus > 1 && !self.options.sleep_at_once;
        let vcpu = vcpu.among(permit).taking_turns(turn).looking(looks);
        let mut vcpu = ManuallyDrop::new(vcpu);
        let ended = vcpu.run();
        // All vCPUs end when the guest asks for its end: the one that tells of it is the one that looks for what was asked.
        let tell = self.take_on_end().map(|on_end| (on_end, self.verdict(ended)));
        self.control.order(RunCommand::Stop);
        let statistics = self.statistics.lock().unwrap_or_else(PoisonError::into_inner).clone();
        // Whoever gave up waiting for statistics has none.
        let _ = statistics.send(vcpu.statistics());
        if let Some((on_end, ended)) = tell {
            on_end(ended);
        }
        // Wedges end with this process. The last of them has RAM freed, for which nobody waits.
        if !self.is_last {
            drop(ManuallyDrop::into_inner(vcpu));
        }
    }

    fn verdict(&self, ended: engine::Ended) -> Ended {
        match ended {
            engine::Ended::Stopped => self.events.take().unwrap_or(Ended::Stopped),
            engine::Ended::TripleFault(report) => Ended::TripleFault(report),
            engine::Ended::Failed(failure) => Ended::Failed(failure),
        }
    }
}

/// Whether [`EngineKind::Auto`] is the fast engine on this host, found out by trying.
///
/// # Errors
/// Says why it is the interpreter.
pub fn check_fast_engine() -> Result<(), String> {
    let ram = Ram::new(TRIAL_RAM).map_err(|error| error.to_string())?;
    fast::check_host(&ram)
}

/// The best engine this host can run, where none is asked for.
///
/// # Errors
/// Says why it is the interpreter.
fn settle(kind: EngineKind, strict: bool, ram: &Ram) -> Result<EngineKind, String> {
    if kind != EngineKind::Auto {
        return Ok(kind);
    }
    fast::check_host(ram)?;
    if !fast::kernel_is_closed() && !strict {
        tracing::info!(
            "no protection keys: programs in the guest can reach the guest kernel's memory, but for --guest-isolation strict"
        );
    }
    Ok(EngineKind::Fast)
}

/// An engine, and why it is the interpreter if nobody asked for that.
type Made = (Box<dyn Engine>, Option<String>);

impl Vm {
    fn engine_of(&self, vcpu: &VcpuParts) -> Result<Made, Error> {
        let (board, state) = (self.parts.clone().board(vcpu)?, vcpu.state.clone());
        let direct = if self.options.translate_user { User::Translated } else { User::Direct };
        let options = &self.options;
        let kind =
            self.choice.get_or_init(|| settle(options.kind, options.fast.strict, board.ram()));
        let (user, kernel_translated) = match kind {
            // Settled.
            Ok(EngineKind::Auto) => {
                return Err(Error::Assembly("no engine was chosen".to_owned()));
            }
            Err(reason) => {
                return Ok((Box::new(Interpreter::new(state, board)), Some(reason.clone())));
            }
            Ok(EngineKind::Interpreter) => {
                return Ok((Box::new(Interpreter::new(state, board)), None));
            }
            Ok(EngineKind::Fast) => (direct, true),
            Ok(EngineKind::Direct) => (direct, false),
            Ok(EngineKind::Jit) => (User::Interpreted, true),
        };
        let modes = Modes { user, kernel_translated, options: self.options_of(vcpu) };
        let shared = (&self.guest, &self.placement);
        let engine = Fast::new(state, board, &vcpu.requests, modes, shared);
        let mut engine = engine.map_err(|error| {
            Error::Engine(Failure { whose: error.whose(), what: error.to_string() })
        })?;
        // Where there is one vCPU, what it waits for comes by interrupts.
        if self.vcpus > 1 {
            engine.give_way_after(PAUSES);
        }
        Ok((Box::new(engine), None))
    }
}

impl Vm {
    /// The fast engine's options for a vCPU: one is compared, if any is.
    fn options_of(&self, vcpu: &VcpuParts) -> FastOptions {
        let compared = self.options.fast.lock_step.filter(|compared| compared.cpu == vcpu.number);
        let among_others = self.vcpus > 1;
        let lock_step = compared.map(|lock_step| LockStep { among_others, ..lock_step });
        FastOptions { lock_step, ..self.options.fast }
    }
}

fn until(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

/// Releases all devices at once: none has to wait for one that stands still. What is returned says so of each, and is disconnected after the last.
fn release(releases: Vec<Release>) -> Receiver<()> {
    let (sender, released) = channel();
    for release in releases {
        let sender = sender.clone();
        let release = move || {
            release();
            // Nobody listens after the time is over.
            let _ = sender.send(());
        };
        // On a host that gives no thread, the process's end is what ends its servers.
        let _ = thread::Builder::new().name("release".into()).spawn(release);
    }
    released
}

impl RunningMachine {
    /// Why guest code is interpreted, if it is without anybody having asked for that.
    pub fn fallback(&self) -> Option<&str> {
        self.fallback.as_deref()
    }

    /// Makes the vCPUs stand still, or go on.
    pub fn pause(&self, pause: bool) {
        self.control.order(if pause { RunCommand::Pause } else { RunCommand::Run });
    }

    /// Adds what further vCPUs say before the deadline.
    fn collect(&self, all: &mut Vec<Statistics>, deadline: Instant) {
        while all.len() < self.vcpus
            && let Ok(one) = self.statistics.recv_timeout(until(deadline))
        {
            all.push(one);
        }
    }

    /// Stops the machine if it has not ended, lets its output out, and returns what it did; `None`
    /// if it does not come to rest. Whatever stands still is left behind after `patience`.
    pub fn finish(mut self, patience: Duration) -> Option<Statistics> {
        let deadline = Instant::now() + patience;
        self.control.order(RunCommand::Stop);
        self.outlet.close();
        // It may wait for the answer of a server that stands still, and goes on when that is hung up on.
        let mut all = Vec::new();
        self.collect(&mut all, Instant::now() + patience / 4);
        let released = release(std::mem::take(&mut self.releases));
        self.collect(&mut all, Instant::now() + patience / 4);
        self.outlet.drain(until(deadline));
        self.alarm.end();
        // Each has released its device, or the time is over.
        while released.recv_timeout(until(deadline)).is_ok() {}
        let statistics = all.iter().skip(1).fold(all.first()?.clone(), Statistics::and);
        (all.len() == self.vcpus).then_some(statistics)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_stands_still_holds_up_no_other() {
        let (sender, seen) = channel();
        let stuck: Release = Box::new(|| thread::sleep(Duration::from_secs(3600)));
        let free: Release = Box::new(move || sender.send(()).expect("seen"));
        let released = release(vec![stuck, free]);
        seen.recv_timeout(Duration::from_secs(20)).expect("released");
        released.recv_timeout(Duration::from_secs(20)).expect("told of");
        let stuck = released.recv_timeout(Duration::from_millis(50));
        assert!(stuck.is_err());
    }
}
