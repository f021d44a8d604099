//! Devices across programs, by vhost-user: other programs' servers for our machine, and ours for QEMU's. Each test needs a program of
//! Debian's, and says so and does nothing where it is not installed.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use guests::{Finished, Guest, Machine, converse, ring3};
use tempfile::TempDir;
use xtask::{assets::Kernel, command::output};

/// MD5 of the numbers 1 to 100000, one a line.
const SUM: &str = "dea9193b768319cbb4ff1a137ac03113  -";
/// Seconds that QEMU may take: it translates, and the host may be busy.
const QEMU_SECONDS: &str = "400";

/// Files are written, read from the disk, and one of them is a program that is run from there.
const DISK: &str = "
mount -t ext4 /dev/vda /mnt && echo mounted
seq 1 100000 > /mnt/numbers
cp /bin/busybox /mnt/busybox
i=0; while [ $i -lt 8 ]; do dd if=/dev/urandom of=/mnt/r$i bs=1M count=2 2>/dev/null; i=$((i+1)); done
md5sum /mnt/r* > /tmp/sums
sync; echo 3 > /proc/sys/vm/drop_caches
/mnt/busybox md5sum < /mnt/numbers
md5sum -c /tmp/sums > /tmp/verdict && echo the same
fstrim /mnt && echo trimmed
umount /mnt && echo unmounted
";

const DISK_SAYS: [&str; 5] = ["mounted", SUM, "the same", "trimmed", "unmounted"];

const FOLDER: &str = "
mkdir -p /work
mount -t virtiofs work /work && echo mounted
cat /work/greeting
seq 1 100000 > /work/numbers; cp /bin/busybox /work/busybox
mkdir -p /work/deep/er && mv /work/numbers /work/deep/er/ && ln -s er/numbers /work/deep/link
echo 3 > /proc/sys/vm/drop_caches
/work/busybox md5sum < /work/deep/link
i=0; while [ $i -lt 100 ]; do echo $i > /work/deep/f$i; i=$((i+1)); done; ls /work/deep | wc -l
rm /work/doomed && umount /work && echo unmounted
";

const FOLDER_SAYS: [&str; 5] = ["mounted", "hello", SUM, "102", "unmounted"];

/// A program that serves; it is killed when forgotten.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        // One that has ended needs no killing.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Server {
    /// Starts it and waits until it listens; none if it is not installed.
    fn start(command: &mut Command, socket: &Path) -> Result<Option<Self>> {
        let program = PathBuf::from(command.get_program());
        let mut server = match command.stdin(Stdio::null()).spawn() {
            Ok(child) => Self(child),
            Err(error) => {
                eprintln!("SKIPPED: {}: {error}; install its package", program.display());
                return Ok(None);
            }
        };
        let deadline = Instant::now() + Duration::from_secs(20);
        while !socket.exists() {
            let ended = server.0.try_wait()?;
            ensure!(ended.is_none(), "{} ended with {ended:?}", program.display());
            ensure!(Instant::now() < deadline, "{} does not listen", program.display());
            thread::sleep(Duration::from_millis(10));
        }
        Ok(Some(server))
    }
}

/// A disk's image with a file system.
fn formatted(directory: &Path) -> Result<PathBuf> {
    let image = directory.join("disk.img");
    File::create(&image)?.set_len(64 << 20)?;
    output(Command::new("mke2fs").args(["-q", "-t", "ext4"]).arg(&image))?;
    Ok(image)
}

fn is_sound(image: &Path) -> Result<()> {
    output(Command::new("e2fsck").arg("-fn").arg(image)).map(drop)
}

fn storage_daemon(image: &Path, socket: &Path) -> Result<Option<Server>> {
    let mut command = Command::new("qemu-storage-daemon");
    let file = format!("driver=file,node-name=disk,discard=unmap,filename={}", image.display());
    let at = format!("addr.type=unix,addr.path={}", socket.display());
    let export = format!("type=vhost-user-blk,id=export,node-name=disk,writable=on,{at}");
    Server::start(command.args(["--blockdev", &file, "--export", &export]), socket)
}

