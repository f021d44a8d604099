//! Programs that test the machine they run on: a kernel with its own self-tests, memtest86+, Xen, and
//! the x86 programs of the kernel's kselftests, built here from Debian's source package.
//!
//! None of it is in the source tree: like other guests it lives in the cache.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};

use crate::{
    archive::Suite,
    assets::{Assets, Kernel, Manifest, unpack, unpack_kernel},
    command::{output, progress},
    modules::ModuleTree,
};

/// Folders of a kernel package with the modules that have tests in the kernel.
const CRYPTO: [&str; 3] = ["kernel/crypto", "kernel/arch/x86/crypto", "kernel/lib/crypto"];
/// Modules that are tests.
const TESTS: [&str; 4] = ["test_bpf", "test_static_key_base", "test_static_keys", "tcrypt"];

/// Modules that show what Xen tells its first domain.
pub const XEN_MODULES: [&str; 2] = ["xen_privcmd", "xenfs"];

const KERNEL_ENTRY: &str = "self-tests-trixie-full-2";
const MEMTEST_ENTRY: &str = "memtest";
const XEN_ENTRY: &str = "xen-4.20";
const XEN_PACKAGE: &str = "xen-hypervisor-4.20-amd64";
/// The 64-bit programs, and both kinds: what there is depends on the compiler.
const KSELFTESTS_ENTRIES: [&str; 2] = ["kselftests-x86-64", "kselftests-x86"];
const SOURCE_PACKAGE: &str = "linux-source-6.12";

/// What of it the programs are built from.
const SOURCES: [&str; 4] = [
    "arch/x86/include/asm/desc_defs.h",
    "tools/testing/selftests/x86/*",
    "tools/testing/selftests/*.h",
    "tools/testing/selftests/*.mk",
];

/// A kernel and the modules its self-tests are in.
#[derive(Debug)]
pub struct SelfTestKernel {
    /// The bzImage.
    pub image: PathBuf,
    /// `test_bpf`, `test_static_keys`, everything that registers cryptographic algorithms, what shows
    /// Xen, and what these depend on.
    pub modules: ModuleTree,
}

impl SelfTestKernel {
    /// Every module that is not itself a test and not for Xen; nearly all register cryptographic algorithms.
    pub fn crypto(&self) -> Vec<&str> {
        let mut names = self.modules.names_below("");
        names.retain(|name| !TESTS.contains(name) && !XEN_MODULES.contains(name));
        names
    }
}

/// A built test program.
#[derive(Clone, Debug)]
pub struct Program {
    /// Its name, which ends in `_64` or `_32`.
    pub name: String,
    /// The executable, linked statically.
    pub path: PathBuf,
}

/// What testing needs of the cache beyond guests.
pub trait SelfTestAssets {
    /// The full kernel of Debian 13 with its self-tests; fetched if not in the cache.
    ///
    /// # Errors
    /// Neither the cache has it nor can it be fetched.
    fn self_test_kernel(&self) -> Result<SelfTestKernel>;
    /// The image of memtest86+ for x86-64; fetched if not in the cache.
    ///
    /// # Errors
    /// Neither the cache has it nor can it be fetched.
    fn memtest(&self) -> Result<PathBuf>;
    /// The image of Xen 4.20, compressed as Debian has it; fetched if not in the cache.
    ///
    /// # Errors
    /// Neither the cache has it nor can it be fetched.
    fn xen(&self) -> Result<PathBuf>;
    /// The kselftests for x86 of Linux 6.12; built if not in the cache. Without a compiler that
    /// makes 32-bit programs ([`makes_32_bit_programs`]) there are only the 64-bit ones.
    ///
    /// # Errors
    /// Neither the cache has them nor can they be built.
    fn kselftests(&self) -> Result<Vec<Program>>;
}

impl SelfTestAssets for Assets {
    fn self_test_kernel(&self) -> Result<SelfTestKernel> {
        self.entry(KERNEL_ENTRY, |fresh| {
            let archive = self.archive(Suite::Trixie)?;
            let package = archive.resolve(Kernel::TrixieFull.meta_package())?;
            unpack_kernel(&archive, &package, fresh, tests_and_tested)
        })?;
        let directory = self.directory(KERNEL_ENTRY);
        let modules = ModuleTree::scan(&directory.join("modules"))?;
        Ok(SelfTestKernel { image: directory.join("vmlinuz"), modules })
    }

