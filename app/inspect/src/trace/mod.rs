//! Tracing a Linux guest from outside: system calls, processes, interrupts, any function of its kernel.
//!
//! Every event is a point in the kernel's code, found by its symbol: a probe there is reached on the vCPU's thread, which reads what
//! it needs from registers and memory and goes on. What is not asked for has no probe and costs nothing. Events
//! go through a queue to whoever reads them; when the queue is full they are counted and dropped.
//!
//! - `plan`: which points an event is; `exits`: where functions end; `calls`: system calls and their arguments,
//!   with what these point to (`structures`).
//! - `tracer`: what is done at a point; `facts`: what a filter asks of it; `orders`: what a service does with a vCPU that stands.

mod calls;
mod exits;
mod facts;
mod numbers;
mod orders;
mod plan;
mod structures;
mod tracer;

use std::{
    io::{self, Write},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, RecvTimeoutError, sync_channel},
    },
    time::{Duration, Instant},
};

use ring3_trace::filter::{Filter, Wrong};
use vmm::{Attendant, Inspector, Probes};

use crate::{
    lines::say,
    linux::{Kernel, Unknown},
};
use plan::Plan;
use tracer::{Tracer, Wanted};

pub use orders::Orders;
pub use ring3_trace::{Answer, Event, Line, Request};

/// Events that wait for their reader at the most.
const QUEUE: usize = 1 << 16;
/// Pause between two looks at whether the reader is still there.
const BREATH: Duration = Duration::from_millis(50);

/// Why there is no trace.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The kernel is not understood.
    #[error(transparent)]
    Kernel(#[from] Unknown),
    /// There is no such event.
    #[error(
        "there is no event `{0}`: syscall[:NAME], exec, exit, fork, switch, signal, irq, exception, break:SYMBOL[+OFFSET], return:SYMBOL"
    )]
    Event(String),
    /// There is no such system call in this kernel.
    #[error("this kernel has no system call `{0}`")]
    Call(String),
    /// There is no such symbol.
    #[error("this kernel has no symbol `{0}`")]
    Symbol(String),
    /// The filter is none, or asks for what these events do not have.
    #[error("the filter, {0}")]
    Filter(#[from] Wrong),
    /// The machine has ended.
    #[error("the machine has ended")]
    Ended,
}

/// Traces for a reader until it goes, or the machine ends. Once it has begun, `obeys` has what carries the reader's orders out.
///
/// # Errors
/// The reader goes.
pub fn serve(
    inspector: &Inspector,
    request: &Request,
    output: &Mutex<impl Write>,
    obeys: impl FnOnce(Orders),
    gone: impl Fn() -> bool,
) -> io::Result<()> {
    match start(inspector, request, &gone) {
        Ok((mut trace, orders)) => {
            obeys(orders);
            trace.run(output, gone)
        }
        Err(refused) => say(&mut *lock(output), &Line::Error(refused.to_string())),
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
) -> Result<(Trace, Orders), Refused> {
    let filter = request.filter.as_deref().map(Filter::new).transpose()?;
    let kernel = Kernel::await_in(inspector, request.wait, gone)?.ok_or(Refused::Ended)?;
    let kernel = Arc::new(kernel);
    let plan = Plan::new(&kernel, inspector.ram(), &request.events)?;
    if let Some(filter) = &filter {
        filter.check(&|name| plan.knows(name))?;
    }
    let (sender, events) = sync_channel(QUEUE);
    let lost = Arc::new(AtomicU64::new(0));
    let probes = plan.probes();
    let shared = Arc::default();
    let wanted =
        Wanted { filter, comm: request.comm.clone(), pid: request.pid, stops: request.stops };
    let tracer = Arc::new(Tracer {
        kernel: Arc::clone(&kernel),
        ram: inspector.ram().clone(),
        plan,
        wanted,
        sink: sender,
        lost: Arc::clone(&lost),
        began: Instant::now(),
        shared: Arc::clone(&shared),
    });
    let attend = |vcpu| {
        let attendant: Box<dyn Attendant> = Box::new(Arc::clone(&tracer).at(vcpu));
        let probes = probes.clone();
        inspector.visit(vcpu, |visited| visited.attend(attendant, probes, false))
    };
    let attendants: Vec<_> = (0..inspector.vcpus()).map(attend).collect();
    let orders = Orders::new(inspector.clone(), kernel, shared, attendants.clone(), request);
    let probes = probes.breakpoints.len();
    Ok((Trace { inspector: inspector.clone(), attendants, events, lost, probes }, orders))
}

impl Trace {
    fn run(&mut self, output: &Mutex<impl Write>, gone: impl Fn() -> bool) -> io::Result<()> {
        say(&mut *lock(output), &Line::Started { probes: self.probes })?;
        lock(output).flush()?;
        let mut last = Instant::now();
        loop {
            match self.events.recv_timeout(BREATH) {
                Ok(event) => tell(&mut *lock(output), event)?,
                Err(RecvTimeoutError::Timeout) => lock(output).flush()?,
                Err(RecvTimeoutError::Disconnected) => return lock(output).flush(),
            }
            if last.elapsed() < BREATH {
                continue;
            }
            last = Instant::now();
            let lost = self.lost.swap(0, Ordering::Relaxed);
            if lost != 0 {
                say(&mut *lock(output), &Line::Lost(lost))?;
            }
            lock(output).flush()?;
            if gone() {
                return Ok(());
            }
        }
    }
}

/// Tells of an event; at once, if a vCPU waits for what the reader says to it.
fn tell(output: &mut impl Write, event: Event) -> io::Result<()> {
    let stands = event.stands;
    say(output, &Line::Event(event))?;
    if stands { output.flush() } else { Ok(()) }
}

/// Whoever held it and failed has reported that; what it holds is whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
