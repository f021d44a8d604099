//! `ring3 run`.

use std::{
    io::{self, Write},
    path::Path,
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use host_linux::{LinuxClock, LinuxEntropy, cpu, limits};
use vmm::{Attachment, Ended, Host, Machine, Running, Statistics};

use crate::{
    console::{RawTerminal, read_stdin, watch_signals},
    control::{self, Asked, Hand, Listener, Order, Screen, Status},
    description::describe,
    disk,
    failure::Failure,
    fault::{Act, inject::Injection},
    gdb,
    hvc::Keyboard,
    isolation, net,
    on_panic::OnPanic,
    outcome::{Outcome, Summary},
    output,
    run_arguments::RunArguments,
    share, spawner,
    values::ConsoleChoice,
};

/// How long a stopped machine may take to come to rest before we leave anyway.
pub const PATIENCE: Duration = Duration::from_secs(2);
/// How long traces may take to tell the rest, once the machine has ended.
pub const TELLING: Duration = Duration::from_secs(20);

/// The state of a machine told to stop.
const STOPPING: &str = "stopping";

/// What ends a run, or happens in it.
#[derive(Debug)]
pub enum Event {
    /// The machine ended by itself.
    Ended(Ended),
    /// The user left.
    Leave,
    /// What is shown to the user cannot be.
    Mute(io::Error),
    /// A signal arrived.
    Signal(i32),
    /// The control socket has an order.
    Control(Asked),
    /// The guest's kernel said that it crashed.
    Panicked,
    /// A fault of the machine itself.
    Fault(Act),
}

/// Runs a machine to its end; returns the exit code.
pub fn run(arguments: &RunArguments) -> Result<u8, Failure> {
    spawner::start()?;
    let clock = start_clock()?;
    let description = describe(arguments)?;
    check_limits(description.memory)?;
    let interactive = arguments.console != ConsoleChoice::None;
    let injection = Injection::of_machine(arguments)?;
    let faults = injection.as_ref();
    let devices = arguments.devices.beside(description.cpus);
    let mut attachments = disk::attach(&arguments.disk, devices, description.cpus, faults)?;
    attachments.extend(net::attach(&arguments.net, devices, description.cpus, faults)?);
    attachments.extend(share::attach(&arguments.share, devices)?);
    let own = interactive.then(|| Box::new(std::io::stdout()) as Box<dyn Write + Send>);
    let screen = Screen::new(match faults {
        Some(faults) => faults.overhears(own),
        None => own,
    });
    let keyboard = (arguments.console == ConsoleChoice::Virtio).then(Keyboard::default);
    attachments.extend(keyboard.as_ref().map(|keyboard| keyboard.console(screen.clone())));
    let shown = screen.clone();
    let mut host = host(ready(clock), Box::new(screen.clone()), attachments);
    let (sender, events) = channel();
    let core = arguments.panic.on_panic.core()?;
    if arguments.panic.on_panic != OnPanic::Ignore {
        let sender = sender.clone();
        // The receiver is gone only if the run has ended otherwise.
        host.on_panic = Some(Box::new(move || drop(sender.send(Event::Panicked))));
    }
    let parts = faults.map(|faults| faults.disturb(&mut host));
    let machine = Machine::build(&description, host);
    let machine = machine.map_err(|error| failure_of(&arguments.kernel, error))?;
    let told = isolation::line(&description.engine);
    drop(description);

    watch_signals(sender.clone())?;
    let terminal = if interactive { Some(RawTerminal::enter()?) } else { None };
    let input = input(keyboard, &machine);
    let viewers = control::serve_console(screen, input.clone());
    let viewers = controllable(viewers);
    if let Some(terminal) = &terminal {
        read_stdin(terminal, move |bytes| input(bytes), sender.clone())?;
    }
    let hand = Hand::new(machine.inspector(), arguments.watched);
    let listener = controllable(listen(sender.clone(), Event::Control, hand));
    let debugger = gdb::listen(arguments.gdb.as_ref(), arguments.paused, machine.inspector())?;
    let inspector = machine.inspector();
    let sandbox = arguments.sandbox.with(arguments.devices);
    sandbox.prepare(&machine)?;
    let started = Instant::now();
    if let (Some(faults), Some(parts)) = (faults, parts) {
        let events = sender.clone();
        // The receiver is gone only if the run has ended otherwise.
        let act = move |act| drop(events.send(Event::Fault(act)));
        faults.conduct(parts, &inspector, act)?;
    }
    let running = machine
        .start(move |ended| {
            // The receiver is gone only if the run has ended otherwise.
            let _ = sender.send(Event::Ended(ended));
        })
        .map_err(failure)?;
    sandbox.enter(&running)?;
    tell_engine(&running);
    isolation::tell(told, &running);
    let stands = arguments.panic.on_panic == OnPanic::Stop;
    let outcome = wait(&events, &running, status(arguments), (arguments.timeout, stands))?;
    if let (Outcome::Panicked, Some(core)) = (&outcome, core) {
        core.write(&inspector);
    }
    drop((listener, viewers));
    let seconds = started.elapsed().as_secs_f64();
    let statistics = running.finish(PATIENCE);
    control::finish_telling(TELLING);
    debugger.into_iter().for_each(gdb::Listener::end);
    drop(terminal);
    faults.iter().for_each(|faults| faults.finish());
    let lost = shown.failure();
    lost.iter().for_each(|problem| output::complain(problem));
    tell(arguments, &outcome, seconds, statistics.as_ref());
    Ok(if lost.is_some() { outcome.code().max(1) } else { outcome.code() })
}

/// Refuses a machine that the limits of this process leave no room for, and warns of those that it may meet later.
pub fn check_limits(memory: u64) -> Result<(), Failure> {
    if let Some(problem) = limits::refusal(memory) {
        return Err(Failure::host(problem));
    }
    if let Some(warning) = limits::warning(memory) {
        output::complain(&warning);
    }
    Ok(())
}

/// Warns the user if guest code is interpreted although no option asks for that.
pub fn tell_engine(running: &Running) {
    if let Some(reason) = running.fallback() {
        let cost = "guest code is interpreted, which is tens of times slower (`ring3 doctor`)";
        output::complain(&format!("{cost}: {reason}"));
    }
}

/// Begins to read the host's clock, which takes a while where its frequency must be measured.
///
/// # Errors
/// The host gives no thread.
pub fn start_clock() -> Result<JoinHandle<LinuxClock>, Failure> {
    let started = thread::Builder::new().name("clock".into()).spawn(LinuxClock::new);
    started.map_err(|error| failure(vmm::Error::Thread(error)))
}

/// The clock, once it can be read. Measuring cannot fail; if the thread could, this one measures.
pub fn ready(clock: JoinHandle<LinuxClock>) -> LinuxClock {
    clock.join().unwrap_or_default()
}

/// This host, with the first serial port's output going to `console`.
pub fn host(
    clock: LinuxClock,
    console: Box<dyn Write + Send>,
    attachments: Vec<Attachment>,
) -> Host {
    let (clock, entropy) = (Arc::new(clock), Arc::new(LinuxEntropy));
    Host { clock, entropy, cpuid, console, attachments, messages: None, on_panic: None }
}

/// The host's CPUID in the model's terms.
fn cpuid(leaf: u32, subleaf: u32) -> vmm::CpuidResult {
    let host = cpu::cpuid(leaf, subleaf);
    vmm::CpuidResult { eax: host.eax, ebx: host.ebx, ecx: host.ecx, edx: host.edx }
}

/// Why there is no machine, as an exit code and a line.
pub fn failure(error: vmm::Error) -> Failure {
    if error.is_users() {
        Failure::usage(error.to_string())
    } else {
        Failure::host(error.to_string())
    }
}

/// The same; a complaint about the kernel names its file.
fn failure_of(kernel: &Path, error: vmm::Error) -> Failure {
    match error {
        vmm::Error::Boot(error) if error.is_of_kernel() => {
            Failure::usage(format!("--kernel {}: {error}", kernel.display()))
        }
        error => failure(error),
    }
}

/// Waits for the end, doing meanwhile what the control socket asks for. A machine that crashes `stands` from then on, or ends.
fn wait(
    events: &Receiver<Event>,
    running: &Running,
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
                match obey(asked, running, &mut status) {
                    true if crashed => Ok(Outcome::Panicked),
                    true => Ok(Outcome::Left),
                    false => continue,
                }
            }
            Ok(Event::Panicked) if stands => {
                crashed = true;
                stand(running, &mut status);
                continue;
            }
            Ok(Event::Panicked) => Ok(Outcome::Panicked),
            Ok(Event::Fault(act)) => match act {
                Act::Pause(pause) => {
                    running.pause(pause);
                    continue;
                }
                Act::PowerCut => Ok(Outcome::PowerCut),
                Act::Reset => Ok(Outcome::Reset),
            },
            Ok(Event::Ended(ended)) => Ok(Outcome::Machine(ended)),
            Ok(Event::Leave | Event::Mute(_)) => Ok(Outcome::Left),
            Ok(Event::Signal(number)) => Ok(Outcome::Signal(number)),
            Err(RecvTimeoutError::Timeout) => Ok(Outcome::TimedOut),
            Err(RecvTimeoutError::Disconnected) => {
                Err(Failure::host("the virtual CPU's thread failed; this is a bug in ring3"))
            }
        };
    }
}

