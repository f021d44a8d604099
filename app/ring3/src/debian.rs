//! `ring3 image create debian`: a disk with Debian on it, its kernel and initrd beside it, and a file that
//! says how to run them.
//!
//! mmdebstrap installs the packages, as root or in a user namespace, and apt verifies them; `mke2fs -d` makes
//! the file system without mounting anything. Three scripts do what needs (that namespace's) root:
//! `debian_early.sh` and `debian_late.sh` inside mmdebstrap, `debian.sh` after it.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use kernels::{
    command::{self, progress},
    interrupt::Guard,
    scratch::Scratch,
};

use crate::{failure::Failure, output, values::MemorySize};

const EARLY: &str = include_str!("debian_early.sh");
const LATE: &str = include_str!("debian_late.sh");
const MAKE: &str = include_str!("debian.sh");
/// What a machine has beyond what apt needs to run.
const PACKAGES: &str = "ca-certificates,dbus,e2fsprogs,initramfs-tools,iproute2,kmod,less,\
                        linux-image-cloud-amd64,procps,systemd-resolved,systemd-sysv,udev";
/// What an ordinary user lacks in whose hands mmdebstrap finds no way to be root.
const NO_RANGE: &str = "an ordinary user needs the package uidmap and a range of users in /etc/subuid and /etc/subgid, \
                        as adduser gives them (usermod --add-subuids 100000-165535 --add-subgids 100000-165535 NAME)";
/// Bytes below which no Debian fits.
const LEAST: u64 = 1 << 30;

/// A Debian to install.
#[derive(Debug, Args)]
pub struct DebianArguments {
    /// The disk to make, a raw image; debian.img if none is given
    #[arg(default_value = "debian.img")]
    pub file: PathBuf,
    /// Which Debian
    #[arg(long, value_enum, default_value_t = DebianRelease::Bookworm)]
    pub suite: DebianRelease,
    /// The disk's size
    #[arg(long, value_name = "SIZE", default_value = "4G")]
    pub size: MemorySize,
    /// Further package to install; can be repeated
    #[arg(long, value_name = "NAME")]
    pub package: Vec<String>,
}

/// A release of Debian.
#[derive(Clone, Copy, Debug, ValueEnum)]
#[allow(missing_docs)] // their names are what they are
pub enum DebianRelease {
    Bookworm,
    Trixie,
    Sid,
}

/// The files that are made.
struct Files {
    disk: PathBuf,
    kernel: PathBuf,
    initrd: PathBuf,
    config: PathBuf,
}

impl Files {
    fn beside(disk: &Path) -> Self {
        let with = |extension| disk.with_extension(extension);
        let (kernel, initrd, config) = (with("vmlinuz"), with("initrd"), with("toml"));
        Self { disk: disk.to_owned(), kernel, initrd, config }
    }

    fn all(&self) -> [&Path; 4] {
        [&self.disk, &self.kernel, &self.initrd, &self.config]
    }
}

/// Makes the disk and says how to run it.
pub fn create(arguments: &DebianArguments) -> Result<u8, Failure> {
    let files = Files::beside(&arguments.file);
    check(arguments, &files)?;
    let guard = Guard::new();
    let made = guard.map_err(Into::into).and_then(|_guard| make(arguments, &files));
    made.map_err(|error| Failure::host(format!("{error:#}")))?;
    output::print(&format!("ring3 run --config {}\n", files.config.display()))
}

fn check(arguments: &DebianArguments, files: &Files) -> Result<(), Failure> {
    let bytes = arguments.size.0;
    if bytes < LEAST {
        return Err(Failure::usage(format!("--size: Debian needs {}M at least", LEAST >> 20)));
    }
    if arguments.file.extension().is_some_and(|extension| extension == "qcow2") {
        let shown = arguments.file.display();
        return Err(Failure::usage(format!(
            "{shown}: it is made as a raw image; put a qcow2 image over it with --backing"
        )));
    }
    let exists = files.all().into_iter().find(|path| path.symlink_metadata().is_ok());
    exists.map_or(Ok(()), |path| Err(Failure::usage(format!("{} exists already", path.display()))))
}

fn make(arguments: &DebianArguments, files: &Files) -> Result<()> {
    let name = files.disk.file_name().context("the file has no name")?.to_string_lossy();
    let folder = files.disk.parent().filter(|parent| !parent.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    // Not in /tmp: it is large.
    let scratch = Scratch::new(folder, ".ring3-debian-")?;
    let archive = scratch.path().join("root.tar");
    install(arguments, &archive)?;
    let made = Files::beside(&scratch.path().join(&*name));
    lay_out(&archive, &made, arguments.size)?;
    fs::write(&made.config, config(&name, files))?;
    // Half a system is none: they come when all are there.
    made.all().into_iter().zip(files.all()).try_for_each(|(from, to)| fs::rename(from, to))?;
    Ok(())
}

/// Debian's packages, installed, as an archive.
fn install(arguments: &DebianArguments, archive: &Path) -> Result<()> {
    let suite = arguments.suite.to_possible_value().context("a suite has a name")?;
    let suite = suite.get_name().to_owned();
    let packages = arguments.package.iter().fold(PACKAGES.to_owned(), |all, one| all + "," + one);
    ensure!(packages.bytes().all(is_of_names), "--package: `{packages}` are not names of packages");
    let bar = progress(format!("installing Debian {suite} (some minutes)"));
    let mut command = Command::new("mmdebstrap");
    command.args(["--variant=minbase", "--format=tar", "--quiet"]);
    command.arg(format!("--include={packages}"));
    // A hook with a space in it is run by a shell, with the file system as $1.
    command.arg(format!("--extract-hook={EARLY}")).arg(format!("--customize-hook={LATE}"));
    command::output(command.arg(suite).arg(archive)).map_err(|error| {
        if format!("{error:#}").contains("unable to pick chroot mode") {
            error.context(NO_RANGE)
        } else {
            error
        }
    })?;
    bar.finish_and_clear();
    Ok(())
}

fn is_of_names(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b",+-.:".contains(&byte)
}

/// The archive as a disk.
fn lay_out(archive: &Path, files: &Files, MemorySize(bytes): MemorySize) -> Result<()> {
    let bar = progress("making the file system");
    let mut command = as_root();
    command.args(["sh", "-c", MAKE, "sh"]).arg(archive).arg(&files.disk).arg(bytes.to_string());
    command::output(command.arg(&files.kernel).arg(&files.initrd)).map_err(|error| {
        if format!("{error:#}").contains("Could not allocate block") {
            error.context(format!("it does not fit in {}M: give more --size", bytes >> 20))
        } else {
            error
        }
    })?;
    bar.finish_and_clear();
    Ok(())
}

/// What runs a command as root: nothing, or a namespace with a range of users of its own.
fn as_root() -> Command {
    if host_linux::user::current().0 == 0 {
        return Command::new("env");
    }
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--map-auto"]);
    command
}

/// How to run it, for `ring3 run --config`.
fn config(name: &str, files: &Files) -> String {
    let file = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let (kernel, initrd) = (file(&files.kernel), file(&files.initrd));
    format!(
        "# Debian: log in as root, without a password.\nkernel = {kernel:?}\ninitrd = {initrd:?}\n\
         append = \"console=ttyS0 root=/dev/vda rootfstype=ext4 rw quiet noreplace-smp\"\nmemory = \"1G\"\ndisk = [{name:?}]\n\
         net = [\"user\"]\n"
    )
}
