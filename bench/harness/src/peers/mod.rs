//! The environments the guest program can run in.
//!
//! Each says how to start it, with the program's lines on standard input and output. What is not
//! on the machine is missing, with the reason and what to do; nothing stands in for it.

mod foreign;
mod gvisor;
mod native;
mod qemu;
mod ring3;
mod uml;

pub use foreign::loaded;
use std::{fmt, fs, net::TcpListener, path::PathBuf, process::Command};

use crate::{
    Error,
    record::{Missing, NATIVE},
};

/// Kernel command line of every machine. The timer check would take a busy host for a broken
/// timer.
const APPEND: &str = "quiet loglevel=1 panic=-1 no_timer_check";
/// Memory of a machine, in MiB; of one of many, the second.
const MEMORY: [u32; 2] = [1024, 128];
/// Where a server inside a machine listens.
const SERVER: u16 = 8080;
/// Size in bytes of the disk that rows write to.
const SCRATCH: u64 = 128 << 20;

/// What an environment is started for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// To take orders.
    Serve,
    /// The same with two CPUs, where it can have them, without a network and a disk to write to.
    ServeOnTwo,
    /// To run a command that does nothing, and end.
    Once,
    /// To take orders, as one of many: with less memory, and no devices but a console.
    Density,
}

impl Work {
    /// Which of all disks a machine gets for this work. If there is a disk of programs, it is the first of `all`.
    fn disks(self, all: &[String], has_programs: bool) -> &[String] {
        match self {
            Self::Serve => all,
            Self::ServeOnTwo => &all[..usize::from(has_programs)],
            Self::Once | Self::Density => &[],
        }
    }
}

/// What environments are made of.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The guest program, static.
    pub program: PathBuf,
    /// A static busybox, for rows that start a shell.
    pub busybox: PathBuf,
    /// The kernel that machines boot.
    pub kernel: PathBuf,
    /// A root file system with the program as its `/init`, and busybox.
    pub initrd: PathBuf,
    /// Other programs, for rows that run them.
    pub userland: Option<Userland>,
    /// Where the newest QEMU and UML are unpacked, if they are to be measured too.
    pub newest: Option<PathBuf>,
    /// Further words of every machine's kernel command line.
    pub append: String,
    /// The ring3 to measure, or several of them.
    pub ring3: Vec<Ring3>,
}

/// Debian programs in a root directory of their own.
#[derive(Clone, Debug)]
pub struct Userland {
    /// As a directory of the host.
    pub directory: PathBuf,
    /// As an ext4 image, which machines have as their first disk, read-only.
    pub image: PathBuf,
}

/// A ring3 to measure.
#[derive(Clone, Debug)]
pub struct Ring3 {
    /// What its environments' names end in; empty or `@REVISION`.
    pub suffix: String,
    /// The program.
    pub program: PathBuf,
}

/// A port of the host that is forwarded to a server in the guest.
#[derive(Clone, Copy, Debug)]
pub struct PortForward {
    /// The port that the server listens on.
    pub guest: u16,
    /// The port of the host's loopback.
    pub host: u16,
}

/// An environment that can be started.
pub struct Peer {
    name: String,
    version: String,
    forward: Option<PortForward>,
    all_cpus: bool,
    command: Box<dyn Fn(Work) -> Command>,
}

impl Peer {
    pub(crate) fn new(
        name: impl Into<String>,
        version: impl Into<String>,
        command: impl Fn(Work) -> Command + 'static,
    ) -> Self {
        let (name, version, command) = (name.into(), version.into(), Box::new(command));
        Self { name, version, forward: None, all_cpus: false, command }
    }

    fn with_forward(self, forward: Option<PortForward>) -> Self {
        Self { forward, ..self }
    }

    /// It is no machine with one CPU, but runs programs on all of the host's.
    fn with_all_cpus(self) -> Self {
        Self { all_cpus: true, ..self }
    }

    /// Whether programs in it have more than one CPU.
    pub(crate) fn has_all_cpus(&self) -> bool {
        self.all_cpus
    }

    /// How the host reaches a server in it; `None` if it has no network.
    pub fn forward(&self) -> Option<PortForward> {
        self.forward
    }

    /// As on the command line.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it says its version is.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// The command that starts it.
    pub fn command(&self, work: Work) -> Command {
        (self.command)(work)
    }
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name, self.version)
    }
}

/// An environment, or why there is none.
pub type PeerResult = Result<Peer, Missing>;

