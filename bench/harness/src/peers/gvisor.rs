//! gVisor: a kernel of its own, in Go. Not Linux, but the same system calls.

use std::{env, path::PathBuf, process::Command};

use super::{Peer, PeerResult, Setup, Work, missing, native, version_of};

/// Where runsc is, if not on the path.
const OVERRIDE: &str = "RING3_BENCH_RUNSC";
const PROGRAM: &str = "runsc";

pub(super) fn find(setup: &Setup) -> Vec<PeerResult> {
    let program = env::var_os(OVERRIDE).map_or_else(|| PROGRAM.into(), PathBuf::from);
    let Some(version) = version_of(Command::new(&program).arg("--version")) else {
        let why =
            format!("{} is not installed: see gvisor.dev, or set {OVERRIDE}", program.display());
        return vec![missing("gvisor", why)];
    };
    let (bench, busybox) = (setup.program.clone(), setup.busybox.clone());
    let userland = setup.variable();
    vec![Ok(Peer::new("gvisor", version, move |work| {
        let mut command = Command::new(&program);
        command.args(["--network=none", "--ignore-cgroups", "--platform=systrap", "do"]);
        command.args(["--force-overlay=true", "--", "/usr/bin/env"]);
        command
            .arg(format!("BENCH_SHELL={}", busybox.display()))
            .args(&userland)
            .arg(native::DISK)
            .arg(&bench);
        command.args(["once"].into_iter().filter(|_| work == Work::Once));
        command
    })
    .with_all_cpus())]
}
