//! Debian as people use it: a disk of `ring3 image create debian`, booted with systemd on the default
//! devices, gets packages by apt, and each of them has to do its work. The host logs in and fetches pages.
//!
//! A workload is a script in the guest (`programs/debian`) that checks what it did, not only that it ended;
//! the host checks what is served to it. All run in one boot, so that each finds the machine as the ones before left it.

mod native;
mod session;
mod visitor;

use std::{
    fs,
    net::TcpListener,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use xtask::{
    assets::{Assets, Manifest},
    command::{output, progress},
    scratch::Scratch,
};

use crate::{is_wanted, machine::Limits, machine::ring3};
use session::Session;
use visitor::Visitor;

/// Name in the cache of the image, and what is in it.
const ENTRY: &str = "debian-bookworm-2";
const IMAGE: &str = "debian.img";
const FILES: [&str; 3] = [IMAGE, "debian.vmlinuz", "debian.initrd"];
/// As `ring3 image create` writes it into `debian.toml`.
const CMDLINE: &str = "console=ttyS0 root=/dev/vda rootfstype=ext4 rw quiet noreplace-smp";
/// From power-on to a login at most so many times what the kernel takes and the same system in a container.
const MOST: f64 = 5.0;
/// Runs one workload.
const RUN: &str = include_str!("../../../../programs/debian/run.sh");

/// What the host does with a workload's service; what it found.
type Visit = fn(&Visitor) -> Result<String>;

/// A workload: its name, its script, and what the host does afterwards.
struct Workload(&'static str, &'static str, Option<Visit>);

macro_rules! workload {
    ($name:literal, $visit:expr) => {
        Workload($name, include_str!(concat!("../../../../programs/debian/", $name, ".sh")), $visit)
    };
}

/// In the order they run.
const WORKLOADS: [Workload; 11] = [
    workload!("boot", None),
    workload!("apt", None),
    workload!("sshd", Some(Visitor::logs_in)),
    workload!("nginx", Some(Visitor::fetches)),
    workload!("postgres", None),
    workload!("containers", None),
    workload!("nftables", None),
    workload!("loop", None),
    workload!("module", None),
    workload!("bpf", None),
    workload!("log", None),
];
/// Those that work without what `apt` installs.
const BARE: [&str; 4] = ["boot", "loop", "module", "log"];

/// Boots the image and runs the workloads whose names have one of `parts`, or all.
///
/// # Errors
/// Names each workload that failed.
pub fn run(assets: &Assets, parts: &[String], limits: Limits<'_>) -> Result<String> {
    ensure!(!limits.qemu, "debian: runs in ring3 alone, leave out --qemu");
    let scratch = Scratch::new(&image(assets)?, ".debian-")?;
    let disk = copied(assets, scratch.path())?;
    let visitor = Visitor::new(scratch.path(), [free_port()?, free_port()?])?;
    shared(scratch.path())?;
    let start = Instant::now();
    let mut guest = Session::start(machine(assets, &disk, &visitor, limits)?, limits.verbose)?;
    guest.reads_past("login: ")?;
    let login = start.elapsed();
    log_in(&mut guest)?;
    let mut failed = work(&mut guest, parts, &visitor)?;
    let kernel = kernel_time(&mut guest)?;
    guest.types("poweroff")?;
    guest.ends()?;
    output(Command::new("e2fsck").arg("-fn").arg(&disk)).context("the disk at the end")?;
    match boot_time(assets, scratch, login, kernel) {
        Ok(said) => println!("debian: login: {said}"),
        Err(error) => failed.push(format!("login failed: {error:#}")),
    }
    ensure!(failed.is_empty(), "{}", failed.join("; "));
    Ok(format!("login after {:.1} s, every workload did its work", login.as_secs_f64()))
}

/// Where the image is, which is made when first asked for.
fn image(assets: &Assets) -> Result<std::path::PathBuf> {
    assets.entry(ENTRY, |fresh| {
        let mut create = Command::new(ring3()?);
        create.args(["image", "create", "debian", "--suite", "bookworm", "--size", "4G"]);
        output(create.arg(fresh.join(IMAGE)))?;
        Manifest::of("debian", fresh, &FILES.map(str::to_owned))
    })?;
    Ok(assets.directory(ENTRY))
}

/// A disk of its own: the image stays as it is. Holes stay holes.
fn copied(assets: &Assets, scratch: &Path) -> Result<std::path::PathBuf> {
    let disk = scratch.join(IMAGE);
    let mut copy = Command::new("cp");
    output(copy.arg("--sparse=always").arg(assets.directory(ENTRY).join(IMAGE)).arg(&disk))?;
    Ok(disk)
}

/// The scripts, where the guest mounts them.
fn shared(scratch: &Path) -> Result<()> {
    let folder = visitor::folder(scratch);
    fs::write(folder.join("run.sh"), RUN)?;
    for Workload(name, script, _) in &WORKLOADS {
        fs::write(folder.join(name).with_extension("sh"), script)?;
    }
    Ok(())
}

fn machine(assets: &Assets, disk: &Path, visitor: &Visitor, limits: Limits<'_>) -> Result<Command> {
    let from = assets.directory(ENTRY);
    let mut command = Command::new(ring3()?);
    command.args(["run", "--append", CMDLINE, "--memory", "1G", "--engine", limits.engine]);
    command.arg("--kernel").arg(from.join(FILES[1])).arg("--initrd").arg(from.join(FILES[2]));
    command.arg("--disk").arg(disk).arg("--net").arg(visitor.network());
    command.arg("--share").arg(visitor.share());
    command.arg("--timeout").arg(limits.timeout.as_secs().to_string());
    Ok(command)
}

/// To a shell that does not edit its lines, with the scripts mounted.
fn log_in(guest: &mut Session) -> Result<()> {
    guest.types("root")?;
    guest.reads_past("# ")?;
    guest.types("mount -t virtiofs work /mnt && exec sh /mnt/run.sh")?;
    guest.reads_past("work: what?")
}

/// Every workload that is wanted; those that failed.
fn work(guest: &mut Session, parts: &[String], visitor: &Visitor) -> Result<Vec<String>> {
    let mut failed = Vec::new();
    for Workload(name, _, visit) in wanted(parts) {
        let (start, bar) = (Instant::now(), progress(format!("debian: {name}")));
        let done = worked(guest, name).and_then(|said| Ok((said, visited(*visit, visitor)?)));
        bar.finish_and_clear();
        let seconds = start.elapsed().as_secs();
        match done {
            Ok((said, found)) => println!("debian: {name}: passed in {seconds} s: {said}{found}"),
            Err(error) => {
                println!("debian: {name}: FAILED after {seconds} s: {error:#}");
                failed.push(format!("{name} failed"));
            }
        }
    }
    Ok(failed)
}

/// The workloads whose names have one of `parts`, and what installs what they need.
fn wanted(parts: &[String]) -> Vec<&'static Workload> {
    let named = |name: &str| is_wanted(name, parts);
    let needy = WORKLOADS.iter().any(|one| named(one.0) && !BARE.contains(&one.0));
    WORKLOADS.iter().filter(|one| named(one.0) || one.0 == "apt" && needy).collect()
}

