//! Connections that are for more than a line: after the answer they carry a dump, a debugger's packets, the events of a trace, or samples.

use std::{
    io,
    os::unix::net::UnixStream,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use inspect::still::Still;
use vmm::Inspector;

use super::{Order, Request, dump, gdb, profile, top, trace};

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
    stands: Arc<Mutex<Option<Still>>>,
}

impl Hand {
    /// Takes them for a machine. One that is `watched` from its start on does not begin before its watcher is there.
    pub fn new(inspector: Inspector, watched: bool) -> Self {
        let stands = Arc::new(Mutex::new(watched.then(|| Still::new(&inspector))));
        Self { inspector: Some(inspector), stands }
    }

    /// Carries on with a connection until it ends.
    pub(super) fn take(&self, order: Order, client: &UnixStream) -> io::Result<()> {
        let Some(inspector) = &self.inspector else { return Ok(()) };
        client.set_read_timeout(None)?;
        match order {
            Order::Dump => dump::send(inspector, client),
            Order::Gdb => gdb::serve(inspector, client),
            Order::Trace | Order::Top | Order::Profile => {
                let _telling = Telling::begin();
                self.stands.lock().unwrap_or_else(PoisonError::into_inner).take();
                match order {
                    Order::Trace => trace::serve(inspector, client),
                    Order::Top => top::serve(inspector, client),
                    _ => profile::serve(inspector, client),
                }
            }
            _ => Ok(()),
        }
    }
}

/// What a line asks for, if the connection is to carry something else behind it.
pub(super) fn order_of(line: &str) -> Option<Order> {
    let request: Request = serde_json::from_str(line).ok()?;
    let Request { command } = request;
    let lines = matches!(command, Order::Trace | Order::Profile | Order::Top);
    (lines || matches!(command, Order::Dump | Order::Gdb)).then_some(command)
}
