//! Programs of another Debian release, run from where they were unpacked.

use std::{path::Path, process::Command};

/// Where a release keeps libraries, with or without merged `/usr`.
const LIBRARIES: [&str; 2] = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"];
/// The loader, beside libraries. The link to it in `lib64` may lead to the host's own.
const LOADER: &str = "ld-linux-x86-64.so.2";

/// The command that runs `program` of `root` by the C library there.
pub fn loaded(root: &Path, program: &str) -> Command {
    let folders = LIBRARIES.map(|directory| root.join(directory));
    let loader = folders.iter().map(|folder| folder.join(LOADER)).find(|path| path.exists());
    let libraries = folders.each_ref().map(|folder| folder.display().to_string());
    let mut command = Command::new(loader.unwrap_or_default());
    command.arg("--library-path").arg(libraries.join(":")).arg(root.join(program));
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
