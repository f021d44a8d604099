//! The files with the blocks of a kernel's code that have been run, translated ([`vmm::KnownBlocks`]).
//!
//! The cache has a file for each kernel and each build of this program. The first machine with a kernel notes its blocks.
//! When that machine ends, another process translates the blocks and writes the file ([`serve`]), and the machine waits for
//! that. The machine's process does not keep the file open for writing: a guest that took the process over could have later
//! machines execute what the guest likes. All that the process can send are bytes to translate, and later machines use a block
//! only where their guest has the same bytes.
//!
//! A file that is cut off counts as none, and one that is damaged is removed: the next machine has it written anew.

mod build;

use crc32fast::hash;
use host_linux::{MappedFile, process};
use kernels::assets::Assets;
use std::{
    fs::{self, File, OpenOptions, Permissions},
    io::{self, Read, Write as _},
    net::Shutdown,
    os::{
        fd::AsFd,
        unix::{
            fs::{FileExt, OpenOptionsExt, PermissionsExt},
            net::UnixStream,
        },
    },
    path::Path,
    sync::Arc,
    time::Duration,
};
use vhost_user::{Served, jail, sandbox};
use vmm::KnownBlocks;

use crate::{kept_files::make_room, spawner};

/// What a file begins with. The last byte is the number of the format.
const MAGIC: [u8; 8] = *b"ring3kb\x02";
/// Bytes of a file before its blocks: [`MAGIC`], the length of the rest, and its CRC-32.
const HEAD: usize = 16;
/// The most bytes that a file has, or that a machine notes.
const MOST: u64 = 64 << 20;
/// The most files, each of one kernel. The oldest file makes room for a new one.
const KERNELS: usize = 16;
/// The fewest bytes of a kernel image that has a file: a smaller kernel starts sooner than a file is read.
const LEAST: usize = 1 << 20;
/// How long a machine waits for its blocks to be translated.
const PATIENCE: Duration = Duration::from_secs(20);

/// What a kernel is started for. Which blocks it runs depends on that: a command's guest needs modules, a file system and an
/// agent, and what `ring3 run` boots may need none of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartedFor {
    /// A command.
    Exec,
    /// Whatever it finds on its disks.
    Run,
}

/// What machines have in common that share a file.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    /// Their kernels are started for this.
    pub started_for: StartedFor,
    /// They have several vCPUs.
    pub several: bool,
}

/// The known blocks of a kernel. If nobody has kept any, what is needed to keep those of this machine.
#[derive(Default)]
pub struct KernelBlocks {
    blocks: Arc<KnownBlocks>,
    keeping: Option<Keeping>,
}

/// A file to be written.
struct Keeping {
    /// The file, locked for as long as this machine is the one that has it written.
    _file: File,
    keeper: spawner::Device,
    ours: UnixStream,
    theirs: UnixStream,
}

impl KernelBlocks {
    /// The blocks of a kernel image, for machines of this kind. Without a cache that can be written no blocks are known
    /// or noted.
    pub fn of(kernel: &[u8], kind: Kind) -> Self {
        let cache = Assets::open().ok().filter(|_| kernel.len() >= LEAST);
        let folder = cache.map(|cache| cache.directory("blocks"));
        let found = folder.and_then(|folder| Self::in_folder(&folder, kernel, kind).ok());
        found.unwrap_or_default()
    }

    fn in_folder(folder: &Path, kernel: &[u8], kind: Kind) -> io::Result<Self> {
        let (path, several) = (folder.join(name(kernel, kind)?), kind.several);
        if let Some(file) = File::open(&path).and_then(Whole::of).ok().flatten() {
            let read = move || file.read().inspect_err(|_| drop(fs::remove_file(&path))).ok();
            let blocks = Arc::new(KnownBlocks::reading(several, read)?);
            return Ok(Self { blocks, keeping: None });
        }
        fs::create_dir_all(folder)?;
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false).mode(0o600).open(&path)?;
        let keeping = Keeping::of(&path, several)?;
        make_room(folder, &path, KERNELS)?;
        Ok(Self { blocks: Arc::new(KnownBlocks::to_note()), keeping: Some(keeping) })
    }

    /// The blocks, for the machine to know or to note.
    pub fn blocks(&self) -> Arc<KnownBlocks> {
        Arc::clone(&self.blocks)
    }

    /// Has the blocks translated and written that the machine has noted, if they are to be. To be called once the machine
    /// has done what it was started for.
    pub fn keep(self) {
        let noted = self.blocks.noted();
        let kept = self.keeping.filter(|_| !noted.is_empty()).map(|keeping| keeping.keep(&noted));
        if let Some(Err(error)) = kept {
            tracing::debug!(%error, "the blocks of the kernel are not kept");
        }
    }
}

