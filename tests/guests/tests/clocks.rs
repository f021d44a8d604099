//! The clocks of guests, beside the host's.

use std::{
    fs,
    io::{BufRead, BufReader, Read},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use guests::{Guest, compile, modules, ring3};
use tempfile::TempDir;
use xtask::assets::Kernel;

const TIMEOUT: &str = "200";
/// What a Linux guest keeps its time by.
const SOURCE: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";

/// The time-stamp counter and a clock at the same moment.
type Moment = (i128, i128);

/// What a clock shows at a value of the counter, by two of its moments.
fn shown_at(tsc: i128, before: Moment, after: Moment) -> i128 {
    before.1 + (after.1 - before.1) * (tsc - before.0) / (after.0 - before.0)
}

/// Moments as `moment.c` prints them.
fn moments(text: &str) -> Vec<Moment> {
    let pair = |line: &str| {
        let (tsc, ns) = line.split_once(' ')?;
        Some((tsc.parse().ok()?, ns.parse().ok()?))
    };
    text.lines().map(str::trim).filter_map(pair).collect()
}

/// `moment.c`, linked so that it runs on any root file system.
fn static_moment(directory: &Path) -> Result<PathBuf> {
    compile(directory, "moment", include_str!("moment.c"), "-O1 -static")
}

/// Runs a guest, which runs `moment` three times. Each time its clock must be the host's. After the first it is
/// paused, and resumed. Guest and host share the counter, so that their clocks can be compared without being read at
/// the same moment.
fn shows_the_hosts_time(command: &mut Command, moment: &Path) -> Result<String> {
    let host = || -> Result<Moment> {
        let output = Command::new(moment).output()?;
        moments(&String::from_utf8_lossy(&output.stdout)).pop().context("no moment")
    };
    let before = host()?;
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
    let mut stdout = BufReader::new(child.stdout.take().context("no standard output")?);
    let mut text = String::new();
    while moments(&text).is_empty() {
        ensure!(stdout.read_line(&mut text)? > 0, "{text}");
    }
    for order in ["pause", "resume"] {
        let done = Command::new(ring3()?).args([order, &child.id().to_string()]).status()?;
        ensure!(done.success(), "{order}");
        std::thread::sleep(Duration::from_secs(1));
    }
    stdout.read_to_string(&mut text)?;
    ensure!(child.wait()?.success(), "{text}");
    let after = host()?;
    let off = |(tsc, ns)| ns - shown_at(tsc, before, after);
    let off: Vec<_> = moments(&text).into_iter().map(off).collect();
    ensure!(off.len() == 3, "{text}");
    println!("{off:?} ns off");
    ensure!(off.iter().all(|off| off.abs() < 5_000_000), "{off:?} ns off\n{text}");
    Ok(text)
}

/// The clock is set by the host's, and led by one that goes as the host's does, whatever NTP does to that.
#[test]
fn the_clock_is_the_hosts() -> Result<()> {
    let directory = TempDir::new()?;
    let moment = static_moment(directory.path())?;
    let mut command = Command::new(ring3()?);
    command.args(["exec", "--memory", "512M", "--timeout", TIMEOUT, "--"]);
    let script = format!("cat {SOURCE}; ./moment; sleep 3; ./moment; sleep 1; ./moment");
    command.args(["sh", "-c", &script]).current_dir(directory.path());
    let said = shows_the_hosts_time(&mut command, &moment)?;
    ensure!(said.starts_with("kvm-clock\n"), "{said}");
    Ok(())
}

/// A file that a guest has just written is as old as its clock says.
#[test]
fn a_shared_folder_has_no_clock_skew() -> Result<()> {
    const CHECK: &str = "import os, time\n\
        for _ in range(20):\n\
        \tbefore = time.time_ns()\n\
        \twith open('made', 'w') as file: file.write('x')\n\
        \tat, after = os.stat('made').st_mtime_ns, time.time_ns()\n\
        \tprint(max(before - at, at - after, 0))\n\
        \tos.unlink('made')\n";
    /// A host's kernel has a file's times from its last tick.
    const TICK_NS: u64 = 10_000_000;
    let directory = TempDir::new()?;
    let mut command = Command::new(ring3()?);
    command.args(["exec", "--memory", "512M", "--timeout", TIMEOUT, "--"]);
    command.args(["python3", "-c", CHECK]).current_dir(directory.path());
    let output = command.output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    let skews: Vec<u64> = said.lines().map(str::parse).collect::<Result<_, _>>()?;
    println!("{skews:?} ns");
    ensure!(skews.len() == 20, "{said} {}", String::from_utf8_lossy(&output.stderr));
    ensure!(skews.iter().all(|skew| *skew < 5_000_000 + TICK_NS), "{skews:?} ns");
    Ok(())
}

/// Programs that keep the host's CPUs busy until this is dropped.
struct Load(Vec<Child>);

impl Load {
    fn new() -> Result<Self> {
        let busy = || Command::new("sh").args(["-c", "while :; do :; done"]).spawn();
        let cpus = std::thread::available_parallelism()?.get();
        Ok(Self((0..2 * cpus).map(|_| busy()).collect::<Result<_, _>>()?))
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill().and_then(|()| child.wait());
        }
    }
}

