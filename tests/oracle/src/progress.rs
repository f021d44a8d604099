//! How far a long campaign has come, in a file: one that was ended goes on where it was.

use std::{
    fs,
    io::{self, ErrorKind},
    path::{Path, PathBuf},
};

/// Cases between two notes: half a minute's work.
pub const BATCH: u64 = 1 << 20;

/// A campaign's state after so many cases.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    path: PathBuf,
    /// What follows from it, in words: another list of cases is another campaign.
    list: String,
    /// Cases run.
    pub done: u64,
    /// Cases the sides disagree on.
    pub failed: u64,
}

impl Progress {
    /// Of the campaign through `list` that `path` tells of; a new one if there is no such file.
    ///
    /// # Errors
    /// The file cannot be read, or tells of another campaign.
    pub fn open(path: &Path, list: &str) -> io::Result<Self> {
        let new = Self { path: path.to_owned(), list: list.to_owned(), done: 0, failed: 0 };
        let text = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(new),
            Err(error) => return Err(error),
        };
        let [known, done, failed] = text.lines().collect::<Vec<_>>()[..] else {
            return Err(other(path, "is no note of a campaign"));
        };
        if known != list {
            return Err(other(path, &format!("tells of another campaign: {known}")));
        }
        let number = |line: &str, name: &str| {
            let number = line.strip_prefix(name).and_then(|number| number.trim().parse().ok());
            number.ok_or_else(|| other(path, &format!("does not say what is {name}")))
        };
        Ok(Self { done: number(done, "done")?, failed: number(failed, "failed")?, ..new })
    }

    /// Notes that more were run. A file that is there is replaced at once: it is never half of one.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn advance(&mut self, cases: u64, failed: u64) -> io::Result<()> {
        self.done += cases;
        self.failed += failed;
        let Self { path, list, done, failed } = self;
        let beside = path.with_extension("new");
        fs::write(&beside, format!("{list}\ndone {done}\nfailed {failed}\n"))?;
        fs::rename(beside, path)
    }
}

fn other(path: &Path, problem: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, format!("{} {problem}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_campaign_goes_on_and_is_no_other() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("note");
        let mut progress = Progress::open(&path, "seed 1").expect("new");
        progress.advance(BATCH, 0).expect("written");
        progress.advance(7, 2).expect("written");
        let again = Progress::open(&path, "seed 1").expect("read");
        assert_eq!((again.done, again.failed), (BATCH + 7, 2));
        assert!(Progress::open(&path, "seed 2").is_err());
        fs::write(&path, "seed 1\n").expect("written");
        assert!(Progress::open(&path, "seed 1").is_err());
    }
}
