//! Kernel modules: where a package has them, and what must be loaded before what.
//!
//! Packages ship no modules.dep (it is made at installation), so dependencies are read from where
//! depmod reads most of them: the `depends=` entry of each module's `.modinfo` section.

use std::{
    collections::BTreeMap,
    fs,
    io::Read,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use object::{Object, ObjectSection};

/// A module ready to be loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Module {
    /// Its name, with underscores.
    pub name: String,
    /// The uncompressed `.ko`.
    pub content: Vec<u8>,
}

/// The modules below a `lib/modules/RELEASE` directory.
#[derive(Debug)]
pub struct ModuleTree {
    root: PathBuf,
    by_name: BTreeMap<String, PathBuf>,
}

impl ModuleTree {
    /// Finds all modules.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn scan(directory: &Path) -> Result<Self> {
        let mut by_name = BTreeMap::new();
        let mut pending = vec![directory.to_owned()];
        while let Some(folder) = pending.pop() {
            let entries = fs::read_dir(&folder)
                .with_context(|| format!("cannot read {}", folder.display()))?;
            for entry in entries {
                let path = entry?.path();
                if path.is_dir() {
                    pending.push(path);
                } else if let Some(name) = module_name(&path) {
                    by_name.insert(name, path);
                }
            }
        }
        Ok(Self { root: directory.to_owned(), by_name })
    }

    /// The names of the modules below a folder of the tree, in alphabetical order.
    pub fn names_below(&self, folder: &str) -> Vec<&str> {
        let folder = self.root.join(folder);
        let below = self.by_name.iter().filter(|(_, path)| path.starts_with(&folder));
        below.map(|(name, _)| name.as_str()).collect()
    }

    /// The named modules and all they depend on, in the order to load them. A name that
    /// is not there is left out: kernels differ in what they have built in.
    ///
    /// # Errors
    /// A module cannot be read or is damaged.
    pub fn closure(&self, names: &[&str]) -> Result<Vec<Module>> {
        let mut ordered = Vec::new();
        for name in names {
            self.add(name, &mut ordered)?;
        }
        Ok(ordered)
    }

    /// Each module's name, and its file relative to the folder.
    pub(crate) fn files(&self) -> impl Iterator<Item = (&str, &Path)> {
        self.by_name
            .iter()
            .map(|(name, path)| (name.as_str(), path.strip_prefix(&self.root).unwrap_or(path)))
    }

    /// What a module says of itself.
    ///
    /// # Errors
    /// It cannot be read or is damaged.
    pub(crate) fn says(&self, file: &Path) -> Result<ModuleInfo> {
        let path = self.root.join(file);
        let content = read_module(&path)?;
        ModuleInfo::of(&content).with_context(|| format!("{} is damaged", path.display()))
    }

    fn add(&self, name: &str, ordered: &mut Vec<Module>) -> Result<()> {
        let name = name.replace('-', "_");
        let Some(path) = self.by_name.get(&name) else { return Ok(()) };
        if ordered.iter().any(|module| module.name == name) {
            return Ok(());
        }
        let content = read_module(path)?;
        let info =
            ModuleInfo::of(&content).with_context(|| format!("{} is damaged", path.display()))?;
        for dependency in info.depends.iter().filter(|d| **d != name) {
            self.add(dependency, ordered)?;
        }
        ordered.push(Module { name, content });
        Ok(())
    }
}

/// `virtio_blk` for `.../virtio_blk.ko` or `.../virtio-blk.ko.xz`.
fn module_name(path: &Path) -> Option<String> {
    let file = path.file_name()?.to_str()?;
    let stem = file.strip_suffix(".ko").or_else(|| file.strip_suffix(".ko.xz"))?;
    Some(stem.replace('-', "_"))
}

fn read_module(path: &Path) -> Result<Vec<u8>> {
    let file = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    if path.extension().is_none_or(|extension| extension != "xz") {
        return Ok(file);
    }
    let mut content = Vec::new();
    lzma_rust2::XzReader::new(file.as_slice(), true)
        .read_to_end(&mut content)
        .with_context(|| format!("{} is damaged", path.display()))?;
    Ok(content)
}

/// What a module says of itself in its `.modinfo` section.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ModuleInfo {
    /// The names of modules that it needs, with underscores.
    pub(crate) depends: Vec<String>,
    /// By which names the kernel asks for it, too.
    pub(crate) aliases: Vec<String>,
}

impl ModuleInfo {
    fn of(module: &[u8]) -> Result<Self> {
        let elf = object::File::parse(module)?;
        let section = elf.section_by_name(".modinfo").context("no .modinfo section")?;
        let data = section.data()?;
        let values = |key: &'static str| {
            let entries = data.split(|&byte| byte == 0);
            entries.filter_map(move |entry| entry.strip_prefix(key.as_bytes()))
        };
        let text = |value: &[u8]| String::from_utf8_lossy(value).into_owned();
        let list = text(values("depends=").next().unwrap_or_default()).replace('-', "_");
        let depends = list.split(',').filter(|name| !name.is_empty()).map(str::to_owned);
        Ok(Self { depends: depends.collect(), aliases: values("alias=").map(text).collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use object::write;

    /// An ELF file with nothing but a `.modinfo` section.
    fn module(depends: &str) -> Vec<u8> {
        let format = object::BinaryFormat::Elf;
        let endian = object::Endianness::Little;
        let mut elf = write::Object::new(format, object::Architecture::X86_64, endian);
        let id = elf.add_section(vec![], b".modinfo".to_vec(), object::SectionKind::ReadOnlyData);
        elf.append_section_data(id, format!("license=GPL\0depends={depends}\0").as_bytes(), 1);
        elf.write().expect("a small object")
    }

    #[test]
    fn dependencies_come_first_and_once() {
        let directory = tempfile::tempdir().expect("a directory");
        let put = |name: &str, depends| fs::write(directory.path().join(name), module(depends));
        put("virtio-blk.ko", "virtio,virtio-ring").expect("written");
        put("virtio-ring.ko", "virtio").expect("written");
        put("virtio.ko", "").expect("written");
        let tree = ModuleTree::scan(directory.path()).expect("scanned");
        let loaded = tree.closure(&["virtio_blk", "virtio_ring", "not_there"]).expect("closed");
        let names: Vec<_> = loaded.iter().map(|module| module.name.as_str()).collect();
        assert_eq!(names, ["virtio", "virtio_ring", "virtio_blk"]);
    }

    #[test]
    fn a_folder_has_its_own_modules() {
        let directory = tempfile::tempdir().expect("a directory");
        fs::create_dir_all(directory.path().join("kernel/crypto")).expect("made");
        let put = |name: &str| fs::write(directory.path().join(name), module(""));
        put("kernel/crypto/wp-512.ko").expect("written");
        put("kernel/crypto/authenc.ko").expect("written");
        put("kernel/crypto_like.ko").expect("written");
        let tree = ModuleTree::scan(directory.path()).expect("scanned");
        assert_eq!(tree.names_below("kernel/crypto"), ["authenc", "wp_512"]);
        assert_eq!(tree.names_below("").len(), 3);
    }

    #[test]
    fn a_damaged_module_is_named() {
        let directory = tempfile::tempdir().expect("a directory");
        fs::write(directory.path().join("bad.ko"), b"not an ELF file").expect("written");
        let tree = ModuleTree::scan(directory.path()).expect("scanned");
        let text = format!("{:#}", tree.closure(&["bad"]).expect_err("damaged"));
        assert!(text.contains("bad.ko"), "{text}");
    }
}
