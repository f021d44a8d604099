//! Programs of another Debian release, run from where they were unpacked.

use std::{path::Path, process::Command};

/// Where a release keeps libraries, with or without merged `/usr`.
const LIBRARIES: [&str; 2] = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"];
const LOADERS: [&str; 2] = ["usr/lib64/ld-linux-x86-64.so.2", "lib64/ld-linux-x86-64.so.2"];

/// The command that runs `program` of `root` by the C library there.
pub(super) fn loaded(root: &Path, program: &str) -> Command {
    let loader = LOADERS.map(|loader| root.join(loader)).into_iter().find(|path| path.exists());
    let libraries = LIBRARIES.map(|directory| root.join(directory).display().to_string());
    let mut command = Command::new(loader.unwrap_or_default());
    command.arg("--library-path").arg(libraries.join(":")).arg(root.join(program));
    command.env("QEMU_MODULE_DIR", root.join(LIBRARIES[0]).join("qemu"));
    command
}

/// Where programs that have `root` as their root directory find the host's files.
pub(super) const HOST: &str = "/host";

/// The command that runs `program` with `root` as its root directory, in a user namespace. For
/// programs that must not be run by a loader: UML finds its memory from where it is loaded.
pub(super) fn rooted(root: &Path, program: &str) -> Command {
    let mut command = Command::new("unshare");
    // Its home is not there; UML wants one for its files.
    command.env("HOME", "/tmp");
    command.args(["--map-root-user", "--mount", "sh", "-c", ENTER, "sh"]).arg(root).arg(program);
    command
}

/// What a program expects, mounted below the root of the first argument; then the others.
const ENTER: &str = "cd \"$1\" && shift && mkdir -p proc dev tmp host &&
    mount --rbind /proc proc && mount --rbind /dev dev && mount --rbind /tmp tmp &&
    mount --rbind / host && exec chroot . \"$@\"";