/// A folder with something in it.
fn folder(directory: &Path) -> Result<PathBuf> {
    let folder = directory.join("folder");
    fs::create_dir(&folder)?;
    fs::write(folder.join("greeting"), "hello\n")?;
    fs::write(folder.join("doomed"), "")?;
    Ok(folder)
}

/// Debian 12's is part of QEMU's package, later ones are a package of their own.
fn virtiofsd(folder: &Path, socket: &Path) -> Result<Option<Server>> {
    let places = ["/usr/libexec/virtiofsd", "/usr/lib/qemu/virtiofsd"];
    let program = places.into_iter().find(|place| Path::new(place).exists());
    let mut command = Command::new(program.unwrap_or("virtiofsd"));
    command.arg(format!("--socket-path={}", socket.display()));
    command.args(["-o", &format!("source={},sandbox=chroot", folder.display())]);
    Server::start(&mut command, socket)
}

#[test]
fn a_disk_of_qemus_storage_daemon() -> Result<()> {
    let directory = TempDir::new()?;
    let (image, socket) = (formatted(directory.path())?, directory.path().join("socket"));
    let Some(_server) = storage_daemon(&image, &socket)? else { return Ok(()) };
    let guest = Guest::new(Kernel::BookwormCloud).runs(DISK);
    let disk = format!("vhost-user:{}", socket.display());
    let finished = guest.with("--disk").with(&disk).boots()?;
    finished.prints(&DISK_SAYS)?;
    finished.powers_off()?;
    is_sound(&image)
}

const ORPHANED: &str = "
mount -t ext4 /dev/vda /mnt && seq 1 100000 > /mnt/numbers && sync && echo written
read line
dd if=/dev/vda of=/dev/null bs=4096 count=1 skip=9000 2>/dev/null || echo cannot read
echo more > /mnt/more; sync
dd if=/dev/vda of=/dev/null bs=4096 count=1 skip=9001 2>/dev/null || echo still not
mount -t tmpfs none /tmp && echo the rest goes on
";

/// The server is killed: its disk is I/O errors, and nothing else is.
#[test]
fn a_disk_whose_server_is_killed_is_an_error() -> Result<()> {
    let directory = TempDir::new()?;
    let (image, socket) = (formatted(directory.path())?, directory.path().join("socket"));
    let Some(server) = storage_daemon(&image, &socket)? else { return Ok(()) };
    let guest = Guest::new(Kernel::BookwormCloud).runs(ORPHANED);
    let disk = format!("vhost-user:{}", socket.display());
    let mut machine = Machine::start(&guest.with("--disk").with(&disk))?;
    machine.says("written")?;
    drop(server);
    machine.hears("")?;
    for line in ["cannot read", "still not", "the rest goes on", "init: script ended with 0"] {
        machine.says(line)?;
    }
    ensure!(machine.ends()?.success());
    Ok(())
}

#[test]
fn a_folder_of_virtiofsd() -> Result<()> {
    let directory = TempDir::new()?;
    let (folder, socket) = (folder(directory.path())?, directory.path().join("socket"));
    let Some(_server) = virtiofsd(&folder, &socket)? else { return Ok(()) };
    let guest = Guest::new(Kernel::BookwormCloud).runs(FOLDER);
    let share = format!("vhost-user:{}:work", socket.display());
    let finished = guest.with("--share").with(&share).boots()?;
    finished.prints(&FOLDER_SAYS)?;
    finished.powers_off()?;
    ensure!(folder.join("deep/er/numbers").exists() && !folder.join("doomed").exists());
    Ok(())
}