fn visited(visit: Option<Visit>, visitor: &Visitor) -> Result<String> {
    visit.map_or_else(|| Ok(String::new()), |visit| visit(visitor))
}

/// One workload's figures.
fn worked(guest: &mut Session, name: &str) -> Result<String> {
    guest.types(name)?;
    let before = guest.reads_up_to(&format!("work: {name} "))?;
    let rest = guest.reads_up_to("\n")?;
    let (status, figures) = rest.split_once(' ').unwrap_or((&rest, ""));
    ensure!(status == "0", "status {status}\n{before}");
    Ok(figures.trim().to_owned())
}

/// How long the kernel took until its first process, by its own log.
fn kernel_time(guest: &mut Session) -> Result<Duration> {
    guest.types("kernel")?;
    guest.reads_past("work: kernel ")?;
    let seconds = guest.reads_up_to("\n")?;
    let seconds = seconds.trim().parse().with_context(|| format!("`{seconds}` is no time"))?;
    Ok(Duration::from_secs_f64(seconds))
}

/// The time to a login, held against the kernel's and a container's.
fn boot_time(
    assets: &Assets,
    scratch: Scratch,
    login: Duration,
    kernel: Duration,
) -> Result<String> {
    let disk = copied(assets, scratch.path())?;
    let Some(container) = native::container(scratch.path(), &disk)? else {
        return Ok("not compared: this host's root alone can start a container".to_owned());
    };
    let times = login.as_secs_f64() / (container + kernel).as_secs_f64();
    let shown = format!(
        "{:.2} s to a login, {times:.1} times {:.2} s of its kernel and {:.2} s of a container",
        login.as_secs_f64(),
        kernel.as_secs_f64(),
        container.as_secs_f64()
    );
    ensure!(times <= MOST, "{shown}");
    Ok(shown)
}

