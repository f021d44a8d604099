//! Guests to run: kernels, modules and busybox out of Debian packages, kept in a cache.
//!
//! apt verifies what it downloads; we record the CRC-32 of every file we keep and check it
//! before each use, so a damaged or half-written cache is fetched again instead of used. An
//! entry appears under its name only when complete. The SHA-256 of each file is recorded as well,
//! because other caches name by that digest what they have made of the file.

use std::{
    env, fs,
    io::{Read, Write as _},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use crc32fast::Hasher;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::{
    alone::alone,
    archive::{Archive, ArchiveKind, Suite},
    command::output,
    modules::{Module, ModuleTree},
    package::{IMAGE, KernelPackage},
    scratch::Scratch,
};

pub use crate::package::unpack;

/// Layout version of the cache; a new one leaves old entries alone.
const VERSION: &str = "v2";
const MANIFEST: &str = "manifest.json";
/// Bytes looked at at a time.
const PIECE: usize = 256 << 10;

/// Modules guests are given, where their kernel does not have them built in.
const MODULES: [&str; 11] = [
    "virtio_pci",
    "virtio_blk",
    "virtio_console",
    "virtio_rng",
    "ext4",
    "crc32c_generic",
    "overlay",
    "virtiofs",
    "virtio_net",
    "af_packet",
    "vmw_vsock_virtio_transport",
];

/// A kernel Debian ships.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Kernel {
    /// Linux 6.1 for cloud machines, from Debian 12.
    BookwormCloud,
    /// Linux 6.12 for cloud machines, from Debian 13.
    TrixieCloud,
    /// Linux 6.12 for any machine, from Debian 13.
    TrixieFull,
    /// The newest Linux for cloud machines, from Debian unstable.
    SidCloud,
    /// Linux 6.1 for 32-bit CPUs, from Debian 12.
    #[value(skip)]
    Bookworm32,
}

/// The kernels by the names users give.
pub const NAMED: [(&str, Kernel); 4] = [
    ("debian-12", Kernel::BookwormCloud),
    ("debian-13", Kernel::TrixieCloud),
    ("debian-13-full", Kernel::TrixieFull),
    ("debian-sid", Kernel::SidCloud),
];

impl Kernel {
    /// The kernel users call by this name.
    pub fn named(name: &str) -> Option<Self> {
        NAMED.iter().find(|(known, _)| *known == name).map(|(_, kernel)| *kernel)
    }
    /// The suite it is from.
    pub const fn suite(self) -> Suite {
        match self {
            Self::BookwormCloud => Suite::Bookworm,
            Self::TrixieCloud | Self::TrixieFull => Suite::Trixie,
            Self::SidCloud => Suite::Sid,
            Self::Bookworm32 => Suite::Bookworm32,
        }
    }
    /// The package that stands for the newest of its kind.
    pub const fn meta_package(self) -> &'static str {
        match self {
            Self::BookwormCloud | Self::TrixieCloud | Self::SidCloud => "linux-image-cloud-amd64",
            Self::TrixieFull => "linux-image-amd64",
            Self::Bookworm32 => "linux-image-686-pae",
        }
    }

    /// The name of the kernel's folder in the cache.
    pub const fn entry(self) -> &'static str {
        match self {
            Self::BookwormCloud => "kernel-bookworm-cloud",
            Self::TrixieCloud => "kernel-trixie-cloud",
            Self::TrixieFull => "kernel-trixie-full",
            Self::SidCloud => "kernel-sid-cloud",
            Self::Bookworm32 => "kernel-bookworm-686-pae",
        }
    }
}

/// A kernel's files.
#[derive(Clone, Debug)]
pub struct KernelFiles {
    /// The bzImage.
    pub image: PathBuf,
    /// SHA-256 of the bzImage in lower-case hexadecimal digits, as recorded when the file was kept.
    pub digest: String,
    /// Modules for it, in the order to load them.
    pub modules: Vec<Module>,
    /// The folder `lib/modules/RELEASE` with all of them, if the cache has it.
    pub tree: Option<PathBuf>,
}

/// What an entry holds: the SHA-256 and the CRC-32 of each of its files.
#[derive(Debug, Serialize, Deserialize)]
pub struct Manifest {
    /// The package it is from.
    pub package: String,
    /// Names relative to the entry, in the order given at creation, with lower-case hex digests.
    pub files: Vec<(String, String)>,
    /// The CRC-32 of each file, in the same order. Older manifests have none.
    #[serde(default)]
    sums: Vec<u32>,
}

/// The cache.
#[derive(Debug)]
pub struct Assets {
    root: PathBuf,
}

