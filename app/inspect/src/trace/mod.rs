//! Tracing a Linux guest from outside: system calls, processes, interrupts, any function of its kernel.
//!
//! Every event is a point in the kernel's code, found by its symbol: a probe there is reached on the vCPU's thread, which reads what
//! it needs from registers and memory and goes on. What is not asked for has no probe and costs nothing. Unless vCPUs are to stop,
//! probes are taps: translated code makes a record where it is, and events are made of that here. Records and events go through a
//! queue; when it is full they are counted and dropped.
//!
//! - `plan`: which points an event is; `function_exits`: where functions end; `calls`: system calls and their arguments,
//!   with what these point to (`structures`); `narrow`: what those of 32-bit programs are called.
//! - `tap_programs`: what a tap records at a point; `conditions`: what of a filter it compares.
//! - `reorder`: records of several vCPUs in the order of time.
//! - `report`: where events go.
//! - `requests`: those of virtio devices; `request_names`: what they are called.
//! - `vcpu_events`: what vCPUs do besides executing instructions.
//! - `tracer`: what is done at a point; `state`: what a trace selects, and what its vCPUs share.
//! - `fields`: the values that a filter compares; `orders`: what a service does with a stopped vCPU.

mod calls;
mod channel;
mod conditions;
mod fields;
mod function_exits;
mod linux_names;
mod narrow;
mod orders;
mod pending;
mod plan;
mod probe_hit;
mod reorder;
mod report;
mod request_names;
mod requests;
mod state;
mod structures;
mod tap_programs;
mod tracer;
mod vcpu_events;

use std::{
    io,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, RecvTimeoutError, sync_channel},
    },
    time::{Duration, Instant},
};

use ring3_trace::{
    Stops,
    filter::{Filter, FilterError},
    ring::RingWriter,
};
use vmm::{Inspector, Probes};

use crate::{
    lines::say,
    linux::{KernelError, LinuxKernel},
};
use channel::{TraceChannel, TraceItem};
use plan::TracePlan;
use reorder::ReorderBuffer;
use report::TraceReport;
use requests::RequestTracer;
use state::{EventSelection, Shared};
use tracer::{Tracer, VcpuTracer};

pub use calls::call_name;
pub use orders::Orders;
pub use report::TraceOutput;
pub use ring3_trace::{Answer, Event, Line, Request};

