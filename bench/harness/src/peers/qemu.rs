//! QEMU, translating: the other way to run an unmodified kernel without hardware virtualization.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

use super::{Peer, PeerResult, PortForward, Setup, Work, foreign, memory, missing, version_of};

/// Names another QEMU than the one on the path.
const OVERRIDE: &str = "RING3_BENCH_QEMU";
const PROGRAM: &str = "qemu-system-x86_64";
/// Firmware, where QEMU is not installed but unpacked.
const FIRMWARE: [&str; 2] = ["usr/share/qemu", "usr/share/seabios"];
/// QEMU's modules, there.
const MODULES: &str = "usr/lib/x86_64-linux-gnu/qemu";

pub(super) fn find(setup: &Setup) -> Vec<PeerResult> {
    let program = env::var_os(OVERRIDE).map_or_else(|| PROGRAM.into(), PathBuf::from);
    let installed = peer(setup, "qemu", move || Command::new(&program));
    let newest = setup.newest.clone().map(|root| peer(setup, "qemu:newest", move || newest(&root)));
    [installed].into_iter().chain(newest).collect()
}

/// A network by translation of addresses, in which one of the machine's ports is one of the host's.
fn network(forward: &PortForward) -> [String; 4] {
    let rule = format!("hostfwd=tcp:127.0.0.1:{}-:{}", forward.host, forward.guest);
    let device = "virtio-net-pci,netdev=bench,romfile=".to_owned();
    ["-netdev".to_owned(), format!("user,id=bench,{rule}"), "-device".to_owned(), device]
}

fn newest(root: &Path) -> Command {
    let mut command = foreign::loaded(root, &format!("usr/bin/{PROGRAM}"));
    command.env("QEMU_MODULE_DIR", root.join(MODULES));
    command.args(FIRMWARE.iter().flat_map(|path| ["-L".into(), root.join(path)]));
    command
}

fn peer(setup: &Setup, name: &str, program: impl Fn() -> Command + 'static) -> PeerResult {
    let Some(version) = version_of(program().arg("--version")) else {
        return missing(
            name,
            format!("{PROGRAM} is not installed: the package is qemu-system-x86"),
        );
    };
    let (kernel, initrd) = (setup.kernel.clone(), setup.initrd.clone());
    let disk = |disk: PathBuf| format!("file={},format=raw,if=virtio", disk.display());
    let disks: Vec<_> =
        [setup.disk().map(|path| disk(path) + ",readonly=on"), setup.scratch_disk(name).map(disk)]
            .into_iter()
            .flatten()
            .collect();
    let (forward, has_programs) = (setup.forward(), setup.disk().is_some());
    let append = setup.append("console=ttyS0");
    Ok(Peer::new(name, version, move |work| {
        let mut command = program();
        command.args([
            "-accel",
            "tcg",
            "-cpu",
            "max",
            "-smp",
            if work == Work::ServeOnTwo { "2" } else { "1" },
            "-m",
            &memory(work).to_string(),
        ]);
        command.args(["-nodefaults", "-display", "none", "-serial", "stdio", "-no-reboot"]);
        command.arg("-kernel").arg(&kernel).arg("-initrd").arg(&initrd);
        command.args(["-append", &append(work)]);
        let disks = work.disks(&disks, has_programs);
        command.args(disks.iter().flat_map(|disk| ["-drive", disk]));
        if work == Work::Serve {
            command.args(forward.iter().flat_map(network));
        }
        command
    })
    .with_forward(forward))
}