    fn memtest(&self) -> Result<PathBuf> {
        boot_file(self, MEMTEST_ENTRY, "memtest86+", "memtest86+x64.bin")
    }

    fn xen(&self) -> Result<PathBuf> {
        boot_file(self, XEN_ENTRY, XEN_PACKAGE, "xen-4.20-amd64.gz")
    }

    fn kselftests(&self) -> Result<Vec<Program>> {
        let name = KSELFTESTS_ENTRIES[usize::from(makes_32_bit_programs()?)];
        let manifest = self.entry(name, |fresh| {
            let archive = self.archive(Suite::Trixie)?;
            let unpacked = unpack(&archive, SOURCE_PACKAGE, fresh)?;
            let names = build_kselftests(unpacked.path(), fresh)?;
            Manifest::of(SOURCE_PACKAGE, fresh, &names)
        })?;
        let directory = self.directory(name);
        let programs = manifest.files.into_iter();
        Ok(programs.map(|(name, _)| Program { path: directory.join(&name), name }).collect())
    }
}

/// What a package of Debian 13 has in `/boot`, under a name in the cache.
fn boot_file(assets: &Assets, entry: &str, package: &str, file: &str) -> Result<PathBuf> {
    assets.entry(entry, |fresh| {
        let archive = assets.archive(Suite::Trixie)?;
        let unpacked = unpack(&archive, package, fresh)?;
        fs::copy(unpacked.path().join("boot").join(file), fresh.join(file))
            .with_context(|| format!("{package} has no /boot/{file}"))?;
        Manifest::of(package, fresh, &[file.to_owned()])
    })?;
    Ok(assets.directory(entry).join(file))
}

/// Whether the compiler can link 32-bit programs: Debian has what it takes in `gcc-multilib`.
///
/// # Errors
/// There is no compiler.
pub fn makes_32_bit_programs() -> Result<bool> {
    let scratch = tempfile::tempdir()?;
    let source = scratch.path().join("empty.c");
    fs::write(&source, "int main(void) { return 0; }\n")?;
    output(Command::new("gcc").arg("--version"))?;
    let mut gcc = Command::new("gcc");
    gcc.args(["-m32", "-static", "-o"]).arg(scratch.path().join("empty")).arg(&source);
    Ok(output(&mut gcc).is_ok())
}

fn tests_and_tested(tree: &ModuleTree) -> Vec<String> {
    let tested = CRYPTO.iter().flat_map(|folder| tree.names_below(folder));
    let named = TESTS.iter().chain(&XEN_MODULES).copied();
    named.chain(tested).map(str::to_owned).collect()
}

/// Builds with the kernel's own Makefile, which knows what each program needs; returns the names.
fn build_kselftests(package: &Path, fresh: &Path) -> Result<Vec<String>> {
    let folder = extract(package)?;
    let bar = progress("building kselftests");
    let mut make = Command::new("make");
    make.current_dir(&folder).args(["--keep-going", "CC=gcc -static"]);
    // Some of the programs may not build here; what did is what there is.
    let built = output(&mut make);
    bar.finish_and_clear();
    let names = programs(&folder)?;
    ensure!(!names.is_empty(), "no kselftest could be built: {:?}", built.err());
    for name in &names {
        fs::copy(folder.join(name), fresh.join(name))?;
    }
    Ok(names)
}

/// Unpacks the tests and the headers they use; returns their folder.
fn extract(package: &Path) -> Result<PathBuf> {
    let archive = package.join("usr/src").join(format!("{SOURCE_PACKAGE}.tar.xz"));
    let bar = progress(format!("unpacking {SOURCE_PACKAGE}"));
    let mut tar = Command::new("tar");
    tar.arg("-xJf").arg(&archive).arg("-C").arg(package).arg("--wildcards");
    tar.args(SOURCES.map(|path| format!("{SOURCE_PACKAGE}/{path}")));
    output(&mut tar)?;
    bar.finish_and_clear();
    Ok(package.join(SOURCE_PACKAGE).join("tools/testing/selftests/x86"))
}

/// The executables the Makefile made.
fn programs(folder: &Path) -> Result<Vec<String>> {
    let entries = fs::read_dir(folder).with_context(|| format!("no {}", folder.display()))?;
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut names: Vec<_> =
        names.filter(|name| name.ends_with("_64") || name.ends_with("_32")).collect();
    names.sort();
    Ok(names)
}
