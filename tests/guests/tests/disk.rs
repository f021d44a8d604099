//! Data on a virtio disk outlives the machine.

use std::{fs::File, process::Command};

use anyhow::{Result, ensure};
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

    let first = Guest::new(Kernel::BookwormCloud).interpreted().runs(WRITE);
    let first = first.has_disk(&image).boots()?;
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

const OVERLAY: &str = "
mount -t ext4 /dev/vda /mnt && echo mounted
cat /mnt/base
echo changed > /mnt/base; seq 1 100000 > /mnt/numbers; sync; md5sum < /mnt/numbers
rm /mnt/numbers; fstrim /mnt && echo trimmed
echo serial $(cat /sys/block/vda/serial)
umount /mnt && echo unmounted
";

#[test]
fn a_qcow2_overlay_takes_the_changes_and_its_base_none() -> Result<()> {
    let directory = TempDir::new()?;
    let (base, overlay) = (directory.path().join("base.img"), directory.path().join("over.qcow2"));
    File::create(&base)?.set_len(64 << 20)?;
    let content = directory.path().join("content");
    std::fs::create_dir(&content)?;
    std::fs::write(content.join("base"), "from the base\n")?;
    output(Command::new("mke2fs").args(["-q", "-t", "ext4", "-d"]).arg(&content).arg(&base))?;
    let before = std::fs::read(&base)?;
    let mut create = Command::new(guests::ring3()?);
    output(create.args(["image", "create", "--backing"]).arg(&base).arg(&overlay))?;

    let guest = Guest::new(Kernel::BookwormCloud).runs(OVERLAY);
    let disk = format!("{},serial=OVER-1", overlay.display());
    let finished = guest.with("--disk").with(&disk).boots()?;
    finished.prints(&["mounted", "from the base", SUM, "trimmed", "serial OVER-1", "unmounted"])?;
    finished.powers_off()?;
    ensure!(std::fs::read(&base)? == before, "the base has changed");

    let again = Guest::new(Kernel::BookwormCloud);
    let again = again.runs("mount -t ext4 /dev/vda /mnt; cat /mnt/base");
    let finished = again.has_disk(&overlay).boots()?;
    finished.prints(&["changed"])?;
    finished.powers_off()
}
