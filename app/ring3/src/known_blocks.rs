//! The files that say which blocks of a kernel's code have been run ([`vmm::KnownBlocks`]).
//!
//! The cache has a file for each kernel. The first machine with a kernel writes the file. That machine opens and locks it
//! before it starts, since its process can open no file once it is shut in. A file that is cut off or damaged counts as
//! none: the next machine writes it anew.

use crc32fast::hash;
use kernels::assets::Assets;
use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::Arc,
};
use vmm::KnownBlocks;

/// What a file begins with. The last byte is the number of the format.
const MAGIC: [u8; 8] = *b"ring3kb\x01";
/// Bytes of a file before its blocks: [`MAGIC`], the number of blocks, and the CRC-32 of all blocks' bytes.
const HEAD: usize = 16;
/// Bytes of a block in a file.
const BLOCK: usize = 8;
/// The most bytes of a file.
const MOST: u64 = 2 << 20;
/// The most files, each of one kernel. The oldest file makes room for a new one.
const KERNELS: usize = 64;
/// The fewest bytes of a kernel image that has a file: a smaller kernel starts sooner than a file is read.
const LEAST: usize = 1 << 20;

/// The blocks of a kernel, and the file to write them to if nobody has.
#[derive(Default)]
pub struct KernelBlocks {
    blocks: Arc<KnownBlocks>,
    file: Option<File>,
}

impl KernelBlocks {
    /// The blocks of a kernel image. Without a cache that can be written no blocks are known or noted.
    pub fn of(kernel: &[u8]) -> Self {
        let cache = Assets::open().ok().filter(|_| kernel.len() >= LEAST);
        let folder = cache.map(|cache| cache.directory("blocks"));
        let found = folder.and_then(|folder| Self::in_folder(&folder, kernel).ok());
        found.unwrap_or_default()
    }

    fn in_folder(folder: &Path, kernel: &[u8]) -> io::Result<Self> {
        let path = folder.join(format!("{:08x}-{:x}", hash(kernel), kernel.len()));
        if let Some(known) = File::open(&path).and_then(read).ok().flatten() {
            return Ok(Self { blocks: Arc::new(KnownBlocks::of(known)), file: None });
        }
        fs::create_dir_all(folder)?;
        let mut options = OpenOptions::new();
        let file = options.write(true).create(true).mode(0o600).open(&path)?;
        // Another machine is about to write it.
        file.try_lock()?;
        make_room(folder, &path)?;
        Ok(Self { blocks: Arc::new(KnownBlocks::to_note()), file: Some(file) })
    }

    /// The blocks, for the machine to know or to note.
    pub fn blocks(&self) -> Arc<KnownBlocks> {
        Arc::clone(&self.blocks)
    }

    /// Writes the blocks that the machine has noted, if the file was to be written. To be called once the machine has done what
    /// it was started for.
    pub fn keep(self) {
        let noted = self.blocks.noted();
        let written = self.file.filter(|_| !noted.is_empty()).map(|file| write(&file, &noted));
        if let Some(Err(error)) = written {
            tracing::debug!(%error, "the blocks of the kernel are not kept");
        }
    }
}

/// The blocks in a file; `None` if the file is not as it was written.
fn read(file: File) -> io::Result<Option<Vec<u64>>> {
    let mut bytes = Vec::new();
    file.take(MOST).read_to_end(&mut bytes)?;
    Ok(parse(&bytes))
}

fn parse(bytes: &[u8]) -> Option<Vec<u64>> {
    let (head, rest) = bytes.split_first_chunk::<HEAD>()?;
    let [count, sum] = [8, 12].map(|at| {
        let field = head.get(at..at + 4).and_then(|field| field.try_into().ok());
        field.map_or(0, u32::from_le_bytes)
    });
    let blocks = rest.get(..(count as usize).checked_mul(BLOCK)?)?;
    let intact = head.starts_with(&MAGIC) && hash(blocks) == sum;
    let (blocks, _) = blocks.as_chunks();
    intact.then(|| blocks.iter().map(|block| u64::from_le_bytes(*block)).collect())
}

