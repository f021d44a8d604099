//! Programs for the benchmark's rows of whole programs: a root directory, and a disk image with the
//! same content. All are Debian's, but one of ours in Go, which Debian's compiler builds.

use std::{fs, os::unix::fs::symlink, path::Path, process::Command};

use anyhow::{Context, Result};
use harness::{
    peers::{self, Userland},
    program,
};

use super::packages::unpack_all;
use crate::{
    archive::{Archive, Suite},
    assets::{Assets, Manifest},
    command::{output, progress},
};

/// What rows run. What these depend on comes with them.
const PACKAGES: [&str; 17] = [
    "bash",
    "busybox-static",
    "coreutils",
    "fio",
    "gcc",
    "gzip",
    "iperf3",
    "libc6-dev",
    "libpython3.11-stdlib",
    "make",
    "nginx",
    "nodejs",
    "perl-base",
    "povray",
    "python3.11-minimal",
    "sqlite3",
    "zstd",
];
/// What is compiled by a row, as source.
const PROJECT: &str = "lua5.4";
/// The Go compiler and its library, for as long as it takes to build one program.
const GO: [&str; 1] = ["golang-1.19-go"];
/// Name in the cache, to be changed with the packages.
const ENTRY: &str = "bench-userland-6";
/// Directories that something is mounted on, or written to.
const MOUNT_POINTS: [&str; 5] = ["tmp", "dev", "proc", "bench/source", "src"];
/// Devices that programs need where no kernel fills `dev`: the host's are mounted on these.
const DEVICES: [&str; 3] = ["dev/null", "dev/urandom", "dev/zero"];
/// Accounts, which nginx looks up.
const ACCOUNTS: [(&str, &str); 2] = [
    ("etc/passwd", "root:x:0:0:::\nnobody:x:65534:65534:::\n"),
    ("etc/group", "root:x:0:\nnogroup:x:65534:\nnobody:x:65534:\n"),
];
/// What makefiles call.
const APPLETS: [&str; 6] = ["cat", "cp", "ls", "mkdir", "rm", "sh"];
const DIRECTORY: &str = "root";
const IMAGE: &str = "userland.ext4";
/// Size of the image: content is half of it.
const IMAGE_SIZE: &str = "1536M";

/// The programs; fetched if they are not in the cache. Scripts are ours and change, so they are
/// not in the image; the directory gets them anew.
///
/// # Errors
/// Neither the cache has them nor can they be fetched.
pub(super) fn prepare(assets: &Assets) -> Result<Userland> {
    assets.entry(ENTRY, |fresh| {
        let root = fresh.join(DIRECTORY);
        let archive = assets.archive(Suite::Bookworm)?;
        unpack_all(&archive, &PACKAGES, &root)?;
        add_system_files(&root)?;
        assets.source(Suite::Bookworm, PROJECT, &root.join("src/lua"))?;
        build_go(&archive, fresh, &root.join("bin/bench-go"))?;
        compile_python(&root)?;
        make_image(&root, &fresh.join(IMAGE))?;
        Manifest::of(&PACKAGES.join(" "), fresh, &[IMAGE.to_owned()])
    })?;
    let (directory, image) =
        (assets.directory(ENTRY).join(DIRECTORY), assets.directory(ENTRY).join(IMAGE));
    for (name, content) in scripts()? {
        fs::write(directory.join(name), content)?;
    }
    Ok(Userland { directory, image })
}

/// Adds the files that maintainers' scripts or an installed system would make.
fn add_system_files(root: &Path) -> Result<()> {
    for directory in MOUNT_POINTS {
        fs::create_dir_all(root.join(directory))?;
    }
    for device in DEVICES {
        fs::write(root.join(device), "")?;
    }
    for (file, content) in ACCOUNTS {
        fs::write(root.join(file), content)?;
    }
    for applet in APPLETS.map(|name| root.join("bin").join(name)) {
        // coreutils' are other programs than those that were measured before it came.
        if applet.symlink_metadata().is_ok() {
            fs::remove_file(&applet)?;
        }
        symlink("busybox", applet)?;
    }
    Ok(())
}

/// Builds the program in Go, static, by Debian's compiler, which is of no use afterwards.
fn build_go(archive: &Archive, near: &Path, program: &Path) -> Result<()> {
    let compiler = tempfile::Builder::new().prefix(".go-").tempdir_in(near)?;
    unpack_all(archive, &GO, compiler.path())?;
    let bar = progress("building a program in Go");
    let home = compiler.path().join("usr/lib/go-1.19");
    let mut command = Command::new(home.join("bin/go"));
    command.arg("build").arg("-o").arg(program).arg(harness::program::scripts().join("go.go"));
    command.env("GOROOT", &home).env("GOCACHE", compiler.path().join("cache"));
    command.envs([
        ("CGO_ENABLED", "0"),
        ("GO111MODULE", "off"),
        ("GOFLAGS", ""),
        ("GOAMD64", "v1"),
    ]);
    output(&mut command)?;
    bar.finish_and_clear();
    Ok(())
}

/// Compiles Python's modules, as Debian's maintainer scripts do. Otherwise the first program of a
/// root that can be written would compile them, and each program of a disk that cannot.
fn compile_python(root: &Path) -> Result<()> {
    let mut command = peers::loaded(root, "usr/bin/python3.11");
    command.args(["-I", "-S", "-m", "compileall", "-q", "-p", "/", "-s"]).arg(root);
    output(command.arg(root.join("usr/lib/python3.11")))?;
    Ok(())
}

/// The scripts and sources that rows run, with their names in the root directory.
///
/// # Errors
/// They cannot be read.
pub(super) fn scripts() -> Result<Vec<(String, Vec<u8>)>> {
    let mut files = Vec::new();
    for (from, to) in [(program::scripts(), "bench"), (program::sources(), "bench/source")] {
        let entries = fs::read_dir(&from).with_context(|| format!("no {}", from.display()))?;
        for entry in entries {
            let entry = entry?;
            let name = format!("{to}/{}", entry.file_name().to_string_lossy());
            files.push((name, fs::read(entry.path())?));
        }
    }
    files.sort();
    Ok(files)
}

fn make_image(root: &Path, image: &Path) -> Result<()> {
    let bar = progress("making a disk image");
    let mut command = Command::new("mke2fs");
    command.args(["-q", "-t", "ext4", "-O", "^has_journal", "-d"]).arg(root);
    output(command.arg(image).arg(IMAGE_SIZE))?;
    bar.finish_and_clear();
    Ok(())
}
