//! `ring3 device`: the process of one device.
//!
//! The monitor starts this program anew (`servers`) with a socket as its standard input and a pipe as its standard output. The device opens
//! what it serves, shuts itself in, says in one line on the pipe what it is, and serves until the monitor hangs up. It dies
//! with the monitor however that dies. It has no other descriptor than these and standard error, and of the environment what says
//! how to report.

use std::{
    io,
    os::{fd::AsFd, unix::net::UnixStream},
    path::PathBuf,
    sync::Arc,
};

use clap::{Args, Subcommand};
use host_linux::{process, user};
use sharedfs::{Folder, Keeping};
use vhost_user::{Bell, Identity, Served, introduce, jail, sandbox};
use virtio::{NET_RECEIVE, VirtioDevice};

use crate::{
    disk::DiskArgument,
    failure::Failure,
    injection::Faults,
    known_blocks,
    net::{self, NetArgument},
    servers::ANSWER,
    share,
};

/// A device to serve.
#[derive(Debug, Args)]
pub struct DeviceArguments {
    /// Which.
    #[command(subcommand)]
    pub kind: ServerKind,
}

/// The jobs of processes that the monitor starts.
#[derive(Debug, Subcommand)]
pub enum ServerKind {
    /// Serves a device.
    #[command(flatten)]
    Device(DeviceKind),
    /// Translates the blocks of a kernel's code that its standard input tells of, for later machines
    KernelBlocks {
        /// For machines of several vCPUs
        #[arg(long)]
        several: bool,
        /// The file to write
        path: PathBuf,
    },
}

/// Which device.
#[derive(Debug, Subcommand)]
pub enum DeviceKind {
    /// A disk
    Disk {
        /// Faults to inject: a scenario's text
        #[arg(long)]
        fault: Option<String>,
        /// So many queues
        #[arg(long, default_value_t = 1)]
        queues: u16,
        /// Its place among the machine's disks
        index: usize,
        /// As `ring3 run --disk` has it
        disk: DiskArgument,
    },
    /// A folder
    Share {
        /// So many request queues
        #[arg(long, default_value_t = 1)]
        queues: u16,
        /// What the guest mounts it by
        tag: String,
        /// Not to be changed
        #[arg(long)]
        readonly: bool,
        /// Asked for anew after a second
        #[arg(long, conflicts_with = "lasting")]
        fresh: bool,
        /// Relied on for as long as the guest runs
        #[arg(long)]
        lasting: bool,
        /// May get device nodes and programs with rights of their own
        #[arg(long)]
        privileged: bool,
        /// The folder
        folder: PathBuf,
    },
    /// A network interface
    Net {
        /// Its address
        #[arg(long)]
        mac: String,
        /// So many pairs of queues
        #[arg(long, default_value_t = 1)]
        pairs: u16,
        /// Faults to inject: a scenario's text
        #[arg(long)]
        fault: Option<String>,
        /// Its place among the machine's networks
        index: usize,
        /// As `ring3 run --net` has it
        net: NetArgument,
    },
}

/// What a device's process begins with once it can do nothing else.
type Start = Box<dyn FnOnce() -> Result<(Box<dyn VirtioDevice>, Option<Bell>), Failure>>;

/// A device with what it serves open, before its process is shut in.
pub struct Opened {
    served: Served,
    start: Start,
}

/// A device's body in a process that is shut in.
pub struct Body {
    device: Box<dyn VirtioDevice>,
    bell: Option<Bell>,
}

impl Opened {
    /// Shuts this process in with what the body needs; `otherwise` says what to do where that fails. It ends when `monitor` hangs up,
    /// or, if it stands still then, some time later.
    pub fn shut_in(self, monitor: &UnixStream, otherwise: &str) -> Result<Body, Failure> {
        let host = |problem: String| Failure::host(format!("a device's process: {problem}"));
        if !matches!(self.served, Served::Folder { .. }) {
            sandbox::enter_empty(self.served != Served::Network)
                .map_err(|e| host(e.to_string()))?;
            sandbox::allow_nothing().map_err(host)?;
        }
        let (device, bell) = (self.start)()?;
        vhost_user::leave_after(monitor, ANSWER).map_err(|e| host(e.to_string()))?;
        let filter = |problem| host(format!("its filter: {problem}; {otherwise}"));
        jail::enter(self.served).map_err(filter)?;
        Ok(Body { device, bell })
    }
}

impl Body {
    /// Serves until the monitor hangs up.
    pub fn serve(self, socket: UnixStream) -> Result<u8, Failure> {
        let served = vhost_user::serve(self.device, self.bell, socket);
        served.map(|()| 0).map_err(|error| Failure::host(format!("a device's process: {error}")))
    }
}

/// Does this process's job, from its start to its end.
pub fn device(arguments: &DeviceArguments) -> Result<u8, Failure> {
    match &arguments.kind {
        ServerKind::Device(kind) => serve(kind),
        ServerKind::KernelBlocks { several, path } => {
            // The user is not told: later machines do without.
            let served = known_blocks::serve(path, *several);
            Ok(served
                .inspect_err(|error| tracing::debug!(%error, "no blocks are kept"))
                .is_err()
                .into())
        }
    }
}

