//! Packages from Debian's archive through the machine's own apt.
//!
//! apt checks the archive's signature (with the installed debian-archive-keyring) and every
//! package's hash. We give it directories of our own, so that it works for an ordinary user, for
//! a suite the machine is not configured for, and without changing anything on the machine;
//! mirror and proxy settings stay the machine's.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use crate::{
    alone::alone,
    command::{output, percentage, watch},
};

const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
const DEFAULT_MIRROR: &str = "http://deb.debian.org/debian";

/// A Debian release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suite {
    /// Debian 12: Linux 6.1.
    Bookworm,
    /// Debian 13: Linux 6.12.
    Trixie,
    /// Debian unstable: the newest Linux.
    Sid,
    /// Debian 12 for 32-bit CPUs.
    Bookworm32,
}

impl Suite {
    /// The suite's name in the archive.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bookworm | Self::Bookworm32 => "bookworm",
            Self::Trixie => "trixie",
            Self::Sid => "sid",
        }
    }

    /// What the archive calls the CPUs that its packages are for.
    const fn architecture(self) -> &'static str {
        match self {
            Self::Bookworm32 => "i386",
            _ => "amd64",
        }
    }

    /// A name of its own.
    pub(crate) fn folder(self) -> String {
        match self {
            Self::Bookworm32 => format!("{}-{}", self.name(), self.architecture()),
            _ => self.name().to_owned(),
        }
    }
}

/// What kind of package.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArchiveKind {
    /// Built packages.
    Binary,
    /// Source packages.
    Source,
}

/// One suite of the archive with its package lists fetched.
#[derive(Debug)]
pub struct Archive {
    suite: Suite,
    kind: ArchiveKind,
    directory: PathBuf,
    /// Nobody else uses the directory.
    _alone: File,
}

impl Archive {
    /// Fetches the suite's lists of packages of a kind into `directory`.
    ///
    /// # Errors
    /// apt is missing or cannot reach the archive.
    pub fn open(suite: Suite, kind: ArchiveKind, directory: PathBuf) -> Result<Self> {
        if !Path::new(KEYRING).exists() {
            bail!("{KEYRING} is missing: install the package debian-archive-keyring");
        }
        for sub in ["lists/partial", "archives/partial"] {
            let path = directory.join(sub);
            fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
        }
        let alone = alone(&directory.join("lock"))?;
        let archive = Self { suite, kind, directory, _alone: alone };
        fs::write(archive.sources(), archive.source_entry())?;
        fs::write(archive.directory.join("status"), "")?;
        let what = format!("fetching the package lists of Debian {}", suite.name());
        fetch(archive.apt("apt-get").arg("update"), what)
            .with_context(|| format!("cannot reach Debian's archive for {}", suite.name()))?;
        Ok(archive)
    }

    /// The kernel a meta-package such as `linux-image-cloud-amd64` stands for.
    ///
    /// # Errors
    /// There is no such package in the suite.
    pub fn resolve(&self, meta: &str) -> Result<String> {
        let depends = output(self.apt("apt-cache").args(["depends", meta]))?;
        let package = kernel_in(&depends).with_context(|| {
            format!("Debian {} has no package {meta} that depends on a kernel", self.suite.name())
        })?;
        Ok(package.to_owned())
    }

    /// The packages that a kernel's consists of: since Debian 14 there are two others with its image and its modules.
    ///
    /// # Errors
    /// There is no such package in the suite.
    pub fn parts(&self, package: &str) -> Result<Vec<String>> {
        let depends = output(self.apt("apt-cache").args(["depends", package]))?;
        Ok(parts_in(&depends, package))
    }

    /// These packages and all they depend on, sorted. Where there are alternatives, all of them.
    ///
    /// # Errors
    /// One of them is not in the suite.
    pub fn closure(&self, packages: &[&str]) -> Result<Vec<String>> {
        let kinds = ["recommends", "suggests", "conflicts", "breaks", "replaces", "enhances"];
        let mut command = self.apt("apt-cache");
        command.args(["depends", "--recurse"]).args(kinds.map(|kind| format!("--no-{kind}")));
        let text = output(command.args(packages))?;
        // Packages begin lines; their dependencies are indented, virtual packages in brackets.
        let is_package =
            |line: &&str| line.starts_with(|first: char| first.is_ascii_alphanumeric());
        let mut names: Vec<_> = text.lines().filter(is_package).map(str::to_owned).collect();
        names.sort();
        names.dedup();
        Ok(names)
    }

