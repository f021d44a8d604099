//! Data on a virtio disk outlives the machine.

use std::{fs::File, process::Command};

use anyhow::{Result, bail, ensure};
use guests::{Guest, Machine};
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

const FILL: &str = "
dd if=/dev/zero bs=64k count=16 | tr '\\0' x | dd of=/dev/vda bs=64k iflag=fullblock oflag=direct 2>/dev/null && echo written
dd if=/dev/zero of=/dev/vda bs=64k seek=16 oflag=direct 2>/dev/null || echo the disk is full
dd if=/dev/vda bs=64k count=16 iflag=direct 2>/dev/null | tr -d x | wc -c
echo still there
";

/// A host without room for what the guest writes: the guest is told, and loses nothing it had written before.
#[test]
fn a_full_host_is_an_error_of_the_disk() -> Result<()> {
    for name in ["disk.img", "disk.qcow2"] {
        let directory = TempDir::new()?;
        let disk = directory.path().join("small").join(name);
        // A file system of 8 MiB, in a namespace of this machine's own.
        let script = "mount -t tmpfs -o size=8M small \"$1\" && ring3=$2 && \
                      \"$ring3\" image create \"$3\" --size 64M && shift 3 && exec \"$ring3\" \"$@\"";
        let mut unshare = Command::new("unshare");
        unshare.args(["--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]);
        std::fs::create_dir(directory.path().join("small"))?;
        unshare.arg(directory.path().join("small")).arg(guests::ring3()?).arg(&disk);
        let guest = Guest::new(Kernel::BookwormCloud).runs(FILL).has_disk(&disk);
        let finished = guest.boots_by(&mut unshare)?;
        finished.prints(&["written", "the disk is full", "0", "still there"])?;
        finished.powers_off()?;
    }
    Ok(())
}

const BUSY: &str = "
mount -t ext4 /dev/vda /mnt && echo mounted
i=0
while [ $i -lt 40 ]; do
    seq $i $((i + 20000)) > /mnt/f$i; sync; echo 3 > /proc/sys/vm/drop_caches
    seq $i $((i + 20000)) | cmp - /mnt/f$i || echo differs
    echo round $i; i=$((i + 1))
done
umount /mnt && echo unmounted
";

/// Whoever serves the disk is killed while it is busy; another goes on where it was.
#[test]
fn a_disk_whose_process_is_killed_goes_on() -> Result<()> {
    let directory = TempDir::new()?;
    let image = directory.path().join("disk.img");
    File::create(&image)?.set_len(64 << 20)?;
    output(Command::new("mke2fs").args(["-q", "-t", "ext4"]).arg(&image))?;
    let guest = Guest::new(Kernel::BookwormCloud).runs(BUSY).has_disk(&image);
    let mut machine = Machine::start(&guest)?;
    machine.says("mounted")?;
    let mut said = String::new();
    for round in [2, 9, 17, 30] {
        said += &machine.says(&format!("round {round}"))?;
        let servers = machine.processes("device")?;
        let [server] = servers[..] else { bail!("{} processes serve the disk", servers.len()) };
        output(Command::new("kill").args(["-KILL", &server.to_string()]))?;
    }
    said += &machine.says("unmounted")?;
    ensure!(!said.contains("differs") && !said.contains("error"), "{said}");
    machine.says("init: script ended with 0")?;
    ensure!(machine.ends()?.success());
    output(Command::new("e2fsck").arg("-fn").arg(&image))?;
    Ok(())
}