/// A port nobody has.
fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use tempfile::TempDir;

    /// The guest's shell, on the host, with these workloads.
    fn shell(workloads: &[(&str, &str)]) -> Result<(Session, TempDir)> {
        let folder = TempDir::new()?;
        fs::write(folder.path().join("run.sh"), RUN)?;
        for (name, script) in workloads {
            fs::write(folder.path().join(name).with_extension("sh"), script)?;
        }
        let mut command = Command::new("sh");
        command.arg(folder.path().join("run.sh")).env("TMPDIR", folder.path());
        let mut shell = Session::start(command, false)?;
        shell.reads_past("work: what?")?;
        Ok((shell, folder))
    }

    #[test]
    fn a_workload_says_its_figures_or_its_last_steps() -> Result<()> {
        let workloads = [("good", "echo 3 >&3; echo of 3 >&3"), ("bad", "test 1 = 2\ntrue")];
        let (mut shell, _folder) = shell(&workloads)?;
        assert_eq!(worked(&mut shell, "good")?, "3 of 3");
        let error = worked(&mut shell, "bad").expect_err("it failed").to_string();
        assert!(error.contains("test 1 = 2") && error.contains("status 1"), "{error}");
        assert_eq!(worked(&mut shell, "good")?, "3 of 3");
        worked(&mut shell, "absent").expect_err("no such script");
        Ok(())
    }

    #[test]
    fn packages_are_installed_where_they_are_needed() {
        let names = |part: &str| wanted(&[part.to_owned()]).into_iter().map(|one| one.0).collect();
        let names: [Vec<_>; 3] = [names("boot"), names("nginx"), names("o")];
        assert_eq!(names[0], ["boot"]);
        assert_eq!(names[1], ["apt", "nginx"]);
        assert_eq!(names[2], ["boot", "apt", "postgres", "containers", "loop", "module", "log"]);
    }

    #[test]
    fn a_server_that_gives_other_bytes_is_found() -> Result<()> {
        let scratch = TempDir::new()?;
        let server = TcpListener::bind("127.0.0.1:0")?;
        let visitor = Visitor::new(scratch.path(), [0, server.local_addr()?.port()])?;
        let answer = |page: Vec<u8>| {
            let (mut stream, _) = server.accept().expect("a visitor");
            // What is closed with something unread is reset, and the answer lost.
            let mut request = Vec::new();
            while !request.ends_with(b"\r\n\r\n") {
                let mut part = [0; 64];
                let length = stream.read(&mut part).expect("a request");
                request.extend(&part[..length]);
            }
            let head = b"HTTP/1.1 200 OK\r\nServer: nginx\r\n\r\n";
            // A visitor that has seen enough may be gone.
            let _ = stream.write_all(&[&head[..], &page].concat());
        };
        let page = fs::read(visitor::folder(scratch.path()).join("page"))?;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                answer(page.clone());
                answer(page[1..].to_vec());
            });
            let error = visitor.fetches().expect_err("a byte is missing").to_string();
            assert!(error.contains("other bytes"), "{error}");
        });
        Ok(())
    }
}