impl Keeping {
    fn of(path: &Path, several: bool) -> io::Result<Self> {
        let file = File::open(path)?;
        // Another machine is about to have it written.
        file.try_lock()?;
        // Or has had it written since this machine looked.
        if Whole::of(file.try_clone()?).is_ok_and(|whole| whole.is_some()) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let name = path.to_str().ok_or(io::ErrorKind::InvalidFilename)?.to_owned();
        let several = several.then(|| "--several".to_owned());
        let words = ["kernel-blocks".to_owned()].into_iter().chain(several).chain([name]);
        let keeper = spawner::Device::register(words.collect())?;
        let (ours, theirs) = UnixStream::pair()?;
        // The process that shuts itself in later may not set it.
        ours.set_read_timeout(Some(PATIENCE))?;
        Ok(Self { _file: file, keeper, ours, theirs })
    }

    fn keep(mut self, noted: &[u8]) -> io::Result<()> {
        self.keeper.start(self.theirs.as_fd(), self.theirs.as_fd())?;
        drop(self.theirs);
        self.ours.write_all(noted)?;
        self.ours.shutdown(Shutdown::Write)?;
        // The keeper says nothing. It closes its end when the file is written.
        self.ours.read(&mut [0]).map(drop)
    }
}

/// Runs the process that translates what a machine has noted, for machines of one vCPU or of `several`, and writes a file. A
/// guest may have chosen what the machine sends, so the process shuts itself in first.
///
/// # Errors
/// The host refuses.
pub fn serve(path: &Path, several: bool) -> io::Result<()> {
    process::keep_only_standard_streams()?;
    process::die_with_parent()?;
    let file = OpenOptions::new().write(true).open(path)?;
    sandbox::enter_empty(true)?;
    sandbox::allow_nothing().and_then(|_| jail::enter(Served::Disk)).map_err(io::Error::other)?;
    let mut noted = Vec::new();
    io::stdin().take(MOST).read_to_end(&mut noted)?;
    write(&file, &vmm::translate_noted(several, &noted))
}

/// The name of the file of a kernel, for machines of a kind. Another build of this program translates otherwise.
fn name(kernel: &[u8], kind: Kind) -> io::Result<String> {
    let build = build::id().ok_or(io::ErrorKind::NotFound)?;
    let build: String = build.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    let vcpus = if kind.several { "several" } else { "one" };
    let started_for = match kind.started_for {
        StartedFor::Exec => "exec",
        StartedFor::Run => "run",
    };
    Ok(format!("{:08x}-{:x}-{started_for}-{vcpus}-{build}", hash(kernel), kernel.len()))
}

/// A file that is as long as it says.
struct Whole {
    file: File,
    len: u32,
    sum: u32,
}

impl Whole {
    /// Looks at a file's head and length. `None` means that the file was cut off, or that its writer did not finish.
    fn of(mut file: File) -> io::Result<Option<Self>> {
        let mut head = [0; HEAD];
        file.read_exact(&mut head)?;
        let number = |at| u32::from_le_bytes([0, 1, 2, 3].map(|n: usize| head[at + n]));
        let (len, sum) = (number(8), number(12));
        let whole = file.metadata()?.len() == HEAD as u64 + u64::from(len);
        let is_one = whole && head.starts_with(&MAGIC) && u64::from(len) <= MOST;
        Ok(is_one.then_some(Self { file, len, sum }))
    }

    /// The blocks in the file.
    fn read(self) -> io::Result<Blocks> {
        let blocks = self.map().or_else(|_| self.copy())?;
        let bytes = blocks.as_ref();
        let good = bytes.len() == self.len as usize && hash(bytes) == self.sum;
        if good { Ok(blocks) } else { Err(io::ErrorKind::InvalidData.into()) }
    }

    /// Closes the file to writers, and maps it. A file that has all its blocks is never written again.
    fn map(&self) -> io::Result<Blocks> {
        self.file.set_permissions(Permissions::from_mode(0o400))?;
        MappedFile::of(&self.file).map(Blocks::Mapped)
    }

    fn copy(&self) -> io::Result<Blocks> {
        let mut bytes = vec![0; self.len as usize];
        self.file.read_exact_at(&mut bytes, HEAD as u64)?;
        Ok(Blocks::Copied(bytes))
    }
}

