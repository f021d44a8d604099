//! What is done when a vCPU reaches a point.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
        mpsc::{SyncSender, TrySendError},
    },
    time::Instant,
};

use contract::Engine;
use ram::Ram;
use ring3_trace::{
    Event, Stops,
    filter::{Fact, Filter},
};
use vmm::{Attendant, Probes, Reached, Verdict};
use x86::{
    paging::Roots,
    reg::{RAX, RDI, RDX, RSI, RSP},
};

use super::{
    calls::{self, Call, Reader},
    facts::Facts,
    lock, numbers,
    plan::{Plan, Point},
};
use crate::{
    linux::{Kernel, Task},
    memory,
};

/// Calls that have begun and not ended, at the most: threads that ended in them leave theirs.
const MOST_PENDING: usize = 1 << 16;
/// Where `struct pt_regs` has the arguments of a system call.
pub const ARGUMENTS: [u64; 6] = [112, 104, 96, 56, 72, 64];
/// Where it has RIP.
const RIP: u64 = 128;
/// `linux_binprm` has the program's path there.
const FILENAME: (&str, &str) = ("linux_binprm", "filename");

/// Which events are meant.
pub struct Wanted {
    pub filter: Option<Filter>,
    pub comm: Option<String>,
    pub pid: Option<u32>,
    pub stops: Stops,
}

/// What vCPUs share, and what carries a service's orders out.
#[derive(Default)]
pub struct Shared {
    /// Functions under way, by RSP at their entry, which no two threads have in common.
    pub pending: Mutex<HashMap<u64, Pending>>,
    /// Places that functions return to whose ends are not known (GVA).
    returns: Mutex<HashSet<u64>>,
    /// vCPUs that stand.
    pub stops: Mutex<HashMap<usize, Stop>>,
}

/// Where a vCPU stands.
#[derive(Clone, Copy)]
pub struct Stop {
    pub rip: u64,
    pub roots: Roots,
    /// RSP, if it is a function's entry.
    pub entry: Option<u64>,
    /// The arguments of a system call, at its entry (`struct pt_regs`, GVA).
    pub frame: Option<u64>,
}

/// What is traced.
pub struct Tracer {
    pub kernel: Arc<Kernel>,
    pub ram: Ram,
    pub plan: Plan,
    pub wanted: Wanted,
    pub sink: SyncSender<Event>,
    pub lost: Arc<AtomicU64>,
    pub began: Instant,
    pub shared: Arc<Shared>,
}

impl Tracer {
    /// The attendant of a vCPU.
    pub fn at(self: Arc<Self>, vcpu: usize) -> Points {
        Points { tracer: self, vcpu, returns: HashSet::new() }
    }

    fn is_meant(&self, task: &Task) -> bool {
        let Wanted { pid, comm, .. } = &self.wanted;
        pid.is_none_or(|pid| pid == task.pid) && comm.as_ref().is_none_or(|comm| *comm == task.comm)
    }

