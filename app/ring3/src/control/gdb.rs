//! `ring3 gdb`: GDB at a machine that runs.

use std::{
    env,
    ffi::OsString,
    io::{self, Read, Write},
    net::Shutdown,
    os::unix::{net::UnixStream, process::CommandExt},
    process::Command,
    thread,
};

use clap::Args;
use vmm::Inspector;

use super::{ControlOrder, Target, client};
use crate::failure::Failure;

/// Seconds that GDB waits for an answer before it sends everything again: on a busy host its own two are too few.
const PATIENCE: &str = "60";

/// What to debug, and how.
#[derive(Debug, Args)]
pub struct GdbArguments {
    /// Which
    #[command(flatten)]
    pub target: Target,
    /// Be the connection that GDB talks by: target remote | ring3 gdb --pipe NAME
    #[arg(long, conflicts_with = "arguments")]
    pub pipe: bool,
    /// Options of GDB, such as the kernel's vmlinux
    #[arg(last = true)]
    pub arguments: Vec<OsString>,
}

/// The machine's side.
pub(super) fn serve(inspector: &Inspector, client: &UnixStream) -> io::Result<()> {
    let (reader, writer) = (client.try_clone()?, client);
    let served = inspect::gdb::serve(inspector, reader, writer, || {});
    served.inspect_err(|problem| tracing::warn!(%problem)).map_err(io::Error::other)
}

/// `ring3 gdb`.
pub fn gdb(arguments: &GdbArguments) -> Result<u8, Failure> {
    if arguments.pipe {
        return pipe(&arguments.target);
    }
    let pid = client::find(&arguments.target)?.pid;
    let own = env::current_exe().map_err(|error| Failure::host(error.to_string()))?;
    let own = own.display().to_string().replace('\'', "'\\''");
    let connect = format!("target remote | '{own}' gdb --pipe {pid}");
    let error = Command::new("gdb")
        .args(["-l", PATIENCE, "-ex", &connect])
        .args(&arguments.arguments)
        .exec();
    Err(Failure::host(format!("gdb: {error}; its package is called gdb")))
}

/// Standard input and output are GDB's.
fn pipe(target: &Target) -> Result<u8, Failure> {
    let mut machine = client::connect(target, ControlOrder::Gdb)?;
    let host = |error: io::Error| Failure::host(format!("machine {}: {error}", target.machine));
    let to_machine = machine.get_ref().try_clone().map_err(host)?;
    let send = move || {
        // The machine's end, or GDB's, shows in what comes back.
        let _ = copy(&mut io::stdin().lock(), &mut &to_machine);
        let _ = to_machine.shutdown(Shutdown::Write);
    };
    thread::Builder::new().name("to-machine".into()).spawn(send).map_err(host)?;
    copy(&mut machine, &mut io::stdout().lock()).map_err(host)?;
    Ok(0)
}

/// Passes on what comes as soon as it comes.
fn copy(from: &mut impl Read, to: &mut impl Write) -> io::Result<()> {
    let mut buffer = [0; 4096];
    loop {
        match from.read(&mut buffer)? {
            0 => return Ok(()),
            count => to.write_all(&buffer[..count]).and_then(|()| to.flush())?,
        }
    }
}
