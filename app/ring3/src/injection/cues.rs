//! Cues that the guest's own code gives: its kernel comes to a function, or a program makes a system call. The vCPU stands there until
//! the fault has struck.

use std::{
    collections::BTreeMap,
    io::{self, Write},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
        mpsc::{Sender, SyncSender, sync_channel},
    },
    thread,
    time::Duration,
};

use faults::Cue;
use inspect::trace::{self, Line, Orders, Request, TraceOutput};
use ring3_trace::Stops;
use vmm::Inspector;

use super::{conductor::Message, lock};
use crate::output;

/// How long a vCPU stands for a fault at the most.
const STANDS: Duration = Duration::from_secs(5);

/// Waits for these, in a thread of its own.
///
/// # Errors
/// The host gives no thread.
pub fn watch(
    inspector: &Inspector,
    cues: impl Iterator<Item = Cue>,
    news: Sender<Message>,
) -> io::Result<()> {
    let awaited: BTreeMap<(String, String), Cue> = cues.filter_map(keyed).collect();
    if awaited.is_empty() {
        return Ok(());
    }
    let inspector = inspector.clone();
    let run = move || {
        // It is over when all cues have come, or with the machine.
        let _ = wait(&inspector, awaited, news);
    };
    thread::Builder::new().name("cues".into()).spawn(run).map(drop)
}

/// A cue by what a trace calls its event.
fn keyed(cue: Cue) -> Option<((String, String), Cue)> {
    let key = match &cue {
        Cue::Reached(function) => ("break".to_owned(), function.clone()),
        Cue::Calls(call) => ("syscall".to_owned(), trace::call_name(call).to_owned()),
        Cue::Console(_) | Cue::Follows(_) => return None,
    };
    Some((key, cue))
}

fn wait(
    inspector: &Inspector,
    awaited: BTreeMap<(String, String), Cue>,
    news: Sender<Message>,
) -> io::Result<()> {
    let events = awaited.keys().map(|(kind, name)| format!("{kind}:{name}")).collect();
    let request = Request { events, stops: Stops::Entry, wait: true, ..Request::default() };
    let left = Arc::new(AtomicUsize::new(awaited.len()));
    let orders = Arc::new(Mutex::new(None));
    let told = Told {
        awaited,
        left: Arc::clone(&left),
        orders: Arc::clone(&orders),
        news,
        line: Vec::new(),
    };
    let obeys = |found: Orders| *lock(&orders) = Some(found);
    let over = || left.load(Ordering::SeqCst) == 0;
    trace::serve(inspector, &request, &Mutex::new(told), obeys, over)
}

/// What the trace writes.
struct Told {
    awaited: BTreeMap<(String, String), Cue>,
    left: Arc<AtomicUsize>,
    orders: Arc<Mutex<Option<Orders>>>,
    news: Sender<Message>,
    line: Vec<u8>,
}

impl Write for Told {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for byte in bytes {
            match byte {
                b'\n' => self.hear(),
                byte => self.line.push(*byte),
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl TraceOutput for Told {}

impl Told {
    /// A line of the trace: a vCPU stands at what was waited for, until it is told to go.
    fn hear(&mut self) {
        let line = serde_json::from_slice(&std::mem::take(&mut self.line));
        match line {
            Ok(Line::Event(event)) => {
                if let Some(cue) = self.awaited.remove(&(event.kind, event.name)) {
                    self.pass(event.vcpu, cue);
                    self.left.store(self.awaited.len(), Ordering::SeqCst);
                }
                if let Some(orders) = &*lock(&self.orders) {
                    // One that stands no more goes already.
                    let _ = orders.obey(&format!("{{\"go\": {{\"vcpu\": {}}}}}", event.vcpu));
                }
            }
            Ok(Line::Error(problem)) => {
                output::complain(&format!("--fault: {problem}: what waits for it never strikes"));
            }
            _ => {}
        }
    }

    /// Waits until what the cue is for has struck.
    fn pass(&self, vcpu: usize, cue: Cue) {
        let (done, struck): (SyncSender<()>, _) = sync_channel(1);
        if self.news.send(Message::Came { cue, vcpu, done }).is_ok() {
            // Whatever comes of it, the vCPU goes on.
            let _ = struck.recv_timeout(STANDS);
        }
    }
}
