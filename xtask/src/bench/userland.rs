//! Debian programs for the benchmark's rows of whole programs: a root directory, and a disk image
//! with the same content.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result};
use harness::{peers::Userland, program};

use super::packages::unpack_all;
use crate::{
    archive::Suite,
    assets::{Assets, Manifest},
    command::{output, progress},
};

/// What rows run. What these depend on comes with them.
const PACKAGES: [&str; 7] =
    ["busybox-static", "gcc", "gzip", "libc6-dev", "python3.11-minimal", "sqlite3", "zstd"];
/// Name in the cache, to be changed with the packages.
const ENTRY: &str = "bench-userland-1";
/// Directories that something is mounted on, or written to.
const MOUNT_POINTS: [&str; 3] = ["tmp", "dev", "bench/source"];
const DIRECTORY: &str = "root";
const IMAGE: &str = "userland.ext4";
/// Size of the image: content is a third of it.
const IMAGE_SIZE: &str = "768M";

/// The programs; fetched if they are not in the cache. Scripts are ours and change, so they are
/// not in the image; the directory gets them anew.
///
/// # Errors
/// Neither the cache has them nor can they be fetched.
pub(super) fn prepare(assets: &Assets) -> Result<Userland> {
    assets.entry(ENTRY, |fresh| {
        let root = fresh.join(DIRECTORY);
        for directory in MOUNT_POINTS {
            fs::create_dir_all(root.join(directory))?;
        }
        unpack_all(&assets.archive(Suite::Bookworm)?, &PACKAGES, &root)?;
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
