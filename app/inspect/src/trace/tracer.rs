//! What is done when a vCPU reaches a point.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{SyncSender, TrySendError},
    },
    time::Instant,
};

use contract::Engine;
use ram::Ram;
use vmm::{Attendant, Probes, Reached, Verdict};
use x86::{
    paging::Roots,
    reg::{RAX, RDI, RDX, RSI, RSP},
};

use super::{
    Event, Request,
    calls::{self, Call},
    plan::{Plan, Point},
};
use crate::{
    linux::{Kernel, Task},
    memory,
};

/// Calls that have begun and not ended, at the most: threads that ended in them leave theirs.
const MOST_PENDING: usize = 1 << 16;
/// Where `struct pt_regs` has the arguments of a system call.
const ARGUMENTS: [u64; 6] = [112, 104, 96, 56, 72, 64];
/// Where it has RIP.
const RIP: u64 = 128;
/// `linux_binprm` has the program's path there.
const FILENAME: (&str, &str) = ("linux_binprm", "filename");

/// What all vCPUs share.
pub struct Tracer {
    kernel: Arc<Kernel>,
    ram: Ram,
    plan: Arc<Plan>,
    comm: Option<String>,
    pid: Option<u32>,
    sink: SyncSender<Event>,
    lost: Arc<AtomicU64>,
    began: Instant,
}

impl Tracer {
    pub fn new(
        kernel: Arc<Kernel>,
        ram: Ram,
        plan: Plan,
        request: &Request,
        sink: SyncSender<Event>,
        lost: Arc<AtomicU64>,
    ) -> Self {
        let (comm, pid, plan) = (request.comm.clone(), request.pid, Arc::new(plan));
        Self { kernel, ram, plan, comm, pid, sink, lost, began: Instant::now() }
    }

    /// The attendant of a vCPU.
    pub fn at(&self, vcpu: usize) -> Points {
        let own = Self {
            kernel: Arc::clone(&self.kernel),
            ram: self.ram.clone(),
            plan: Arc::clone(&self.plan),
            comm: self.comm.clone(),
            sink: self.sink.clone(),
            lost: Arc::clone(&self.lost),
            ..*self
        };
        Points { tracer: own, vcpu, returns: HashSet::new(), pending: HashMap::new() }
    }

    fn is_meant(&self, task: &Task) -> bool {
        self.pid.is_none_or(|pid| pid == task.pid)
            && self.comm.as_ref().is_none_or(|comm| *comm == task.comm)
    }

