//! What is done when a vCPU comes by a point: on the spot, if it is to stand there, or later, by the record of a tap.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, atomic::Ordering},
    time::Instant,
};

use contract::{Engine, Taps, Watcher};
use ram::Ram;
use ring3_trace::{
    Event, Stops,
    filter::{Fact, Filter},
};
use vmm::{ProbeHandler, Probes, Reached, Verdict};
use x86::{
    paging::Roots,
    reg::{RAX, RDI, RSI, RSP},
    tap::{self, Moment, Outcome},
};

use super::{
    calls::{self, Call, Reader},
    doings,
    facts::Facts,
    lock, numbers,
    outlet::{Batch, Item, TraceOutlet, when},
    pending::{Of, Pending},
    plan::{Point, TracePlan},
    programs::{Programs, programs},
    scene::{Scene, arguments, exception, moment, read_both, shown, status},
};
use crate::{
    linux::{LinuxKernel, Task},
    memory,
};

/// Room for a record that the monitor makes itself (bytes).
const MOST_OF_A_RECORD: usize = 256 << 10;
/// Calls that have begun and not ended, at the most: threads that ended in them leave theirs.
const MOST_PENDING: usize = 1 << 16;
/// Where `struct pt_regs` has the arguments of a system call.
pub const ARGUMENTS: [u64; 6] = [112, 104, 96, 56, 72, 64];
/// `linux_binprm` has the program's path there.
pub const FILENAME: (&str, &str) = ("linux_binprm", "filename");

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
    pub returns: Mutex<HashSet<u64>>,
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
    pub kernel: Arc<LinuxKernel>,
    pub ram: Ram,
    pub plan: TracePlan,
    pub wanted: Wanted,
    pub outlet: Arc<TraceOutlet>,
    pub began: Instant,
    pub shared: Arc<Shared>,
}

impl Tracer {
    /// Who comes by the points of a vCPU.
    pub fn at(self: Arc<Self>, vcpu: usize) -> Points {
        Points {
            tracer: self,
            vcpu,
            returns: HashSet::new(),
            events: Vec::new(),
            is_handler: false,
        }
    }

    /// Nobody stands: points are taps.
    pub fn taps(&self) -> bool {
        self.wanted.stops == Stops::Never
    }

    fn is_meant(&self, task: &Task) -> bool {
        let Wanted { pid, comm, .. } = &self.wanted;
        pid.is_none_or(|pid| pid == task.pid) && comm.as_ref().is_none_or(|comm| *comm == task.comm)
    }

