//! PostgreSQL, as Debian has it, on a disk of its own.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Result;
use xtask::{
    archive::Suite,
    assets::{Assets, Kernel, Manifest},
    bench::packages::unpack_without,
    command::output,
};

use crate::Guest;

/// Name in the cache of the file system with the programs.
const ENTRY: &str = "postgresql-1";
const PACKAGES: [&str; 3] = ["postgresql-15", "coreutils", "dash"];
const IMAGE: &str = "disk.ext4";
const IMAGE_SIZE: &str = "512M";
/// What compiles queries, and all languages: they are larger than all else.
const WITHOUT: [&str; 4] = ["libllvm", "libz3", "locales", "libc-l10n"];
const USERS: &str = "root:x:0:0::/:/bin/sh\npostgres:x:1000:1000::/load:/bin/sh\n";

/// A guest's script begins with this: `postgres`, `initdb` and `psql` are run on the disk's own system. The server refuses to be
/// root's.
const PROGRAMS: &str = "dmesg -n 1
mount -t ext4 /dev/vda /mnt && mount -t devtmpfs dev /mnt/dev && mkdir -p /mnt/dev/shm || exit
mount -t tmpfs -o mode=1777 shm /mnt/dev/shm
its() { chroot /mnt /usr/sbin/chroot --userspec=1000:1000 / /usr/lib/postgresql/15/bin/\"$@\" 2>> /tmp/log; }
query() { its psql -h /tmp -U postgres -qAt \"$@\" postgres; }
starts() {
    its postgres -D /load/db -k /tmp -c listen_addresses= -c shared_buffers=16MB \"$@\" &
    for n in $(seq 300); do its pg_isready -q -h /tmp && return; sleep 0.1; done
    cat /tmp/log; exit
}
leaves() { its pg_ctl -D /load/db -s -m fast stop; wait; umount /mnt/dev/shm /mnt/dev /mnt; }
";
const FIRST: &str = "mkdir -m 700 /mnt/load; chown 1000:1000 /mnt/load
its initdb -D /load/db -U postgres -A trust --no-sync --locale=C > /tmp/log || cat /tmp/log
starts; query -c 'create table t (i integer primary key, x text)' && echo 'the table is there'
leaves
";

/// A guest that runs this script with the disk of [`database`], where there are `starts` with further words for the server, `query`,
/// and `leaves`.
pub fn guest(script: &str) -> Guest {
    Guest::new(Kernel::BookwormCloud).runs(&format!("{PROGRAMS}{script}"))
}

/// A disk in this folder with a database that has an empty table `t (i, x)`.
///
/// # Errors
/// The packages cannot be fetched, or PostgreSQL does not start.
pub fn database(folder: &Path) -> Result<PathBuf> {
    let disk = folder.join(IMAGE);
    fs::copy(image()?, &disk)?;
    let finished = guest(FIRST).has_disk(&disk).boots()?;
    finished.prints(&["the table is there"])?;
    finished.powers_off()?;
    Ok(disk)
}

fn image() -> Result<PathBuf> {
    let assets = Assets::open()?;
    assets.entry(ENTRY, |fresh| {
        let root = fresh.join("root");
        fs::create_dir_all(&root)?;
        unpack_without(&assets.archive(Suite::Bookworm)?, &PACKAGES, &WITHOUT, &root)?;
        complete(&root)?;
        let mut make = Command::new("mke2fs");
        make.args(["-q", "-t", "ext4", "-d"]).arg(&root).arg(fresh.join(IMAGE)).arg(IMAGE_SIZE);
        output(&mut make)?;
        fs::remove_dir_all(&root)?;
        Manifest::of(&PACKAGES.join(" "), fresh, &[IMAGE.to_owned()])
    })?;
    Ok(assets.directory(ENTRY).join(IMAGE))
}

/// What an installation would have made.
fn complete(root: &Path) -> Result<()> {
    use fs::Permissions;
    use std::os::unix::fs::PermissionsExt;
    for folder in ["dev", "tmp", "etc"] {
        fs::create_dir_all(root.join(folder))?;
    }
    fs::set_permissions(root.join("tmp"), Permissions::from_mode(0o1777))?;
    fs::write(root.join("etc/passwd"), USERS)?;
    if !root.join("bin/sh").exists() {
        symlink("dash", root.join("bin/sh"))?;
    }
    Ok(())
}
