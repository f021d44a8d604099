//! Folders of the cache that have a file for each kernel, and not for too many.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// Removes files of a folder until at most `most` are left. The file `own` stays. Empty files go first: their machines ended badly,
/// before anything was written. Then the oldest files go.
pub fn make_room(folder: &Path, own: &Path, most: usize) -> io::Result<()> {
    let worth = |path: &PathBuf| {
        let data = path.metadata().ok()?;
        Some((data.len() > 0, data.modified().ok()?))
    };
    let files = fs::read_dir(folder)?.flatten().map(|entry| entry.path());
    let mut others: Vec<_> = files.filter(|path| path.is_file() && path != own).collect();
    others.sort_by_cached_key(worth);
    let too_many = (others.len() + 1).saturating_sub(most);
    others.iter().take(too_many).try_for_each(fs::remove_file)
}
