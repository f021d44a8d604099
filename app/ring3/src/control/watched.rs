//! Machines that send lines for as long as somebody reads them: traces and profiles. A machine that runs is watched until the reader
//! has enough; one that is started for it, from its kernel's start to its end.

use std::{
    env,
    ffi::OsString,
    io::{self, BufRead, BufReader, BufWriter, Write},
    net::Shutdown,
    os::unix::net::UnixStream,
    process::{Child, Command},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use serde::de::DeserializeOwned;
use signal_hook::{
    consts::{SIGINT, SIGTERM},
    iterator::Signals,
};

use super::{Order, Target, client};
use crate::failure::Failure;

/// The machine's side: what is wanted is a line of the client's. `send` writes until it is told that the client has gone.
pub(super) fn serve<R: DeserializeOwned>(
    client: &UnixStream,
    send: impl FnOnce(&R, &mut BufWriter<&UnixStream>, &dyn Fn() -> bool) -> io::Result<()>,
) -> io::Result<()> {
    let mut reader = BufReader::new(client.try_clone()?);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let request = serde_json::from_str(&line)?;
    let gone = Arc::new(AtomicBool::new(false));
    let noted = Arc::clone(&gone);
    let wait = move || {
        // A client says nothing more; whatever ends this, it has gone.
        let _ = reader.read_line(&mut String::new());
        noted.store(true, Ordering::SeqCst);
    };
    thread::Builder::new().name("watcher".into()).spawn(wait)?;
    let mut writer = BufWriter::new(client);
    let served = send(&request, &mut writer, &|| gone.load(Ordering::SeqCst));
    // What was refused is told, too.
    let flushed = writer.flush();
    // The thread above waits for this.
    let _ = client.shutdown(Shutdown::Both);
    served.and(flushed)
}

/// Watches a machine that runs, or the one that `words` start; returns the exit status. `follow` is told whether there may be no
/// kernel yet.
pub(super) fn watch(
    machine: Option<&str>,
    words: &[OsString],
    purpose: &str,
    mut follow: impl FnMut(&Target, bool) -> Result<(), Failure>,
) -> Result<u8, Failure> {
    let Some(machine) = machine else { return started(words, purpose, follow) };
    follow(&Target { machine: machine.to_owned() }, false)?;
    Ok(0)
}

fn started(
    words: &[OsString],
    purpose: &str,
    mut follow: impl FnMut(&Target, bool) -> Result<(), Failure>,
) -> Result<u8, Failure> {
    let host = |error: io::Error| Failure::host(error.to_string());
    let name = format!("{purpose}-{}", std::process::id());
    let (first, rest) = words.split_first().unwrap_or((&words[0], &[]));
    let mut command = Command::new(env::current_exe().map_err(host)?);
    let mut child = command.arg(first).args(["--name", &name]).args(rest).spawn().map_err(host)?;
    let target = Target { machine: name };
    if listens(&target, &mut child)? {
        let followed = follow(&target, true);
        if followed.is_err() {
            // One that has ended by itself needs no stopping.
            let _ = client::order(&target, Order::Stop);
            child.wait().map_err(host)?;
        }
        followed?;
    }
    let status = child.wait().map_err(host)?;
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}

/// Waits until the machine can be asked; false if it has ended.
fn listens(target: &Target, child: &mut Child) -> Result<bool, Failure> {
    const BREATH: Duration = Duration::from_millis(5);
    let host = |error: io::Error| Failure::host(error.to_string());
    while client::find(target).is_err() {
        if child.try_wait().map_err(host)?.is_some() {
            return Ok(false);
        }
        thread::sleep(BREATH);
    }
    Ok(true)
}

/// Hangs up when a signal asks for an end.
pub(super) fn hang_up_on_signals(connection: UnixStream) -> io::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    let wait = move || {
        if signals.forever().next().is_some() {
            // One that has ended has hung up itself.
            let _ = connection.shutdown(Shutdown::Both);
        }
    };
    thread::Builder::new().name("signals".into()).spawn(wait).map(drop)
}
