//! Tests inside a stock kernel: it boots, a script loads modules, the kernel's log has the verdict.

use std::{fs, ops::ControlFlow, path::Path};

use anyhow::{Context, Result, bail};
use tempfile::NamedTempFile;
use xtask::{
    assets::Assets,
    command::progress,
    initramfs::{self, File, Purpose},
    self_tests::SelfTestKernel,
};

use crate::{
    console::Console,
    machine::{Limits, Machine},
};

/// Nothing that would keep the kernel from checking its machine.
const CMDLINE: &str = "console=ttyS0 panic=-1";
/// Guest memory that is enough for most, in MiB.
pub const MEMORY: u32 = 512;

/// What a guest is given.
#[derive(Debug)]
pub struct Userland<'a> {
    /// Its files.
    pub files: &'a [File],
    /// What it does before it powers off.
    pub script: &'a str,
    /// Words for the kernel's command line.
    pub options: &'a str,
    /// Memory, in MiB: the files are in it twice while the guest unpacks them.
    pub memory: u32,
}

/// Files with the named modules and what they depend on, and their names in the order to load.
///
/// # Errors
/// The cache is damaged.
pub fn modules(kernel: &SelfTestKernel, names: &[&str]) -> Result<(Vec<File>, Vec<String>)> {
    let closure = kernel.modules.closure(names)?;
    let order = closure.iter().map(|module| module.name.clone()).collect();
    let file = |name: String, content| {
        let path = format!("modules/{name}.ko");
        File { path, permissions: 0o644, content }
    };
    Ok((closure.into_iter().map(|module| file(module.name, module.content)).collect(), order))
}

/// Boots a kernel with a userland until it powers off.
///
/// # Errors
/// It did not come to its end; the error shows the end of its console.
pub fn boot(
    assets: &Assets,
    image: &Path,
    to: &Userland<'_>,
    limits: Limits<'_>,
) -> Result<Console> {
    let script = format!("echo 7 > /proc/sys/kernel/printk\n{}", to.script);
    let purpose = Purpose::Script(&script);
    let initrd = NamedTempFile::new()?;
    let archive = initramfs::build_with(&assets.busybox()?, &[], to.files, purpose);
    fs::write(initrd.path(), archive)?;
    let cmdline = format!("{CMDLINE} {}", to.options);
    let machine = Machine {
        kernel: image,
        initrd: Some(initrd.path()),
        modules: &[],
        cmdline: cmdline.trim(),
        memory: to.memory,
    };
    watch(&machine, limits)
}

/// Runs a machine with Linux's console until it powers off.
///
/// # Errors
/// It did not come to its end; the error shows the end of its console.
pub fn watch(machine: &Machine<'_>, limits: Limits<'_>) -> Result<Console> {
    let mut console = Console::default();
    let bar = progress("booting");
    let ended = machine.run(limits, &mut |printed| {
        if let Some(line) = console.print(printed) {
            bar.set_message(line.to_owned());
        }
        ControlFlow::Continue(())
    });
    bar.finish_and_clear();
    ended.with_context(|| console.tail())?;
    if let Some(complaint) = console.complaint() {
        bail!("the kernel complained: {complaint}\n{}", console.tail());
    }
    Ok(console)
}
