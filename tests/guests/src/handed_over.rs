//! What an ordinary user needs of whoever runs the test.

use anyhow::{Result, ensure};
use std::{fs, path::Path, process::Command};
use xtask::assets::Assets;

use crate::{USUAL, ring3};

/// Copies ring3 and its usual kernel into a folder, as `ring3` and in `cache` (a value for `XDG_CACHE_HOME`): an ordinary user may see
/// neither where this program was built nor the cache of whoever runs the test.
///
/// # Errors
/// There is no such kernel, or the folder cannot be written.
pub fn hand_over(directory: &Path) -> Result<()> {
    fs::copy(ring3()?, directory.join("ring3"))?;
    let cached = Assets::open()?;
    cached.kernel(USUAL)?;
    let (from, to) = (cached.directory(USUAL.entry()), directory.join("cache/ring3/v2"));
    fs::create_dir_all(&to)?;
    ensure!(Command::new("cp").arg("-r").arg(from).arg(&to).status()?.success());
    Ok(())
}
