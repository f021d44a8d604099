//! The fast engine on a host with protection keys, which most machines that have no virtualization lack: QEMU has a CPU
//! that has them. Our release runs in a machine of QEMU's as on any host, and in its guest a program tries to get
//! out ([`PROGRAM`]): with the keys all of the guest's kernel and of the wedge must be closed to it.
//! QEMU 11.1 does; 7.2 takes an IRET of a program's for one of the kernel's, and with SMAP refuses it.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;
use xtask::{
    assets::{Assets, Kernel},
    initramfs::File,
};

use crate::{
    console::Console,
    in_kernel::{self, Userland},
    machine::{self, Limits},
};

/// What tries to get out (`programs/isolation.rs`).
static PROGRAM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/isolation"));
/// Where the archive of the machine's files is, and where they go.
const ARCHIVE: &str = "root/host.tar";
/// What catches the program's system calls.
const WAYS: [&str; 2] = ["seccomp", "dispatch"];
/// The oldest QEMU that was seen to do.
const OLDEST_QEMU: u32 = 11;
/// Memory of QEMU's machine, in MiB: its first root file system is in it twice.
const MEMORY: u32 = 3072;

/// Runs it.
///
/// # Errors
/// The program got at something, or the guest did not come to its end.
pub fn run(assets: &Assets, limits: Limits<'_>) -> Result<String> {
    let said = done(Command::new("qemu-system-x86_64").arg("--version"))?;
    let said = String::from_utf8_lossy(&said);
    let new = major(&said).is_some_and(|major| major >= OLDEST_QEMU);
    ensure!(new, "QEMU {OLDEST_QEMU} or later must be first on the path, not this: {said}");
    // The first kernel that delivers signals to a stack with a key.
    let kernel = assets.kernel(Kernel::TrixieCloud)?;
    let files = [File {
        path: ARCHIVE.to_owned(),
        permissions: 0o644,
        content: archive(assets, &machine::ring3()?)?,
    }];
    let script = script();
    let userland = Userland { files: &files, script: &script, options: "quiet", memory: MEMORY };
    let in_qemu = Limits { qemu: true, ..limits };
    verdict(&in_kernel::boot(assets, &kernel.image, &userland, in_qemu)?)
}

/// Our program, its libraries, what it boots, and what tries to get out, as a root directory.
fn archive(assets: &Assets, ring3: &Path) -> Result<Vec<u8>> {
    let directory = TempDir::new()?;
    let root = directory.path();
    let put = |content: &[u8], path: &str| write(&root.join(path), content);
    put(&stripped(ring3)?, "bin/ring3")?;
    put(PROGRAM, "bin/isolation")?;
    for library in libraries(ring3)? {
        put(&fs::read(&library)?, library.trim_start_matches('/'))?;
    }
    let guests = assets.kernel(Kernel::BookwormCloud)?;
    let cached = guests.image.parent().context("the kernel is in a directory")?;
    let into = root.join("root/.cache/ring3").join(version(cached)?);
    fs::create_dir_all(&into)?;
    done(Command::new("cp").arg("-r").arg(cached).arg(into))?;
    done(Command::new("chmod").args(["-R", "a+rx"]).arg(root))?;
    done(Command::new("tar").arg("-C").arg(root).args(["-cf", "-", "."]))
}

/// The program without what debuggers want: the machine's memory holds it three times.
fn stripped(program: &Path) -> Result<Vec<u8>> {
    let directory = TempDir::new()?;
    let bare = directory.path().join("bare");
    done(Command::new("strip").arg("-o").arg(&bare).arg(program))?;
    Ok(fs::read(bare)?)
}

/// The dynamic libraries of a program and what loads them, by their paths.
fn libraries(program: &Path) -> Result<Vec<String>> {
    let printed = done(Command::new("ldd").arg(program))?;
    let printed = String::from_utf8_lossy(&printed);
    let paths = printed.split_whitespace().filter(|word| word.starts_with('/'));
    Ok(paths.map(str::to_owned).collect())
}

/// Major number of the version that QEMU says it has.
fn major(said: &str) -> Option<u32> {
    said.strip_prefix("QEMU emulator version ")?.split('.').next()?.parse().ok()
}

/// The name of the cache that a kernel's directory is in.
fn version(kernel: &Path) -> Result<&Path> {
    let cache = kernel.parent().and_then(Path::file_name);
    Ok(Path::new(cache.context("the cache has a name")?))
}

fn write(path: &Path, content: &[u8]) -> Result<()> {
    fs::create_dir_all(path.parent().context("files are in directories")?)?;
    fs::write(path, content).with_context(|| format!("cannot write {}", path.display()))
}

/// Runs a command to its end; what it printed.
fn done(command: &mut Command) -> Result<Vec<u8>> {
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    let messages = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {}\n{messages}", output.status);
    Ok(output.stdout)
}

/// What QEMU's machine does. Its CPU does not check alignment.
fn script() -> String {
    let attempt = |way: &str| {
        format!(
            "ring3 exec --system-calls {way} --memory 512M -- /bin/isolation kernel wedge unaligned
             echo \"keys, {way}: $?\"\n"
        )
    };
    let prepare = "mkdir -p /dev/pts /dev/shm && mount -t devpts devpts /dev/pts
        mount -t tmpfs shm /dev/shm; ip link set lo up
        tar xf /root/host.tar -C / && rm /root/host.tar && cd /tmp
        ring3 doctor | grep '^protection keys'\n";
    prepare.to_owned() + &WAYS.map(attempt).concat()
}

fn verdict(console: &Console) -> Result<String> {
    let keys = console.after("protection keys").is_some_and(|word| word == "yes");
    ensure!(keys, "QEMU's CPU and kernel have no protection keys:\n{}", console.tail());
    for way in WAYS {
        let ended = console.after(&format!("keys, {way}: "));
        ensure!(ended == Some("0"), "{way} ended with {ended:?}:\n{}", console.tail());
    }
    let attempts = console.lines().filter(|line| line.contains(": ok: ")).count();
    let skipped = console.lines().filter(|line| line.contains(": skipped: ")).count();
    let [per_way, skipped] = [attempts, skipped].map(|count| count / WAYS.len());
    ensure!(per_way > 0, "nothing was attempted:\n{}", console.tail());
    Ok(format!("{per_way} attempts, {skipped} skipped, each with {}", WAYS.join(" and ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(text: &str) -> Console {
        let mut console = Console::default();
        console.print(text.as_bytes());
        console
    }

    #[test]
    fn qemu_says_its_version() {
        assert_eq!(major("QEMU emulator version 11.1.3 (Debian 1:11.1.3+ds-1)"), Some(11));
        assert_eq!(major("something else"), None);
    }

    #[test]
    fn both_ways_have_to_end_well() {
        let good = "protection keys          yes\nload x: ok: Signal(11)\nkeys, seccomp: 0\n\
            load x: ok: Signal(11)\nunaligned: skipped: no\nkeys, dispatch: 0\n";
        assert_eq!(
            verdict(&printed(good)).expect("is good"),
            "1 attempts, 0 skipped, each with seccomp and dispatch"
        );
        for (from, to) in [("yes", "NO"), ("dispatch: 0", "dispatch: 1"), (": ok: ", ": FAILED: ")]
        {
            verdict(&printed(&good.replace(from, to))).expect_err(to);
        }
    }
}
