//! Debian programs for the benchmark's rows of whole programs: a root directory and a disk image
//! with the same content.
//!
//! Packages come from Debian's archive and are unpacked, not installed: no row needs what their
//! maintainers' scripts would do, and so nothing needs root.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use harness::{peers::Userland, program};
use sha2::{Digest, Sha256};

use super::packages::unpack_all;
use crate::{
    archive::Suite,
    assets::{Assets, Manifest},
    command::{output, progress},
};

/// What rows run. What these depend on comes with them.
const PACKAGES: [&str; 7] =
    ["busybox-static", "gcc", "gzip", "libc6-dev", "python3.11-minimal", "sqlite3", "zstd"];
/// Directories that something is mounted on, or written to.
const MOUNT_POINTS: [&str; 3] = ["tmp", "dev", "bench/source"];
const DIRECTORY: &str = "root";
const IMAGE: &str = "userland.ext4";
/// Size of the image: content is a third of it.
const IMAGE_SIZE: &str = "768M";

/// The programs; fetched if they are not in the cache, or their scripts have changed.
///
/// # Errors
/// Neither the cache has them nor can they be fetched.
pub(super) fn prepare(assets: &Assets) -> Result<Userland> {
    let entry = format!("bench-userland-{}", &digest()?[..12]);
    assets.entry(&entry, |fresh| {
        let root = fresh.join(DIRECTORY);
        fs::create_dir_all(&root)?;
        unpack_all(&assets.archive(Suite::Bookworm)?, &PACKAGES, &root)?;
        add_scripts(&root)?;
        make_image(&root, &fresh.join(IMAGE))?;
        Manifest::of(&PACKAGES.join(" "), fresh, &[IMAGE.to_owned()])
    })?;
    let directory = assets.directory(&entry);
    Ok(Userland { directory: directory.join(DIRECTORY), image: directory.join(IMAGE) })
}

/// What we add ourselves: source, and where it goes.
fn scripts() -> Result<Vec<(PathBuf, PathBuf)>> {
    let mut files = Vec::new();
    for (from, to) in [(program::scripts(), "bench"), (program::sources(), "bench/source")] {
        let entries = fs::read_dir(&from).with_context(|| format!("no {}", from.display()))?;
        let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
        files.extend(paths.map(|path| {
            let name = path.file_name().unwrap_or_default().to_owned();
            (path, Path::new(to).join(name))
        }));
    }
    files.sort();
    Ok(files)
}

/// Of scripts and packages.
fn digest() -> Result<String> {
    let mut hash = Sha256::new();
    hash.update(PACKAGES.join(" "));
    for (from, to) in scripts()? {
        hash.update(to.as_os_str().as_encoded_bytes());
        hash.update(fs::read(from)?);
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

fn add_scripts(root: &Path) -> Result<()> {
    for directory in MOUNT_POINTS {
        fs::create_dir_all(root.join(directory))?;
    }
    for (from, to) in scripts()? {
        fs::copy(from, root.join(to))?;
    }
    Ok(())
}

fn make_image(root: &Path, image: &Path) -> Result<()> {
    let bar = progress("making a disk image");
    let mut command = Command::new("mke2fs");
    command.args(["-q", "-t", "ext4", "-O", "^has_journal", "-d"]).arg(root);
    output(command.arg(image).arg(IMAGE_SIZE))?;
    bar.finish_and_clear();
    Ok(())
}
