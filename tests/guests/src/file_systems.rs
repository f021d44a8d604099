//! File systems on disks that fail: what makes and checks them are Debian's programs, run on this host with their own
//! libraries; their drivers are modules of the guest's kernel.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Result;
use xtask::{
    archive::Suite,
    assets::{Assets, Kernel, Manifest},
    bench::packages::unpack_all,
    command::output,
};

use crate::{Guest, modules};

/// Name in the cache of the programs.
const ENTRY: &str = "file-systems-1";
const PACKAGES: [&str; 3] = ["e2fsprogs", "xfsprogs", "btrfs-progs"];
/// That script: it looks for the program in each folder for programs, and runs it with the packages' own libraries.
const RUN: &str = "#!/bin/sh
root=$(dirname \"$(readlink -f \"$0\")\")/root
program=$1; shift
libraries=$root/lib/x86_64-linux-gnu:$root/usr/lib/x86_64-linux-gnu
for folder in sbin usr/sbin bin usr/bin; do
    [ -x $root/$folder/$program ] || continue
    exec $root/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2 --library-path $libraries $root/$folder/$program \"$@\"
done
echo \"no $program\"; exit 127
";
const KERNEL: Kernel = Kernel::BookwormCloud;

/// A file system: how it is made and checked, and the modules of its driver in the order of loading.
pub struct FileSystem {
    /// What `mount` calls it.
    pub name: &'static str,
    size: u64,
    make: &'static [&'static str],
    check: &'static str,
    modules: &'static [&'static str],
}

/// It has a journal.
pub const EXT4: FileSystem = FileSystem {
    name: "ext4",
    size: 96 << 20,
    make: &["mke2fs", "-q", "-t", "ext4"],
    check: "e2fsck -fn",
    modules: &[],
};
/// The smallest that there is.
pub const XFS: FileSystem = FileSystem {
    name: "xfs",
    size: 320 << 20,
    make: &["mkfs.xfs", "-q"],
    check: "xfs_repair -n",
    modules: &["libcrc32c", "xfs"],
};
/// Nothing is there twice, so what is damaged stays so.
pub const BTRFS: FileSystem = FileSystem {
    name: "btrfs",
    size: 160 << 20,
    make: &["mkfs.btrfs", "-q", "-m", "single", "-d", "single"],
    check: "btrfs check --check-data-csum",
    modules: &["xor", "raid6_pq", "libcrc32c", "zstd_compress", "btrfs"],
};

impl FileSystem {
    /// A guest that has its driver, and runs this script, in which `mounts` mounts the first disk at `/mnt`.
    ///
    /// # Errors
    /// The driver cannot be fetched.
    pub fn guest(&self, script: &str) -> Result<Guest> {
        let loads = self.modules.iter().map(|name| format!("insmod /bin/{name}.ko\n"));
        let (name, loads) = (self.name, loads.collect::<String>());
        let mounts = format!("mounts() {{ mount -t {name} /dev/vda /mnt; }}\n");
        let guest = Guest::new(KERNEL).runs(&format!("dmesg -n 1\n{loads}{mounts}{script}"));
        if self.modules.is_empty() {
            return Ok(guest);
        }
        let files = self.modules.iter().zip(modules(KERNEL, self.modules)?);
        Ok(files.fold(guest, |guest, (name, file)| guest.has_program(&format!("{name}.ko"), &file)))
    }

    /// An empty one, in a file of this folder.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn image(&self, folder: &Path) -> Result<PathBuf> {
        let disk = folder.join("disk.img");
        File::create(&disk)?.set_len(self.size)?;
        output(Command::new("sh").arg(tools()?).args(self.make).arg(&disk))?;
        Ok(disk)
    }

    /// A shell's script that looks at `disk0` and says whether it `finds nothing` or `finds damage`.
    ///
    /// # Errors
    /// The programs cannot be fetched.
    pub fn check(&self) -> Result<String> {
        let (tools, check, name) = (tools()?, self.check, self.name);
        Ok(format!(
            "#!/bin/sh\nif sh {} {check} disk0 > said 2>&1; then echo '{name} checker finds nothing'\n\
             else echo '{name} checker finds damage'; tail -n 5 said; fi\n",
            tools.display()
        ))
    }
}

/// A shell's script that runs one of the packages' programs. Its first argument is the program's name, the others are the program's.
fn tools() -> Result<PathBuf> {
    let assets = Assets::open()?;
    assets.entry(ENTRY, |fresh| {
        let root = fresh.join("root");
        fs::create_dir_all(&root)?;
        unpack_all(&assets.archive(Suite::Bookworm)?, &PACKAGES, &root)?;
        fs::write(fresh.join("run"), RUN)?;
        Manifest::of(&PACKAGES.join(" "), fresh, &["run".to_owned()])
    })?;
    Ok(assets.directory(ENTRY).join("run"))
}
