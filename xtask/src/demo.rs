//! `cargo xtask demo`: an unmodified Debian kernel to a shell.

use std::{fs, process::Command};

use anyhow::{Context, Result, bail};

use crate::{
    assets::{Assets, Kernel},
    checks::build_ring3,
    initramfs::{self, Purpose},
};

/// Builds ring3, gets a guest ready and runs it on this terminal. Returns its exit code.
///
/// # Errors
/// Something cannot be built or fetched.
pub fn demo() -> Result<u8> {
    let ring3 = build_ring3()?;
    let assets = Assets::open()?;
    let kernel = assets.kernel(Kernel::BookwormCloud)?;
    let archive = initramfs::build(&assets.busybox()?, &kernel.modules, Purpose::Shell);
    let initrd = tempfile::Builder::new().prefix("ring3-demo-").suffix(".cpio").tempfile()?;
    fs::write(initrd.path(), archive)?;
    let mut command = Command::new(&ring3);
    command.arg("run").arg("--kernel").arg(&kernel.image).arg("--initrd").arg(initrd.path());
    command.args(["--append", "console=ttyS0 quiet", "--memory", "512M"]);
    eprintln!("Booting {} with busybox; Ctrl-A X leaves.", kernel.image.display());
    let status = command.status().with_context(|| format!("cannot run {}", ring3.display()))?;
    match status.code() {
        Some(code) => Ok(u8::try_from(code).unwrap_or(1)),
        None => bail!("ring3 was killed ({status})"),
    }
}
