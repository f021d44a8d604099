//! `ring3 serve`: a device of ours for another program's machine, by vhost-user.
//!
//! It listens, opens what it serves, says where to find it, takes one monitor's connection, and is from then on what `ring3 device` is,
//! in the same jail. Like virtiofsd it ends when that monitor hangs up.

use std::{
    io,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
};

use clap::{Args, Subcommand};
use faults::Target;
use host_linux::process;

use crate::{
    device::{disk_body, net_body, share_body},
    disk::DiskArgument,
    failure::Failure,
    injection::{FaultOptions, Faults},
    net::NetArgument,
    output,
    share::{self, ShareArgument},
};

const EXAMPLES: &str = "\
Examples:
  A disk for QEMU, whose guest's memory must be a file that can be shared:
    ring3 serve disk debian.qcow2 --socket /tmp/disk.sock &
    qemu-system-x86_64 -m 1G -object memory-backend-memfd,id=mem,size=1G,share=on \\
        -machine q35,memory-backend=mem -chardev socket,id=disk,path=/tmp/disk.sock \\
        -device vhost-user-blk-pci,chardev=disk,num-queues=1 ...

  A folder for QEMU, which names its tag:
    ring3 serve share src:work --socket /tmp/src.sock &
    qemu-system-x86_64 ... -chardev socket,id=src,path=/tmp/src.sock \\
        -device vhost-user-fs-pci,chardev=src,tag=work

  A network for QEMU, which names its interface's address:
    ring3 serve net user,hostfwd=tcp:127.0.0.1:2222-:22 --socket /tmp/net.sock &
    qemu-system-x86_64 ... -chardev socket,id=net,path=/tmp/net.sock \\
        -netdev vhost-user,id=user,chardev=net -device virtio-net-pci,netdev=user
";

/// A device to serve to another program.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct ServeArguments {
    /// Which.
    #[command(subcommand)]
    kind: Kind,
}

/// Which device.
#[derive(Debug, Subcommand)]
enum Kind {
    /// Serve a disk
    #[command(after_help = EXAMPLES)]
    Disk {
        /// As `ring3 run --disk` has it
        disk: DiskArgument,
        /// Where to listen
        #[arg(long, value_name = "FILE")]
        socket: PathBuf,
        /// Faults.
        #[command(flatten)]
        fault: FaultOptions,
    },
    /// Serve a network interface
    #[command(after_help = EXAMPLES)]
    Net {
        /// As `ring3 run --net` has it
        net: NetArgument,
        /// Where to listen
        #[arg(long, value_name = "FILE")]
        socket: PathBuf,
        /// Faults.
        #[command(flatten)]
        fault: FaultOptions,
    },
    /// Serve a folder
    #[command(after_help = EXAMPLES)]
    Share {
        /// As `ring3 run --share` has it
        share: ShareArgument,
        /// Where to listen
        #[arg(long, value_name = "FILE")]
        socket: PathBuf,
    },
}

/// Serves one machine, until it hangs up.
pub fn serve(arguments: &ServeArguments) -> Result<u8, Failure> {
    process::keep_only_standard_streams().map_err(|error| Failure::host(error.to_string()))?;
    let (opened, socket, option) = match &arguments.kind {
        Kind::Disk { disk, socket, fault } => {
            (disk_body(0, disk, 1, Faults::of_server(fault, Target::Disk(0))?)?, socket, "disk")
        }
        Kind::Net { net, socket, fault } => {
            let faults = Faults::of_server(fault, Target::Net(0))?;
            (net_body(net.own_mac(0), net, (0, 1), faults)?, socket, "net")
        }
        Kind::Share { share: ShareArgument { folder, tag }, socket } => {
            folder.find().map_err(share::refused)?;
            (share_body(tag, folder.clone(), 1, None), socket, "share")
        }
    };
    // Afterwards there are no names, the socket's included.
    let monitor = accept(socket, option)?;
    let otherwise = "this needs a host with seccomp filters (CONFIG_SECCOMP_FILTER)";
    opened.shut_in(&monitor, otherwise)?.serve(monitor)
}

/// Waits for a monitor, which needs to be told where and how; nobody else can come after it.
fn accept(path: &Path, option: &str) -> Result<UnixStream, Failure> {
    let problem =
        |error: io::Error| Failure::usage(format!("--socket {}: {error}", path.display()));
    let listener = cables::listen(path).map_err(problem)?;
    output::complain(&invitation(path, option));
    let (monitor, _) = listener.accept().map_err(problem)?;
    std::fs::remove_file(path).map_err(problem)?;
    Ok(monitor)
}

/// What the user is to do next.
fn invitation(path: &Path, option: &str) -> String {
    let (path, tag) = (path.display(), if option == "share" { ":TAG" } else { "" });
    format!(
        "waiting at {path} for one machine: `ring3 run --{option} vhost-user:{path}{tag} ...`, or QEMU's as \
         `ring3 serve --help` shows"
    )
}