/// The blocks of a file.
enum Blocks {
    /// The whole file.
    Mapped(MappedFile),
    /// What is behind its head, where files cannot be closed to writers.
    Copied(Vec<u8>),
}

impl AsRef<[u8]> for Blocks {
    fn as_ref(&self) -> &[u8] {
        match self {
            Self::Mapped(file) => file.get(HEAD..).unwrap_or_default(),
            Self::Copied(bytes) => bytes,
        }
    }
}

/// Writes the blocks, and the head last: a file without a head counts as none.
fn write(file: &File, blocks: &[u8]) -> io::Result<()> {
    file.set_len(0)?;
    file.write_all_at(blocks, HEAD as u64)?;
    let len = blocks.len() as u32;
    let head = [&MAGIC[..], &len.to_le_bytes(), &hash(blocks).to_le_bytes()].concat();
    file.write_all_at(&head, 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{collections::HashSet, time::SystemTime};

    const KERNEL: &[u8] = b"a kernel";
    const KIND: Kind = Kind { started_for: StartedFor::Exec, several: false };

    /// The blocks in a file.
    fn read(path: &Path) -> io::Result<Vec<u8>> {
        let whole = File::open(path).and_then(Whole::of)?;
        let whole = whole.ok_or(io::ErrorKind::UnexpectedEof)?;
        assert_eq!(whole.map()?.as_ref(), whole.copy()?.as_ref());
        whole.read().map(|blocks| blocks.as_ref().to_vec())
    }

    #[test]
    fn a_file_that_is_not_as_it_was_written_counts_as_none() {
        let path = tempfile::NamedTempFile::new().expect("there is room");
        let changed = |bytes: &[u8]| {
            let file = path.as_file();
            file.set_len(0).and_then(|()| file.write_all_at(bytes, 0)).expect("written");
            read(path.path())
        };
        write(path.as_file(), &[1, 2, 3]).expect("there is room");
        assert_eq!(read(path.path()).expect("whole"), [1, 2, 3]);
        let good = fs::read(path.path()).expect("read");
        assert!(changed(&[&good[..], &[4]].concat()).is_err());
        for at in 0..good.len() {
            assert!(changed(&good[..at]).is_err(), "cut off at {at}");
            let mut bad = good.clone();
            bad[at] ^= 1;
            assert!(changed(&bad).is_err(), "changed at {at}");
        }
        write(path.as_file(), &[4]).expect("there is room");
        assert_eq!(read(path.path()).expect("written anew"), [4]);
    }

    #[test]
    fn a_damaged_file_is_removed() {
        // A folder each: the file is read later, by a thread of its own.
        let files = [false, true].map(|damage| {
            let folder = tempfile::tempdir().expect("there is room");
            let path = folder.path().join(name(KERNEL, KIND).expect("a build"));
            write(&File::create(&path).expect("made"), &[1, 2, 3]).expect("there is room");
            if damage {
                let mut bytes = fs::read(&path).expect("read");
                bytes[HEAD] ^= 1;
                fs::write(&path, &bytes).expect("written");
            }
            let known = KernelBlocks::in_folder(folder.path(), KERNEL, KIND).expect("it is there");
            (folder, path, known)
        });
        let [(_, good, _), (_, damaged, _)] = &files;
        let patience = std::time::Instant::now();
        while damaged.exists() {
            assert!(patience.elapsed() < PATIENCE, "it is still there");
            std::thread::yield_now();
        }
        assert!(good.exists());
    }

    #[test]
    fn each_kind_of_machine_has_a_file_of_its_own() {
        let several = Kind { several: true, ..KIND };
        let run = Kind { started_for: StartedFor::Run, ..KIND };
        let all = [(KERNEL, KIND), (KERNEL, several), (KERNEL, run), (b"another", KIND)];
        let names: HashSet<_> = all.iter().map(|(kernel, kind)| name(kernel, *kind).ok()).collect();
        assert!(names.len() == all.len() && !names.contains(&None), "{names:?}");
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
        make_room(folder.path(), &folder.path().join("5"), KERNELS).expect("removed");
        let left = fs::read_dir(folder.path()).expect("there").count();
        assert_eq!(left, KERNELS);
        let is_there = |number: &str| folder.path().join(number).exists();
        let expected = [false, true, true, false];
        assert_eq!(["0", "1", "5", "6"].map(is_there), expected, "6 is empty, and 5 ours");
    }
}
