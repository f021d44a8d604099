//! Debian's packages, unpacked, and what guests are given of a kernel's: its image, some modules to begin with, and all of them in a folder
//! `lib/modules/RELEASE` with the lists that kmod reads.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use crate::{
    archive::Archive,
    command::{output, progress},
    lists,
    modules::ModuleTree,
    scratch::Scratch,
};

/// A kernel's image, among the files that are kept of its package.
pub(crate) const IMAGE: &str = "vmlinuz";
/// The list of modules and what each depends on.
const LIST: &str = "modules.dep";
/// Where depmod is. An ordinary user's PATH may not have it.
const DEPMOD: [&str; 2] = ["/usr/sbin/depmod", "/sbin/depmod"];

/// Downloads and unpacks a package next to where it is needed.
///
/// # Errors
/// It cannot be downloaded or unpacked.
pub fn unpack(archive: &Archive, package: &str, near: &Path) -> Result<Scratch> {
    let parent = near.parent().unwrap_or(near);
    let directory = Scratch::new(parent, ".package-")?;
    let file = archive.download(package, directory.path())?;
    let bar = progress(format!("unpacking {package}"));
    output(Command::new("dpkg-deb").arg("-x").arg(&file).arg(directory.path()))?;
    bar.finish_and_clear();
    Ok(directory)
}

/// A kernel's package and the package with its modules, unpacked.
#[derive(Debug)]
pub(crate) struct KernelPackage {
    name: String,
    parts: Vec<Scratch>,
}

impl KernelPackage {
    /// Downloads and unpacks it, next to where it is needed.
    pub(crate) fn fetch(archive: &Archive, name: &str, near: &Path) -> Result<Self> {
        let parts = archive.parts(name)?;
        let parts = parts.iter().map(|part| unpack(archive, part, near)).collect::<Result<_>>()?;
        Ok(Self { name: name.to_owned(), parts })
    }

    /// What it is called.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    fn release(&self) -> &str {
        self.name.strip_prefix("linux-image-").unwrap_or(&self.name)
    }

    fn find(&self, names: [String; 2]) -> Option<PathBuf> {
        let inside = |part: &Scratch| names.each_ref().map(|name| part.path().join(name));
        self.parts.iter().flat_map(inside).find(|place| place.exists())
    }

    /// The bzImage.
    pub(crate) fn image(&self) -> Result<PathBuf> {
        let release = self.release();
        let places =
            [format!("boot/vmlinuz-{release}"), format!("usr/lib/modules/{release}/vmlinuz")];
        self.find(places).with_context(|| format!("{} has no boot/vmlinuz-{release}", self.name))
    }

    /// The folder `lib/modules/RELEASE`.
    pub(crate) fn modules(&self) -> Result<PathBuf> {
        let release = self.release();
        let places = ["lib", "usr/lib"].map(|lib| format!("{lib}/modules/{release}/kernel"));
        let kernel = self.find(places).context("the package has no modules")?;
        Ok(kernel.parent().unwrap_or(&kernel).to_owned())
    }

    /// Copies the image and the modules that `choose` names to a folder. Returns the places of the copies, relative to the
    /// folder.
    pub(crate) fn keep(
        &self,
        fresh: &Path,
        choose: impl FnOnce(&ModuleTree) -> Vec<String>,
    ) -> Result<Vec<String>> {
        fs::copy(self.image()?, fresh.join(IMAGE))?;
        let tree = ModuleTree::scan(&self.modules()?)?;
        let names = choose(&tree);
        let modules = tree.closure(&names.iter().map(String::as_str).collect::<Vec<_>>())?;
        fs::create_dir_all(fresh.join("modules"))?;
        let mut files = vec![IMAGE.to_owned()];
        for module in modules {
            let file = format!("modules/{}.ko", module.name);
            fs::write(fresh.join(&file), &module.content)?;
            files.push(file);
        }
        Ok(files)
    }

    /// Moves all modules to `lib/modules/RELEASE` of a folder, and lists them there. Returns the place of the list, relative to the
    /// folder. Call [`KernelPackage::keep`] before this: afterwards it finds no modules.
    pub(crate) fn keep_tree(&self, fresh: &Path) -> Result<String> {
        let release = self.release();
        let folder = fresh.join("lib/modules");
        fs::create_dir_all(&folder)?;
        fs::rename(self.modules()?, folder.join(release))?;
        list(fresh, release)?;
        Ok(format!("lib/modules/{release}/{LIST}"))
    }
}

/// Makes the lists of modules in `root/lib/modules/RELEASE`: depmod does, or without it we make those that the guest's agent reads.
fn list(root: &Path, release: &str) -> Result<()> {
    if let Some(depmod) = DEPMOD.iter().find(|depmod| Path::new(depmod).exists()) {
        return output(Command::new(depmod).arg("-b").arg(root).arg(release)).map(drop);
    }
    let bar = progress("listing modules");
    let folder = root.join("lib/modules").join(release);
    for (name, text) in lists::of(&ModuleTree::scan(&folder)?)? {
        fs::write(folder.join(name), text)?;
    }
    bar.finish_and_clear();
    Ok(())
}
