//! What is done when a vCPU reaches a point: at once, if the vCPU may have to stop there, or later, by the record of a tap.

use std::{
    collections::HashSet,
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use contract::{Engine, Taps, Watcher};
use ring3_trace::{Event, Stops, filter::FieldValue};
use vmm::{Inspector, ProbeHandler, Probes, Reached, Verdict};
use x86::{
    paging::Roots,
    reg::{RAX, RDI, RSI, RSP},
    tap::{self, Moment, Outcome},
};

use super::{
    calls::{self, Call, Reader},
    channel::{Batch, TraceChannel, TraceItem, time_of},
    fields::EventFields,
    linux_names, lock,
    pending::{Entered, PendingReturn},
    plan::{TracePlan, Tracepoint},
    probe_hit::{ProbeHit, arguments, exception, moment, read_both, shown, status},
    state::{EventSelection, Shared, StoppedVcpu},
    tap_programs::{TapPrograms, tap_programs},
    vcpu_events,
};
use crate::{
    linux::{LinuxKernel, Task},
    memory,
};

/// Room for a record that the monitor makes itself (bytes).
const MOST_OF_A_RECORD: usize = 256 << 10;
/// Calls that have begun and not ended, at the most: threads that ended in them leave theirs.
const MOST_PENDING: usize = 1 << 16;
/// `linux_binprm` has the program's path there.
pub const FILENAME: (&str, &str) = ("linux_binprm", "filename");

/// A running trace: the guest's kernel, the points at which vCPUs are traced, and the events that are reported.
pub struct Tracer {
    pub kernel: Arc<LinuxKernel>,
    pub inspector: Inspector,
    pub plan: TracePlan,
    pub selection: EventSelection,
    pub channel: Arc<TraceChannel>,
    pub began: Instant,
    pub shared: Arc<Shared>,
}

impl Tracer {
    /// The tracer of one vCPU.
    pub fn for_vcpu(self: Arc<Self>, vcpu: usize) -> VcpuTracer {
        VcpuTracer {
            tracer: self,
            vcpu,
            returns: HashSet::new(),
            events: Vec::new(),
            is_handler: false,
        }
    }

    /// No vCPU stops: points are taps.
    pub fn uses_taps(&self) -> bool {
        self.selection.stops == Stops::Never
    }

    fn selects(&self, task: &Task) -> bool {
        let EventSelection { pid, comm, .. } = &self.selection;
        pid.is_none_or(|pid| pid == task.pid) && comm.as_ref().is_none_or(|comm| *comm == task.comm)
    }

    /// Has every vCPU probe the place (GVA) to which a function on the vCPU of this number will return: the thread may move to
    /// another vCPU before it returns. The vCPU itself gets the probe when its handler is done.
    fn add_return(&self, back: u64, vcpu: usize) {
        if !lock(&self.shared.returns).insert(back) {
            return;
        }
        for other in (0..self.inspector.vcpus()).filter(|other| *other != vcpu) {
            self.inspector.queue_on_vcpu(other, |access| access.refresh_handlers());
        }
    }

    /// Nanoseconds since the trace began.
    pub fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

/// Traces one vCPU: makes events when the vCPU reaches points.
pub struct VcpuTracer {
    tracer: Arc<Tracer>,
    vcpu: usize,
    /// Those of [`Shared::returns`] that this vCPU has probes at.
    returns: HashSet<u64>,
    /// Events that are not sent yet.
    events: Vec<Event>,
    /// This tracer is the vCPU's probe handler: the channel counts it.
    is_handler: bool,
}

impl ProbeHandler for VcpuTracer {
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
            event.map(|event| tracer.channel.send(TraceItem::Event(event), || 1));
            return Verdict::Resume;
        }
        if tracer.uses_taps() {
            self.record(&moment, roots, probes);
            return Verdict::Resume;
        }
        let read = |gva, bytes: &mut [u8]| memory::read(tracer.inspector.ram(), roots, gva, bytes);
        let hit = ProbeHit { moment, ns: tracer.now(), read: &read, record: &[] };
        let stop = self.handle_hit(&hit);
        for event in self.events.drain(..) {
            tracer.channel.send(TraceItem::Event(event), || 1);
        }
        self.refresh(probes);
        match stop {
            Some(event) => self.stop(engine, event),
            None => Verdict::Resume,
        }
    }

    fn refresh(&mut self, probes: &mut Probes) {
        if self.learn_returns() {
            *probes = self.probes();
        }
    }
}