/// Events that wait for their reader at the most.
const QUEUE: usize = 1 << 16;
/// Pause between two looks at whether the reader is still there.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Why there is no trace.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TraceError {
    /// The kernel is not understood.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// There is no such event.
    #[error(
        "there is no event `{0}`: syscall[:NAME], exec, exit, fork, switch, signal, irq, exception, break:SYMBOL[+OFFSET], return:SYMBOL, watch:SYMBOL[+OFFSET][:BYTES], port, mmio, msr, vector, engine, virtio"
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
    Filter(#[from] FilterError),
    /// Nobody knows whose such an event is.
    #[error("`{0}` is not of a process: leave out --pid and --comm, or trace it by itself")]
    NoProcess(&'static str),
    /// Events at which vCPUs stand do not come by a ring.
    #[error("a ring is for events at which no vCPU stands: leave out `ring` or `stops`")]
    RingOfStops,
    /// There is no memory for a ring.
    #[error("no memory for a ring: {0}")]
    Ring(String),
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
    output: &Mutex<impl TraceOutput>,
    obeys: impl FnOnce(Orders),
    gone: impl Fn() -> bool,
) -> io::Result<()> {
    let started = ring(request).and_then(|ring| Ok((ring, start(inspector, request, &gone)?)));
    match started {
        Ok((ring, (mut trace, orders))) => {
            obeys(orders);
            trace.run(&mut TraceReport { output, ring, gone: &gone })
        }
        Err(refused) => say(&mut *lock(output), &Line::Error(refused.to_string())),
    }
}

/// The ring that the reader asks for.
fn ring(request: &Request) -> Result<Option<RingWriter>, TraceError> {
    if request.ring.is_some() && request.stops != Stops::Never {
        return Err(TraceError::RingOfStops);
    }
    request
        .ring
        .map(|bytes| RingWriter::new(bytes).map_err(|error| TraceError::Ring(error.to_string())))
        .transpose()
}

/// A running trace; dropping it removes its probes from the machine.
struct Trace {
    inspector: Inspector,
    /// The number of the tracer's handler at each vCPU.
    handlers: Vec<Option<u64>>,
    items: Receiver<TraceItem>,
    lost: Arc<AtomicU64>,
    channel: Arc<TraceChannel>,
    probes: usize,
    /// For each vCPU: makes events of its records.
    tracers: Vec<VcpuTracer>,
    /// The time-stamp counter when the trace began; zero if the vCPU had ended.
    began: u64,
    reorder: ReorderBuffer,
    requests: Option<RequestTracer>,
}

fn start(
    inspector: &Inspector,
    request: &Request,
    gone: &impl Fn() -> bool,
) -> Result<(Trace, Orders), TraceError> {
    let filter = request.filter.as_deref().map(Filter::new).transpose()?;
    let (kernel, stopped) =
        LinuxKernel::wait_for(inspector, request.wait, gone)?.ok_or(TraceError::Ended)?;
    let kernel = Arc::new(kernel);
    let mut plan = TracePlan::new(&kernel, inspector.ram(), &request.events)?;
    let doing = plan.vcpu_events().iter().next().copied();
    let doing = doing.or(plan.has_requests().then_some("virtio"));
    if let Some(doing) = doing.filter(|_| request.pid.is_some() || request.comm.is_some()) {
        return Err(TraceError::NoProcess(doing));
    }
    if let Some(filter) = &filter {
        filter.check(&|name| plan.knows(name))?;
    }
    let (sender, items) = sync_channel(QUEUE);
    let lost = Arc::new(AtomicU64::new(0));
    let probes = plan.probes().breakpoints.len();
    let shared = Arc::new(Shared::default());
    if request.stops != Stops::Never {
        *lock(&shared.breaks) = plan.take_breaks();
    }
    let requests =
        plan.has_requests().then(|| RequestTracer::new(inspector.devices(), filter.clone()));
    let selection = EventSelection {
        filter,
        comm: request.comm.clone(),
        pid: request.pid,
        stops: request.stops,
    };
    let channel = Arc::new(TraceChannel::new(sender, Arc::clone(&lost)));
    let tracer = Arc::new(Tracer {
        kernel: Arc::clone(&kernel),
        inspector: inspector.clone(),
        plan,
        selection,
        channel: Arc::clone(&channel),
        began: Instant::now(),
        shared: Arc::clone(&shared),
    });
    let tsc = inspector.run_on_vcpu(0, |access| access.engine.time_stamp());
    let add = |vcpu| {
        let handler = Arc::clone(&tracer).for_vcpu(vcpu).into_handler();
        let probes = handler.probes();
        inspector.run_on_vcpu(vcpu, |access| access.add_handler(Box::new(handler), probes, false))
    };
    let handlers: Vec<_> = (0..inspector.vcpus()).map(add).collect();
    // From here on nothing is missed.
    drop(stopped);
    let fixed = tracer.plan.addresses().collect();
    let orders = Orders::new(inspector.clone(), kernel, shared, handlers.clone(), fixed, request);
    let tracers = (0..inspector.vcpus()).map(|vcpu| Arc::clone(&tracer).for_vcpu(vcpu)).collect();
    let (inspector, began, reorder) =
        (inspector.clone(), tsc.unwrap_or_default(), ReorderBuffer::default());
    let trace = Trace {
        inspector,
        handlers,
        items,
        lost,
        channel,
        probes,
        tracers,
        began,
        reorder,
        requests,
    };
    Ok((trace, orders))
}

impl Trace {
    fn run(&mut self, report: &mut TraceReport<'_, impl TraceOutput>) -> io::Result<()> {
        report.begin(self.probes)?;
        let mut last = Instant::now();
        loop {
            match self.items.recv_timeout(POLL_INTERVAL) {
                Ok(item) => self.take(item, report)?,
                Err(RecvTimeoutError::Timeout) => {
                    self.report_recorded(report, false)?;
                    report.flush()?;
                }
                Err(RecvTimeoutError::Disconnected) => {
                    self.report_recorded(report, true)?;
                    self.report_requests(report)?;
                    self.report_lost(report)?;
                    return report.flush();
                }
            }
            if last.elapsed() < POLL_INTERVAL {
                continue;
            }
            last = Instant::now();
            self.report_requests(report)?;
            self.report_lost(report)?;
            report.flush()?;
            if (report.gone)() {
                return self.finish(report);
            }
        }
    }

    /// Ends the trace and reports what was recorded. A write error means that the reader has gone.
    fn finish(&mut self, report: &mut TraceReport<'_, impl TraceOutput>) -> io::Result<()> {
        self.remove_handlers();
        while let Ok(item) = self.items.try_recv() {
            self.take(item, report)?;
        }
        self.report_recorded(report, true)?;
        self.report_requests(report)?;
        self.report_lost(report)?;
        report.flush()
    }

    fn remove_handlers(&mut self) {
        for (vcpu, handler) in self.handlers.iter_mut().enumerate() {
            let Some(number) = handler.take() else { continue };
            // A vCPU that has ended has no handler any more.
            let _ = self.inspector.run_on_vcpu(vcpu, move |access| access.remove_handler(number));
        }
    }

    fn report_lost(&self, report: &mut TraceReport<'_, impl TraceOutput>) -> io::Result<()> {
        match self.lost.swap(0, Ordering::Relaxed) {
            0 => Ok(()),
            lost => report.lost(lost),
        }
    }

    fn take(
        &mut self,
        item: TraceItem,
        report: &mut TraceReport<'_, impl TraceOutput>,
    ) -> io::Result<()> {
        match item {
            TraceItem::Event(event) => report.event(event),
            TraceItem::Records(batch) => {
                self.channel.waiting.fetch_sub(batch.records.len(), Ordering::Relaxed);
                self.reorder.batches.push(batch);
                self.report_recorded(report, false)
            }
        }
    }

    /// Reports the requests that devices have given back.
    fn report_requests(
        &mut self,
        report: &mut TraceReport<'_, impl TraceOutput>,
    ) -> io::Result<()> {
        let Some(requests) = &mut self.requests else { return Ok(()) };
        let (events, lost) = requests.take();
        self.lost.fetch_add(lost, Ordering::Relaxed);
        events.into_iter().try_for_each(|event| report.event(event))
    }

    /// Reports what was recorded, in the order of time.
    fn report_recorded(
        &mut self,
        report: &mut TraceReport<'_, impl TraceOutput>,
        all: bool,
    ) -> io::Result<()> {
        let hold = self.tracers.len() > 1 && !all;
        let due = self.reorder.due(hold);
        for (batch, records) in due.runs() {
            let Some(tracer) = self.tracers.get_mut(batch.vcpu) else { continue };
            for event in tracer.events_of(batch, records, self.began) {
                report.event(event)?;
            }
        }
        Ok(())
    }
}

/// Locks a mutex, even if a thread has panicked while holding it: the value is whole, and the panic has been reported.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Trace {
    fn drop(&mut self) {
        self.remove_handlers();
    }
}

/// Breakpoints at these addresses.
fn breakpoints(addresses: impl Iterator<Item = u64>) -> Probes {
    Probes { breakpoints: addresses.collect(), ..Probes::default() }
}