    /// False if nobody will hear of it.
    fn send(&self, event: Event) -> bool {
        match self.sink.try_send(event) {
            Ok(()) => true,
            Err(TrySendError::Full(_)) => {
                self.lost.fetch_add(1, Ordering::Relaxed);
                false
            }
            Err(TrySendError::Disconnected(_)) => false,
        }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

/// A function that has been entered.
pub struct Pending {
    event: Event,
    task: Task,
    arguments: Vec<u64>,
    of: Of,
    /// Its file name, where it has one and a filter may ask for it at its end.
    path: Option<String>,
}

/// What has been entered.
enum Of {
    Call(Arc<Call>),
    Function,
    /// `get_signal`.
    Signal,
}

/// What is done at a vCPU's points.
pub struct Points {
    tracer: Arc<Tracer>,
    vcpu: usize,
    /// Those of [`Shared::returns`] that this vCPU has probes at.
    returns: HashSet<u64>,
}

impl Attendant for Points {
    fn reached(&mut self, engine: &mut dyn Engine, probes: &mut Probes, _: Reached) -> Verdict {
        let tracer = Arc::clone(&self.tracer);
        let (rip, rsp) = (engine.vcpu().rip, engine.vcpu().gpr[RSP]);
        let mut stop = None;
        if self.returns.contains(&rip) {
            stop = self.end(engine, rsp.wrapping_sub(8));
        }
        if tracer.plan.is_exit(rip) {
            stop = stop.or_else(|| self.end(engine, rsp));
        }
        for point in tracer.plan.at(rip) {
            let begun = self.begin(engine, point);
            stop = stop.or(begun);
        }
        let returns = lock(&tracer.shared.returns);
        if returns.len() != self.returns.len() {
            probes.breakpoints.extend(&*returns);
            self.returns.clone_from(&returns);
        }
        drop(returns);
        match stop {
            Some(event) => self.stand(engine, event),
            None => Verdict::GoOn,
        }
    }
}

/// An event at which the vCPU is to stand.
struct Standing {
    event: Event,
    entry: Option<u64>,
    frame: Option<u64>,
}

impl Points {
    /// Whoever waits for the event lets the vCPU go on; where nobody hears of it, it goes on by itself.
    fn stand(&self, engine: &dyn Engine, standing: Standing) -> Verdict {
        let Standing { event, entry, frame } = standing;
        let (rip, roots) = (engine.vcpu().rip, Roots::from(engine.vcpu()));
        let stops = &self.tracer.shared.stops;
        lock(stops).insert(self.vcpu, Stop { rip, roots, entry, frame });
        if self.tracer.send(Event { stands: true, ..event }) {
            return Verdict::Stand;
        }
        lock(stops).remove(&self.vcpu);
        Verdict::GoOn
    }

    /// What happens at a point: where the vCPU is to stand.
    fn begin(&mut self, engine: &dyn Engine, point: &Point) -> Option<Standing> {
        let Tracer { kernel, ram, .. } = &*self.tracer;
        let task = kernel.current(ram, engine)?;
        if !self.tracer.is_meant(&task) {
            return None;
        }
        match point {
            Point::Call(call) => self.begin_call(engine, task, call),
            Point::Return(name) => {
                self.begin_function(engine, task, ("return", name), Of::Function)
            }
            Point::Signal => self.begin_function(engine, task, ("signal", "?"), Of::Signal),
            Point::Killed if engine.vcpu().gpr[RDI] & 0x7f == 0 => None,
            _ => {
                let event = self.simple(engine, &task, point);
                let arguments = arguments(engine);
                let filter = self.tracer.wanted.filter.as_ref();
                let meant = filter.is_none_or(|filter| {
                    let facts = self.facts(&event, &task, &arguments, None, &nothing);
                    // It has no result, now or later.
                    filter.matches(&|name| facts.fact(name))
                });
                meant.then(|| self.tell(event, self.tracer.wanted.stops.at_entry(), None, None))?
            }
        }
    }

    /// Tells of an event, or has it told once the vCPU stands.
    fn tell(
        &self,
        event: Event,
        stands: bool,
        entry: Option<u64>,
        frame: Option<u64>,
    ) -> Option<Standing> {
        if stands {
            return Some(Standing { event, entry, frame });
        }
        self.tracer.send(event);
        None
    }

    fn facts<'a>(
        &self,
        event: &'a Event,
        task: &'a Task,
        arguments: &'a [u64],
        call: Option<&'a Call>,
        read: Reader<'a>,
    ) -> Facts<'a> {
        let Event { kind, name, .. } = event;
        Facts { kind, name, task, vcpu: self.vcpu, arguments, call, read, end: None }
    }

    /// An event that is complete at once.
    fn simple(&self, engine: &dyn Engine, task: &Task, point: &Point) -> Event {
        let Tracer { kernel, ram, .. } = &*self.tracer;
        let argument = |register: usize| engine.vcpu().gpr[register];
        let other = |register| {
            let task = kernel.task(ram, argument(register));
            task.map_or_else(|| "?".to_owned(), |task| format!("{} {}", task.comm, task.tid))
        };
        let (kind, name, arguments) = match point {
            Point::Exec => ("exec", "exec", self.program(argument(RDI))),
            Point::Exit => ("exit", "exit", status(argument(RDI))),
            Point::Fork => ("fork", "fork", other(RDI)),
            Point::Switch => ("switch", "switch", format!("{} -> {}", other(RDI), other(RSI))),
            Point::Interrupt(name) => ("irq", name.as_str(), String::new()),
            Point::Exception(name) => ("exception", name.as_str(), self.exception(engine)),
            Point::Break(name) | Point::Return(name) => {
                let registers =
                    [RDI, RSI, RDX].map(|register| format!("{:#x}", argument(register)));
                ("break", name.as_str(), registers.join(", "))
            }
            Point::Killed => {
                let signal = numbers::signal(argument(RDI) & 0x7f);
                return Event {
                    arguments: "kills".to_owned(),
                    ..self.event(task, "signal", &signal)
                };
            }
            Point::Call(_) | Point::Signal => ("", "", String::new()),
        };
        Event { arguments, ..self.event(task, kind, name) }
    }

