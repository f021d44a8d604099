//! The host itself: what all others are multiples of.

use std::process::Command;

use super::{Peer, PeerResult, PortForward, Setup, Work};
use crate::record::NATIVE;

/// A directory in memory, as `/tmp` is inside the machines.
const SCRATCH: &str = "/dev/shm";
/// A file in the other programs' root directory, in place of a disk.
pub(super) const DISK: &str = "BENCH_DISK=/tmp/bench-disk";

pub(super) fn find(setup: &Setup) -> Vec<PeerResult> {
    let (program, busybox) = (setup.program.clone(), setup.busybox.clone());
    let userland = setup.userland.as_ref().map(|userland| userland.directory.clone());
    // There is no guest: the server listens on the host's port.
    let forward = setup.forward().map(|forward| PortForward { guest: forward.host, ..forward });
    let command = move |work| {
        let mut command = Command::new(&program);
        command.env("BENCH_SCRATCH", SCRATCH).env("BENCH_SHELL", &busybox);
        command.envs(userland.iter().map(|directory| ("BENCH_USERLAND", directory)));
        command.envs(DISK.split_once('='));
        if work == Work::Once {
            command.arg("once");
        }
        command
    };
    vec![Ok(Peer::new(NATIVE, "", command).with_forward(forward).with_all_cpus())]
}
