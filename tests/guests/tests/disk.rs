//! Data on a virtio disk outlives the machine.

use std::{fs::File, process::Command};

use anyhow::Result;
use guests::Guest;
use tempfile::TempDir;
use xtask::{assets::Kernel, command::output};

const WRITE: &str = "
mount -t ext4 /dev/vda /mnt && echo mounted
seq 1 100000 > /mnt/numbers
md5sum < /mnt/numbers
umount /mnt && echo unmounted
";

const READ: &str = "
mount -t ext4 -o ro /dev/vda /mnt && echo mounted
md5sum < /mnt/numbers
umount /mnt
echo x > /dev/vda || echo the disk is read-only
";

/// MD5 of the numbers 1 to 100000, one a line.
const SUM: &str = "dea9193b768319cbb4ff1a137ac03113  -";

#[test]
fn a_file_is_there_after_a_second_boot() -> Result<()> {
    let directory = TempDir::new()?;
    let image = directory.path().join("disk.img");
    File::create(&image)?.set_len(64 << 20)?;
    output(Command::new("mke2fs").args(["-q", "-t", "ext4"]).arg(&image))?;

    let first = Guest::new(Kernel::BookwormCloud).runs(WRITE).has_disk(&image).boots()?;
    first.prints(&["mounted", SUM, "unmounted"])?;
    first.powers_off()?;

    // The host agrees that it is a sound file system.
    output(Command::new("e2fsck").arg("-fn").arg(&image))?;

    let second = Guest::new(Kernel::BookwormCloud).runs(READ);
    let read_only = format!("{},readonly", image.display());
    let second = second.with("--disk").with(&read_only).boots()?;
    second.prints(&["mounted", SUM, "the disk is read-only"])?;
    second.powers_off()
}