    /// The path of the program that `struct linux_binprm` stands for.
    fn program(&self, binprm: u64) -> String {
        let Tracer { kernel, ram, .. } = &*self.tracer;
        let at = kernel.types.offset(FILENAME.0, FILENAME.1).ok();
        let path = at.and_then(|at| kernel.word(ram, binprm.wrapping_add(at)));
        path.and_then(|path| kernel.text(ram, path)).unwrap_or_else(|| "?".to_owned())
    }

    /// Where it happened, and its error code.
    fn exception(&self, engine: &dyn Engine) -> String {
        let Tracer { kernel, ram, .. } = &*self.tracer;
        let gpr = engine.vcpu().gpr;
        let rip = kernel.word(ram, gpr[RDI].wrapping_add(RIP)).unwrap_or_default();
        format!("rip {rip:#x}, cr2 {:#x}, code {:#x}", engine.vcpu().cr2, gpr[RSI] as u32)
    }

    fn begin_call(&self, engine: &dyn Engine, task: Task, call: &Arc<Call>) -> Option<Standing> {
        let Tracer { kernel, ram, wanted, .. } = &*self.tracer;
        let frame = engine.vcpu().gpr[RDI];
        let mut values = [0; 6];
        for (value, at) in values.iter_mut().zip(ARGUMENTS) {
            *value = kernel.word(ram, frame.wrapping_add(at))?;
        }
        let roots = Roots::from(engine.vcpu());
        let read = |gva, bytes: &mut [u8]| memory::read(ram, roots, gva, bytes);
        let mut event = self.event(&task, "syscall", &call.name);
        if let Some(filter) = &wanted.filter {
            let facts = self.facts(&event, &task, &values, Some(call), &read);
            // One that cannot be meant whatever it returns costs no second exit.
            let fact = |name: &str| facts.fact(name);
            // One that does not return has no result, now or later.
            let meant =
                if call.is_last() { filter.matches(&fact) } else { filter.may_match(&fact) };
            meant.then_some(())?;
        }
        event.arguments = call.arguments(&values, None, &read);
        let stands = wanted.stops.at_entry();
        if stands {
            event.values = values[..call.count()].to_vec();
        }
        if call.is_last() {
            event.result = Some("?".to_owned());
        } else if wanted.stops != Stops::Entry {
            let n = wanted.filter.as_ref().and_then(|_| call.parameter("path"));
            let path = n.and_then(|n| call.text(n, values[n], &read));
            let (event, of) = (event.clone(), Of::Call(Arc::clone(call)));
            self.wait(engine, Pending { event, task, arguments: values.to_vec(), of, path })?;
            if !stands {
                return None;
            }
        }
        self.tell(event, stands, Some(engine.vcpu().gpr[RSP]), Some(frame))
    }

    fn begin_function(
        &self,
        engine: &dyn Engine,
        task: Task,
        (kind, name): (&str, &str),
        of: Of,
    ) -> Option<Standing> {
        let (event, arguments) = (self.event(&task, kind, name), arguments(engine).to_vec());
        let Wanted { stops, filter, .. } = &self.tracer.wanted;
        let stands = stops.at_entry() && matches!(of, Of::Function);
        if let (Of::Function, Some(filter)) = (&of, filter) {
            let facts = self.facts(&event, &task, &arguments, None, &nothing);
            filter.may_match(&|name| facts.fact(name)).then_some(())?;
        }
        if *stops != Stops::Entry || !stands {
            let (event, arguments) = (event.clone(), arguments.clone());
            self.wait(engine, Pending { event, task, arguments, of, path: None })?;
        }
        let event = Event { values: arguments, ..event };
        stands.then(|| self.tell(event, true, Some(engine.vcpu().gpr[RSP]), None))?
    }

