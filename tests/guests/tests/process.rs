//! What the process that runs a guest does, and does not do, to its host.

use std::{fs, process::Command};

use anyhow::{Result, ensure};
use guests::{Guest, ring3};
use tempfile::TempDir;
use xtask::assets::Kernel;

/// ring3 needs no hardware virtualization, and does not touch it where it exists.
#[test]
fn never_opens_kvm() -> Result<()> {
    let directory = TempDir::new()?;
    let log = directory.path().join("strace");
    let mut strace = Command::new("strace");
    strace.args(["--follow-forks", "--trace=open,openat,openat2", "--output"]);
    strace.arg(&log).arg(ring3()?);
    let guest = Guest::new(Kernel::BookwormCloud).boots_by(&mut strace)?;
    guest.powers_off()?;
    let opened = fs::read_to_string(&log)?;
    ensure!(opened.contains("vmlinuz"), "strace saw nothing");
    ensure!(!opened.contains("kvm"), "something with kvm in its name was opened");
    Ok(())
}

/// Root has nothing an ordinary user lacks.
#[test]
fn needs_no_privilege() -> Result<()> {
    let mut setpriv = Command::new("setpriv");
    setpriv.args(["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]).arg(ring3()?);
    let guest = Guest::new(Kernel::BookwormCloud).boots_by(&mut setpriv)?;
    guest.powers_off()
}

/// A panicking kernel reboots, which ends the machine with the code for a reset.
#[test]
fn a_kernel_panic_is_a_reset() -> Result<()> {
    let guest = Guest::new(Kernel::BookwormCloud).runs("echo c > /proc/sysrq-trigger").boots()?;
    ensure!(guest.console.contains("Kernel panic"), "no panic: {}", guest.messages);
    ensure!(guest.code == Some(4), "ended with {:?}", guest.code);
    Ok(())
}
