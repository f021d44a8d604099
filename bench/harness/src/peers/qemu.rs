//! QEMU, translating: the other way to run an unmodified kernel without hardware virtualization.

use std::{env, path::PathBuf, process::Command};

use super::{Found, MEMORY, Peer, Setup, missing, version_of};

/// Where a QEMU newer than the distribution's may be.
const OVERRIDE: &str = "RING3_BENCH_QEMU";
const PROGRAM: &str = "qemu-system-x86_64";

pub(super) fn find(setup: &Setup) -> Vec<Found> {
    let mut found = vec![peer(setup, "qemu", PROGRAM.into())];
    if let Some(program) = env::var_os(OVERRIDE) {
        found.push(peer(setup, "qemu:new", program.into()));
    }
    found
}

fn peer(setup: &Setup, name: &str, program: PathBuf) -> Found {
    let Some(version) = version_of(&program, "--version") else {
        let what = program.display();
        return missing(name, format!("{what} is not installed: the package is qemu-system-x86"));
    };
    let (kernel, initrd) = (setup.kernel.clone(), setup.initrd.clone());
    let disk = setup.disk();
    let disk = disk.map(|disk| format!("file={},format=raw,if=virtio,readonly=on", disk.display()));
    let append = setup.append("console=ttyS0");
    Ok(Peer::new(name, version, move |work| {
        let mut command = Command::new(&program);
        command.args(["-accel", "tcg", "-cpu", "max", "-smp", "1", "-m", &MEMORY.to_string()]);
        command.args(["-nodefaults", "-display", "none", "-serial", "stdio", "-no-reboot"]);
        command.arg("-kernel").arg(&kernel).arg("-initrd").arg(&initrd);
        command.args(["-append", &append(work)]);
        command.args(disk.iter().flat_map(|disk| ["-drive", disk]));
        command
    }))
}