    /// Downloads a package into a directory and returns the file.
    ///
    /// # Errors
    /// There is no such package, or the archive cannot be reached.
    pub fn download(&self, package: &str, into: &Path) -> Result<PathBuf> {
        let mut command = self.apt("apt-get");
        fetch(
            command.args(["download", package]).current_dir(into),
            format!("downloading {package}"),
        )?;
        let prefix = format!("{package}_");
        let mut files = fs::read_dir(into)?.filter_map(|entry| Some(entry.ok()?.path()));
        files
            .find(|path| path.file_name().is_some_and(|n| n.to_string_lossy().starts_with(&prefix)))
            .with_context(|| format!("apt-get left no file for {package}"))
    }

    /// Downloads packages into an empty directory, all by one apt, whose start is what takes time; the
    /// files, sorted.
    ///
    /// # Errors
    /// There is no such package, or the archive cannot be reached.
    pub fn download_all(&self, packages: &[String], into: &Path) -> Result<Vec<PathBuf>> {
        let mut command = self.apt("apt-get");
        command.arg("download").args(packages).current_dir(into);
        fetch(&mut command, format!("downloading {} packages", packages.len()))?;
        let files = fs::read_dir(into)?.map(|entry| Ok(entry?.path()));
        let mut files = files.collect::<Result<Vec<_>>>()?;
        files.sort();
        Ok(files)
    }

    /// Downloads the files of a source package into an empty directory.
    ///
    /// # Errors
    /// There is no such package, or the archive cannot be reached.
    pub fn download_source(&self, package: &str, into: &Path) -> Result<()> {
        let mut command = self.apt("apt-get");
        command.args(["source", "--download-only", package]).current_dir(into);
        fetch(&mut command, format!("downloading the source of {package}"))
    }

    fn sources(&self) -> PathBuf {
        self.directory.join("ring3.sources")
    }

    fn source_entry(&self) -> String {
        let kind = match self.kind {
            ArchiveKind::Binary => "deb",
            ArchiveKind::Source => "deb-src",
        };
        format!(
            "Types: {kind}\nURIs: {}\nSuites: {}\nComponents: main\nArchitectures: {}\n\
             Signed-By: {KEYRING}\n",
            mirror(),
            self.suite.name(),
            self.suite.architecture()
        )
    }

    /// apt with every directory it writes replaced by ours.
    fn apt(&self, program: &str) -> Command {
        let at = |key: &str, path: &Path| format!("-o{key}={}", path.display());
        let mut command = Command::new(program);
        command
            .arg("-qq")
            .arg(at("Dir::Etc::sourcelist", &self.sources()))
            .arg(at("Dir::State", &self.directory))
            .arg(at("Dir::State::lists", &self.directory.join("lists")))
            .arg(at("Dir::State::status", &self.directory.join("status")))
            .arg(at("Dir::Cache", &self.directory))
            .arg(at("Dir::Cache::archives", &self.directory.join("archives")))
            .args(["-oDir::Etc::sourceparts=/dev/null", "-oDir::Etc::preferences=/dev/null"])
            .args(["-oDir::Etc::preferencesparts=/dev/null", "-oAPT::Default-Release="])
            .arg(format!("-oAPT::Architecture={}", self.suite.architecture()))
            .arg(format!("-oAPT::Architectures::={}", self.suite.architecture()))
            .args(["-oAPT::Sandbox::User=root", "-oAcquire::Languages=none"])
            .args([
                "-oAcquire::Retries=3",
                "-oAcquire::IndexTargets::deb::DEP-11::DefaultEnabled=0",
            ]);
        command.env("LC_ALL", "C");
        command
    }
}

