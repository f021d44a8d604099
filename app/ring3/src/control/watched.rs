//! Machines that send lines for as long as somebody reads them: traces and profiles. A machine that runs is watched until the reader
//! has enough; one that is started for it, from its kernel's start to its end.

use std::{
    env,
    ffi::OsString,
    fs::File,
    io::{self, BufRead, BufReader, BufWriter, Read, Write},
    net::Shutdown,
    os::unix::net::UnixStream,
    path::Path,
    process::{Child, Command},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use serde::{Serialize, de::DeserializeOwned};
use signal_hook::{
    consts::{SIGINT, SIGTERM},
    iterator::Signals,
};

use super::{ControlOrder, Target, client};
use crate::failure::Failure;

/// Bytes of a client's line, at the most.
const MOST_LINE: u64 = 4096;

/// The machine's side: what is wanted is a line of the client's. `send` writes until it is told that the client has gone.
pub(super) fn serve<R: DeserializeOwned>(
    client: &UnixStream,
    send: impl FnOnce(&R, &mut BufWriter<&UnixStream>, &dyn Fn() -> bool) -> io::Result<()>,
) -> io::Result<()> {
    let mut reader = BufReader::new(client.try_clone()?);
    let mut line = String::new();
    reader.by_ref().take(MOST_LINE).read_line(&mut line)?;
    let request = serde_json::from_str(&line)?;
    let gone = Arc::new(AtomicBool::new(false));
    let noted = Arc::clone(&gone);
    let wait = move || {
        // A client says nothing more; whatever ends this, it has gone.
        let _ = reader.read(&mut [0]);
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

/// Where what was seen goes: to a file, or to standard output, or to standard error if a machine started here has that.
pub(super) fn output(
    path: Option<&Path>,
    machine: Option<&str>,
) -> Result<Box<dyn Write>, Failure> {
    Ok(match path {
        Some(path) => {
            let wrong = |error| Failure::usage(format!("--output {}: {error}", path.display()));
            Box::new(BufWriter::new(File::create(path).map_err(wrong)?))
        }
        None if machine.is_some() => Box::new(io::stdout()),
        None => Box::new(io::stderr()),
    })
}

/// Gives a machine an order and says what is wanted; its lines can be read then. A machine that ran already is left when a signal asks
/// for an end; one that was `started` for this ends by itself.
pub(super) fn ask(
    target: &Target,
    order: ControlOrder,
    request: &impl Serialize,
    started: bool,
) -> Result<BufReader<UnixStream>, Failure> {
    let host = |error: io::Error| Failure::host(format!("machine {}: {error}", target.machine));
    let mut machine = client::connect(target, order)?;
    let line = serde_json::to_string(request).map_err(|error| Failure::host(error.to_string()))?;
    machine.get_mut().write_all(format!("{line}\n").as_bytes()).map_err(host)?;
    if !started {
        hang_up_on_signals(machine.get_ref().try_clone().map_err(host)?).map_err(host)?;
    }
    Ok(machine)
}

/// Hands on each line that a machine sends, until it ends or one is cut off.
pub(super) fn each_line<L: DeserializeOwned>(
    machine: &mut BufReader<UnixStream>,
    mut take: impl FnMut(L) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let mut line = String::new();
    loop {
        line.clear();
        // The connection ends with the machine.
        if machine.read_line(&mut line).unwrap_or(0) == 0 {
            return Ok(());
        }
        let Ok(line) = serde_json::from_str(&line) else { return Ok(()) };
        take(line)?;
    }
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
    let mut child =
        command.arg(first).args(["--watched", "--name", &name]).args(rest).spawn().map_err(host)?;
    let target = Target { machine: name };
    if listens(&target, &mut child)? {
        let followed = follow(&target, true);
        if followed.is_err() {
            // One that has ended by itself needs no stopping.
            let _ = client::order(&target, ControlOrder::Stop);
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

/// Says that no more is wanted when a signal asks for an end; what has happened so far still comes. Hangs up at the next signal.
fn hang_up_on_signals(connection: UnixStream) -> io::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    let wait = move || {
        for (_, how) in signals.forever().zip([Shutdown::Write, Shutdown::Both]) {
            // One that has ended has hung up itself.
            let _ = connection.shutdown(how);
        }
    };
    thread::Builder::new().name("signals".into()).spawn(wait).map(drop)
}
