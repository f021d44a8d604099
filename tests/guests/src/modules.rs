//! Modules of guests' kernels beyond those that ring3's guests boot with.

use std::fs;

use anyhow::{Context, Result};
use xtask::assets::{Assets, Kernel, unpack_kernel};

/// The files of modules, from Debian's package of the kernel that guests boot. The cache keeps the files by the first
/// module's name.
///
/// # Errors
/// The kernel's package cannot be fetched, or does not contain one of the modules.
pub fn modules(kernel: Kernel, names: &[&str]) -> Result<Vec<Vec<u8>>> {
    let assets = Assets::open()?;
    assets.kernel(kernel)?;
    let package = assets.installed(kernel).context("no kernel")?;
    let entry = format!("{}-{package}", names.first().context("no module is named")?);
    let wanted = names.iter().map(|name| (*name).to_owned()).collect();
    assets.entry(&entry, |fresh| {
        let archive = assets.archive(kernel.suite())?;
        unpack_kernel(&archive, &package, fresh, |_| wanted)
    })?;
    let folder = assets.directory(&entry).join("modules");
    names.iter().map(|name| Ok(fs::read(folder.join(format!("{name}.ko")))?)).collect()
}