/// The kernel sets its clock when it starts, and keeps it by a clock that follows the host's: however much the host
/// has to do.
#[test]
fn a_machines_clock_is_the_hosts() -> Result<()> {
    let directory = TempDir::new()?;
    let moment = static_moment(directory.path())?;
    let moments = "moment; sleep 3; moment; sleep 1; moment";
    let script = format!("dmesg -n 1; cat {SOURCE}; {moments}; dmesg");
    let boots = |kernel, cpus| -> Result<()> {
        let guest = Guest::new(kernel).has_program("moment", &fs::read(&moment)?);
        let guest = guest.with("--cpus").with(cpus).runs(&script);
        let mut command = Command::new(ring3()?);
        let _initrd = guest.prepares(&mut command)?;
        let console = shows_the_hosts_time(&mut command, &moment)?;
        ensure!(console.contains("kvm-clock\r\n"), "{kernel:?}: {console}");
        for complaint in ["Marking clocksource", "MSR access error"] {
            ensure!(!console.contains(complaint), "{kernel:?}: {console}");
        }
        Ok(())
    };
    boots(Kernel::BookwormCloud, "2")?;
    let _load = Load::new()?;
    boots(Kernel::BookwormCloud, "1")?;
    boots(Kernel::TrixieCloud, "1")
}

/// A guest whose userland has the driver of KVM's clock of the host: `/dev/ptp0`.
fn with_the_hosts_clock(kernel: Kernel, moment: &Path, script: &str) -> Result<Guest> {
    let driver = modules(kernel, &["ptp_kvm"])?.pop().context("no module")?;
    let guest = Guest::new(kernel).has_program("moment", &fs::read(moment)?);
    let guest = guest.has_program("ptp_kvm.ko", &driver);
    let begins = "dmesg -n 1; insmod /bin/ptp_kvm.ko; cat /sys/class/ptp/ptp0/clock_name;";
    Ok(guest.runs(&format!("{begins} {script}")))
}

/// Guests have the host's clock beside their own: what follows it there (chrony's `refclock PHC`) needs no network.
#[test]
fn the_hosts_clock_is_a_device() -> Result<()> {
    let directory = TempDir::new()?;
    let moment = static_moment(directory.path())?;
    let script = "moment /dev/ptp0; sleep 3; moment /dev/ptp0; sleep 1; moment /dev/ptp0";
    for options in [["--cpus", "1"], ["--cpus", "2"], ["--paravirt", "none"]] {
        let guest = with_the_hosts_clock(Kernel::BookwormCloud, &moment, script)?;
        let guest = options.iter().fold(guest, |guest, option| guest.with(option));
        let mut command = Command::new(ring3()?);
        let _initrd = guest.prepares(&mut command)?;
        let console = shows_the_hosts_time(&mut command, &moment)?;
        ensure!(console.contains("KVM virtual PTP"), "{console}");
    }
    Ok(())
}

/// The host's clock is set ahead while a machine runs: `/dev/ptp0` shows the new time, the guest's own clock does not.
#[test]
fn a_hosts_clock_that_is_set_is_seen_in_the_device() -> Result<()> {
    const SET: &str = "[[fault]]\non = 'clock'\ndo = { step = '20s' }\nconsole = 'set it now'\n";
    const STEP_NS: i128 = 20_000_000_000;
    let directory = TempDir::new()?;
    let (moment, scenario) = (static_moment(directory.path())?, directory.path().join("set.toml"));
    fs::write(&scenario, SET)?;
    let script = "moment; moment /dev/ptp0; echo set it now; sleep 2; moment /dev/ptp0; moment";
    let guest = with_the_hosts_clock(Kernel::BookwormCloud, &moment, script)?;
    let finished = guest.with("--fault").with(&scenario.display().to_string()).boots()?;
    let moments = moments(&finished.console);
    ensure!(moments.len() == 4, "{}", finished.console);
    let ahead = |(tsc, ns): Moment| ns - shown_at(tsc, moments[0], moments[3]);
    let (before, after) = (ahead(moments[1]), ahead(moments[2]));
    println!("{before} ns ahead, and {after} ns when it has been set");
    ensure!(before.abs() < 5_000_000, "{before} ns ahead");
    ensure!((after - STEP_NS).abs() < 5_000_000, "{after} ns ahead when it has been set");
    Ok(())
}
