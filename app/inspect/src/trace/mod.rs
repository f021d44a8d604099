//! Tracing a Linux guest from outside: system calls, processes, interrupts, any function of its kernel.
//!
//! Every event is a point in the kernel's code, found by its symbol: a probe there is reached on the vCPU's thread, which reads what
//! it needs from registers and memory and goes on. What is not asked for has no probe and costs nothing. Events
//! go through a queue to whoever reads them; when the queue is full they are counted and dropped.
//!
//! - `plan`: which points an event is; `calls`: system calls and their arguments; `tracer`: what is done at a point.

mod calls;
mod numbers;
mod plan;
mod tracer;

use std::{
    io::{self, Write},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, RecvTimeoutError, sync_channel},
    },
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use vmm::{Attendant, Inspector, Probes};

use crate::{
    lines::say,
    linux::{Kernel, Unknown},
};
use plan::Plan;
use tracer::Tracer;

/// Events that wait for their reader at the most.
const QUEUE: usize = 1 << 16;
/// Pause between two looks at whether the reader is still there.
const BREATH: Duration = Duration::from_millis(50);

/// What is to be traced.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// Events, such as `syscall:openat`.
    pub events: Vec<String>,
    /// Threads of this name only.
    pub comm: Option<String>,
    /// This process only.
    pub pid: Option<u32>,
    /// Wait for a kernel if there is none yet.
    pub wait: bool,
}

/// What is sent to the reader.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Line {
    /// It begins, with so many probes.
    Started {
        /// Points in the kernel.
        probes: usize,
    },
    /// Something has happened.
    Event(Event),
    /// So many events were dropped since the last line.
    Lost(u64),
    /// It cannot be, or is over.
    Error(String),
}

/// Something that has happened in the guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Nanoseconds since the trace began.
    pub ns: u64,
    /// The vCPU.
    pub vcpu: usize,
    /// The process.
    pub pid: u32,
    /// Its thread.
    pub tid: u32,
    /// The thread's name.
    pub comm: String,
    /// `syscall`, `exec`, `break` and so on.
    pub kind: String,
    /// Which.
    pub name: String,
    /// Its arguments.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub arguments: String,
    /// What came of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<String>,
    /// Nanoseconds it took.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub took: Option<u64>,
}

/// Why there is no trace.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The kernel is not understood.
    #[error(transparent)]
    Kernel(#[from] Unknown),
    /// There is no such event.
    #[error(
        "there is no event `{0}`: syscall[:NAME], exec, exit, fork, switch, irq, exception, break:SYMBOL[+OFFSET], return:SYMBOL"
    )]
    Event(String),
    /// There is no such system call in this kernel.
    #[error("this kernel has no system call `{0}`")]
    Call(String),
    /// There is no such symbol.
    #[error("this kernel has no symbol `{0}`")]
    Symbol(String),
    /// The machine has ended.
    #[error("the machine has ended")]
    Ended,
}

/// Traces for a reader until it goes, or the machine ends.
///
/// # Errors
/// The reader goes.
pub fn serve(
    inspector: &Inspector,
    request: &Request,
    output: &mut impl Write,
    gone: impl Fn() -> bool,
) -> io::Result<()> {
    match start(inspector, request, &gone) {
        Ok(mut trace) => trace.run(output, gone),
        Err(refused) => say(output, &Line::Error(refused.to_string())),
    }
}

/// A trace under way; what it has put into the machine goes with it.
struct Trace {
    inspector: Inspector,
    /// The tracer at each vCPU.
    attendants: Vec<Option<u64>>,
    events: Receiver<Event>,
    lost: Arc<AtomicU64>,
    probes: usize,
}

fn start(
    inspector: &Inspector,
    request: &Request,
    gone: &impl Fn() -> bool,
) -> Result<Trace, Refused> {
    let kernel = Kernel::await_in(inspector, request.wait, gone)?.ok_or(Refused::Ended)?;
    let kernel = Arc::new(kernel);
    let plan = Plan::new(&kernel, inspector.ram(), &request.events)?;
    let (sender, events) = sync_channel(QUEUE);
    let lost = Arc::new(AtomicU64::new(0));
    let probes = plan.probes();
    let ram = inspector.ram().clone();
    let tracer = Tracer::new(kernel, ram, plan, request, sender, Arc::clone(&lost));
    let attend = |vcpu| {
        let attendant: Box<dyn Attendant> = Box::new(tracer.at(vcpu));
        let probes = probes.clone();
        inspector.visit(vcpu, |visited| visited.attend(attendant, probes, false))
    };
    let attendants = (0..inspector.vcpus()).map(attend).collect();
    let count = probes.breakpoints.len();
    Ok(Trace { inspector: inspector.clone(), attendants, events, lost, probes: count })
}

impl Trace {
    fn run(&mut self, output: &mut impl Write, gone: impl Fn() -> bool) -> io::Result<()> {
        say(output, &Line::Started { probes: self.probes })?;
        output.flush()?;
        let mut last = Instant::now();
        loop {
            match self.events.recv_timeout(BREATH) {
                Ok(event) => say(output, &Line::Event(event))?,
                Err(RecvTimeoutError::Timeout) => output.flush()?,
                Err(RecvTimeoutError::Disconnected) => return output.flush(),
            }
            if last.elapsed() < BREATH {
                continue;
            }
            last = Instant::now();
            let lost = self.lost.swap(0, Ordering::Relaxed);
            if lost != 0 {
                say(output, &Line::Lost(lost))?;
            }
            output.flush()?;
            if gone() {
                return Ok(());
            }
        }
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        for (vcpu, attendant) in self.attendants.iter().enumerate() {
            let Some(number) = *attendant else { continue };
            // One that has ended has none any more.
            let _ = self.inspector.visit(vcpu, move |visited| visited.dismiss(number));
        }
    }
}

/// Breakpoints at these addresses.
fn breakpoints(addresses: impl Iterator<Item = u64>) -> Probes {
    Probes { breakpoints: addresses.collect(), watches: Vec::new() }
}
