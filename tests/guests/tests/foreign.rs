//! Devices across programs, by vhost-user: other programs' servers for our machine, and ours for QEMU's. Each test needs a program of
//! Debian's, and says so and does nothing where it is not installed.

use std::{
    fs::{self, File},
    io::{Read, Write},
    net::TcpListener,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use guests::{Finished, Guest, LEASE, Machine, converse, ring3};
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

/// The guest ends its direction, then hears.
const HALF_CLOSED: &str = "head -c 4194304 /dev/zero | timeout 200 nc $(cat /router) PORT | md5sum";

/// The host ends first. passt of May 2025 loses what comes in once the guest has ended its direction, with QEMU's guests, too.
const OPEN: &str = "
mkfifo /zeroes; head -c 4194304 /dev/zero > /zeroes &
timeout 200 nc $(cat /router) PORT <> /zeroes | md5sum
";

/// Bytes sent each way.
const BULK: u64 = 4 << 20;

/// MD5 of 4 MiB of zeroes.
const ZEROES: &str = "b5cfa9d6c8febd618f91ac2843d50a1c  -";

/// What the guest does on a network: 4 MiB go out on a connection of this kind, and come back.
fn bulk(connection: &str) -> Result<String> {
    let until_its_end = connection == HALF_CLOSED;
    let port = echo(if until_its_end { u64::MAX } else { BULK })?;
    Ok(format!("{LEASE}{}", connection.replace("PORT", &port.to_string())))
}

/// Sends back what the first connection brings, or so many bytes of it; returns the port.
fn echo(most: u64) -> Result<u16> {
    let listener = TcpListener::bind("0.0.0.0:0")?;
    let port = listener.local_addr()?.port();
    thread::spawn(move || -> std::io::Result<()> {
        let (mut stream, mut bytes) = (listener.accept()?.0, Vec::new());
        (&stream).take(most).read_to_end(&mut bytes)?;
        stream.write_all(&bytes)
    });
    Ok(port)
}

/// A guest that is given a network by the server at the socket.
fn on_network(script: &str, socket: &Path) -> Guest {
    let net = format!("vhost-user:{}", socket.display());
    Guest::new(Kernel::BookwormCloud).runs(script).with("--net").with(&net)
}

fn passt(socket: &Path) -> Result<Option<Server>> {
    let probe = Command::new("passt").args(["--vhost-user", "--print-capabilities"]).output();
    if probe.is_ok_and(|probe| !probe.status.success()) {
        eprintln!("SKIPPED: passt: this one has no vhost-user; that of Debian 13 has");
        return Ok(None);
    }
    let mut command = Command::new("passt");
    command.args(["--vhost-user", "--foreground", "--quiet", "--socket"]).arg(socket);
    Server::start(&mut command, socket)
}

#[test]
fn a_network_of_passt() -> Result<()> {
    // passt becomes nobody if root starts it, and must find its socket.
    let directory = TempDir::new()?;
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777))?;
    let socket = directory.path().join("socket");
    let Some(_server) = passt(&socket)? else { return Ok(()) };
    let script = bulk(OPEN)?;
    let finished = on_network(&script, &socket).boots()?;
    finished.prints(&[ZEROES])?;
    finished.powers_off()
}

/// Neither end knows that the other is ring3.
#[test]
fn a_network_of_ours_for_ours() -> Result<()> {
    let directory = TempDir::new()?;
    let socket = directory.path().join("socket");
    let mut server = served("net", "user", &socket)?;
    let script = bulk(HALF_CLOSED)?;
    let finished = on_network(&script, &socket).boots()?;
    finished.prints(&[ZEROES])?;
    finished.powers_off()?;
    ensure!(server.0.wait()?.success(), "it ends when the machine hangs up");
    Ok(())
}

const UNPLUGGED: &str = "
ifconfig eth0 10.0.2.15 netmask 255.255.255.0 up
until ping -c 1 -W 1 10.0.2.2 >/dev/null; do :; done
echo up
read line
ping -c 3 -W 1 10.0.2.2 | grep transmitted
ifconfig eth0 down && ifconfig eth0 up && echo the rest goes on
";

