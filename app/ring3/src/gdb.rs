//! `ring3 run --gdb`: a socket at which debuggers are served, one after the other.

use std::{
    fmt,
    io::{self, Read, Write},
    net::{SocketAddr, TcpListener},
    os::unix::net::UnixListener,
    path::{self, PathBuf},
    str::FromStr,
    sync::{Arc, Condvar, Mutex, PoisonError},
    thread,
    time::Duration,
};

use inspect::{gdb, stopped::StoppedVcpus};
use vmm::Inspector;

use crate::{failure::Failure, output, spawner};

/// Where debuggers connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GdbAddress {
    /// A Unix socket that is made.
    Unix(PathBuf),
    /// A TCP port.
    Tcp(SocketAddr),
}

impl FromStr for GdbAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("unix", path)) if !path.is_empty() => Ok(Self::Unix(path.into())),
            Some(("tcp", address)) => {
                let parsed = address.parse().map(Self::Tcp);
                parsed.map_err(|_| {
                    format!("`{address}`: not an address and a port, such as 127.0.0.1:1234")
                })
            }
            _ => Err("unix:PATH or tcp:ADDRESS:PORT is wanted".to_owned()),
        }
    }
}

impl fmt::Display for GdbAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => write!(f, "tcp:{address}"),
        }
    }
}

/// How long a debugger is waited for that is to be told of the machine's end.
const FAREWELL: Duration = Duration::from_millis(500);

/// The socket; removed when dropped, or when this process ends otherwise.
pub struct GdbListener {
    path: Option<PathBuf>,
    served: Arc<Served>,
}

impl GdbListener {
    /// The machine has ended. Debuggers that let it run are told so before this returns; one that had it stand is not waited for
    /// long.
    pub fn end(self) {
        self.served.wait();
    }
}

impl Drop for GdbListener {
    fn drop(&mut self) {
        // Whoever removed it before has done what is wanted.
        self.path.take().into_iter().for_each(|path| drop(spawner::remove(path)));
    }
}

/// Whether a debugger is being served.
#[derive(Default)]
struct Served {
    any: Mutex<bool>,
    changed: Condvar,
}

impl Served {
    fn set(&self, any: bool) {
        *self.any.lock().unwrap_or_else(PoisonError::into_inner) = any;
        self.changed.notify_all();
    }

    /// Waits until none is, or for long enough.
    fn wait(&self) {
        let any = self.any.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(any, FAREWELL, |any| *any);
        drop(waited);
    }
}

/// Serves debuggers at an address, if there is one. With `paused` the machine, which has not been started, waits for the first.
pub fn listen(
    address: Option<&GdbAddress>,
    paused: bool,
    inspector: Inspector,
) -> Result<Option<GdbListener>, Failure> {
    let Some(address) = address else { return Ok(None) };
    let wrong = |error: io::Error| Failure::usage(format!("--gdb {address}: {error}"));
    let mut stopped = paused.then(|| StoppedVcpus::new(&inspector));
    let served = Arc::new(Served::default());
    let tell = Arc::clone(&served);
    match address {
        GdbAddress::Unix(path) => {
            let listener = UnixListener::bind(path).map_err(wrong)?;
            let accept =
                move || listener.accept().and_then(|(stream, _)| Ok((stream.try_clone()?, stream)));
            start(move || serve_debuggers(accept, &inspector, &mut stopped, &tell))
                .map_err(wrong)?;
            let path = path::absolute(path).map_err(wrong)?;
            spawner::remove_at_end(path.clone());
            Ok(Some(GdbListener { path: Some(path), served }))
        }
        GdbAddress::Tcp(address) => {
            let listener = TcpListener::bind(address).map_err(wrong)?;
            let accept = move || {
                let (stream, _) = listener.accept()?;
                // A process that is shut in may not; GDB waits a little longer then.
                let _ = stream.set_nodelay(true);
                Ok((stream.try_clone()?, stream))
            };
            start(move || serve_debuggers(accept, &inspector, &mut stopped, &tell))
                .map_err(wrong)?;
            Ok(Some(GdbListener { path: None, served }))
        }
    }
}

fn start(serve_debuggers: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new().name("gdb-listener".into()).spawn(serve_debuggers).map(drop)
}

/// Until no more can come.
fn serve_debuggers<R: Read + Send + 'static, W: Write>(
    accept: impl Fn() -> io::Result<(R, W)>,
    inspector: &Inspector,
    stopped: &mut Option<StoppedVcpus>,
    tell: &Served,
) {
    loop {
        let (reader, writer) = match accept() {
            Ok(both) => both,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return output::complain(&format!("--gdb: {error}")),
        };
        tell.set(true);
        let served = gdb::serve(inspector, reader, writer, || drop(stopped.take()));
        tell.set(false);
        if let Err(problem) = served {
            output::complain(&problem.to_string());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_what_they_say_or_refused() {
        for text in ["unix:/tmp/a:b", "tcp:127.0.0.1:1234", "tcp:[::1]:1"] {
            let address: GdbAddress = text.parse().expect("an address");
            assert_eq!(address.to_string(), text);
        }
        for text in ["", "unix:", "tcp:1234", "tcp:localhost:1", "udp:127.0.0.1:1", "/tmp/x"] {
            assert!(text.parse::<GdbAddress>().is_err(), "{text}");
        }
    }
}
