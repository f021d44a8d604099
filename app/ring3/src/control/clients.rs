//! The clients of a socket. Each has a thread, because any of them may be slow, or silent for ever. There are never more than so many
//! of them, and when the host has no descriptors left we wait for some instead of asking again and again.

use std::{
    io::{self, ErrorKind},
    net::Shutdown,
    os::unix::net::{UnixListener, UnixStream},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

/// How long to wait when the host has no thread or descriptor for a client.
const BREATH: Duration = Duration::from_millis(100);

/// Which client is disconnected when one more connects than the limit allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leaves {
    /// The oldest connection: a request takes a moment only.
    Oldest,
    /// The new connection: the older ones are in use.
    Newest,
}

/// How many clients a socket serves, and which is disconnected when one more connects.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClientLimit {
    pub name: &'static str,
    pub most: usize,
    pub leaves: Leaves,
}

struct Clients {
    limit: ClientLimit,
    state: Mutex<State>,
    gone: Condvar,
}

#[derive(Default)]
struct State {
    /// In the order they came, with a number each.
    clients: Vec<(u64, UnixStream)>,
    next: u64,
    /// Threads there are: those of clients that were told to leave may take a moment.
    threads: usize,
}

/// Has every client that comes to `listener` served, each by a thread; does not return.
pub(super) fn serve_all(
    listener: &UnixListener,
    limit: ClientLimit,
    serve: impl Fn(&UnixStream) + Clone + Send + 'static,
) {
    let (state, gone) = Default::default();
    let clients = Arc::new(Clients { limit, state, gone });
    loop {
        clients.accepted(listener.accept().map(|(client, _)| client), &serve);
    }
}

impl Clients {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What came of waiting for a client. Where the host has none for us to take we wait: asked again it would say the same at once.
    fn accepted(
        self: &Arc<Self>,
        client: io::Result<UnixStream>,
        serve: &(impl Fn(&UnixStream) + Clone + Send + 'static),
    ) {
        match client {
            Ok(client) => self.take(client, serve.clone()),
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::Interrupted | ErrorKind::ConnectionAborted
                ) => {}
            Err(_) => thread::sleep(BREATH),
        }
    }

    fn take(self: &Arc<Self>, client: UnixStream, serve: impl Fn(&UnixStream) + Send + 'static) {
        let Some(number) = client.try_clone().ok().and_then(|copy| self.enter(copy)) else {
            return;
        };
        let clients = Arc::clone(self);
        let serve = move || {
            serve(&client);
            clients.leave(number);
        };
        if thread::Builder::new().name(self.limit.name.into()).spawn(serve).is_err() {
            self.leave(number);
            thread::sleep(BREATH);
        }
    }

    /// The number of a new client. At the limit it is refused, or the oldest client disconnected.
    fn enter(&self, client: UnixStream) -> Option<u64> {
        let ClientLimit { most, leaves, .. } = self.limit;
        let full = |state: &mut State| state.threads >= 2 * most;
        let state = self.gone.wait_while(self.lock(), full);
        let mut state = state.unwrap_or_else(PoisonError::into_inner);
        if state.clients.len() >= most {
            if leaves == Leaves::Newest {
                return None;
            }
            let (_, oldest) = state.clients.remove(0);
            // One that has left already needs no hanging up.
            let _ = oldest.shutdown(Shutdown::Both);
        }
        state.next += 1;
        let number = state.next;
        state.clients.push((number, client));
        state.threads += 1;
        Some(number)
    }

    fn leave(&self, number: u64) {
        let mut state = self.lock();
        state.clients.retain(|(known, _)| *known != number);
        state.threads -= 1;
        self.gone.notify_one();
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::{fs, io::Write, path::Path, time::Instant};

    use super::*;

    /// How long anything may take here.
    const AGES: Duration = Duration::from_secs(20);

    #[test]
    fn a_listener_without_descriptors_waits_for_some() {
        let limit = ClientLimit { name: "none", most: 1, leaves: Leaves::Oldest };
        let (state, gone) = Default::default();
        let clients = Arc::new(Clients { limit, state, gone });
        let start = Instant::now();
        for _ in 0..3 {
            let none_left = io::Error::from_raw_os_error(rustix::io::Errno::MFILE.raw_os_error());
            clients.accepted(Err(none_left), &|_| ());
        }
        assert!(start.elapsed() >= 3 * BREATH, "{:?}", start.elapsed());
        clients.accepted(Err(ErrorKind::Interrupted.into()), &|_| ());
    }

    /// Threads of this process with this name.
    pub fn threads(name: &str) -> usize {
        let tasks = fs::read_dir("/proc/self/task").expect("listed").flatten();
        let names = tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
        names.filter(|known| known.trim() == name).count()
    }

    fn descriptors() -> usize {
        fs::read_dir("/proc/self/fd").expect("listed").count()
    }

    /// Comes a thousand times to the socket, each time to say another nonsense or nothing, and stays for a while; all the while
    /// `asks` has to succeed, and nothing may be left of all this.
    pub fn besiege(path: &Path, name: &str, asks: impl Fn()) {
        let (before, mut staying) = (descriptors(), Vec::new());
        for round in 0..1000_usize {
            let client = UnixStream::connect(path).expect("connected");
            let words = ["", "{", "{\"command\": \"status\"}", "nonsense\n", "{}\n\n\n"];
            let long = "x".repeat(100_000);
            let words = words.get(round % 7).copied().unwrap_or(&long);
            client.set_nonblocking(true).expect("set");
            // It may have been told to leave.
            let _ = (&client).write(words.as_bytes());
            if round % 3 != 0 {
                staying.push(client);
            }
            if staying.len() > 200 {
                staying.drain(..150);
            }
            if round % 50 == 0 {
                asks();
            }
        }
        drop(staying);
        let start = Instant::now();
        // Other tests of this process have descriptors, too, but not hundreds.
        while threads(name) > 0 || descriptors() > before + 50 {
            assert!(
                start.elapsed() < AGES,
                "{} threads, {} descriptors",
                threads(name),
                descriptors()
            );
            thread::sleep(Duration::from_millis(10));
        }
    }
}
