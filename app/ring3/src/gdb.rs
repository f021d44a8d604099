//! `ring3 run --gdb`: a socket at which debuggers are served, one after the other.

use std::{
    fmt,
    io::{self, Read, Write},
    net::{SocketAddr, TcpListener},
    os::unix::net::UnixListener,
    path::{self, PathBuf},
    str::FromStr,
    thread,
};

use inspect::{gdb, still::Still};
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

/// The socket; removed when dropped, or when this process ends otherwise.
pub struct Listener(Option<PathBuf>);

impl Drop for Listener {
    fn drop(&mut self) {
        // Whoever removed it before has done what is wanted.
        self.0.take().into_iter().for_each(|path| drop(spawner::remove(path)));
    }
}

/// Serves debuggers at an address, if there is one. With `paused` the machine, which has not been started, waits for the first.
pub fn listen(
    address: Option<&GdbAddress>,
    paused: bool,
    inspector: Inspector,
) -> Result<Option<Listener>, Failure> {
    let Some(address) = address else { return Ok(None) };
    let wrong = |error: io::Error| Failure::usage(format!("--gdb {address}: {error}"));
    let mut still = paused.then(|| Still::new(&inspector));
    match address {
        GdbAddress::Unix(path) => {
            let listener = UnixListener::bind(path).map_err(wrong)?;
            let accept =
                move || listener.accept().and_then(|(stream, _)| Ok((stream.try_clone()?, stream)));
            start(move || attend(accept, &inspector, &mut still)).map_err(wrong)?;
            let path = path::absolute(path).map_err(wrong)?;
            spawner::remove_at_end(path.clone());
            Ok(Some(Listener(Some(path))))
        }
        GdbAddress::Tcp(address) => {
            let listener = TcpListener::bind(address).map_err(wrong)?;
            let accept = move || {
                let (stream, _) = listener.accept()?;
                // A process that is shut in may not; GDB waits a little longer then.
                let _ = stream.set_nodelay(true);
                Ok((stream.try_clone()?, stream))
            };
            start(move || attend(accept, &inspector, &mut still)).map_err(wrong)?;
            Ok(Some(Listener(None)))
        }
    }
}

fn start(attend: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new().name("gdb-listener".into()).spawn(attend).map(drop)
}

/// Until no more can come.
fn attend<R: Read + Send + 'static, W: Write>(
    accept: impl Fn() -> io::Result<(R, W)>,
    inspector: &Inspector,
    still: &mut Option<Still>,
) {
    loop {
        let (reader, writer) = match accept() {
            Ok(both) => both,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return output::complain(&format!("--gdb: {error}")),
        };
        let served = gdb::serve(inspector, reader, writer, || drop(still.take()));
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
