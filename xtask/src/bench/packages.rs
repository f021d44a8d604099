//! Debian packages unpacked, not installed: what is measured needs nothing that their
//! maintainers' scripts would do, and so nothing needs root.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Result;

use crate::{
    archive::{Archive, Suite},
    assets::{Assets, Manifest},
    command::output,
};

/// Directories that no measured program reads.
const UNUSED_DIRECTORIES: [&str; 5] =
    ["usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info", "var"];
/// Packages that only maintainers' scripts need, by prefix of the name.
const SCRIPT_DEPENDENCIES: [&str; 5] = ["cdebconf", "debconf", "libperl", "perl", "usrmerge"];
/// Peers that Debian has.
const PEERS: [&str; 2] = ["qemu-system-x86", "user-mode-linux"];
const PROGRAMS: [&str; 2] = ["usr/bin/qemu-system-x86_64", "usr/bin/linux.uml"];
const ENTRY: &str = "bench-newest";

/// Unpacks these packages, and those of all they depend on that are ever run.
///
/// # Errors
/// One of them is not in the archive, or the archive cannot be reached.
pub fn unpack_all(archive: &Archive, packages: &[&str], root: &Path) -> Result<()> {
    unpack_without(archive, packages, &[], root)
}

/// The same without the packages whose names begin so.
///
/// # Errors
/// As for [`unpack_all`].
pub fn unpack_without(
    archive: &Archive,
    packages: &[&str],
    without: &[&str],
    root: &Path,
) -> Result<()> {
    let downloads = tempfile::Builder::new().prefix("ring3-packages-").tempdir()?;
    let mut needed = archive.closure(packages)?;
    needed.retain(|name| is_run(name, packages, without));
    for file in archive.download_all(&needed, downloads.path())? {
        output(Command::new("dpkg-deb").arg("-x").arg(&file).arg(root))?;
        fs::remove_file(file)?;
    }
    for directory in
        UNUSED_DIRECTORIES.map(|name| root.join(name)).iter().filter(|path| path.exists())
    {
        fs::remove_dir_all(directory)?;
    }
    Ok(())
}

/// Whether a package is to be unpacked: it is asked for, or one that is asked for needs it to run, as far as prefixes of names tell.
fn is_run(name: &str, asked: &[&str], without: &[&str]) -> bool {
    let mut excepted = SCRIPT_DEPENDENCIES.iter().chain(without);
    asked.contains(&name) || !excepted.any(|prefix| name.starts_with(prefix))
}

/// Where the newest QEMU and UML are, from Debian unstable; fetched if not in the cache. They stay
/// what they were when fetched: remove the directory for newer ones.
///
/// # Errors
/// Neither the cache has them nor can they be fetched.
pub(super) fn newest(assets: &Assets) -> Result<PathBuf> {
    assets.entry(ENTRY, |fresh| {
        // Links that an installation has before its packages.
        for directory in ["lib", "lib64"] {
            symlink(Path::new("usr").join(directory), fresh.join(directory))?;
        }
        unpack_all(&assets.archive(Suite::Sid)?, &PEERS, fresh)?;
        Manifest::of(&PEERS.join(" "), fresh, &PROGRAMS.map(str::to_owned))
    })?;
    Ok(assets.directory(ENTRY))
}

#[cfg(test)]
mod tests {
    use super::is_run;

    #[test]
    fn what_is_asked_for_is_there_even_if_others_need_it_for_scripts_only() {
        assert!(
            is_run("perl-base", &["bash", "perl-base"], &[]) && is_run("libc6", &["bash"], &[])
        );
        assert!(!is_run("perl-base", &["bash"], &[]) && !is_run("gcc-12", &["gcc"], &["gcc-1"]));
    }
}
