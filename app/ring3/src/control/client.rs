//! The user's side: `ring3 ps`, `stop`, `pause`, `resume`.

use std::{
    fs,
    io::{self, BufRead, BufReader, Write},
    os::unix::net::UnixStream,
    path::Path,
    time::Duration,
};

use clap::Args;

use super::{ControlOrder, Reply, Request, Stats, Status, folder};
use crate::{failure::Failure, output};

const PATIENCE: Duration = Duration::from_secs(6);

/// What to list.
#[derive(Debug, Args)]
pub struct PsArguments {
    /// Print JSON, one object a line
    #[arg(long)]
    pub json: bool,
}

/// A machine.
#[derive(Debug, Args)]
pub struct Target {
    /// Its name, or the number of its process
    pub machine: String,
}

/// A machine whose use of the host is asked for.
#[derive(Debug, Args)]
pub struct StatsArguments {
    /// Which
    #[command(flatten)]
    pub target: Target,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// `ring3 stats`.
pub fn stats(arguments: &StatsArguments) -> Result<u8, Failure> {
    let status = tell(find(&arguments.target)?.pid, ControlOrder::Stats)?;
    if arguments.json {
        let line = serde_json::to_string(&status);
        return output::print(&(line.map_err(|error| Failure::host(error.to_string()))? + "\n"));
    }
    let Stats { processes, cpu_seconds, memory_used } = status.stats.ok_or_else(|| {
        Failure::host(format!("machine {}: it is of a ring3 without `stats`", status.name))
    })?;
    let Status { name, seconds, memory, .. } = status;
    output::print(&format!(
        "{name}: {cpu_seconds:.1} s of CPU time in {seconds:.1} s, by {processes} processes\n\
         {name}: {} MiB of memory; the guest has {} MiB\n",
        memory_used >> 20,
        memory >> 20
    ))
}

/// `ring3 ps`.
pub fn ps(arguments: &PsArguments) -> Result<u8, Failure> {
    let machines = machines()?;
    if arguments.json {
        let lines = machines.iter().filter_map(|machine| serde_json::to_string(machine).ok());
        return output::print(&lines.map(|line| line + "\n").collect::<String>());
    }
    let [name, pid, state, seconds, memory] = ["NAME", "PID", "STATE", "SECONDS", "MEMORY"];
    let head = format!("{name:<16}{pid:<9}{state:<10}{seconds:>10}{memory:>10}  KERNEL\n");
    let line = |machine: &Status| {
        let Status { name, pid, state, seconds, memory, kernel, .. } = machine;
        format!("{name:<16}{pid:<9}{state:<10}{seconds:>10.0}{:>9}M  {kernel}\n", memory >> 20)
    };
    output::print(&(head + &machines.iter().map(line).collect::<String>()))
}

/// Gives the machine an order.
pub fn order(target: &Target, order: ControlOrder) -> Result<u8, Failure> {
    tell(find(target)?.pid, order).map(|_| 0)
}

/// The machine that is meant.
pub(super) fn find(target: &Target) -> Result<Status, Failure> {
    let wanted = &target.machine;
    let named = |machine: &Status| machine.name == *wanted || machine.pid.to_string() == *wanted;
    let mut found: Vec<_> = machines()?.into_iter().filter(named).collect();
    match (found.pop(), found.is_empty()) {
        (None, _) => {
            Err(Failure::usage(format!("no machine is called {wanted}; `ring3 ps` lists them")))
        }
        (Some(machine), true) => Ok(machine),
        _ => Err(Failure::usage(format!("{wanted} is the name of several; give a process number"))),
    }
}

fn tell(pid: u32, order: ControlOrder) -> Result<Status, Failure> {
    let host = |error: io::Error| Failure::host(format!("machine {pid}: {error}"));
    ask(&folder().map_err(host)?.join(format!("{pid}.sock")), order).map_err(host)
}

/// All machines of this user that answer. Sockets nobody listens on any more are removed.
fn machines() -> Result<Vec<Status>, Failure> {
    let host = |error: io::Error| Failure::host(format!("control sockets: {error}"));
    let mut machines = Vec::new();
    for entry in fs::read_dir(folder().map_err(host)?).map_err(host)?.flatten() {
        if entry.path().extension().is_none_or(|extension| extension != "sock") {
            continue;
        }
        match ask(&entry.path(), ControlOrder::Status) {
            Ok(status) => machines.push(status),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                // Whoever else removes them does the same.
                let _ = fs::remove_file(entry.path());
                let _ = fs::remove_file(entry.path().with_extension("console"));
            }
            // It ends just now.
            Err(_) => {}
        }
    }
    machines.sort_by_key(|machine| machine.pid);
    Ok(machines)
}

/// Gives the machine an order after which the connection carries something else; what it carries can be read on.
pub(super) fn connect(
    target: &Target,
    order: ControlOrder,
) -> Result<BufReader<UnixStream>, Failure> {
    let pid = find(target)?.pid;
    let host = |error: io::Error| Failure::host(format!("machine {pid}: {error}"));
    let socket = folder().map_err(host)?.join(format!("{pid}.sock"));
    let (_, reader) = converse(&socket, order).map_err(host)?;
    reader.get_ref().set_read_timeout(None).map_err(host)?;
    Ok(reader)
}

fn ask(socket: &Path, order: ControlOrder) -> io::Result<Status> {
    converse(socket, order).map(|(status, _)| status)
}

fn converse(socket: &Path, order: ControlOrder) -> io::Result<(Status, BufReader<UnixStream>)> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut request = serde_json::to_string(&Request { command: order })?;
    request.push('\n');
    stream.write_all(request.as_bytes())?;
    let mut line = String::new();
    let mut reader = BufReader::new(stream);
    reader.read_line(&mut line)?;
    match serde_json::from_str(&line)? {
        Reply::Status(status) => Ok((status, reader)),
        Reply::Error { error } => Err(io::Error::other(error)),
    }
}
