//! What kernel images unpack to, kept in the cache.
//!
//! A kernel image is compressed, and to unpack it takes longer than the rest of what a machine does before its guest runs. So
//! the first machine with a kernel leaves the unpacked kernel in a file of the cache, whose name is the image's SHA-256. Later
//! machines read the file straight to where the kernel is to be in RAM. Each piece is checked when it is read. A file that
//! turns out to be damaged is removed, and the image unpacked as if there had been none.

use std::{
    borrow::Cow,
    fs::{self, File},
    io::{self, Write as _},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};

use crc32fast::hash;
use kernels::{assets::Assets, scratch::Scratch};
use sha2::{Digest, Sha256};
use vmm::unpacked::{self, PIECE, Unpacked};

use crate::kept_files::make_room;

/// What a file begins with. The last byte is the number of the format.
const MAGIC: [u8; 8] = *b"ring3uk\x01";
/// Bytes of a file before the kernel: [`MAGIC`], the kernel's length, the CRC-32 of each of its pieces, and zeros.
const HEAD: usize = 4096;
/// Where the CRCs begin.
const SUMS: usize = 16;
/// The most pieces that a file has.
const MOST_PIECES: usize = (HEAD - SUMS) / 4;
/// The most files. The one that was used the longest ago makes room.
const KERNELS: usize = 6;
/// The fewest bytes of a kernel image that has a file: a smaller image is unpacked sooner than a file is read.
const LEAST: usize = 1 << 20;
/// Prefix of the names of the folders in which files are made.
const FRESH: &str = ".fresh-";

/// Returns what a kernel image unpacks to. An image that the cache has nothing of is unpacked, and the result kept for later
/// machines. `digest` is the image's SHA-256 in hexadecimal digits, if it is known. `None` means that images of this kind are
/// not kept, or that the cache cannot be written.
pub fn of(image: &[u8], digest: Option<&str>) -> Option<Arc<dyn Unpacked>> {
    if image.len() < LEAST || !unpacked::is_of_use(image) {
        return None;
    }
    let folder = Assets::open().ok()?.directory("unpacked");
    let kept = in_folder(&folder, image, digest);
    kept.inspect_err(|error| tracing::debug!(%error, "the unpacked kernel is not kept")).ok()
}

fn in_folder(folder: &Path, image: &[u8], digest: Option<&str>) -> io::Result<Arc<dyn Unpacked>> {
    let digest = digest.map_or_else(|| hexadecimal(&Sha256::digest(image)), str::to_owned);
    let path = folder.join(digest);
    if let Ok(Some(kept)) = Kept::open(&path) {
        return Ok(Arc::new(kept));
    }
    let Ok(Cow::Owned(kernel)) = vmm::unpacked_kernel(image) else {
        return Err(io::ErrorKind::InvalidData.into());
    };
    keep(folder, &path, &kernel)?;
    make_room(folder, &path, KERNELS)?;
    let kept = Kept::open(&path)?.ok_or(io::ErrorKind::NotFound)?;
    Ok(Arc::new(kept))
}

