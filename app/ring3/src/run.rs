//! `ring3 run`.

use std::{
    io::{self, Write},
    path::Path,
    sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use host_linux::LinuxClock;
use vmm::{Description, Ended, Machine, RunningMachine, Statistics, Whose};

use crate::{
    console::{End, RawTerminal, read_stdin, watch_signals},
    control::{self, Asked, ControlListener, Hand, Screen, Status},
    description::describe,
    disk,
    failure::Failure,
    gdb::{self, GdbListener},
    hvc::Keyboard,
    injection::{Act, ConductorParts, Injection},
    isolation,
    known_blocks::{KernelBlocks, StartedFor},
    machine, net,
    on_panic::{self, OnPanic},
    outcome::{Outcome, Summary},
    output,
    run_arguments::RunArguments,
    share, spawner,
    values::ConsoleChoice,
};

/// What ends a run, or happens in it.
#[derive(Debug)]
enum Event {
    /// The machine ended by itself.
    Ended(Ended),
    /// The user, or a signal, ends it.
    User(End),
    /// The control socket has an order.
    Control(Asked),
    /// The guest's kernel said that it crashed. The vCPU that said it stands until this is dropped.
    Panicked(on_panic::Stands),
    /// A fault of the machine itself.
    Fault(Act),
}

impl From<End> for Event {
    fn from(end: End) -> Self {
        Self::User(end)
    }
}

/// Runs a machine to its end; returns the exit code.
pub fn run(arguments: &RunArguments) -> Result<u8, Failure> {
    spawner::start()?;
    let clock = machine::start_clock()?;
    let description = describe(arguments)?;
    machine::check_limits(description.memory)?;
    let injection = Injection::new(&arguments.fault, &arguments.extent())?;
    let faults = injection.as_ref();
    let (sender, events) = channel();
    let core = arguments.panic.on_panic.core()?;
    let mut made = make(arguments, &description, clock, faults, &sender)?;
    let blocks = std::mem::take(&mut made.blocks);
    let told = isolation::line(&description.engine);
    drop(description);
    let (screen, inspector) = (made.screen.clone(), made.machine.inspector());
    let fronts = open_fronts(arguments, &made, &sender)?;
    let started = Instant::now();
    let running = start(arguments, made, faults, sender)?;
    isolation::tell(told, &running);
    let stands = arguments.panic.on_panic == OnPanic::Stop;
    let outcome = wait(&events, &running, status(arguments), (arguments.timeout, stands))?;
    if let (Outcome::Panicked, Some(core)) = (&outcome, core) {
        core.write(&inspector);
    }
    if matches!(outcome, Outcome::Machine(Ended::PowerOff)) {
        blocks.keep();
    }
    drop(fronts.sockets);
    let seconds = started.elapsed().as_secs_f64();
    let statistics = running.finish(machine::PATIENCE);
    machine::finish_telling(outcome.is_the_machines());
    fronts.debugger.into_iter().for_each(GdbListener::end);
    drop(fronts.terminal);
    faults.iter().for_each(|faults| faults.finish());
    let lost = screen.failure();
    lost.iter().for_each(|problem| output::complain(problem));
    tell(arguments, &outcome, seconds, statistics.as_ref());
    Ok(if lost.is_some() { outcome.code().max(1) } else { outcome.code() })
}

/// A machine that has not been started.
struct Unstarted {
    machine: Machine,
    blocks: KernelBlocks,
    /// What its console shows.
    screen: Screen,
    /// The input of its virtio console.
    keyboard: Option<Keyboard>,
    /// What faults are injected into.
    disturbed: Option<ConductorParts>,
}

fn make(
    arguments: &RunArguments,
    description: &Description,
    clock: JoinHandle<LinuxClock>,
    faults: Option<&Injection>,
    sender: &Sender<Event>,
) -> Result<Unstarted, Failure> {
    let devices = arguments.devices.beside(description.cpus);
    let mut attachments = disk::attach(&arguments.disk, devices, description.cpus, faults)?;
    attachments.extend(net::attach(&arguments.net, devices, description.cpus, faults)?);
    attachments.extend(share::attach(&arguments.share, devices, description.cpus)?);
    let own =
        arguments.is_interactive().then(|| Box::new(std::io::stdout()) as Box<dyn Write + Send>);
    let screen = Screen::new(match faults {
        Some(faults) => faults.overhears(own),
        None => own,
    });
    let keyboard = (arguments.console == ConsoleChoice::Virtio).then(Keyboard::default);
    attachments.extend(keyboard.as_ref().map(|keyboard| keyboard.console(screen.clone())));
    let (kernel, cpus) = (&description.kernel, description.cpus);
    let blocks = arguments.engine.known_blocks.of(kernel, StartedFor::Run, cpus);
    let console = Box::new(screen.clone());
    let (known, turns) =
        (blocks.blocks(), machine::turns(arguments.engine.crowded, description.cpus));
    let mut host = machine::host(machine::ready(clock), console, attachments, known, turns);
    if arguments.panic.on_panic != OnPanic::Ignore {
        host.on_panic = Some(Box::new(on_panic::teller(sender.clone(), Event::Panicked)));
    }
    let disturbed = faults.map(|faults| faults.disturb(&mut host));
    let machine = Machine::build(description, host);
    let machine = machine.map_err(|error| failure_of(&arguments.kernel, error))?;
    Ok(Unstarted { machine, blocks, screen, keyboard, disturbed })
}

/// Where users meet the machine: their terminal, the sockets of `ring3 console` and `ring3 stats`, a debugger's.
struct Fronts {
    terminal: Option<RawTerminal>,
    sockets: [Option<ControlListener>; 2],
    debugger: Option<GdbListener>,
}

fn open_fronts(
    arguments: &RunArguments,
    made: &Unstarted,
    sender: &Sender<Event>,
) -> Result<Fronts, Failure> {
    watch_signals(sender.clone())?;
    let terminal = arguments.is_interactive().then(RawTerminal::enter).transpose()?;
    let input = input(made.keyboard.clone(), &made.machine);
    let viewers = controllable(control::serve_console(made.screen.clone(), input.clone()));
    if let Some(terminal) = &terminal {
        read_stdin(terminal, move |bytes| input(bytes), sender.clone())?;
    }
    let asked = sender.clone();
    let asked = move |order| asked.send(Event::Control(order)).is_ok();
    let orders = controllable(control::listen(
        asked,
        Hand::new(made.machine.inspector(), arguments.watched),
    ));
    let debugger = gdb::listen(arguments.gdb.as_ref(), arguments.paused, made.machine.inspector())?;
    Ok(Fronts { terminal, sockets: [orders, viewers], debugger })
}

/// Starts the machine in its box, and the faults with it.
fn start(
    arguments: &RunArguments,
    made: Unstarted,
    faults: Option<&Injection>,
    sender: Sender<Event>,
) -> Result<RunningMachine, Failure> {
    let machine = made.machine;
    let sandbox = arguments.sandbox.with(arguments.devices);
    sandbox.permits(&arguments.engine)?;
    sandbox.prepare(&machine)?;
    if let (Some(faults), Some(parts)) = (faults, made.disturbed) {
        let events = sender.clone();
        // The receiver is gone only if the run has ended otherwise.
        let act = move |act| drop(events.send(Event::Fault(act)));
        faults.conduct(parts, &machine.inspector(), act)?;
    }
    // The receiver is gone only if the run has ended otherwise.
    let on_end = move |ended| drop(sender.send(Event::Ended(ended)));
    sandbox.start(machine, on_end)
}

/// Why there is no machine. A complaint about the kernel names its file.
fn failure_of(kernel: &Path, error: vmm::Error) -> Failure {
    match error {
        vmm::Error::Boot(error) if error.is_of_kernel() => {
            Failure::usage(format!("--kernel {}: {error}", kernel.display()))
        }
        error => error.into(),
    }
}

/// Waits for the end, doing meanwhile what the control socket asks for. A machine that crashes `stands` from then on, or ends.
fn wait(
    events: &Receiver<Event>,
    running: &RunningMachine,
    mut status: Status,
    (timeout, stands): (Option<Duration>, bool),
) -> Result<Outcome, Failure> {
    // Without a timeout, far enough ahead to never come, yet a time the clock can express.
    const NEVER: Duration = Duration::from_secs(1 << 32);
    let started = Instant::now();
    let deadline = started + timeout.unwrap_or(NEVER);
    let mut crashed = false;
    loop {
        let event = events.recv_timeout(deadline.saturating_duration_since(Instant::now()));
        return match event {
            Ok(Event::Control(asked)) => {
                status.seconds = started.elapsed().as_secs_f64();
                match control::obey(asked, running, &mut status) {
                    true if crashed => Ok(Outcome::Panicked),
                    true => Ok(Outcome::Left),
                    false => continue,
                }
            }
            Ok(Event::Panicked(vcpu)) => {
                running.pause(true);
                drop(vcpu);
                if !stands {
                    return Ok(Outcome::Panicked);
                }
                crashed = true;
                "crashed".clone_into(&mut status.state);
                on_panic::tell(&status.name);
                continue;
            }
            Ok(Event::Fault(act)) => match act {
                Act::Pause(pause) => {
                    running.pause(pause || crashed);
                    continue;
                }
                Act::PowerCut => Ok(Outcome::PowerCut),
                Act::Reset => Ok(Outcome::Reset),
            },
            Ok(Event::Ended(ended)) => Ok(Outcome::Machine(ended)),
            Ok(Event::User(End::Left)) => Ok(Outcome::Left),
            Ok(Event::User(End::Signal(number))) => Ok(Outcome::Signal(number)),
            Err(RecvTimeoutError::Timeout) => Ok(Outcome::TimedOut),
            Err(RecvTimeoutError::Disconnected) => {
                Err(Failure::bug("the virtual CPU's thread failed"))
            }
        };
    }
}

fn status(arguments: &RunArguments) -> Status {
    let kernel = arguments.kernel.display().to_string();
    Status::new(arguments.name.clone(), arguments.memory.0, kernel)
}

/// A machine that cannot be controlled is still one that runs.
fn controllable(listener: io::Result<ControlListener>) -> Option<ControlListener> {
    listener.inspect_err(|error| output::complain(&format!("no control socket: {error}"))).ok()
}

/// What is typed goes to the virtio console if there is one, or to the serial port.
fn input(keyboard: Option<Keyboard>, machine: &Machine) -> impl Fn(&[u8]) + Clone + Send + use<> {
    let serial = machine.console_input();
    move |bytes| {
        keyboard.as_ref().map_or_else(|| serial.push(bytes), |keyboard| keyboard.push(bytes))
    }
}

fn tell(
    arguments: &RunArguments,
    outcome: &Outcome,
    seconds: f64,
    statistics: Option<&Statistics>,
) {
    if let Some(message) = outcome.message() {
        output::complain(&message);
    }
    if arguments.json {
        let statistics = statistics.filter(|_| arguments.stats);
        let whose = outcome.whose().map(Whose::name);
        let (outcome, exit_code) = (outcome.name(), outcome.code());
        let summary = Summary { outcome, exit_code, whose, seconds, statistics };
        output::say(&(serde_json::to_string(&summary).unwrap_or_default() + "\n"));
    } else if let Some(statistics) = statistics.filter(|_| arguments.stats) {
        output::say(&format!("{statistics}\n"));
    }
}
