//! `ring3 dump`: the machine sends its core, the client writes it.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, BufWriter, Read, Seek, SeekFrom, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
};

use clap::Args;
use inspect::core_file::Core;
use serde::{Deserialize, Serialize};
use tempfile::NamedTempFile;
use vmm::Inspector;

use super::{Order, Target, client};
use crate::{failure::Failure, output};

/// Bytes looked at at a time: a piece of nothing but zeros becomes a hole.
const PIECE: usize = 64 << 10;

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
    let mut machine = client::connect(&arguments.target, Order::Dump)?;
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
    let mut piece = vec![0; PIECE];
    let mut copied = 0;
    loop {
        let len = fill(from, &mut piece)?;
        if len == 0 {
            to.set_len(copied)?;
            return Ok(copied);
        }
        copied += len as u64;
        if piece[..len].iter().all(|byte| *byte == 0) {
            to.seek(SeekFrom::Current(len as i64))?;
        } else {
            to.write_all(&piece[..len])?;
        }
    }
}

/// Reads as much as there is room for, or less at the end.
fn fill(from: &mut impl Read, piece: &mut [u8]) -> io::Result<usize> {
    let mut len = 0;
    while len < piece.len() {
        match from.read(&mut piece[len..])? {
            0 => break,
            count => len += count,
        }
    }
    Ok(len)
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