impl Assets {
    /// The user's cache: `$XDG_CACHE_HOME/ring3` or `~/.cache/ring3`.
    ///
    /// # Errors
    /// There is no home directory.
    pub fn open() -> Result<Self> {
        let xdg = env::var_os("XDG_CACHE_HOME").filter(|dir| !dir.is_empty()).map(PathBuf::from);
        let base = xdg.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cache")));
        let base = base.context("set HOME or XDG_CACHE_HOME: there is nowhere to keep guests")?;
        Ok(Self::at(base.join("ring3").join(VERSION)))
    }

    /// A cache in the given directory.
    pub fn at(root: PathBuf) -> Self {
        Self { root }
    }

    /// A kernel and its modules; fetched if they are not in the cache.
    ///
    /// # Errors
    /// Neither the cache has it nor can it be fetched.
    pub fn kernel(&self, kernel: Kernel) -> Result<KernelFiles> {
        let name = kernel.entry();
        let manifest = self.entry(name, |fresh| {
            let archive = self.archive(kernel.suite())?;
            let package = archive.resolve(kernel.meta_package())?;
            let package = KernelPackage::fetch(&archive, &package, fresh)?;
            let files = package.keep(fresh, |_| MODULES.map(str::to_owned).to_vec())?;
            self.keep_tree(&package)?;
            Manifest::of(package.name(), fresh, &files)
        })?;
        let tree = self.tree_of(&manifest.package);
        let image = manifest.files.iter().find(|(file, _)| file == IMAGE);
        let digest =
            image.map(|(_, digest)| digest.clone()).context("a kernel without an image")?;
        let directory = self.root.join(name);
        let modules = manifest.files.iter().filter_map(|(file, _)| {
            let name = file.strip_prefix("modules/")?.strip_suffix(".ko")?;
            Some((name, directory.join(file)))
        });
        let modules = modules
            .map(|(name, path)| Ok(Module { name: name.to_owned(), content: fs::read(path)? }))
            .collect::<Result<_>>()?;
        Ok(KernelFiles { image: directory.join(IMAGE), digest, modules, tree })
    }

    /// The package a kernel in the cache is from; `None` if it is not there or damaged.
    pub fn installed(&self, kernel: Kernel) -> Option<String> {
        Manifest::verified(&self.root.join(kernel.entry())).map(|manifest| manifest.package)
    }

    /// Removes a kernel from the cache; whether it was there.
    ///
    /// # Errors
    /// Its files cannot be removed.
    pub fn remove(&self, kernel: Kernel) -> Result<bool> {
        if let Some(package) = self.installed(kernel) {
            self.remove_entry(&tree_entry(&package))?;
        }
        self.remove_entry(kernel.entry())
    }

    /// Removes an entry of the cache; whether it was there.
    fn remove_entry(&self, name: &str) -> Result<bool> {
        let directory = self.directory(name);
        if !directory.exists() {
            return Ok(false);
        }
        fs::remove_dir_all(&directory)
            .with_context(|| format!("cannot remove {}", directory.display()))?;
        Ok(true)
    }

    /// The folder `lib/modules/RELEASE` of a kernel of the cache that is from this package, if it is there.
    fn tree_of(&self, package: &str) -> Option<PathBuf> {
        let directory = self.directory(&tree_entry(package));
        let manifest = Manifest::verified(&directory)?;
        let (list, _) = manifest.files.first()?;
        Some(directory.join(list).parent()?.to_owned())
    }

    /// The folder `lib/modules/RELEASE` of a kernel, fetched if the cache does not have it. A kernel that is fetched brings its
    /// folder along; a kernel that an older ring3 has fetched has none.
    ///
    /// # Errors
    /// Neither the cache has it nor can it be fetched.
    pub fn tree(&self, kernel: Kernel) -> Result<PathBuf> {
        if let Some(tree) = self.kernel(kernel)?.tree {
            return Ok(tree);
        }
        let package = self.installed(kernel).context("the kernel was removed meanwhile")?;
        let archive = self.archive(kernel.suite())?;
        let near = self.directory("package");
        self.keep_tree(&KernelPackage::fetch(&archive, &package, &near)?)?;
        self.tree_of(&package).context("the modules were removed meanwhile")
    }

    /// Of its files only the list is checked before each use: all of them would take as long as a guest's start. A
    /// kernel does not load a module whose signature is wrong.
    fn keep_tree(&self, package: &KernelPackage) -> Result<()> {
        let make = |fresh: &Path| {
            let list = package.keep_tree(fresh)?;
            Manifest::of(package.name(), fresh, &[list])
        };
        self.entry(&tree_entry(package.name()), make).map(drop)
    }