impl Drop for VcpuTracer {
    fn drop(&mut self) {
        if self.is_handler {
            self.tracer.channel.remove_handler();
        }
    }
}

/// An event at which the vCPU is to stop, with what [`StoppedVcpu`] will have of it.
struct StopEvent {
    event: Event,
    entry: Option<u64>,
    frame: Option<[u64; 6]>,
}

impl VcpuTracer {
    /// Makes this tracer the vCPU's probe handler.
    pub fn into_handler(mut self) -> Self {
        self.tracer.channel.handlers.fetch_add(1, Ordering::SeqCst);
        self.is_handler = true;
        self
    }

    /// The probes at all points; taps, unless the vCPU may have to stop.
    pub fn probes(&self) -> Probes {
        let Tracer { plan, kernel, inspector, selection, channel, .. } = &*self.tracer;
        let mut probes = plan.probes();
        probes.breakpoints.extend(&self.returns);
        probes.breakpoints.extend(lock(&self.tracer.shared.breaks).keys());
        probes.watchers.extend(self.watcher());
        if !self.tracer.uses_taps() {
            return probes;
        }
        let TapPrograms { points, steps } =
            tap_programs((kernel, inspector.ram()), plan, selection, &self.returns);
        let (channel, tracer, vcpu) =
            (Arc::clone(channel), Arc::downgrade(&self.tracer), self.vcpu);
        let sink = Box::new(move |records, tsc| {
            if let Some(tracer) = tracer.upgrade() {
                channel.send_records(Batch { vcpu, records, tsc, ns: tracer.now() });
            }
        });
        Probes { taps: Some(Arc::new(Taps { points, steps, sink })), ..probes }
    }

    /// The event for a write to watched memory: what wrote, and what is there now.
    fn watched(&self, moment: &Moment, roots: Roots, gva: u64, len: u64) -> Option<Event> {
        let Tracer { kernel, inspector, selection, .. } = &*self.tracer;
        let read = |gva, bytes: &mut [u8]| memory::read(inspector.ram(), roots, gva, bytes);
        let hit = ProbeHit { moment: *moment, ns: self.tracer.now(), read: &read, record: &[] };
        // The kernel's first instructions have no task.
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
        let event = self.event(&hit, &task, "watch", &place(gva));
        let arguments = format!("{len} bytes, now {now:#x}, by {}", place(moment.rip));
        let values = [gva, now];
        let fields = self.fields(&event, &task, &values, None, &nothing);
        let filter = selection.filter.as_ref();
        let matches = filter.is_none_or(|filter| filter.matches(&|name| fields.field(name)));
        (matches && self.tracer.selects(&task)).then_some(Event { arguments, ..event })
    }

    /// Reports events other than executed instructions, if any are traced.
    fn watcher(&self) -> Option<Watcher> {
        let (channel, tracer) = (Arc::clone(&self.tracer.channel), Arc::downgrade(&self.tracer));
        let vcpu = self.vcpu;
        (!self.tracer.plan.vcpu_events().is_empty()).then_some(())?;
        Some(Arc::new(move |event| {
            let event =
                tracer.upgrade().and_then(|tracer| vcpu_events::event(&tracer, vcpu, event));
            event.map(|event| channel.send(TraceItem::Event(event), || 1));
        }))
    }