/// A server that is another's, or none: one line, and exit code 2.
#[test]
fn wrong_servers_are_refused() -> Result<()> {
    let directory = TempDir::new()?;
    let (image, socket) = (formatted(directory.path())?, directory.path().join("socket"));
    let Some(_server) = storage_daemon(&image, &socket)? else { return Ok(()) };
    let path = socket.display();
    for (option, value, part) in [
        ("--share", format!("vhost-user:{path}:work"), "no folder has"),
        ("--disk", format!("vhost-user:{path}.absent"), "no server can be reached"),
        ("--share", format!("vhost-user:{path}.absent:work"), "no server can be reached"),
        ("--disk", format!("vhost-user:{}", image.display()), "no server can be reached"),
    ] {
        let finished = Guest::new(Kernel::BookwormCloud).with(option).with(&value).boots()?;
        let said = &finished.messages;
        ensure!(finished.code == Some(2) && said.contains(part), "{option} {value}: {said}");
    }
    Ok(())
}

/// Boots a guest in QEMU, with a device that is served at the socket; none if there is no QEMU.
fn in_qemu(script: &str, device: &str, socket: &Path) -> Result<Option<Finished>> {
    if let Err(error) = Command::new("qemu-system-x86_64").arg("--version").output() {
        eprintln!("SKIPPED: qemu-system-x86_64: {error}; install the package qemu-system-x86");
        return Ok(None);
    }
    let guest = Guest::new(Kernel::BookwormCloud).runs(script);
    let boot = guest.boot_files()?;
    let mut qemu = Command::new("timeout");
    qemu.args([QEMU_SECONDS, "qemu-system-x86_64", "-accel", "tcg", "-cpu", "max", "-nodefaults"]);
    qemu.args(["-no-reboot", "-display", "none", "-serial", "stdio", "-m", "512M"]);
    qemu.args(["-object", "memory-backend-memfd,id=mem,size=512M,share=on"]);
    qemu.args(["-machine", "q35,memory-backend=mem"]);
    qemu.arg("-chardev").arg(format!("socket,id=served,path={}", socket.display()));
    qemu.args(["-device", device, "-append", "console=ttyS0 panic=-1"]);
    qemu.arg("-kernel").arg(&boot.kernel).arg("-initrd").arg(boot.initrd.path());
    converse(&mut qemu, &[]).map(Some)
}

/// Has us serve something, until QEMU hangs up.
fn served(kind: &str, what: &str, socket: &Path) -> Result<Server> {
    let mut command = Command::new(ring3()?);
    command.args(["serve", kind, what, "--socket"]).arg(socket);
    Server::start(&mut command, socket)?.context("ring3 can be run")
}

#[test]
fn a_disk_of_ours_for_qemu() -> Result<()> {
    let directory = TempDir::new()?;
    let (image, socket) = (formatted(directory.path())?, directory.path().join("socket"));
    let mut server = served("disk", &image.display().to_string(), &socket)?;
    let device = "vhost-user-blk-pci,chardev=served,num-queues=1";
    let Some(finished) = in_qemu(DISK, device, &socket)? else { return Ok(()) };
    finished.prints(&DISK_SAYS)?;
    finished.powers_off()?;
    ensure!(server.0.wait()?.success(), "it ends when QEMU hangs up");
    ensure!(!socket.exists());
    is_sound(&image)
}

#[test]
fn a_folder_of_ours_for_qemu() -> Result<()> {
    let directory = TempDir::new()?;
    let (folder, socket) = (folder(directory.path())?, directory.path().join("socket"));
    let mut server = served("share", &format!("{}:work", folder.display()), &socket)?;
    let device = "vhost-user-fs-pci,chardev=served,tag=work";
    let Some(finished) = in_qemu(FOLDER, device, &socket)? else { return Ok(()) };
    finished.prints(&FOLDER_SAYS)?;
    finished.powers_off()?;
    ensure!(server.0.wait()?.success(), "it ends when QEMU hangs up");
    ensure!(folder.join("deep/er/numbers").exists() && !folder.join("doomed").exists());
    Ok(())
}
