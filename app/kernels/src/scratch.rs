//! Folders in which something is made, of which nothing is left behind.
//!
//! What is made grows in a folder beside its place and is moved there when it is complete. The folder goes when it is dropped; that of a process
//! that was killed goes when the next one is made there. A folder is in use as long as somebody holds a lock on it, which the host
//! takes from a process that ends, however it does.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use tempfile::TempDir;

/// A folder of one's own; it is removed when dropped.
#[derive(Debug)]
pub struct Scratch {
    folder: TempDir,
    _lock: File,
}

impl Scratch {
    /// A new folder in `near`, whose name begins with `prefix`. Others of that prefix whose owners are gone are removed.
    ///
    /// # Errors
    /// `near` cannot be written to.
    pub fn new(near: &Path, prefix: &str) -> Result<Self> {
        sweep(near, prefix);
        let made = || loop {
            let folder = tempfile::Builder::new().prefix(prefix).tempdir_in(near)?;
            let lock = File::open(folder.path())?;
            lock.lock()?;
            // Between the two somebody else may have taken it for one that was left behind.
            if folder.path().exists() {
                return Ok::<_, io::Error>(Self { folder, _lock: lock });
            }
        };
        made().with_context(|| format!("cannot write to {}", near.display()))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// It stays, and is its new owner's to move.
    pub fn keep(self) -> PathBuf {
        self.folder.keep()
    }
}

/// Removes what others were making when they were killed.
fn sweep(near: &Path, prefix: &str) {
    for entry in fs::read_dir(near).into_iter().flatten().flatten() {
        let is_scratch = entry.file_name().to_string_lossy().starts_with(prefix);
        let Ok(folder) = File::open(entry.path()) else { continue };
        if is_scratch && folder.try_lock().is_ok() {
            // Another user's, in a folder of both, is that user's to remove.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_killed_leave_behind_goes_and_what_is_in_use_stays() {
        let near = tempfile::tempdir().expect("a folder");
        let left = near.path().join(".making-left");
        fs::create_dir(&left).expect("made");
        fs::write(left.join("half"), "written").expect("written");
        fs::create_dir(near.path().join("other")).expect("made");
        let first = Scratch::new(near.path(), ".making-").expect("made");
        assert!(!left.exists());
        let second = Scratch::new(near.path(), ".making-").expect("made");
        assert!(first.path().exists() && near.path().join("other").exists());
        drop((first, second));
        assert_eq!(fs::read_dir(near.path()).expect("readable").count(), 1, "`other` alone");
    }

    #[test]
    fn what_is_kept_stays() {
        let near = tempfile::tempdir().expect("a folder");
        let kept = Scratch::new(near.path(), ".making-").expect("made").keep();
        assert!(kept.exists());
    }
}