/// Writes the blocks, and the head last: a file without a head counts as none.
fn write(file: &File, blocks: &[u64]) -> io::Result<()> {
    let most = (MOST as usize - HEAD) / BLOCK;
    let blocks: Vec<u8> = blocks.iter().take(most).flat_map(|block| block.to_le_bytes()).collect();
    file.write_all_at(&blocks, HEAD as u64)?;
    let count = (blocks.len() / BLOCK) as u32;
    let head = [&MAGIC[..], &count.to_le_bytes(), &hash(&blocks).to_le_bytes()].concat();
    file.write_all_at(&head, 0)
}

/// Removes files until there are few enough. The machine's own stays. Of the others empty ones go first, which nobody has
/// written to as their machines came to no good end, and then the oldest.
fn make_room(folder: &Path, own: &Path) -> io::Result<()> {
    let worth = |path: &PathBuf| {
        let data = path.metadata().ok()?;
        Some((data.len() > 0, data.modified().ok()?))
    };
    let others = fs::read_dir(folder)?.flatten().map(|entry| entry.path());
    let mut all: Vec<_> = others.filter(|path| path != own).collect();
    all.sort_by_cached_key(worth);
    let too_many = (all.len() + 1).saturating_sub(KERNELS);
    all.iter().take(too_many).try_for_each(fs::remove_file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{io::Write as _, time::SystemTime};

    const KERNEL: &[u8] = b"a kernel";

    #[test]
    fn what_one_machine_has_written_the_next_one_knows() {
        let folder = tempfile::tempdir().expect("there is room");
        let of = |kernel| KernelBlocks::in_folder(folder.path(), kernel);
        let first = of(KERNEL).expect("it is to write");
        assert!(of(KERNEL).is_err(), "two write at once");
        of(b"another kernel").expect("it has a file of its own");
        let file = first.file.as_ref().expect("it is to write");
        write(file, &[3, 5]).expect("there is room");
        drop(first);
        let second = of(KERNEL).expect("it is there");
        assert!(second.file.is_none());
        assert_eq!(format!("{:?}", second.blocks), format!("{:?}", KnownBlocks::of(vec![3, 5])));
    }

    #[test]
    fn a_damaged_file_is_written_anew() {
        let folder = tempfile::tempdir().expect("there is room");
        let of = || KernelBlocks::in_folder(folder.path(), KERNEL);
        write(of().expect("new").file.as_ref().expect("to write"), &[1, 2, 3]).expect("room");
        let path = fs::read_dir(folder.path()).expect("there").next().expect("one").expect("read");
        let good = fs::read(path.path()).expect("read");
        assert_eq!(parse(&good), Some(vec![1, 2, 3]));
        for at in 0..good.len() {
            assert_eq!(parse(&good[..at]), None, "cut off at {at}");
            let mut bad = good.clone();
            bad[at] ^= 1;
            assert_eq!(parse(&bad), None, "changed at {at}");
        }
        fs::write(path.path(), &good[..good.len() - 1]).expect("written");
        assert!(of().expect("it is to write").file.is_some());
    }

    #[test]
    fn the_oldest_make_room() {
        let folder = tempfile::tempdir().expect("there is room");
        for number in 0..KERNELS + 2 {
            let mut file = File::create(folder.path().join(number.to_string())).expect("made");
            if !(5..=6).contains(&number) {
                file.write_all(b"a list").expect("there is room");
            }
            let age = std::time::Duration::from_secs(number as u64);
            file.set_modified(SystemTime::UNIX_EPOCH + age).expect("set");
        }
        make_room(folder.path(), &folder.path().join("5")).expect("removed");
        let left = fs::read_dir(folder.path()).expect("there").count();
        assert_eq!(left, KERNELS);
        let is_there = |number: &str| folder.path().join(number).exists();
        let expected = [false, true, true, false];
        assert_eq!(["0", "1", "5", "6"].map(is_there), expected, "6 is empty, and 5 ours");
    }
}
