//! A module of the guest's kernel is loaded when a program first uses the module's device or file system, as on a machine.

use std::process::{Command, Stdio};

use anyhow::{Result, ensure};
use guests::{USUAL, ring3};
use tempfile::TempDir;
use xtask::assets::Assets;

const TIMEOUT: &str = "400";

/// What a guest with all of its modules says.
fn says(options: &[&str], script: &str) -> Result<String> {
    Assets::open()?.tree(USUAL)?;
    let directory = TempDir::new()?;
    let mut command = Command::new(ring3()?);
    command.args(["exec", "--memory=512M", "--cpus=1", "--timeout", TIMEOUT]).args(options);
    command.args(["--", "sh", "-c", script]).current_dir(directory.path());
    let output = command.stdin(Stdio::null()).output()?;
    ensure!(output.status.success(), "{output:?}");
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// A device that is opened, and a file system that needs another module: the kernel has them loaded by modprobe or, where there is
/// none, by our agent.
#[test]
fn a_driver_is_loaded_when_it_is_needed() -> Result<()> {
    const SCRIPT: &str = "grep -c -e ^tun -e ^isofs -e ^cdrom /proc/modules; \
        (: <> /dev/net/tun) && grep -o ^tun /proc/modules; \
        mount -t iso9660 /dev/null /mnt 2> /dev/null; grep -o ^cdrom /proc/modules; \
        grep -o iso9660 /proc/filesystems; \
        stat -c %a /dev/net/tun /dev/fuse";
    for options in [&["--root"][..], &["--root", "--append=sysctl.kernel.modprobe=/no/modprobe"]] {
        let said = says(options, SCRIPT)?;
        ensure!(said == "0\ntun\ncdrom\niso9660\n666\n666\n", "{options:?}: {said}");
    }
    Ok(())
}

/// The folder is the kernel's, whole, and nobody's to change.
#[test]
fn modprobe_finds_the_kernels_modules() -> Result<()> {
    const SCRIPT: &str = "modprobe loop && losetup --find; modprobe -n no-such-module 2> /dev/null || echo none; \
        touch /lib/modules/$(uname -r)/new 2> /dev/null || echo kept";
    let said = says(&["--root"], SCRIPT)?;
    ensure!(said == "/dev/loop0\nnone\nkept\n", "{said}");
    Ok(())
}