    /// Nanoseconds since it began.
    pub fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

/// What is done at a vCPU's points.
pub struct Points {
    tracer: Arc<Tracer>,
    vcpu: usize,
    /// Those of [`Shared::returns`] that this vCPU has probes at.
    returns: HashSet<u64>,
    /// What has happened.
    events: Vec<Event>,
    /// These points are the vCPU's probe handler: the outlet counts them.
    is_handler: bool,
}

impl ProbeHandler for Points {
    fn reached(
        &mut self,
        engine: &mut dyn Engine,
        probes: &mut Probes,
        reached: Reached,
    ) -> Verdict {
        let tracer = Arc::clone(&self.tracer);
        let (moment, roots) = (moment(engine), Roots::from(engine.vcpu()));
        if let Reached::Watch { gva, len, write: _ } = reached {
            let event = self.watched(&moment, roots, gva, len);
            event.map(|event| tracer.outlet.send(Item::Event(event), || 1));
            return Verdict::Resume;
        }
        if tracer.taps() {
            self.record(&moment, roots, probes);
            return Verdict::Resume;
        }
        let read = |gva, bytes: &mut [u8]| memory::read(&tracer.ram, roots, gva, bytes);
        let scene = Scene { moment, ns: tracer.now(), read: &read, record: &[] };
        let stop = self.come_by(&scene);
        for event in self.events.drain(..) {
            tracer.outlet.send(Item::Event(event), || 1);
        }
        let returns = lock(&tracer.shared.returns);
        if returns.len() != self.returns.len() {
            probes.breakpoints.extend(&*returns);
            self.returns.clone_from(&returns);
        }
        drop(returns);
        match stop {
            Some(event) => self.stand(engine, event),
            None => Verdict::Resume,
        }
    }
}

impl Drop for Points {
    fn drop(&mut self) {
        if self.is_handler {
            self.tracer.outlet.remove_handler();
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
    /// Makes these points the vCPU's probe handler.
    pub fn into_handler(mut self) -> Self {
        self.tracer.outlet.handlers.fetch_add(1, Ordering::SeqCst);
        self.is_handler = true;
        self
    }

    /// The probes at all points; taps, unless the vCPU may have to stand.
    pub fn probes(&self) -> Probes {
        let Tracer { plan, kernel, ram, wanted, outlet, .. } = &*self.tracer;
        let mut probes = plan.probes();
        probes.breakpoints.extend(&self.returns);
        probes.watchers.extend(self.watcher());
        if !self.tracer.taps() {
            return probes;
        }
        let Programs { points, steps } = programs((kernel, ram), plan, wanted, &self.returns);
        let (outlet, tracer, vcpu) = (Arc::clone(outlet), Arc::downgrade(&self.tracer), self.vcpu);
        let sink = Box::new(move |records, tsc| {
            if let Some(tracer) = tracer.upgrade() {
                outlet.send_records(Batch { vcpu, records, tsc, ns: tracer.now() });
            }
        });
        Probes { taps: Some(Arc::new(Taps { points, steps, sink })), ..probes }
    }

    /// Watched memory has been written: by whom, and what is there now.
    fn watched(&self, moment: &Moment, roots: Roots, gva: u64, len: u64) -> Option<Event> {
        let Tracer { kernel, ram, wanted, .. } = &*self.tracer;
        let read = |gva, bytes: &mut [u8]| memory::read(ram, roots, gva, bytes);
        let scene = Scene { moment: *moment, ns: self.tracer.now(), read: &read, record: &[] };
        // In the first instructions of the kernel there is none.
        let task = kernel.current_in(moment.gs_base, &read).unwrap_or_default();
        let place = |address| match kernel.symbols.before(address) {
            Some((symbol, 0)) => symbol.to_owned(),
            Some((symbol, offset)) => format!("{symbol}+{offset:#x}"),
            None => format!("{address:#x}"),
        };
        let mut now = [0; 8];
        let known = &mut now[..len.min(8) as usize];
        read(gva, known);
        let now = u64::from_le_bytes(now);
        let event = self.event(&scene, &task, "watch", &place(gva));
        let arguments = format!("{len} bytes, now {now:#x}, by {}", place(moment.rip));
        let values = [gva, now];
        let facts = self.facts(&event, &task, &values, None, &nothing);
        let filter = wanted.filter.as_ref();
        let matches = filter.is_none_or(|filter| filter.matches(&|name| facts.fact(name)));
        (matches && self.tracer.is_meant(&task)).then_some(Event { arguments, ..event })
    }

    /// Who is told what else the vCPU does, if that is wanted.
    fn watcher(&self) -> Option<Watcher> {
        let (outlet, tracer) = (Arc::clone(&self.tracer.outlet), Arc::downgrade(&self.tracer));
        let vcpu = self.vcpu;
        (!self.tracer.plan.doings().is_empty()).then_some(())?;
        Some(Arc::new(move |doing| {
            let event = tracer.upgrade().and_then(|tracer| doings::event(&tracer, vcpu, doing));
            event.map(|event| outlet.send(Item::Event(event), || 1));
        }))
    }

    /// Makes the record of a point that translated code has left to the monitor, or that an interpreter has come by. A function
    /// may return where none has returned so far.
    fn record(&mut self, moment: &Moment, roots: Roots, probes: &mut Probes) {
        let tracer = Arc::clone(&self.tracer);
        if let Some(back) = self.returns_to(moment, roots) {
            lock(&tracer.shared.returns).insert(back);
        }
        let returns = lock(&tracer.shared.returns).clone();
        if returns != self.returns {
            self.returns = returns;
            *probes = self.probes();
        }
        let Some(taps) = &probes.taps else { return };
        let Some(first) = taps.points.get(&moment.rip) else { return };
        let step = |n: u64| taps.steps.get(usize::try_from(n).ok()?).copied();
        let mut room = vec![0; MOST_OF_A_RECORD];
        let mut memory = memory::Tapped(&tracer.ram, roots);
        match tap::run(step, (*first).into(), moment, &mut memory, &mut room) {
            Outcome::Noted(len) => {
                room.truncate(len);
                (taps.sink)(room, moment.tsc);
            }
            Outcome::Dropped => {}
            Outcome::Full | Outcome::Odd => {
                tracer.outlet.lost.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Where the function that begins here returns to, if that has to be known.
    fn returns_to(&self, moment: &Moment, roots: Roots) -> Option<u64> {
        let Tracer { plan, ram, .. } = &*self.tracer;
        let ends = plan.at(moment.rip).iter().any(Point::ends);
        let back = memory::word(ram, roots, moment.gpr[RSP]);
        back.filter(|_| ends && !plan.has_exits_of(moment.rip))
    }

    /// The events of a batch of records, in the order of these.
    pub fn events_of(&mut self, batch: &Batch, began: u64) -> Vec<Event> {
        self.returns.clone_from(&lock(&self.tracer.shared.returns));
        let mut rest = &batch.records[..];
        for record in tap::records(&batch.records) {
            let len = record.len().min(rest.len());
            let (bytes, behind) = rest.split_at(len);
            rest = behind;
            let ns = when(batch, began, record.moment.tsc);
            let read = |gva, to: &mut [u8]| record.read(gva, to);
            let scene = Scene { moment: record.moment, ns, read: &read, record: bytes };
            self.come_by(&scene);
        }
        std::mem::take(&mut self.events)
    }

    /// The vCPU comes by a point: where it is to stand.
    fn come_by(&mut self, scene: &Scene<'_>) -> Option<Standing> {
        let tracer = Arc::clone(&self.tracer);
        let Moment { rip, gpr, .. } = scene.moment;
        let mut stop = None;
        if self.returns.contains(&rip) {
            stop = self.end(scene, gpr[RSP].wrapping_sub(8));
        }
        if tracer.plan.is_exit(rip) {
            stop = stop.or_else(|| self.end(scene, gpr[RSP]));
        }
        for point in tracer.plan.at(rip) {
            let begun = self.begin(scene, point);
            stop = stop.or(begun);
        }
        stop
    }

    /// Whoever waits for the event lets the vCPU go on; where nobody hears of it, it goes on by itself.
    fn stand(&self, engine: &dyn Engine, standing: Standing) -> Verdict {
        let Standing { event, entry, frame } = standing;
        let (rip, roots) = (engine.vcpu().rip, Roots::from(engine.vcpu()));
        let stops = &self.tracer.shared.stops;
        lock(stops).insert(self.vcpu, Stop { rip, roots, entry, frame });
        if self.tracer.outlet.send(Item::Event(Event { stands: true, ..event }), || 1) {
            return Verdict::Stop;
        }
        lock(stops).remove(&self.vcpu);
        Verdict::Resume
    }

    /// What happens at a point: where the vCPU is to stand.
    fn begin(&mut self, scene: &Scene<'_>, point: &Point) -> Option<Standing> {
        let task = self.tracer.kernel.current_in(scene.moment.gs_base, scene.read)?;
        if !self.tracer.is_meant(&task) {
            return None;
        }
        match point {
            Point::Call(call) => self.begin_call(scene, task, call),
            Point::Return(name) => self.begin_function(scene, task, ("return", name), Of::Function),
            Point::Signal => self.begin_function(scene, task, ("signal", "?"), Of::Signal),
            Point::Killed if scene.register(RDI) & 0x7f == 0 => None,
            _ => {
                let event = self.simple(scene, &task, point);
                let arguments = arguments(scene);
                let filter = self.tracer.wanted.filter.as_ref();
                let meant = filter.is_none_or(|filter| {
                    let mut facts = self.facts(&event, &task, &arguments, None, scene.read);
                    if let Point::Break(_, parameters) = point {
                        facts.parameters = parameters;
                    }
                    // It has no result, now or later.
                    filter.matches(&|name| facts.fact(name))
                });
                meant.then(|| self.tell(event, self.tracer.wanted.stops.at_entry(), None, None))?
            }
        }
    }

    /// Tells of an event, or has it told once the vCPU stands.
    fn tell(
        &mut self,
        event: Event,
        stands: bool,
        entry: Option<u64>,
        frame: Option<u64>,
    ) -> Option<Standing> {
        if stands {
            return Some(Standing { event, entry, frame });
        }
        self.events.push(event);
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
        Facts {
            kind,
            name,
            task,
            vcpu: self.vcpu,
            arguments,
            call,
            parameters: &[],
            read,
            end: None,
        }
    }

    /// An event that is complete at once.
    fn simple(&self, scene: &Scene<'_>, task: &Task, point: &Point) -> Event {
        let argument = |register: usize| scene.register(register);
        let other = |register| {
            let task = self.tracer.kernel.task_in(argument(register), scene.read);
            task.map_or_else(|| "?".to_owned(), |task| format!("{} {}", task.comm, task.tid))
        };
        let (kind, name, arguments) = match point {
            Point::Exec => ("exec", "exec", self.program(scene)),
            Point::Exit => ("exit", "exit", status(argument(RDI))),
            Point::Fork => ("fork", "fork", other(RDI)),
            Point::Switch => ("switch", "switch", format!("{} -> {}", other(RDI), other(RSI))),
            Point::Interrupt(name) => ("irq", name.as_str(), String::new()),
            Point::Exception(name) => ("exception", name.as_str(), exception(scene)),
            Point::Break(name, parameters) => ("break", name.as_str(), shown(scene, parameters)),
            Point::Return(name) => ("break", name.as_str(), shown(scene, &[])),
            Point::Killed => {
                let signal = numbers::signal(argument(RDI) & 0x7f);
                return Event {
                    arguments: "kills".to_owned(),
                    ..self.event(scene, task, "signal", &signal)
                };
            }
            Point::Call(_) | Point::Signal => ("", "", String::new()),
        };
        Event { arguments, ..self.event(scene, task, kind, name) }
    }

    /// The path of the program that `struct linux_binprm` stands for.
    fn program(&self, scene: &Scene<'_>) -> String {
        const MOST: usize = 256;
        let at = self.tracer.kernel.types.offset(FILENAME.0, FILENAME.1).ok();
        let path = at.and_then(|at| scene.word(scene.register(RDI).wrapping_add(at)));
        let mut bytes = [0; MOST];
        let count = path.map_or(0, |path| (scene.read)(path, &mut bytes));
        let text = bytes[..count].split(|byte| *byte == 0).next().unwrap_or_default();
        if text.is_empty() { "?".to_owned() } else { String::from_utf8_lossy(text).into_owned() }
    }

    fn begin_call(&mut self, scene: &Scene<'_>, task: Task, call: &Arc<Call>) -> Option<Standing> {
        let tracer = Arc::clone(&self.tracer);
        let wanted = &tracer.wanted;
        let frame = scene.register(RDI);
        let mut values = [0; 6];
        for (value, at) in values.iter_mut().zip(ARGUMENTS) {
            *value = scene.word(frame.wrapping_add(at))?;
        }
        let mut event = self.event(scene, &task, "syscall", &call.name);
        if let Some(filter) = &wanted.filter {
            let facts = self.facts(&event, &task, &values, Some(call), scene.read);
            // One that cannot be meant whatever it returns costs no second exit.
            let fact = |name: &str| facts.fact(name);
            // One that does not return has no result, now or later.
            let meant =
                if call.is_last() { filter.matches(&fact) } else { filter.may_match(&fact) };
            meant.then_some(())?;
        }
        let stands = wanted.stops.at_entry();
        if stands {
            event.values = values[..call.count()].to_vec();
        }
        // What is told only at its end is made then.
        if stands || call.is_last() || of_new_program(&call.name) {
            event.arguments = call.arguments(&values, None, scene.read);
        }
        if call.is_last() {
            event.result = Some("?".to_owned());
        } else if wanted.stops != Stops::Entry {
            let n = wanted.filter.as_ref().and_then(|_| call.parameter("path"));
            let path = n.and_then(|n| call.text(n, values[n], scene.read));
            let (event, of) = (event.clone(), Of::Call(Arc::clone(call)));
            let (arguments, entry) = (values.to_vec(), scene.record.to_vec());
            self.wait(scene, Pending { event, task, arguments, of, path, entry })?;
            if !stands {
                return None;
            }
        }
        self.tell(event, stands, Some(scene.register(RSP)), Some(frame))
    }

    fn begin_function(
        &mut self,
        scene: &Scene<'_>,
        task: Task,
        (kind, name): (&str, &str),
        of: Of,
    ) -> Option<Standing> {
        let event = self.event(scene, &task, kind, name);
        let arguments = arguments(scene).to_vec();
        let tracer = Arc::clone(&self.tracer);
        let Wanted { stops, filter, .. } = &tracer.wanted;
        let stands = stops.at_entry() && matches!(of, Of::Function);
        if let (Of::Function, Some(filter)) = (&of, filter) {
            let facts = self.facts(&event, &task, &arguments, None, &nothing);
            filter.may_match(&|name| facts.fact(name)).then_some(())?;
        }
        if *stops != Stops::Entry || !stands {
            let (event, arguments) = (event.clone(), arguments.clone());
            let entry = Vec::new();
            self.wait(scene, Pending { event, task, arguments, of, path: None, entry })?;
        }
        let event = Event { values: arguments, ..event };
        stands.then(|| self.tell(event, true, Some(scene.register(RSP)), None))?
    }

    /// A function has been entered, whose end is wanted.
    fn wait(&self, scene: &Scene<'_>, pending: Pending) -> Option<()> {
        let Tracer { plan, shared, .. } = &*self.tracer;
        let rsp = scene.register(RSP);
        if !plan.has_exits_of(scene.moment.rip) {
            let back = scene.word(rsp)?;
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
    fn end(&mut self, scene: &Scene<'_>, entry: u64) -> Option<Standing> {
        let tracer = Arc::clone(&self.tracer);
        let Tracer { shared, wanted, .. } = &*tracer;
        let pending = lock(&shared.pending).remove(&entry)?;
        let value = scene.register(RAX);
        let Pending { mut event, task, arguments, of, path, entry } = pending;
        event.took = Some(scene.ns.saturating_sub(event.ns));
        let before = tap::records(&entry).next();
        let read = |gva, bytes: &mut [u8]| read_both(scene, before.as_ref(), gva, bytes);
        let (mut result, mut call) = (value as i64, None);
        match &of {
            Of::Function => event.result = Some(format!("{value:#x}")),
            Of::Signal => {
                result = self.signal(scene, &mut event, *arguments.first()?)?;
            }
            Of::Call(of) => {
                let values = arguments.first_chunk()?;
                // Another program has other memory: what was there before is what counts.
                if !of_new_program(&of.name) {
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
    fn signal(&self, scene: &Scene<'_>, event: &mut Event, found: u64) -> Option<i64> {
        const CODE: u64 = 8;
        const SENDER: u64 = 16;
        (scene.register(RAX) & 0xff != 0).then_some(())?;
        let member = |name| self.tracer.kernel.types.offset("ksignal", name).ok();
        let word = |at: u64| scene.word(found.wrapping_add(at));
        let info = member("info")?;
        let (number, handler) = (word(member("sig")?)? & 0xff, word(member("ka")?)?);
        let (code, sender) = (word(info + CODE)? as i32, word(info + SENDER)? as u32);
        event.name = numbers::signal(number);
        let by = if code <= 0 { format!(", from {sender}") } else { String::new() };
        event.arguments = format!("handler {handler:#x}, code {code}{by}");
        event.took = None;
        Some(number as i64)
    }

    fn event(&self, scene: &Scene<'_>, task: &Task, kind: &str, name: &str) -> Event {
        let Task { pid, tid, comm, .. } = task.clone();
        let (kind, name) = (kind.to_owned(), name.to_owned());
        let (ns, vcpu) = (scene.ns, self.vcpu);
        Event { ns, vcpu, pid, tid, comm, kind, name, ..Event::default() }
    }
}

/// Behind it memory is another program's: what was there before is what counts.
fn of_new_program(call: &str) -> bool {
    matches!(call, "execve" | "execveat")
}

/// No memory: what has no text.
fn nothing(_: u64, _: &mut [u8]) -> usize {
    0
}