    fn send(&self, event: Event) {
        if let Err(TrySendError::Full(_)) = self.sink.try_send(event) {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

/// A function that has been entered.
struct Pending {
    event: Event,
    call: Option<(Arc<Call>, [u64; 6])>,
}

/// What is done at a vCPU's points.
pub struct Points {
    tracer: Tracer,
    vcpu: usize,
    /// Where functions return to whose result is wanted (GVA).
    returns: HashSet<u64>,
    /// By RSP after the return, which no two threads have in common.
    pending: HashMap<u64, Pending>,
}

impl Attendant for Points {
    fn reached(&mut self, engine: &mut dyn Engine, probes: &mut Probes, _: Reached) -> Verdict {
        let rip = engine.vcpu().rip;
        if self.returns.contains(&rip) {
            self.end(engine);
        }
        let plan = Arc::clone(&self.tracer.plan);
        for point in plan.0.get(&rip).into_iter().flatten() {
            if let Some(back) = self.begin(engine, point)
                && self.returns.insert(back)
            {
                probes.breakpoints.insert(back);
            }
        }
        Verdict::GoOn
    }
}

impl Points {
    /// What happens at a point; where a function returns to, if its result is wanted.
    fn begin(&mut self, engine: &dyn Engine, point: &Point) -> Option<u64> {
        let Tracer { kernel, ram, .. } = &self.tracer;
        let task = kernel.current(ram, engine)?;
        if !self.tracer.is_meant(&task) {
            return None;
        }
        match point {
            Point::Call(call) => return self.begin_call(engine, task, call),
            Point::Return(name) => {
                let event = self.event(task, "return", name);
                return self.wait(engine, Pending { event, call: None });
            }
            _ => {}
        }
        let event = self.simple(engine, task, point);
        self.tracer.send(event);
        None
    }

    /// An event that is complete at once.
    fn simple(&self, engine: &dyn Engine, task: Task, point: &Point) -> Event {
        let Tracer { kernel, ram, .. } = &self.tracer;
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
            Point::Call(call) => ("syscall", call.name.as_str(), String::new()),
        };
        Event { arguments, ..self.event(task, kind, name) }
    }

    /// The path of the program that `struct linux_binprm` stands for.
    fn program(&self, binprm: u64) -> String {
        let Tracer { kernel, ram, .. } = &self.tracer;
        let at = kernel.types.offset(FILENAME.0, FILENAME.1).ok();
        let path = at.and_then(|at| kernel.word(ram, binprm.wrapping_add(at)));
        path.and_then(|path| kernel.text(ram, path)).unwrap_or_else(|| "?".to_owned())
    }

    /// Where it happened, and its error code.
    fn exception(&self, engine: &dyn Engine) -> String {
        let Tracer { kernel, ram, .. } = &self.tracer;
        let gpr = engine.vcpu().gpr;
        let rip = kernel.word(ram, gpr[RDI].wrapping_add(RIP)).unwrap_or_default();
        format!("rip {rip:#x}, cr2 {:#x}, code {:#x}", engine.vcpu().cr2, gpr[RSI] as u32)
    }

    fn begin_call(&mut self, engine: &dyn Engine, task: Task, call: &Arc<Call>) -> Option<u64> {
        let Tracer { kernel, ram, .. } = &self.tracer;
        let registers = engine.vcpu().gpr[RDI];
        let mut values = [0; 6];
        for (value, at) in values.iter_mut().zip(ARGUMENTS) {
            *value = kernel.word(ram, registers.wrapping_add(at))?;
        }
        let mut event = self.event(task, "syscall", &call.name);
        event.arguments = self.arguments(engine, call, &values, None);
        if call.is_last() {
            self.tracer.send(Event { result: Some("?".to_owned()), ..event });
            return None;
        }
        self.wait(engine, Pending { event, call: Some((Arc::clone(call), values)) })
    }

    fn arguments(
        &self,
        engine: &dyn Engine,
        call: &Call,
        values: &[u64; 6],
        result: Option<i64>,
    ) -> String {
        let roots = Roots::from(engine.vcpu());
        let read = |gva, bytes: &mut [u8]| memory::read(&self.tracer.ram, roots, gva, bytes);
        call.arguments(values, result, &read)
    }

    /// A function has been entered, whose end is wanted: where that will be.
    fn wait(&mut self, engine: &dyn Engine, pending: Pending) -> Option<u64> {
        let rsp = engine.vcpu().gpr[RSP];
        let back = self.tracer.kernel.word(&self.tracer.ram, rsp)?;
        if self.pending.len() >= MOST_PENDING {
            self.pending.clear();
        }
        self.pending.insert(rsp.wrapping_add(8), pending);
        Some(back)
    }

    /// A function has returned that may be one whose end is wanted.
    fn end(&mut self, engine: &dyn Engine) {
        let Some(pending) = self.pending.remove(&engine.vcpu().gpr[RSP]) else { return };
        let value = engine.vcpu().gpr[RAX];
        let Pending { mut event, call } = pending;
        event.took = Some(self.tracer.now().saturating_sub(event.ns));
        event.result = Some(match call {
            None => format!("{value:#x}"),
            Some((call, values)) => {
                let value = value as i64;
                // Another program has other memory: what was there before is what counts.
                if call.name != "execve" && call.name != "execveat" {
                    event.arguments = self.arguments(engine, &call, &values, Some(value));
                }
                calls::result(&call.name, value)
            }
        });
        self.tracer.send(event);
    }

    fn event(&self, task: Task, kind: &str, name: &str) -> Event {
        let Task { pid, tid, comm, .. } = task;
        let (kind, name) = (kind.to_owned(), name.to_owned());
        let (ns, vcpu) = (self.tracer.now(), self.vcpu);
        Event { ns, vcpu, pid, tid, comm, kind, name, ..Event::default() }
    }
}

/// A status as wait has it.
fn status(code: u64) -> String {
    match code & 0x7f {
        0 => format!("status {}", code >> 8 & 0xff),
        signal => format!("signal {signal}"),
    }
}
