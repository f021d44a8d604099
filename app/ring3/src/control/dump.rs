//! `ring3 dump`: the machine sends its core, the client writes it.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, BufWriter, Read, Seek, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
};

use clap::Args;
use inspect::core_file::{self, Core, Segment};
use serde::{Deserialize, Serialize};
use tempfile::NamedTempFile;
use vmm::Inspector;

use super::{ControlOrder, Target, client};
use crate::{failure::Failure, output};

/// Bytes looked at at a time: a piece of nothing but zeros becomes a hole.
const PIECE: usize = 64 << 10;

/// Bytes of all that is in a core before memory, at the most.
const FIRST: u64 = 1 << 20;

/// What to write where.
#[derive(Debug, Args)]
pub struct DumpArguments {
    /// Which
    #[command(flatten)]
    pub target: Target,
    /// The file, which is replaced when all is written
    pub file: PathBuf,
}

/// The line before the core.
#[derive(Debug, Serialize, Deserialize)]
struct Head {
    /// Bytes of the core.
    bytes: u64,
    /// What its readers will miss.
    missing: Option<String>,
}

/// The machine's side. It stands until the client has everything, or has gone.
pub(super) fn send(inspector: &Inspector, client: &UnixStream) -> io::Result<()> {
    let core = Core::new(inspector)?;
    let missing = core.missing().map(str::to_owned);
    let mut line = serde_json::to_string(&Head { bytes: core.len(), missing })?;
    line.push('\n');
    let mut writer = BufWriter::new(client);
    writer.write_all(line.as_bytes())?;
    core.write(&mut writer)
}

/// `ring3 dump`.
pub fn dump(arguments: &DumpArguments) -> Result<u8, Failure> {
    let path = &arguments.file;
    let wrong = |error: io::Error| Failure::host(format!("{}: {error}", path.display()));
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    let mut file = NamedTempFile::new_in(folder).map_err(wrong)?;
    let mut machine = client::connect(&arguments.target, ControlOrder::Dump)?;
    let head = head(&mut machine).map_err(|error| lost(arguments, &error))?;
    let copied = copy_sparsely(&mut machine.take(head.bytes), file.as_file_mut()).map_err(wrong)?;
    if copied != head.bytes {
        return Err(lost(arguments, &io::ErrorKind::UnexpectedEof.into()));
    }
    file.persist(path).map_err(|error| wrong(error.error))?;
    if let Some(missing) = head.missing {
        output::complain(&missing);
    }
    Ok(0)
}

/// Writes a core of a running machine without the memory: a hole in the file stands for that. Returns where the memory
/// is that the core names, for a reader that gets it from the machine itself.
pub(super) fn hollow(target: &Target, file: &mut File) -> Result<Vec<Segment>, Failure> {
    let wrong = |error: io::Error| Failure::host(format!("machine {}: {error}", target.machine));
    let mut machine = client::connect(target, ControlOrder::Dump)?;
    let bytes = head(&mut machine).map_err(wrong)?.bytes;
    let mut first = vec![0; FIRST.min(bytes) as usize];
    machine.read_exact(&mut first).map_err(wrong)?;
    // From here on there is memory, which is not read: the machine goes on when nobody listens.
    drop(machine);
    let end = core_file::head_len(&first).unwrap_or(first.len());
    file.write_all(&first[..end.min(first.len())]).map_err(wrong)?;
    file.set_len(bytes).map_err(wrong)?;
    Ok(core_file::segments(&first))
}

/// Writes a machine's core to an empty file, with holes where there are zeros. Returns what its readers will miss.
///
/// # Errors
/// The file cannot be written.
pub fn write_core(inspector: &Inspector, file: &mut File) -> io::Result<Option<&'static str>> {
    let core = Core::new(inspector)?;
    core.write(&mut Sparse(file))?;
    file.set_len(core.len())?;
    Ok(core.missing())
}

/// A file in which zeros are holes. Whoever has written all sets its length.
struct Sparse<'a>(&'a mut File);

impl Write for Sparse<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let piece = &bytes[..bytes.len().min(PIECE)];
        if piece.iter().all(|byte| *byte == 0) {
            self.0.seek_relative(piece.len() as i64)?;
        } else {
            self.0.write_all(piece)?;
        }
        Ok(piece.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

fn lost(arguments: &DumpArguments, error: &io::Error) -> Failure {
    Failure::host(format!("machine {}: it ended meanwhile: {error}", arguments.target.machine))
}

fn head(machine: &mut BufReader<UnixStream>) -> io::Result<Head> {
    let mut line = String::new();
    machine.read_line(&mut line)?;
    Ok(serde_json::from_str(&line)?)
}

/// Copies until the end, with holes where there are zeros; how many bytes that is.
fn copy_sparsely(from: &mut impl Read, to: &mut File) -> io::Result<u64> {
    let copied = io::copy(&mut BufReader::with_capacity(PIECE, from), &mut Sparse(to))?;
    to.set_len(copied)?;
    Ok(copied)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_become_holes_and_nothing_is_lost() {
        let mut bytes = vec![0; 3 * PIECE + 7];
        bytes[PIECE + 1] = 1;
        let mut file = tempfile::tempfile().expect("a file");
        let copied = copy_sparsely(&mut &bytes[..], &mut file).expect("copied");
        assert_eq!(copied, bytes.len() as u64);
        let mut read = Vec::new();
        file.rewind().expect("rewound");
        file.read_to_end(&mut read).expect("read");
        assert!(read == bytes);
    }
}