    /// The statically linked busybox; fetched if it is not in the cache.
    ///
    /// # Errors
    /// Neither the cache has it nor can it be fetched.
    pub fn busybox(&self) -> Result<Vec<u8>> {
        self.busybox_of("busybox", Suite::Bookworm)
    }

    /// The same for the CPUs that a kernel is for.
    ///
    /// # Errors
    /// As for [`Assets::busybox`].
    pub fn busybox_for(&self, kernel: Kernel) -> Result<Vec<u8>> {
        match kernel {
            Kernel::Bookworm32 => self.busybox_of("busybox-i386", kernel.suite()),
            _ => self.busybox(),
        }
    }

    fn busybox_of(&self, name: &str, suite: Suite) -> Result<Vec<u8>> {
        self.entry(name, |fresh| {
            let archive = self.archive(suite)?;
            let unpacked = unpack(&archive, "busybox-static", fresh)?;
            fs::copy(unpacked.path().join("bin/busybox"), fresh.join("busybox"))?;
            Manifest::of("busybox-static", fresh, &["busybox".to_owned()])
        })?;
        Ok(fs::read(self.root.join(name).join("busybox"))?)
    }

    /// A suite of the archive, its package lists fetched.
    ///
    /// # Errors
    /// The archive cannot be reached.
    pub fn archive(&self, suite: Suite) -> Result<Archive> {
        Archive::open(suite, ArchiveKind::Binary, self.root.join("apt").join(suite.folder()))
    }

    /// A source package, unpacked with Debian's changes into a new folder; fetched if it is not in the
    /// cache.
    ///
    /// # Errors
    /// Neither the cache has it nor can it be fetched.
    pub fn source(&self, suite: Suite, package: &str, into: &Path) -> Result<()> {
        let name = format!("source-{}-{package}", suite.name());
        let manifest = self.entry(&name, |fresh| {
            let lists = self.root.join("apt").join(format!("{}-sources", suite.name()));
            Archive::open(suite, ArchiveKind::Source, lists)?.download_source(package, fresh)?;
            let files = fs::read_dir(fresh)?.map(|entry| Ok(entry?.file_name()));
            let files: Vec<_> = files.collect::<Result<_>>()?;
            let files: Vec<_> = files.iter().map(|f| f.to_string_lossy().into_owned()).collect();
            Manifest::of(package, fresh, &files)
        })?;
        let description = manifest.files.iter().find(|(file, _)| file.ends_with(".dsc"));
        let (description, _) = description.with_context(|| format!("no source of {package}"))?;
        let mut unpack = Command::new("dpkg-source");
        unpack.args(["--no-check", "-x"]).arg(self.directory(&name).join(description)).arg(into);
        output(&mut unpack).map(drop)
    }

    /// Where an entry is, if it is.
    pub fn directory(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    /// The manifest of a verified entry; `make` fills a fresh directory if there is none.
    ///
    /// # Errors
    /// `make` failed, or the cache cannot be written.
    pub fn entry(
        &self,
        name: &str,
        make: impl FnOnce(&Path) -> Result<Manifest>,
    ) -> Result<Manifest> {
        let directory = self.root.join(name);
        if let Some(manifest) = Manifest::verified(&directory) {
            return Ok(manifest);
        }
        fs::create_dir_all(&self.root)
            .with_context(|| format!("cannot make {}", self.root.display()))?;
        let _alone = alone(&self.root.join(format!(".lock-{name}")))?;
        if let Some(manifest) = Manifest::verified(&directory) {
            return Ok(manifest);
        }
        let fresh = Scratch::new(&self.root, ".fresh-")?;
        let manifest = make(fresh.path()).with_context(|| format!("cannot fetch {name}"))?;
        fs::write(fresh.path().join(MANIFEST), serde_json::to_vec_pretty(&manifest)?)?;
        if directory.exists() {
            fs::remove_dir_all(&directory)?;
        }
        fs::rename(fresh.keep(), &directory)?;
        Ok(manifest)
    }
}

impl Manifest {
    /// Describes files of a directory.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn of(package: &str, directory: &Path, files: &[String]) -> Result<Self> {
        let mut manifest =
            Self { package: package.to_owned(), files: Vec::new(), sums: Vec::new() };
        for file in files {
            let (mut digest, mut sum) = (Sha256::new(), Hasher::new());
            read(&directory.join(file), |piece| {
                digest.update(piece);
                sum.update(piece);
            })?;
            let digest = digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
            manifest.files.push((file.clone(), digest));
            manifest.sums.push(sum.finalize());
        }
        Ok(manifest)
    }

