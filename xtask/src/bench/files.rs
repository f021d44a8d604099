//! What machines of the benchmark are made of.

use std::{
    env, fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use harness::{
    peers::{Ring3, Setup},
    program,
};

use crate::{
    assets::{Assets, Kernel},
    checks::root,
    cpio::Archive,
};

/// What machines are made of.
pub(super) struct Files {
    program: PathBuf,
    busybox: Vec<u8>,
    kernel: PathBuf,
}

impl Files {
    /// Builds or fetches everything.
    pub(super) fn prepare(kernel: Kernel) -> Result<Self> {
        let assets = Assets::open()?;
        let (busybox, kernel) = (assets.busybox()?, assets.kernel(kernel)?.image);
        Ok(Self { program: program::build(&workshop())?, busybox, kernel })
    }

    /// What environments are made of, with files in `directory`.
    pub(super) fn setup(&self, directory: &Path, append: &str, ring3: Vec<Ring3>) -> Result<Setup> {
        let (busybox, initrd) = (directory.join("sh"), directory.join("initrd.cpio"));
        fs::write(&busybox, &self.busybox)?;
        make_executable(&busybox)?;
        fs::write(&initrd, self.initramfs()?)?;
        let (program, kernel) = (self.program.clone(), self.kernel.clone());
        let append = append.to_owned();
        Ok(Setup { program, busybox, kernel, initrd, append, ring3 })
    }

    /// The program as the first process, and busybox as its shell.
    fn initramfs(&self) -> Result<Vec<u8>> {
        let program = fs::read(&self.program)?;
        let mut archive = Archive::new();
        for directory in ["bin", "dev", "proc", "sys", "tmp"] {
            archive.directory(directory);
        }
        archive.character_device("dev/console", 5, 1);
        archive.file("bin/sh", 0o755, &self.busybox);
        archive.file("init", 0o755, &program);
        Ok(archive.finish())
    }

    /// Writes the root file system and says how to boot it.
    pub(super) fn write_initramfs(&self, output: &Path) -> Result<()> {
        fs::write(output, self.initramfs()?)
            .with_context(|| format!("cannot write {}", output.display()))?;
        println!(
            "ring3 run --kernel {} --initrd {} --append 'console=ttyS0 quiet'",
            self.kernel.display(),
            output.display()
        );
        Ok(())
    }
}

/// Where things are built for the benchmark.
pub(super) fn workshop() -> PathBuf {
    let target = env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    target.unwrap_or_else(|| root().join("target")).join("bench")
}

fn make_executable(file: &Path) -> Result<()> {
    Ok(fs::set_permissions(file, fs::Permissions::from_mode(0o755))?)
}