/// A machine that has crashed stands, and its user learns how to look at it.
fn stand(running: &Running, status: &mut Status) {
    running.pause(true);
    "crashed".clone_into(&mut status.state);
    let name = &status.name;
    output::complain(&format!(
        "the guest's kernel crashed, and the machine stands: `ring3 gdb {name}`, `ring3 dump {name} FILE`, `ring3 stop {name}`"
    ));
}

/// Does what the control socket asks for; true if that is to end the machine.
pub fn obey(asked: Asked, running: &Running, status: &mut Status) -> bool {
    match asked.order {
        Order::Status | Order::Stats | Order::Dump | Order::Gdb => {}
        Order::Trace | Order::Profile | Order::Top => {}
        Order::Pause => {
            running.pause(true);
            "paused".clone_into(&mut status.state);
        }
        Order::Resume => {
            running.pause(false);
            "running".clone_into(&mut status.state);
        }
        Order::Stop => STOPPING.clone_into(&mut status.state),
    }
    asked.answer(status.clone());
    let ends = asked.order == Order::Stop;
    if ends {
        asked.wait(); // this process ends now, and with it the thread that answers
    }
    ends
}

fn status(arguments: &RunArguments) -> Status {
    let kernel = arguments.kernel.display().to_string();
    Status::new(arguments.name.clone(), arguments.memory.0, kernel)
}

/// Listens for orders, each of which becomes an event.
pub fn listen<E: Send + 'static>(
    sender: Sender<E>,
    event: fn(Asked) -> E,
    hand: Hand,
) -> io::Result<Listener> {
    control::listen(move |asked| sender.send(event(asked)).is_ok(), hand)
}

/// A machine that cannot be controlled is still one that runs.
fn controllable(listener: io::Result<Listener>) -> Option<Listener> {
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
        let (outcome, exit_code) = (outcome.name(), outcome.code());
        let summary = Summary { outcome, exit_code, seconds, statistics };
        output::say(&(serde_json::to_string(&summary).unwrap_or_default() + "\n"));
    } else if let Some(statistics) = statistics.filter(|_| arguments.stats) {
        output::say(&format!("{statistics}\n"));
    }
}
