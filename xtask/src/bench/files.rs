//! What machines of the benchmark are made of.

use std::{
    env, fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use harness::{
    peers::{Ring3, Setup, Userland},
    program,
};

use super::{packages, userland};
use crate::{
    assets::{Assets, Kernel, KernelFiles},
    checks::root,
    cpio::CpioArchive,
    modules::ModuleTree,
};

/// What a machine needs for its disks and network, where its kernel does not have it built in.
const MODULES: [&str; 5] = ["virtio_pci", "virtio_blk", "virtio_net", "crc32c_generic", "ext4"];

/// What machines are made of.
pub(super) struct Files {
    program: PathBuf,
    busybox: Vec<u8>,
    kernel: KernelFiles,
    userland: Option<Userland>,
    newest: Option<PathBuf>,
}

impl Files {
    /// Builds or fetches everything.
    pub(super) fn prepare(kernel: Kernel, with_programs: bool, with_newest: bool) -> Result<Self> {
        let assets = Assets::open()?;
        let userland = with_programs.then(|| userland::prepare(&assets)).transpose()?;
        let newest = with_newest.then(|| packages::newest(&assets)).transpose()?;
        let (busybox, kernel) = (assets.busybox()?, assets.kernel(kernel)?);
        Ok(Self { program: program::build(&build_directory())?, busybox, kernel, userland, newest })
    }

    /// What environments are made of, with files in `directory`.
    pub(super) fn setup(&self, directory: &Path, append: &str, ring3: Vec<Ring3>) -> Result<Setup> {
        let (busybox, initrd) = (directory.join("sh"), directory.join("initrd.cpio"));
        fs::write(&busybox, &self.busybox)?;
        make_executable(&busybox)?;
        fs::write(&initrd, self.initramfs()?)?;
        let (program, kernel) = (self.program.clone(), self.kernel.image.clone());
        let (userland, newest) = (self.userland.clone(), self.newest.clone());
        let append = append.to_owned();
        Ok(Setup { program, busybox, kernel, initrd, userland, newest, append, ring3 })
    }

    /// The program as the first process, and busybox as its shell.
    fn initramfs(&self) -> Result<Vec<u8>> {
        let program = fs::read(&self.program)?;
        let mut archive = CpioArchive::new();
        for directory in ["bin", "dev", "mnt", "modules", "proc", "sys", "tmp"] {
            archive.directory(directory);
        }
        archive.character_device("dev/console", 5, 1);
        archive.file("bin/sh", 0o755, &self.busybox);
        archive.file("init", 0o755, &program);
        self.add_modules(&mut archive)?;
        self.add_scripts(&mut archive)?;
        Ok(archive.finish())
    }

    /// Modules make starts slower, and only disks and networks need them.
    fn add_modules(&self, archive: &mut CpioArchive) -> Result<()> {
        let mut order = String::new();
        if self.userland.is_some() {
            let directory = self.kernel.image.with_file_name("modules");
            for module in ModuleTree::scan(&directory)?.closure(&MODULES)? {
                archive.file(&format!("modules/{}.ko", module.name), 0o644, &module.content);
                order += &format!("{}\n", module.name);
            }
        }
        archive.file("modules/order", 0o644, order.as_bytes());
        Ok(())
    }

    /// Scripts for the programs on the disk.
    fn add_scripts(&self, archive: &mut CpioArchive) -> Result<()> {
        if self.userland.is_some() {
            archive.directory("bench");
            archive.directory("bench/source");
            for (name, content) in userland::scripts()? {
                archive.file(&name, 0o644, &content);
            }
        }
        Ok(())
    }

    /// Writes the root file system and says how to boot it.
    pub(super) fn write_initramfs(&self, output: &Path) -> Result<()> {
        fs::write(output, self.initramfs()?)
            .with_context(|| format!("cannot write {}", output.display()))?;
        println!(
            "ring3 run --kernel {} --initrd {} --append 'console=ttyS0 quiet'",
            self.kernel.image.display(),
            output.display()
        );
        Ok(())
    }
}

/// Where things are built for the benchmark.
pub(super) fn build_directory() -> PathBuf {
    let target = env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    target.unwrap_or_else(|| root().join("target")).join("bench")
}

fn make_executable(file: &Path) -> Result<()> {
    Ok(fs::set_permissions(file, fs::Permissions::from_mode(0o755))?)
}