    /// The manifest in a directory, if every file is there as it was recorded. One without CRCs is written anew, with CRCs.
    fn verified(directory: &Path) -> Option<Self> {
        let text = fs::read(directory.join(MANIFEST)).ok()?;
        let manifest: Self = serde_json::from_slice(&text).ok()?;
        if manifest.sums.len() == manifest.files.len() {
            let mut all = manifest.files.iter().zip(&manifest.sums);
            let same = |((file, _), recorded): (&(String, String), &u32)| {
                sum(&directory.join(file)).is_ok_and(|found| found == *recorded)
            };
            return all.all(same).then_some(manifest);
        }
        let files: Vec<_> = manifest.files.iter().map(|(file, _)| file.clone()).collect();
        let found = Self::of(&manifest.package, directory, &files).ok()?;
        let same = found.files == manifest.files;
        // Who may not write here checks the digests again.
        same.then(|| drop(found.replace(directory)));
        same.then_some(found)
    }

    fn replace(&self, directory: &Path) -> Result<()> {
        let readable = fs::Permissions::from_mode(0o644);
        let mut fresh = tempfile::Builder::new().permissions(readable).tempfile_in(directory)?;
        fresh.write_all(&serde_json::to_vec_pretty(self)?)?;
        fresh.persist(directory.join(MANIFEST)).map(drop)?;
        Ok(())
    }
}

/// The CRC-32 of a file.
fn sum(path: &Path) -> Result<u32> {
    let mut sum = Hasher::new();
    read(path, |piece| sum.update(piece))?;
    Ok(sum.finalize())
}

/// Reads a file piece by piece.
fn read(path: &Path, mut take: impl FnMut(&[u8])) -> Result<()> {
    let (mut file, mut piece) = (fs::File::open(path)?, vec![0; PIECE]);
    loop {
        match file.read(&mut piece)? {
            0 => return Ok(()),
            count => take(&piece[..count]),
        }
    }
}

/// Keeps of a kernel package the image and the modules that `choose` names.
///
/// # Errors
/// It cannot be fetched, or is not as kernel packages are.
pub fn unpack_kernel(
    archive: &Archive,
    package: &str,
    fresh: &Path,
    choose: impl FnOnce(&ModuleTree) -> Vec<String>,
) -> Result<Manifest> {
    let files = KernelPackage::fetch(archive, package, fresh)?.keep(fresh, choose)?;
    Manifest::of(package, fresh, &files)
}

/// The cache's entry with all modules of a kernel's package.
fn tree_entry(package: &str) -> String {
    format!("modules-of-{package}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(directory: &Path) -> Result<Manifest> {
        fs::write(directory.join("file"), "content")?;
        Manifest::of("package", directory, &["file".to_owned()])
    }

    #[test]
    fn an_entry_is_made_once_and_again_when_damaged() {
        let cache = tempfile::tempdir().expect("a directory");
        let assets = Assets::at(cache.path().join("deep"));
        let never = |_: &Path| -> Result<Manifest> { panic!("made twice") };
        assets.entry("x", fill).expect("made");
        assets.entry("x", never).expect("found");
        fs::write(assets.root.join("x/file"), "rotten").expect("damaged");
        let manifest = assets.entry("x", fill).expect("made again");
        assert_eq!(manifest.files.len(), 1);
        assert_eq!(fs::read(assets.root.join("x/file")).expect("there"), b"content");
    }

    #[test]
    fn an_entry_without_sums_gets_some_if_it_is_not_damaged() {
        let cache = tempfile::tempdir().expect("a directory");
        let assets = Assets::at(cache.path().to_owned());
        let old = |damage: bool| {
            let mut manifest = assets.entry("x", fill).expect("made");
            manifest.sums.clear();
            manifest.replace(&cache.path().join("x")).expect("written");
            if damage {
                fs::write(cache.path().join("x/file"), "rotten").expect("damaged");
            }
            Manifest::verified(&cache.path().join("x"))
        };
        let sums = [crc32fast::hash(b"content")];
        assert_eq!(old(false).expect("as recorded").sums, sums);
        let text = fs::read_to_string(cache.path().join("x").join(MANIFEST)).expect("there");
        assert!(text.contains(&sums[0].to_string()), "{text}");
        assert!(old(true).is_none());
    }

    #[test]
    fn a_failed_fetch_leaves_no_entry() {
        let cache = tempfile::tempdir().expect("a directory");
        let assets = Assets::at(cache.path().to_owned());
        fs::create_dir(cache.path().join(".fresh-killed")).expect("as a killed one leaves it");
        assets.entry("x", |_| anyhow::bail!("no network")).expect_err("it failed");
        assert!(!cache.path().join("x").exists());
        let left = fs::read_dir(cache.path())
            .expect("readable")
            .map(|entry| entry.expect("one").file_name());
        assert_eq!(
            left.collect::<Vec<_>>(),
            [".lock-x"],
            "nothing left over but what others wait for"
        );
    }
}