    /// Makes the record of a point that translated code has left to the monitor, or that an interpreter has reached. A function
    /// may return where none has returned so far.
    fn record(&mut self, moment: &Moment, roots: Roots, probes: &mut Probes) {
        let tracer = Arc::clone(&self.tracer);
        if let Some(back) = self.returns_to(moment, roots) {
            tracer.add_return(back, self.vcpu);
        }
        self.refresh(probes);
        let Some(taps) = &probes.taps else { return };
        let Some(first) = taps.points.get(&moment.rip) else { return };
        let step = |n: u64| taps.steps.get(usize::try_from(n).ok()?).copied();
        let mut room = vec![0; MOST_OF_A_RECORD];
        let mut memory = memory::TapMemory(tracer.inspector.ram(), roots);
        match tap::run(step, (*first).into(), moment, &mut memory, &mut room) {
            Outcome::Noted(len) => {
                room.truncate(len);
                (taps.sink)(room, moment.tsc);
            }
            Outcome::Dropped => {}
            Outcome::Full | Outcome::Odd => {
                tracer.channel.lost.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Takes over the places that functions return to; whether there are new ones. Places are only ever added, so a new one shows
    /// in their number.
    fn learn_returns(&mut self) -> bool {
        let returns = lock(&self.tracer.shared.returns);
        let has_new = returns.len() != self.returns.len();
        if has_new {
            self.returns.clone_from(&returns);
        }
        has_new
    }

    /// Where the function that begins here returns to, if that has to be known.
    fn returns_to(&self, moment: &Moment, roots: Roots) -> Option<u64> {
        let Tracer { plan, inspector, .. } = &*self.tracer;
        let ends = plan.at(moment.rip).iter().any(Tracepoint::ends);
        let back = memory::word(inspector.ram(), roots, moment.gpr[RSP]);
        back.filter(|_| ends && !plan.has_exits_of(moment.rip))
    }

    /// The events of records of a batch, in the order of these.
    pub fn events_of(&mut self, batch: &Batch, records: &[u8], began: u64) -> Vec<Event> {
        self.learn_returns();
        let mut rest = records;
        for record in tap::records(records) {
            let len = record.len().min(rest.len());
            let (bytes, behind) = rest.split_at(len);
            rest = behind;
            let ns = time_of(batch, began, record.moment.tsc);
            let read = |gva, to: &mut [u8]| record.read(gva, to);
            let hit = ProbeHit { moment: record.moment, ns, read: &read, record: bytes };
            self.handle_hit(&hit);
        }
        std::mem::take(&mut self.events)
    }

    /// Makes the events of a hit. Returns the one at which the vCPU is to stop.
    fn handle_hit(&mut self, hit: &ProbeHit<'_>) -> Option<StopEvent> {
        let tracer = Arc::clone(&self.tracer);
        let Moment { rip, gpr, .. } = hit.moment;
        let mut stop = None;
        if self.returns.contains(&rip) {
            stop = self.end(hit, gpr[RSP].wrapping_sub(8));
        }
        if tracer.plan.is_exit(rip) {
            stop = stop.or_else(|| self.end(hit, gpr[RSP]));
        }
        let moved = lock(&tracer.shared.breaks).get(&rip).cloned();
        for point in tracer.plan.at(rip).iter().chain(&moved) {
            let begun = self.begin(hit, point);
            stop = stop.or(begun);
        }
        stop
    }

    /// Stops the vCPU and sends the event; the event's receiver resumes the vCPU. If the event cannot be sent the vCPU goes on.
    fn stop(&self, engine: &dyn Engine, stop_event: StopEvent) -> Verdict {
        let StopEvent { event, entry, frame } = stop_event;
        let (rip, roots) = (engine.vcpu().rip, Roots::from(engine.vcpu()));
        let stops = &self.tracer.shared.stopped;
        lock(stops).insert(self.vcpu, StoppedVcpu { rip, roots, entry, frame });
        if self.tracer.channel.send(TraceItem::Event(Event { stands: true, ..event }), || 1) {
            return Verdict::Stop;
        }
        lock(stops).remove(&self.vcpu);
        Verdict::Resume
    }

    /// Makes the event of one point. Returns it if the vCPU is to stop there.
    fn begin(&mut self, hit: &ProbeHit<'_>, point: &Tracepoint) -> Option<StopEvent> {
        let task = self.tracer.kernel.current_in(hit.moment.gs_base, hit.read)?;
        if !self.tracer.selects(&task) {
            return None;
        }
        match point {
            Tracepoint::Call(call) => self.begin_call(hit, task, call),
            Tracepoint::Return(name) => {
                self.begin_function(hit, task, ("return", name), Entered::Function)
            }
            Tracepoint::Signal => self.begin_function(hit, task, ("signal", "?"), Entered::Signal),
            Tracepoint::Killed if hit.register(RDI) & 0x7f == 0 => None,
            _ => {
                let event = self.simple(hit, &task, point);
                let arguments = arguments(hit);
                let filter = self.tracer.selection.filter.as_ref();
                let meant = filter.is_none_or(|filter| {
                    let mut fields = self.fields(&event, &task, &arguments, None, hit.read);
                    if let Tracepoint::Break(_, parameters) = point {
                        fields.parameters = parameters;
                    }
                    // The event has no result, now or later.
                    filter.matches(&|name| fields.field(name))
                });
                meant.then(|| {
                    self.report(event, self.tracer.selection.stops.at_entry(), None, None)
                })?
            }
        }
    }

    /// Queues an event, or returns it if the vCPU stops at it.
    fn report(
        &mut self,
        event: Event,
        stands: bool,
        entry: Option<u64>,
        frame: Option<[u64; 6]>,
    ) -> Option<StopEvent> {
        if stands {
            return Some(StopEvent { event, entry, frame });
        }
        self.events.push(event);
        None
    }

    fn fields<'a>(
        &self,
        event: &'a Event,
        task: &'a Task,
        arguments: &'a [u64],
        call: Option<&'a Call>,
        read: Reader<'a>,
    ) -> EventFields<'a> {
        let Event { kind, name, .. } = event;
        EventFields {
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
    fn simple(&self, hit: &ProbeHit<'_>, task: &Task, point: &Tracepoint) -> Event {
        let argument = |register: usize| hit.register(register);
        let other = |register| {
            let task = self.tracer.kernel.task_in(argument(register), hit.read);
            task.map_or_else(|| "?".to_owned(), |task| format!("{} {}", task.comm, task.tid))
        };
        let (kind, name, arguments) = match point {
            Tracepoint::Exec => ("exec", "exec", self.program(hit)),
            Tracepoint::Exit => ("exit", "exit", status(argument(RDI))),
            Tracepoint::Fork => ("fork", "fork", other(RDI)),
            Tracepoint::Switch => ("switch", "switch", format!("{} -> {}", other(RDI), other(RSI))),
            Tracepoint::Interrupt(name) => ("irq", name.as_str(), String::new()),
            Tracepoint::Exception(name) => ("exception", name.as_str(), exception(hit)),
            Tracepoint::Break(name, parameters) => ("break", name.as_str(), shown(hit, parameters)),
            Tracepoint::Return(name) => ("break", name.as_str(), shown(hit, &[])),
            Tracepoint::Killed => {
                let signal = linux_names::signal(argument(RDI) & 0x7f);
                return Event {
                    arguments: "kills".to_owned(),
                    ..self.event(hit, task, "signal", &signal)
                };
            }
            Tracepoint::Call(_) | Tracepoint::Signal => ("", "", String::new()),
        };
        Event { arguments, ..self.event(hit, task, kind, name) }
    }

    /// The path of the program that `struct linux_binprm` stands for.
    fn program(&self, hit: &ProbeHit<'_>) -> String {
        const MOST: usize = 256;
        let at = self.tracer.kernel.types.offset(FILENAME.0, FILENAME.1).ok();
        let path = at.and_then(|at| hit.word(hit.register(RDI).wrapping_add(at)));
        let mut bytes = [0; MOST];
        let count = path.map_or(0, |path| (hit.read)(path, &mut bytes));
        let text = bytes[..count].split(|byte| *byte == 0).next().unwrap_or_default();
        if text.is_empty() { "?".to_owned() } else { String::from_utf8_lossy(text).into_owned() }
    }

    fn begin_call(
        &mut self,
        hit: &ProbeHit<'_>,
        task: Task,
        call: &Arc<Call>,
    ) -> Option<StopEvent> {
        let tracer = Arc::clone(&self.tracer);
        let selection = &tracer.selection;
        let frame = call.places().map(|at| hit.register(RDI).wrapping_add(at));
        let mut values = [0; 6];
        for (value, at) in values.iter_mut().zip(frame) {
            *value = hit.word(at)? & call.mask();
        }
        let mut event = self.event(hit, &task, "syscall", &call.name);
        if let Some(filter) = &selection.filter {
            let fields = self.fields(&event, &task, &values, Some(call), hit.read);
            // A call that the filter refuses whatever the result costs no second exit.
            let field = |name: &str| fields.field(name);
            // A call that does not return has no result, now or later.
            let meant =
                if call.is_last() { filter.matches(&field) } else { filter.may_match(&field) };
            meant.then_some(())?;
        }
        let stands = selection.stops.at_entry();
        if stands {
            event.values = values[..call.count()].to_vec();
        }
        // The arguments of a call that is reported at its end are printed then.
        if stands || call.is_last() || replaces_program(&call.name) {
            event.arguments = call.arguments(&values, None, hit.read);
        }
        if call.is_last() {
            event.result = Some("?".to_owned());
        } else if selection.stops != Stops::Entry {
            let n = selection.filter.as_ref().and_then(|_| call.parameter("path"));
            let path = n.and_then(|n| call.text(n, values[n], hit.read));
            let (event, entered) = (event.clone(), Entered::Call(Arc::clone(call)));
            let (arguments, entry) = (values.to_vec(), hit.record.to_vec());
            self.expect_return(
                hit,
                PendingReturn { event, task, arguments, entered, path, entry },
            )?;
            if !stands {
                return None;
            }
        }
        self.report(event, stands, Some(hit.register(RSP)), Some(frame))
    }

    fn begin_function(
        &mut self,
        hit: &ProbeHit<'_>,
        task: Task,
        (kind, name): (&str, &str),
        entered: Entered,
    ) -> Option<StopEvent> {
        let event = self.event(hit, &task, kind, name);
        let arguments = arguments(hit).to_vec();
        let tracer = Arc::clone(&self.tracer);
        let EventSelection { stops, filter, .. } = &tracer.selection;
        let stands = stops.at_entry() && matches!(entered, Entered::Function);
        if let (Entered::Function, Some(filter)) = (&entered, filter) {
            let fields = self.fields(&event, &task, &arguments, None, &nothing);
            filter.may_match(&|name| fields.field(name)).then_some(())?;
        }
        if *stops != Stops::Entry || !stands {
            let (event, arguments) = (event.clone(), arguments.clone());
            let entry = Vec::new();
            self.expect_return(
                hit,
                PendingReturn { event, task, arguments, entered, path: None, entry },
            )?;
        }
        let event = Event { values: arguments, ..event };
        stands.then(|| self.report(event, true, Some(hit.register(RSP)), None))?
    }

    /// Remembers a function whose return is traced.
    fn expect_return(&self, hit: &ProbeHit<'_>, pending: PendingReturn) -> Option<()> {
        let Tracer { plan, shared, .. } = &*self.tracer;
        let rsp = hit.register(RSP);
        if !plan.has_exits_of(hit.moment.rip) {
            let back = hit.word(rsp)?;
            self.tracer.add_return(back, self.vcpu);
        }
        let mut all = lock(&shared.pending);
        if all.len() >= MOST_PENDING {
            all.clear();
        }
        all.insert(rsp, pending);
        Some(())
    }

    /// A function returns whose entry may have been at this RSP. Returns its event if the vCPU is to stop there.
    fn end(&mut self, hit: &ProbeHit<'_>, entry: u64) -> Option<StopEvent> {
        let tracer = Arc::clone(&self.tracer);
        let Tracer { shared, selection, .. } = &*tracer;
        let pending = lock(&shared.pending).remove(&entry)?;
        let value = hit.register(RAX);
        let PendingReturn { mut event, task, arguments, entered, path, entry } = pending;
        event.took = Some(hit.ns.saturating_sub(event.ns));
        let before = tap::records(&entry).next();
        let read = |gva, bytes: &mut [u8]| read_both(hit, before.as_ref(), gva, bytes);
        let (mut result, mut call) = (value as i64, None);
        match &entered {
            Entered::Function => event.result = Some(format!("{value:#x}")),
            Entered::Signal => {
                result = self.signal(hit, &mut event, *arguments.first()?)?;
            }
            Entered::Call(entered) => {
                let values = arguments.first_chunk()?;
                if !replaces_program(&entered.name) {
                    event.arguments = entered.arguments(values, Some(result), &read);
                }
                event.result = Some(calls::result(&entered.name, result));
                call = Some(&**entered);
            }
        }
        if let Some(filter) = &selection.filter {
            let mut fields = self.fields(&event, &task, &arguments, call, &read);
            fields.end = Some((result, event.took.unwrap_or_default()));
            let is_path = |name: &str| {
                call.is_some_and(|call| call.parameter(name) == call.parameter("path"))
            };
            let field = |name: &str| match &path {
                Some(path) if is_path(name) => FieldValue::Text(path.clone()),
                _ => fields.field(name),
            };
            filter.matches(&field).then_some(())?;
        }
        let stands = selection.stops.at_end();
        if stands {
            event.values = arguments;
        }
        self.report(event, stands, None, None)
    }

    /// Fills in the event for the signal that `get_signal` has found: `struct ksignal` is at `found`. Returns the signal's number.
    fn signal(&self, hit: &ProbeHit<'_>, event: &mut Event, found: u64) -> Option<i64> {
        const CODE: u64 = 8;
        const SENDER: u64 = 16;
        (hit.register(RAX) & 0xff != 0).then_some(())?;
        let member = |name| self.tracer.kernel.types.offset("ksignal", name).ok();
        let word = |at: u64| hit.word(found.wrapping_add(at));
        let info = member("info")?;
        let (number, handler) = (word(member("sig")?)? & 0xff, word(member("ka")?)?);
        let (code, sender) = (word(info + CODE)? as i32, word(info + SENDER)? as u32);
        event.name = linux_names::signal(number);
        let by = if code <= 0 { format!(", from {sender}") } else { String::new() };
        event.arguments = format!("handler {handler:#x}, code {code}{by}");
        event.took = None;
        Some(number as i64)
    }

    fn event(&self, hit: &ProbeHit<'_>, task: &Task, kind: &str, name: &str) -> Event {
        let Task { pid, tid, comm, .. } = task.clone();
        let (kind, name) = (kind.to_owned(), name.to_owned());
        let (ns, vcpu) = (hit.ns, self.vcpu);
        Event { ns, vcpu, pid, tid, comm, kind, name, ..Event::default() }
    }
}

/// The call replaces the program: memory after it is another program's, so arguments are read before.
fn replaces_program(call: &str) -> bool {
    matches!(call, "execve" | "execveat")
}

/// No memory: what has no text.
fn nothing(_: u64, _: &mut [u8]) -> usize {
    0
}
