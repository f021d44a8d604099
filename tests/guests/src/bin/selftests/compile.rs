//! C projects, compiled by the same compiler in a guest and on the host: objects, libraries and programs
//! must be the same. Compilers are deterministic, take all memory and files a machine has to offer,
//! and their programs start by the hundred.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;
use xtask::{archive::Suite, assets::Assets};

use crate::{in_guest, machine::Limits};

/// Debian source packages, and what builds them.
const PROJECTS: [(&str, &str); 2] = [
    ("zlib", "./configure && make -j$(nproc)"),
    ("bzip2", "make -j$(nproc) libbz2.a bzip2 bzip2recover"),
];
/// How objects and programs begin, and archives of them.
const MADE: [&[u8]; 2] = [b"\x7fELF", b"!<arch>\n"];
/// The folder a project is built in, on both sides: paths get into debugging information.
const BUILD: &str = "build";

/// Builds every project once on the host and `times` times in a guest, and compares the bytes.
///
/// # Errors
/// A project could not be built, or not to the same bytes.
pub fn run(assets: &Assets, times: u32, limits: Limits<'_>) -> Result<String> {
    let (scratch, mut figures) = (TempDir::new()?, Vec::new());
    for (package, command) in PROJECTS {
        let build = Build { assets, package, command, scratch: scratch.path(), limits };
        let host = build.run(in_guest::on_the_host)?;
        let mut same = String::new();
        for time in 1..=times {
            let of_build = || format!("{package}, build {time} of {times}");
            let guest = build.run(in_guest::run).with_context(of_build)?;
            same = compare(&host, &guest).with_context(of_build)?;
        }
        figures.push(format!("{same} {times} times"));
    }
    Ok(figures.join("; "))
}

/// A project to build.
struct Build<'a> {
    assets: &'a Assets,
    package: &'a str,
    command: &'a str,
    scratch: &'a Path,
    limits: Limits<'a>,
}

/// Runs a command in a folder, on the host or in a guest.
type Run = fn(&Path, Limits<'_>, &[&str]) -> Result<in_guest::Ended>;

impl Build<'_> {
    /// Builds the project from its sources, and returns what was made. The folder is gone afterwards.
    fn run(&self, run: Run) -> Result<BTreeMap<PathBuf, Vec<u8>>> {
        let directory = self.scratch.join(BUILD);
        self.assets.source(Suite::Bookworm, self.package, &directory)?;
        let words = ["sh", "-c", &format!("cd {BUILD} && {}", self.command)];
        let ended = run(self.scratch, self.limits, &words)?;
        ensure!(ended.code == Some(0), "{:?}: {}", ended.code, ended.tail());
        let made = made(&directory)?;
        fs::remove_dir_all(&directory)?;
        Ok(made)
    }
}

/// What a compiler has made in a folder, by path.
fn made(directory: &Path) -> Result<BTreeMap<PathBuf, Vec<u8>>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![directory.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)? {
            let entry = entry?;
            match entry.file_type()? {
                kind if kind.is_dir() => folders.push(entry.path()),
                kind if kind.is_file() => {
                    let name = entry.path().strip_prefix(directory)?.to_owned();
                    let bytes = fs::read(entry.path())?;
                    if MADE.iter().any(|start| bytes.starts_with(start)) {
                        found.insert(name, bytes);
                    }
                }
                _ => {}
            }
        }
    }
    Ok(found)
}

fn compare(
    host: &BTreeMap<PathBuf, Vec<u8>>,
    guest: &BTreeMap<PathBuf, Vec<u8>>,
) -> Result<String> {
    let paths = host.keys().chain(guest.keys().filter(|path| !host.contains_key(*path)));
    let differ: Vec<_> = paths.filter(|path| host.get(*path) != guest.get(*path)).collect();
    ensure!(differ.is_empty(), "not the same as on the host: {differ:?}");
    let objects = host.keys().filter(|path| path.extension().is_some_and(|e| e == "o")).count();
    ensure!(objects > 0, "nothing was compiled");
    let bytes: usize = host.values().map(Vec::len).sum();
    Ok(format!("{} files, {objects} of them objects, {bytes} bytes, the same", host.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_counts() {
        let build = |bytes: &[u8]| BTreeMap::from([(PathBuf::from("a.o"), bytes.to_vec())]);
        let same = compare(&build(b"code"), &build(b"code")).expect("the same");
        assert_eq!(same, "1 files, 1 of them objects, 4 bytes, the same");
        compare(&build(b"code"), &build(b"cods")).expect_err("a byte");
        compare(&build(b"code"), &BTreeMap::new()).expect_err("not made in the guest");
        compare(&BTreeMap::new(), &build(b"code")).expect_err("not made on the host");
        compare(&BTreeMap::new(), &BTreeMap::new()).expect_err("nothing at all");
    }
}