/// The process of a device.
fn serve(kind: &DeviceKind) -> Result<u8, Failure> {
    let host = |error: io::Error| Failure::host(error.to_string());
    process::keep_only_standard_streams().map_err(host)?;
    process::die_with_parent().map_err(host)?;
    let socket = standard_stream(io::stdin()).map_err(host)?;
    let body =
        body(kind).and_then(|opened| opened.shut_in(&socket, "--devices inline does without"));
    let problem = body.as_ref().err().map(ToString::to_string);
    let identity = body.as_ref().ok().map(|body| Identity::of(&*body.device));
    let words = identity.as_ref().ok_or(problem.as_deref().unwrap_or_default());
    if introduce(&mut io::stdout(), words).is_err() {
        return Ok(1); // the monitor has ended, and has said why
    }
    // Whoever refuses has said why.
    body.map_or(Ok(1), |body| body.serve(socket))
}

fn body(kind: &DeviceKind) -> Result<Opened, Failure> {
    match kind {
        DeviceKind::Disk { fault, queues, index, disk } => {
            disk_body(*index, disk, *queues, Faults::of_process(fault.as_deref())?)
        }
        DeviceKind::Share { queues, tag, readonly, fresh, lasting, privileged, folder } => {
            let keeping = match (fresh, lasting) {
                (true, _) => Keeping::Fresh,
                (_, true) => Keeping::Lasting,
                _ => Keeping::Usual,
            };
            let privileged = *privileged;
            let folder = Folder { keeping, privileged, ..Folder::new(folder, *readonly) };
            let listener = || standard_stream(io::stdout());
            let listener = share::has_listener(&folder).then(listener).transpose();
            let listener = listener.map_err(|error| Failure::host(error.to_string()))?;
            Ok(share_body(tag, folder, *queues, listener))
        }
        DeviceKind::Net { mac, pairs, fault, index, net } => {
            let mac = net::parse_mac(mac).map_err(Failure::usage)?;
            net_body(mac, net, (*index, *pairs), Faults::of_process(fault.as_deref())?)
        }
    }
}

/// Opens a disk.
pub fn disk_body(
    index: usize,
    disk: &DiskArgument,
    queues: u16,
    mut faults: Option<Faults>,
) -> Result<Opened, Failure> {
    // A thread that listens to orders can begin only when the process is in its sandbox.
    let start_listening = faults.as_mut().map(Faults::postpone);
    let device = disk.body(index, queues, faults)?;
    let start = move || {
        start_listening.map_or(Ok(()), |start| start())?;
        Ok((device, None))
    };
    Ok(Opened { served: Served::Disk, start: Box::new(start) })
}

/// The socket that a standard stream of this process is.
fn standard_stream(stream: impl AsFd) -> io::Result<UnixStream> {
    stream.as_fd().try_clone_to_owned().map(UnixStream::from)
}

/// Opens a folder from where there is nothing else, with so many request queues. A `listener` is told what the host changes in it.
pub fn share_body(
    tag: &str,
    mut folder: Folder,
    queues: u16,
    listener: Option<UnixStream>,
) -> Opened {
    let Folder { readonly, privileged, .. } = folder;
    let tag = tag.to_owned();
    // In the sandbox nobody can ask for the host's settings.
    let listener = listener.map(|listener| (listener, sharedfs::watches_allowed()));
    let start = move || {
        let host = |problem: String| Failure::host(format!("--share: {problem}"));
        let place = sandbox::enter_folder(&folder.path, readonly, privileged);
        folder.path = place.map_err(|error| host(error.to_string()))?;
        let server = share::open(&folder)?;
        let withdrawals = server.withdrawals();
        let device: Box<dyn VirtioDevice> = Box::new(share::body(server, &tag, queues));
        if !sandbox::allow_only(&folder.path).map_err(host)? {
            tracing::warn!("this host has no Landlock");
        }
        if let Some((listener, watches)) = listener
            && let Err(error) = withdrawals.start(listener, watches)
        {
            // As it does on network file systems.
            tracing::info!(%error, "the guest asks for what the host may have changed");
        }
        Ok((device, None))
    };
    // What an ordinary user's server makes has no more rights than the user.
    let privileged = privileged || user::current().0 != 0;
    Opened { served: Served::Folder { readonly, privileged }, start: Box::new(start) }
}

/// Opens a network's ports and descriptors, for the machine's interface of this number with so many pairs of queues.
pub fn net_body(
    mac: [u8; 6],
    net: &NetArgument,
    (index, pairs): (usize, u16),
    faults: Option<Faults>,
) -> Result<Opened, Failure> {
    let (open, served) = (net.open(mac, faults, index)?, net.served());
    let bell = Bell::new(NET_RECEIVE).map_err(|error| Failure::host(error.to_string()))?;
    let start = move || {
        let (device, connect) = open()?;
        connect(Arc::new(bell.ringer()));
        Ok((device.with_pairs(pairs), Some(bell)))
    };
    Ok(Opened { served, start: Box::new(start) })
}