    /// A function has been entered, whose end is wanted.
    fn wait(&self, engine: &dyn Engine, pending: Pending) -> Option<()> {
        let Tracer { kernel, ram, plan, shared, .. } = &*self.tracer;
        let rsp = engine.vcpu().gpr[RSP];
        if !plan.has_exits_of(engine.vcpu().rip) {
            let back = kernel.word(ram, rsp)?;
            lock(&shared.returns).insert(back);
        }
        let mut all = lock(&shared.pending);
        if all.len() >= MOST_PENDING {
            all.clear();
        }
        all.insert(rsp, pending);
        Some(())
    }

    /// A function returns whose entry may have been at this RSP: where the vCPU is to stand.
    fn end(&self, engine: &dyn Engine, entry: u64) -> Option<Standing> {
        let Tracer { ram, shared, wanted, .. } = &*self.tracer;
        let pending = lock(&shared.pending).remove(&entry)?;
        let value = engine.vcpu().gpr[RAX];
        let Pending { mut event, task, arguments, of, path } = pending;
        event.took = Some(self.tracer.now().saturating_sub(event.ns));
        let roots = Roots::from(engine.vcpu());
        let read = |gva, bytes: &mut [u8]| memory::read(ram, roots, gva, bytes);
        let (mut result, mut call) = (value as i64, None);
        match &of {
            Of::Function => event.result = Some(format!("{value:#x}")),
            Of::Signal => {
                result = self.signal(&mut event, value, *arguments.first()?)?;
            }
            Of::Call(of) => {
                let values = arguments.first_chunk()?;
                // Another program has other memory: what was there before is what counts.
                if of.name != "execve" && of.name != "execveat" {
                    event.arguments = of.arguments(values, Some(result), &read);
                }
                event.result = Some(calls::result(&of.name, result));
                call = Some(&**of);
            }
        }
        if let Some(filter) = &wanted.filter {
            let mut facts = self.facts(&event, &task, &arguments, call, &read);
            facts.end = Some((result, event.took.unwrap_or_default()));
            let is_path = |name: &str| {
                call.is_some_and(|call| call.parameter(name) == call.parameter("path"))
            };
            let fact = |name: &str| match &path {
                Some(path) if is_path(name) => Fact::Text(path.clone()),
                _ => facts.fact(name),
            };
            filter.matches(&fact).then_some(())?;
        }
        let stands = wanted.stops.at_end();
        if stands {
            event.values = arguments;
        }
        self.tell(event, stands, None, None)
    }

    /// What `get_signal` has found for this thread, if it has: `struct ksignal` is at `found`. Returns its number.
    fn signal(&self, event: &mut Event, is_there: u64, found: u64) -> Option<i64> {
        const CODE: u64 = 8;
        const SENDER: u64 = 16;
        let Tracer { kernel, ram, .. } = &*self.tracer;
        (is_there & 0xff != 0).then_some(())?;
        let member = |name| kernel.types.offset("ksignal", name).ok();
        let word = |at: u64| kernel.word(ram, found.wrapping_add(at));
        let info = member("info")?;
        let (number, handler) = (word(member("sig")?)? & 0xff, word(member("ka")?)?);
        let (code, sender) = (word(info + CODE)? as i32, word(info + SENDER)? as u32);
        event.name = numbers::signal(number);
        let by = if code <= 0 { format!(", from {sender}") } else { String::new() };
        event.arguments = format!("handler {handler:#x}, code {code}{by}");
        event.took = None;
        Some(number as i64)
    }

    fn event(&self, task: &Task, kind: &str, name: &str) -> Event {
        let Task { pid, tid, comm, .. } = task.clone();
        let (kind, name) = (kind.to_owned(), name.to_owned());
        let (ns, vcpu) = (self.tracer.now(), self.vcpu);
        Event { ns, vcpu, pid, tid, comm, kind, name, ..Event::default() }
    }
}

/// The first arguments of a function, at its entry.
fn arguments(engine: &dyn Engine) -> [u64; 3] {
    [RDI, RSI, RDX].map(|register| engine.vcpu().gpr[register])
}

/// No memory: what has no text.
fn nothing(_: u64, _: &mut [u8]) -> usize {
    0
}

/// A status as wait has it.
fn status(code: u64) -> String {
    match code & 0x7f {
        0 => format!("status {}", code >> 8 & 0xff),
        signal => format!("signal {signal}"),
    }
}
