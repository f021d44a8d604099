//! What the process that runs a guest does, and does not do, to its host.

use std::{
    fs,
    path::PathBuf,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use guests::{Guest, Machine, ring3};
use harness::processes::descendants;
use tempfile::TempDir;
use xtask::assets::Kernel;

/// ring3 needs no hardware virtualization, and does not touch it where it exists.
#[test]
fn never_opens_kvm() -> Result<()> {
    let directory = TempDir::new()?;
    let log = directory.path().join("strace");
    let mut strace = Command::new("strace");
    strace.args(["--follow-forks", "--trace=open,openat,openat2", "--output"]);
    strace.arg(&log).arg(ring3()?);
    let guest = Guest::new(Kernel::BookwormCloud).boots_by(&mut strace)?;
    guest.powers_off()?;
    let opened = fs::read_to_string(&log)?;
    ensure!(opened.contains("vmlinuz"), "strace saw nothing");
    ensure!(!opened.contains("kvm"), "something with kvm in its name was opened");
    Ok(())
}

/// Root has nothing an ordinary user lacks.
#[test]
fn needs_no_privilege() -> Result<()> {
    let mut setpriv = Command::new("setpriv");
    setpriv.args(["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]).arg(ring3()?);
    let guest = Guest::new(Kernel::BookwormCloud).boots_by(&mut setpriv)?;
    guest.powers_off()
}

/// A panicking kernel reboots, which ends the machine with the code for a reset.
#[test]
fn a_kernel_panic_is_a_reset() -> Result<()> {
    let guest = Guest::new(Kernel::BookwormCloud).runs("echo c > /proc/sysrq-trigger").boots()?;
    ensure!(guest.console.contains("Kernel panic"), "no panic: {}", guest.messages);
    ensure!(guest.code == Some(4), "ended with {:?}", guest.code);
    Ok(())
}

/// A monitor that is killed takes its wedges, their processes of user code, its device servers and its socket with it.
#[test]
fn nothing_outlives_a_killed_monitor() -> Result<()> {
    const PATIENCE: Duration = Duration::from_secs(30);
    let directory = TempDir::new()?;
    let disk = directory.path().join("disk.img");
    fs::File::create(&disk)?.set_len(4 << 20)?;
    let guest = Guest::new(Kernel::BookwormCloud).runs("echo up; read answer").has_disk(&disk);
    let guest = guest.with("--net").with("user");
    let mut machine = Machine::start(&guest)?;
    machine.says("up")?;
    let monitor = machine.process();
    let descendants = descendants(monitor);
    ensure!(descendants.len() > 5, "wedges and servers are not to be seen: {descendants:?}");
    let sockets = sockets(monitor)?;
    ensure!(!sockets.is_empty(), "it has no sockets");
    ensure!(Command::new("kill").args(["-KILL", &monitor.to_string()]).status()?.success());
    machine.ends()?;
    let started = Instant::now();
    loop {
        let left: Vec<_> = descendants.iter().filter(|process| lives(**process)).collect();
        let names: Vec<_> = sockets.iter().filter(|socket| socket.exists()).collect();
        if left.is_empty() && names.is_empty() {
            return Ok(());
        }
        ensure!(started.elapsed() < PATIENCE, "left behind: {left:?}, {names:?}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// The sockets of a machine that have a name, and are there.
fn sockets(monitor: u32) -> Result<Vec<PathBuf>> {
    let all = fs::read_to_string("/proc/net/unix")?;
    let names = all.lines().filter_map(|line| line.split_whitespace().nth(7));
    // It is bound under another name, and gets its own when it is listened at.
    let names = names.map(|name| PathBuf::from(name.trim_end_matches(".new")));
    let of_machine = |path: &PathBuf| {
        path.display().to_string().contains(&format!("/{monitor}.")) && path.exists()
    };
    Ok(names.filter(of_machine).collect())
}

/// A process that has ended and was not waited for is none.
fn lives(process: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    status.lines().any(|line| line.starts_with("State:") && !line.contains('Z'))
}

/// What the machine of one vCPU takes beyond the RAM its guest has used: 48 MiB at the most, in all its processes.
#[test]
fn takes_little_memory_of_its_own() -> Result<()> {
    let guest = Guest::new(Kernel::BookwormCloud).runs("echo up; read answer");
    let mut machine = Machine::start(&guest)?;
    machine.says("up")?;
    let processes = descendants(machine.process());
    let shares = processes.iter().map(|process| memory(*process)).collect::<Result<Vec<_>>>()?;
    let (own, ram) = shares.iter().fold((0, 0), |(own, ram), share| (own + share.0, ram + share.1));
    ensure!(ram > 16 << 10, "the guest's RAM is not to be seen: {ram} KiB");
    ensure!(processes.len() > 2, "wedges are not to be seen");
    ensure!(own < 48 << 10, "{own} KiB beside {ram} KiB of the guest's");
    Ok(())
}

/// The process's share of memory, KiB: of its own and of the guest's RAM.
fn memory(process: u32) -> Result<(u64, u64)> {
    let (mut shares, mut is_ram) = ((0, 0), false);
    for line in fs::read_to_string(format!("/proc/{process}/smaps"))?.lines() {
        let mut words = line.split_whitespace();
        match (words.next(), words.next()) {
            (Some("Pss:"), Some(kib)) if is_ram => shares.1 += kib.parse::<u64>()?,
            (Some("Pss:"), Some(kib)) => shares.0 += kib.parse::<u64>()?,
            (Some(first), _) if first.contains('-') => is_ram = line.contains("memfd:ring3-ram"),
            _ => {}
        }
    }
    Ok(shares)
}