/// Has apt fetch something, with a bar that shows how far it is.
fn fetch(apt: &mut Command, what: String) -> Result<()> {
    let bar = percentage(what);
    let outcome = watch(apt.arg("-oAPT::Status-Fd=1"), |line| {
        if let Some(percent) = percent_in(line) {
            bar.set_position(percent);
        }
    });
    bar.finish_and_clear();
    outcome
}

/// A package's dependencies, as `apt-cache depends` lists them.
fn dependencies(depends: &str) -> impl Iterator<Item = &str> {
    depends.lines().filter_map(|line| line.trim().strip_prefix("Depends: "))
}

/// The kernel among them. Sid's has others before it.
fn kernel_in(depends: &str) -> Option<&str> {
    dependencies(depends).find(|package| package.starts_with("linux-image-"))
}

/// A kernel's package and those of its release that it depends on.
fn parts_in(depends: &str, package: &str) -> Vec<String> {
    let release = package.strip_prefix("linux-image-").unwrap_or(package);
    let parts = ["linux-binary-", "linux-modules-"].map(|part| format!("{part}{release}"));
    let needed = dependencies(depends).filter(|one| parts.iter().any(|part| part == one));
    std::iter::once(package).chain(needed).map(str::to_owned).collect()
}

/// How far apt is with fetching: `dlstatus:1:23.4567:Retrieving file 1 of 1` (apt's README.progress-reporting).
fn percent_in(line: &str) -> Option<u64> {
    let (_, rest) = line.strip_prefix("dlstatus:")?.split_once(':')?;
    let percent: f64 = rest.split(':').next()?.parse().ok()?;
    Some(percent as u64)
}

/// The mirror this machine is configured for.
fn mirror() -> String {
    let mut command = Command::new("apt-get");
    command.args(["indextargets", "--format", "$(LABEL)|$(REPO_URI)", "Identifier: Packages"]);
    let targets = output(command.env("LC_ALL", "C")).unwrap_or_default();
    mirror_in(&targets).unwrap_or(DEFAULT_MIRROR).to_owned()
}

fn mirror_in(targets: &str) -> Option<&str> {
    let uris = targets.lines().filter_map(|line| line.strip_prefix("Debian|"));
    uris.map(|uri| uri.trim_end_matches('/')).find(|uri| !uri.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn apt_says_how_far_it_is() {
        let line = "dlstatus:1:23.4567:Retrieving file 1 of 1";
        assert_eq!(percent_in(line), Some(23));
        for line in ["", "dlstatus:", "dlstatus:1:x:", "pmstatus:dpkg:10:x", "Get:1 http://x"] {
            assert_eq!(percent_in(line), None, "{line}");
        }
    }

    #[test]
    fn a_kernel_is_found_among_dependencies() {
        let sid = "linux-image-cloud-amd64\n  Depends: linux-base-cloud-amd64\n  Depends: linux-image-7.0-cloud-amd64\n";
        assert_eq!(kernel_in(sid), Some("linux-image-7.0-cloud-amd64"));
        assert_eq!(kernel_in("linux-image-cloud-amd64\n  Depends: linux-base\n"), None);
    }

    #[test]
    fn a_kernel_of_several_packages_is_all_of_them() {
        let depends = "linux-image-7\n |Depends: dracut\n  Depends: linux-base-7\n  Depends: linux-binary-7\n  \
                       Depends: linux-modules-7\n  Suggests: linux-doc-7\n";
        let parts = ["linux-image-7", "linux-binary-7", "linux-modules-7"];
        assert_eq!(parts_in(depends, "linux-image-7"), parts);
        assert_eq!(
            parts_in("linux-image-6\n  Depends: kmod\n", "linux-image-6"),
            ["linux-image-6"]
        );
    }

    #[test]
    fn the_mirror_is_debians_main_archive() {
        let targets = "Debian-Security|http://one/debian-security/\nDebian|http://two/debian/\n";
        assert_eq!(mirror_in(targets), Some("http://two/debian"));
        assert_eq!(mirror_in("Ubuntu|http://three/ubuntu/\n"), None);
    }
}