/// Families of environments. A family's name stands for all of its members.
type Family = (&'static str, fn(&Setup) -> Vec<PeerResult>);
const FAMILIES: [Family; 5] = [
    (NATIVE, native::find),
    ("ring3", ring3::find),
    ("qemu", qemu::find),
    ("uml", uml::find),
    ("gvisor", gvisor::find),
];

/// The engine that ring3 uses unless told otherwise, with both of its borders between programs and kernel; the others are measured
/// on request.
const USUAL: [&str; 2] = ["ring3:fast", "ring3:strict"];

/// Finds the environments named (`ring3`, `ring3:direct`, `qemu`), or all if none is, but of ring3's
/// engines only the usual one; native is always first.
///
/// # Errors
/// A name means nothing.
pub fn find(names: &[String], setup: &Setup) -> Result<Vec<PeerResult>, Error> {
    let mut found = native::find(setup);
    for (family, members) in FAMILIES.iter().skip(1) {
        let wanted = |name: &str| {
            let stem = name.split('@').next().unwrap_or(name);
            let usual = *family != "ring3" || USUAL.contains(&stem);
            let named = names.iter().any(|wanted| wanted == family || wanted == stem);
            named || names.is_empty() && usual
        };
        let of_family = |name: &&String| name.split(':').next() == Some(family);
        if names.is_empty() || names.iter().any(|name| of_family(&name)) {
            found.extend(members(setup).into_iter().filter(|member| wanted(name_of(member))));
        }
    }
    match names.iter().find(|name| !is_known(name, &found)) {
        None => Ok(found),
        Some(name) => Err(unknown(name, setup)),
    }
}

fn name_of(found: &PeerResult) -> &str {
    match found {
        Ok(peer) => &peer.name,
        Err(missing) => &missing.name,
    }
}

fn is_known(name: &str, found: &[PeerResult]) -> bool {
    let families = FAMILIES.iter().any(|(family, _)| *family == name);
    families || found.iter().any(|found| name_of(found).split('@').next() == Some(name))
}

fn unknown(name: &str, setup: &Setup) -> Error {
    let members = FAMILIES.iter().flat_map(|(_, members)| members(setup));
    let mut known: Vec<_> = FAMILIES.iter().map(|(family, _)| (*family).to_owned()).collect();
    known.extend(members.map(|member| name_of(&member).to_owned()));
    known.sort();
    known.dedup();
    Error::Unknown { kind: "environment", name: name.to_owned(), known: known.join(", ") }
}

/// A port of the host's loopback that nobody listens on.
fn free_port() -> Option<u16> {
    Some(TcpListener::bind(("127.0.0.1", 0)).ok()?.local_addr().ok()?.port())
}

/// The memory of a machine for this work, in MiB.
fn memory(work: Work) -> u32 {
    MEMORY[usize::from(work == Work::Density)]
}

fn missing(name: &str, why: impl Into<String>) -> PeerResult {
    Err(Missing { name: name.to_owned(), why: why.into() })
}

/// The first line a program prints about itself; `None` if it cannot be run.
fn version_of(command: &mut Command) -> Option<String> {
    let output = command.output().ok().filter(|output| output.status.success())?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Some(text.lines().next().unwrap_or_default().trim().to_owned())
}

impl Setup {
    /// The disk that machines have, if any.
    fn disk(&self) -> Option<PathBuf> {
        Some(self.userland.as_ref()?.image.clone())
    }

    /// The disk that rows write to, new and empty, if other programs are to be run. It is as fast as
    /// the host's cache of it.
    fn scratch_disk(&self, peer: &str) -> Option<PathBuf> {
        self.userland.as_ref()?;
        let path = self.initrd.with_file_name(format!("disk-{}.raw", peer.replace(':', "-")));
        let made = fs::File::create(&path).and_then(|file| file.set_len(SCRATCH));
        made.is_ok().then_some(path)
    }

    /// The port forward to a server of a machine that has a network, if other programs are to be run.
    fn forward(&self) -> Option<PortForward> {
        self.userland.as_ref()?;
        Some(PortForward { guest: SERVER, host: free_port()? })
    }

    /// The variable that tells the guest program where other programs are, where it runs on the
    /// host's files.
    fn variable(&self) -> Option<String> {
        let directory = self.userland.as_ref()?.directory.display();
        Some(format!("BENCH_USERLAND={directory}"))
    }

    /// The kernel command line; `console` is the option that names it.
    fn append(&self, console: &str) -> impl Fn(Work) -> String + 'static {
        let words = format!("{console} {APPEND} {}", self.append);
        move |work| format!("{words}{}", if work == Work::Once { " -- once" } else { "" })
    }
}
