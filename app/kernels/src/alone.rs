//! One at a time, of all processes that use a cache: apt refuses who comes second, and what is fetched need not be fetched twice.

use anyhow::{Context, Result};
use std::{fs::File, path::Path};

/// Waits until nobody else has this file, which is made if it is not there; it is given back when what is returned goes.
///
/// # Errors
/// The file cannot be made or locked.
pub(crate) fn alone(lock: &Path) -> Result<File> {
    let file = File::create(lock).with_context(|| format!("cannot make {}", lock.display()))?;
    file.lock().with_context(|| format!("cannot lock {}", lock.display()))?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_one_waits_for_the_first() {
        let directory = tempfile::tempdir().expect("there is room");
        let lock = directory.path().join("lock");
        let first = alone(&lock).expect("nobody has it");
        assert!(File::create(&lock).expect("it is there").try_lock().is_err());
        drop(first);
        alone(&lock).expect("it has been given back");
    }
}
