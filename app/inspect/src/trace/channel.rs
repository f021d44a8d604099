//! The channel from vCPUs to the thread that reports events.

use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicU64, AtomicUsize, Ordering},
    mpsc::{SyncSender, TrySendError},
};

use ring3_trace::Event;
use x86::tap;

/// What vCPUs send.
pub enum TraceItem {
    /// An event that is complete.
    Event(Event),
    /// What taps of a vCPU have recorded.
    Records(Batch),
}

/// Records of a vCPU, and when they were taken.
pub struct Batch {
    pub vcpu: usize,
    pub records: Vec<u8>,
    /// The time-stamp counter when the records were taken.
    pub tsc: u64,
    /// Nanoseconds from the trace's beginning to when the records were taken.
    pub ns: u64,
}

/// Bytes of records that wait to be reported, at the most.
const MOST_BYTES: usize = 64 << 20;

/// The channel from vCPUs to the thread that reports events. The channel closes with the last handler: engines keep the rest of a
/// trace longer.
pub struct TraceChannel {
    sink: Mutex<Option<SyncSender<TraceItem>>>,
    pub lost: Arc<AtomicU64>,
    /// Bytes of records on their way.
    pub waiting: AtomicUsize,
    /// vCPUs that have a handler.
    pub handlers: AtomicUsize,
}

impl TraceChannel {
    pub fn new(sink: SyncSender<TraceItem>, lost: Arc<AtomicU64>) -> Self {
        Self {
            sink: Mutex::new(Some(sink)),
            lost,
            waiting: AtomicUsize::new(0),
            handlers: AtomicUsize::new(0),
        }
    }

    /// Sends an item; false if nobody will receive it. `count` is the number of records lost if the channel is full.
    pub fn send(&self, item: TraceItem, count: impl Fn() -> u64) -> bool {
        let sink = self.sink.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(sink) = sink.as_ref() else { return false };
        match sink.try_send(item) {
            Ok(()) => true,
            Err(TrySendError::Full(_)) => {
                self.lost.fetch_add(count(), Ordering::Relaxed);
                false
            }
            Err(TrySendError::Disconnected(_)) => false,
        }
    }

    pub fn send_records(&self, batch: Batch) {
        let len = batch.records.len();
        let count = tap::records(&batch.records).count() as u64;
        if self.waiting.fetch_add(len, Ordering::Relaxed) > MOST_BYTES {
            self.lost.fetch_add(count, Ordering::Relaxed);
        } else if self.send(TraceItem::Records(batch), || count) {
            return;
        }
        self.waiting.fetch_sub(len, Ordering::Relaxed);
    }

    /// A vCPU's handler has gone; the last one closes the channel.
    pub fn remove_handler(&self) {
        if self.handlers.fetch_sub(1, Ordering::SeqCst) != 1 {
            return;
        }
        self.sink.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

/// When a record was made, in nanoseconds since the trace began, at which the time-stamp counter was `began`.
pub fn time_of(batch: &Batch, began: u64, tsc: u64) -> u64 {
    let (span, since) = (batch.tsc.saturating_sub(began), tsc.saturating_sub(began));
    let ns = u128::from(batch.ns) * u128::from(since.min(span)) / u128::from(span.max(1));
    u64::try_from(ns).unwrap_or(batch.ns)
}