/// The server is killed: nothing comes any more, and the machine goes on.
#[test]
fn a_network_whose_server_is_killed_is_silent() -> Result<()> {
    let directory = TempDir::new()?;
    let socket = directory.path().join("socket");
    let server = served("net", "user", &socket)?;
    let mut machine = Machine::start(&on_network(UNPLUGGED, &socket))?;
    machine.says("up")?;
    drop(server);
    machine.hears("")?;
    machine.says("3 packets transmitted, 0 packets received, 100% packet loss")?;
    machine.says("the rest goes on")?;
    machine.says("init: script ended with 0")?;
    ensure!(machine.ends()?.success());
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
        ("--net", format!("vhost-user:{path}"), "no network interface has"),
    ] {
        let finished = Guest::new(Kernel::BookwormCloud).with(option).with(&value).boots()?;
        let said = &finished.messages;
        ensure!(finished.code == Some(2) && said.contains(part), "{option} {value}: {said}");
    }
    Ok(())
}

/// Boots a guest in QEMU, with a device that is served at the socket; none if there is no QEMU.
fn in_qemu(script: &str, device: &[&str], socket: &Path) -> Result<Option<Finished>> {
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
    qemu.args(device).args(["-append", "console=ttyS0 panic=-1"]);
    qemu.arg("-kernel").arg(&boot.kernel).arg("-initrd").arg(boot.initrd.path());
    converse(&mut qemu, &[]).map(Some)
}

/// QEMU's disk that is served at the socket.
const BLOCK: [&str; 2] = ["-device", "vhost-user-blk-pci,chardev=served,num-queues=1"];

/// Has us serve something, until QEMU hangs up.
fn served(kind: &str, what: &str, socket: &Path) -> Result<Server> {
    served_with(kind, what, socket, &[])
}

/// The same, with further options.
fn served_with(kind: &str, what: &str, socket: &Path, options: &[&str]) -> Result<Server> {
    let mut command = Command::new(ring3()?);
    command.args(["serve", kind, what, "--socket"]).arg(socket).args(options);
    Server::start(&mut command, socket)?.context("ring3 can be run")
}

/// Has us serve something with faults. Their records are in the file `records` of the folder.
fn served_badly(kind: &str, what: &str, folder: &Path, scenario: &str) -> Result<Server> {
    let path = |name: &str| folder.join(name).display().to_string();
    fs::write(path("faults.toml"), scenario)?;
    let options = ["--fault", &path("faults.toml"), "--fault-log", &path("records")];
    served_with(kind, what, &folder.join("socket"), &options)
}

/// A sector that cannot be read, and a write that is lost.
const WORN: &str = "
[[fault]]
name = 'worn'
on = 'disk0'
do = 'read-error'
sectors = [8192, 8193]
[[fault]]
name = 'forgetful'
on = 'disk0'
do = 'lost'
sectors = [16384, 16385]
";

/// The first sector of each MiB is read by itself. The eighth and the ninth are written before.
const ON_WORN: &str = "
at() { dd if=/dev/vda bs=512 count=1 skip=$(($1 * 2048)) 2>/dev/null; }
put() { yes $2 | dd of=/dev/vda bs=512 count=1 seek=$(($1 * 2048)) conv=notrunc,fsync 2>/dev/null; }
put 8 lost; put 9 kept
echo 0 > /sys/block/vda/queue/read_ahead_kb; echo 3 > /proc/sys/vm/drop_caches
for n in 3 4 5 8 9; do at $n > /tmp/$n && echo $n: $(tr -d '\\000' < /tmp/$n | head -n 1); done
";