fn hexadecimal(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Writes a file. It has its name once it is complete.
fn keep(folder: &Path, path: &Path, kernel: &[u8]) -> io::Result<()> {
    if kernel.len().div_ceil(PIECE) > MOST_PIECES {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    fs::create_dir_all(folder)?;
    let scratch = Scratch::new(folder, FRESH).map_err(io::Error::other)?;
    let fresh = scratch.path().join("kernel");
    let sums = kernel.chunks(PIECE).flat_map(|piece| hash(piece).to_le_bytes());
    let mut head: Vec<u8> =
        MAGIC.into_iter().chain((kernel.len() as u64).to_le_bytes()).chain(sums).collect();
    head.resize(HEAD, 0);
    let mut file = File::create_new(&fresh)?;
    file.write_all(&head)?;
    file.write_all(kernel)?;
    fs::rename(fresh, path)
}

/// A file of the cache.
#[derive(Debug)]
struct Kept {
    file: File,
    path: PathBuf,
    len: u64,
    /// The CRC-32 of each piece.
    sums: Vec<u32>,
}

impl Kept {
    /// Opens a file, and checks its head and its length. `None` means that the file was cut off, or is of another format.
    fn open(path: &Path) -> io::Result<Option<Self>> {
        let file = File::open(path)?;
        let mut head = [0; HEAD];
        file.read_exact_at(&mut head, 0)?;
        let (magic, rest) = head.split_at(MAGIC.len());
        let (len, sums) = rest.split_first_chunk().ok_or(io::ErrorKind::InvalidData)?;
        let len = u64::from_le_bytes(*len);
        let pieces = usize::try_from(len.div_ceil(PIECE as u64)).unwrap_or(usize::MAX);
        let whole = file.metadata()?.len().checked_sub(HEAD as u64) == Some(len);
        if magic != MAGIC || !whole || pieces > MOST_PIECES {
            return Ok(None);
        }
        let sums = sums.as_chunks().0.iter().take(pieces).map(|sum| u32::from_le_bytes(*sum));
        // The file that was used last stays longest. Where its use cannot be noted, its age counts.
        let _ = file.set_modified(SystemTime::now());
        Ok(Some(Self { path: path.to_owned(), len, sums: sums.collect(), file }))
    }
}

impl Unpacked for Kept {
    fn size(&self) -> u64 {
        self.len
    }

    fn read(&self, number: u64, into: &mut [u8]) -> io::Result<()> {
        let sum = usize::try_from(number).ok().and_then(|number| self.sums.get(number));
        self.file.read_exact_at(into, HEAD as u64 + number * PIECE as u64)?;
        if sum == Some(&hash(into)) {
            return Ok(());
        }
        tracing::warn!(file = %self.path.display(), "damaged, and removed");
        fs::remove_file(&self.path)?;
        Err(io::ErrorKind::InvalidData.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// So many bytes, none of which is like its neighbours.
    fn kernel(len: usize) -> Vec<u8> {
        (0..len).map(|at| (at ^ at >> 8 ^ at >> 16) as u8).collect()
    }

    fn read(kept: &Kept, number: u64, len: usize) -> io::Result<Vec<u8>> {
        let mut piece = vec![0; len];
        kept.read(number, &mut piece).map(|()| piece)
    }

    #[test]
    fn what_is_kept_is_read_as_it_was() {
        let folder = tempfile::tempdir().expect("there is room");
        let (path, kernel) = (folder.path().join("a"), kernel(PIECE + 5));
        keep(folder.path(), &path, &kernel).expect("kept");
        let kept = Kept::open(&path).expect("there").expect("whole");
        assert_eq!(kept.size(), kernel.len() as u64);
        assert_eq!(read(&kept, 0, PIECE).expect("read"), kernel[..PIECE]);
        assert_eq!(read(&kept, 1, 5).expect("read"), kernel[PIECE..]);
        assert!(read(&kept, 2, 0).is_err(), "there is no such piece");
    }

    #[test]
    fn a_file_that_is_cut_off_counts_as_none() {
        let folder = tempfile::tempdir().expect("there is room");
        let path = folder.path().join("a");
        keep(folder.path(), &path, &kernel(100)).expect("kept");
        let whole = fs::read(&path).expect("read");
        for len in [0, 7, HEAD, whole.len() - 1] {
            fs::write(&path, &whole[..len]).expect("written");
            assert!(!matches!(Kept::open(&path), Ok(Some(_))), "{len} bytes");
        }
    }

    #[test]
    fn a_damaged_file_is_removed() {
        let folder = tempfile::tempdir().expect("there is room");
        let path = folder.path().join("a");
        for at in [SUMS, HEAD, HEAD + 99] {
            keep(folder.path(), &path, &kernel(100)).expect("kept");
            let mut damaged = fs::read(&path).expect("read");
            damaged[at] ^= 1;
            fs::write(&path, &damaged).expect("written");
            let kept = Kept::open(&path).expect("there").expect("whole");
            assert!(read(&kept, 0, 100).is_err(), "changed at {at}");
            assert!(!path.exists());
        }
    }

    #[test]
    fn the_one_used_the_longest_ago_makes_room() {
        let folder = tempfile::tempdir().expect("there is room");
        let path = |number: usize| folder.path().join(number.to_string());
        for number in 0..=KERNELS {
            keep(folder.path(), &path(number), &kernel(100)).expect("kept");
            let file = File::open(path(number)).expect("there");
            let time = SystemTime::UNIX_EPOCH + Duration::from_secs(number as u64);
            file.set_modified(time).expect("set");
        }
        Kept::open(&path(0)).expect("there").expect("used now");
        make_room(folder.path(), &path(3), KERNELS).expect("removed");
        let there: Vec<_> = (0..=KERNELS).filter(|number| path(*number).exists()).collect();
        assert_eq!(there, [0, 2, 3, 4, 5, 6]);
    }
}
