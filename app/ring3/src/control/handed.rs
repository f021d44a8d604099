//! Connections that are for more than a line: after the answer they carry a dump, a debugger's packets, the events of a trace, or samples.

use std::{
    io,
    os::unix::net::UnixStream,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use inspect::stopped::StoppedVcpus;
use vmm::Inspector;

use super::{ControlOrder, Request, dump, gdb, perf_map, profile, top, trace};

/// Connections that tell what the machine does until it ends, and then what they have not told so far.
static TELLING: (Mutex<usize>, Condvar) = (Mutex::new(0), Condvar::new());

/// One of them.
struct Telling;

impl Telling {
    fn begin() -> Self {
        *count() += 1;
        Self
    }
}

impl Drop for Telling {
    fn drop(&mut self) {
        *count() -= 1;
        TELLING.1.notify_all();
    }
}

fn count() -> MutexGuard<'static, usize> {
    TELLING.0.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The machine has ended: waits until all has been told, but no longer than this.
pub fn finish_telling(patience: Duration) {
    // Whoever does not read in this time does not hear the rest.
    drop(TELLING.1.wait_timeout_while(count(), patience, |count| *count != 0));
}

/// Who takes such connections; nobody, where there is no machine to look into.
#[derive(Clone, Default)]
pub struct Hand {
    inspector: Option<Inspector>,
    /// The machine stands until somebody watches it.
    stands: Arc<Mutex<Option<StoppedVcpus>>>,
}

impl Hand {
    /// Takes them for a machine. One that is `watched` from its start on does not begin before its watcher is there.
    pub fn new(inspector: Inspector, watched: bool) -> Self {
        let stands = Arc::new(Mutex::new(watched.then(|| StoppedVcpus::new(&inspector))));
        Self { inspector: Some(inspector), stands }
    }

    /// Carries on with a connection until it ends.
    pub(super) fn take(&self, order: ControlOrder, client: &UnixStream) -> io::Result<()> {
        let Some(inspector) = &self.inspector else { return Ok(()) };
        client.set_read_timeout(None)?;
        match order {
            ControlOrder::Dump => dump::send(inspector, client),
            ControlOrder::Gdb => gdb::serve(inspector, client),
            ControlOrder::Code => perf_map::send(inspector, client),
            ControlOrder::Trace | ControlOrder::Top | ControlOrder::Profile => {
                let _telling = Telling::begin();
                self.stands.lock().unwrap_or_else(PoisonError::into_inner).take();
                match order {
                    ControlOrder::Trace => trace::serve(inspector, client),
                    ControlOrder::Top => top::serve(inspector, client),
                    _ => profile::serve(inspector, client),
                }
            }
            _ => Ok(()),
        }
    }
}

/// What a line asks for, if the connection is to carry something else behind it.
pub(super) fn order_of(line: &str) -> Option<ControlOrder> {
    let request: Request = serde_json::from_str(line).ok()?;
    let Request { command } = request;
    let lines = matches!(command, ControlOrder::Trace | ControlOrder::Profile | ControlOrder::Top);
    (lines || matches!(command, ControlOrder::Dump | ControlOrder::Gdb | ControlOrder::Code))
        .then_some(command)
}