#[test]
fn a_disk_of_ours_fails_qemu_as_asked() -> Result<()> {
    let directory = TempDir::new()?;
    let image = directory.path().join("disk.img");
    File::create(&image)?.set_len(64 << 20)?;
    let mut server = served_badly("disk", &image.display().to_string(), directory.path(), WORN)?;
    let socket = directory.path().join("socket");
    let Some(finished) = in_qemu(ON_WORN, &BLOCK, &socket)? else { return Ok(()) };
    finished.powers_off()?;
    ensure!(server.0.wait()?.success(), "it ends when QEMU hangs up");
    finished.prints(&["3:", "5:", "8:", "9: kept"])?;
    ensure!(!finished.console.contains("8: lost") && !finished.console.contains("\n4:"));
    ensure!(finished.console.contains("I/O error, dev vda, sector 8192"), "{}", finished.console);
    let records = fs::read_to_string(directory.path().join("records"))?;
    let of = |fault: &str| records.lines().find(|line| line.contains(fault));
    let worn = of("worn").context("a record")?;
    ensure!(worn.contains(r#""op":"read""#) && worn.contains(r#""effect":"failed""#), "{worn}");
    let lost = of("forgetful").context("a record")?;
    ensure!(lost.contains(r#""effect":"dropped""#), "{lost}");
    ensure!(
        lost.contains(r#""before":"00000000"#) && lost.contains(r#""meant":"6c6f7374"#),
        "{lost}"
    );
    Ok(())
}

#[test]
fn a_disk_of_ours_for_qemu() -> Result<()> {
    let directory = TempDir::new()?;
    let (image, socket) = (formatted(directory.path())?, directory.path().join("socket"));
    let mut server = served("disk", &image.display().to_string(), &socket)?;
    let Some(finished) = in_qemu(DISK, &BLOCK, &socket)? else { return Ok(()) };
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
    let device = ["-device", "vhost-user-fs-pci,chardev=served,tag=work"];
    let Some(finished) = in_qemu(FOLDER, &device, &socket)? else { return Ok(()) };
    finished.prints(&FOLDER_SAYS)?;
    finished.powers_off()?;
    ensure!(server.0.wait()?.success(), "it ends when QEMU hangs up");
    ensure!(folder.join("deep/er/numbers").exists() && !folder.join("doomed").exists());
    Ok(())
}

/// Whether QEMU's guests can use a network by vhost-user without KVM: those of QEMU 7.2 cannot, whoever serves it.
fn qemu_has_networks() -> bool {
    let version = Command::new("qemu-system-x86_64").arg("--version").output();
    let version = version.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    let crashes = version.is_ok_and(|version| version.contains("version 7."));
    if crashes {
        eprintln!(
            "SKIPPED: QEMU 7 crashes when its guest starts such an interface; put a later one into PATH"
        );
    }
    !crashes
}

#[test]
fn a_network_of_ours_for_qemu() -> Result<()> {
    if !qemu_has_networks() {
        return Ok(());
    }
    let directory = TempDir::new()?;
    let socket = directory.path().join("socket");
    carries_bulk(served("net", "user", &socket)?, &socket).map(drop)
}

/// A guest of QEMU's sends 4 MiB by the network that is served, and has them back. False if there is no QEMU.
fn carries_bulk(mut server: Server, socket: &Path) -> Result<bool> {
    let script = bulk(HALF_CLOSED)?;
    let device =
        ["-netdev", "vhost-user,id=net,chardev=served", "-device", "virtio-net-pci,netdev=net"];
    let Some(finished) = in_qemu(&script, &device, socket)? else { return Ok(false) };
    finished.prints(&[ZEROES])?;
    finished.powers_off()?;
    ensure!(server.0.wait()?.success(), "it ends when QEMU hangs up");
    Ok(true)
}

/// One of a hundred frames is lost; TCP sends it again.
const LOSSES: &str = "
[[fault]]
name = 'hundredth'
on = 'net0'
do = 'loss'
probability = 0.01
";

#[test]
fn a_network_of_ours_loses_frames_of_qemu() -> Result<()> {
    if !qemu_has_networks() {
        return Ok(());
    }
    let directory = TempDir::new()?;
    let server = served_badly("net", "user", directory.path(), LOSSES)?;
    if !carries_bulk(server, &directory.path().join("socket"))? {
        return Ok(());
    }
    let records = fs::read_to_string(directory.path().join("records"))?;
    ensure!(records.lines().filter(|line| line.contains(r#""effect":"dropped""#)).count() > 20);
    Ok(())
}
