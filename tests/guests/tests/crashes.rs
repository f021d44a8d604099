//! Guests whose kernel crashes and says so: `--on-panic`.

use std::{
    fs,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, anyhow, ensure};
use guests::{Finished, Guest, modules, ring3};
use tempfile::TempDir;
use xtask::{assets::Kernel, command::output};

/// What a driver of the pvpanic device does, by hand.
const BY_HAND: &str = "dmesg -n 1
for device in /sys/bus/pci/devices/*; do
    [ \"$(cat $device/vendor):$(cat $device/device)\" = 0x1b36:0x0011 ] || continue
    echo 1 > $device/enable
    read window rest < $device/resource
done
echo \"it takes $(devmem $window 8)\"
devmem $window 8 1
sleep 20; echo 'still there'
";
/// A real one: the kernel's own driver hears of a panic, after which this kernel (`panic=-1`) resets the machine at once.
const BY_DRIVER: &str =
    "insmod /bin/pvpanic.ko && insmod /bin/pvpanic_pci.ko && echo 'driver loaded'
echo c > /proc/sysrq-trigger
";
/// How long a machine may take to crash.
const PATIENCE: Duration = Duration::from_secs(120);

/// The driver's modules.
const DRIVER: [&str; 2] = ["pvpanic", "pvpanic_pci"];

fn by_hand() -> Guest {
    Guest::new(Kernel::BookwormCloud).runs(BY_HAND)
}

fn by_driver() -> Result<Guest> {
    let guest = Guest::new(Kernel::BookwormCloud).runs(BY_DRIVER);
    let has = |guest: Guest, (name, module): (&&str, Vec<u8>)| {
        guest.has_program(&format!("{name}.ko"), &module)
    };
    Ok(DRIVER.iter().zip(modules(Kernel::BookwormCloud, &DRIVER)?).fold(guest, has))
}

/// A guest that crashes, of a machine that does this then.
fn crashes(guest: Guest, what: &str) -> Result<Finished> {
    let finished = guest.with("--on-panic").with(what).boots()?;
    ensure!(
        finished.code == Some(8),
        "ended with {:?}: {}{}",
        finished.code,
        finished.messages,
        finished.console
    );
    ensure!(finished.messages.contains("kernel crashed"), "{}", finished.messages);
    ensure!(!finished.console.contains("still there"), "it went on");
    Ok(finished)
}

#[test]
fn a_crash_that_the_kernel_tells_of_ends_the_machine() -> Result<()> {
    crashes(by_hand(), "exit")?.prints(&["it takes 0x03"])
}

#[test]
fn a_machine_that_crashes_leaves_its_core() -> Result<()> {
    let folder = TempDir::new()?;
    let core = folder.path().join("core");
    let finished = crashes(by_hand(), &format!("dump={}", core.display()))?;
    ensure!(finished.messages.contains("core is in"), "{}", finished.messages);
    let notes = output(Command::new("readelf").arg("-ln").arg(&core))?;
    ensure!(notes.contains("VMCOREINFO") && notes.contains("NT_PRSTATUS"), "{notes}");
    Ok(())
}

/// Waits until `ring3 ps` lists a machine as crashed.
fn waits_for_crash(name: &str) -> Result<()> {
    let started = Instant::now();
    let crashed =
        |list: &str| list.lines().any(|line| line.contains(name) && line.contains("crashed"));
    while !crashed(&output(Command::new(ring3()?).arg("ps"))?) {
        ensure!(started.elapsed() < PATIENCE, "{name} did not crash");
        thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

/// What a crashed machine has in memory is what its kernel said last.
fn is_looked_at(name: &str, core: &str) -> Result<()> {
    waits_for_crash(name)?;
    let ring3 = |words: &[&str]| output(Command::new(ring3()?).args(words));
    ring3(&["dump", name, core])?;
    ring3(&["stop", name]).map(drop)
}

#[test]
fn a_machine_whose_kernel_panics_stands_until_it_has_been_looked_at() -> Result<()> {
    let name = format!("crash-stop-{}", std::process::id());
    let folder = TempDir::new()?;
    let core = folder.path().join("core");
    let (looked_at, to) = (name.clone(), core.display().to_string());
    let look = thread::spawn(move || is_looked_at(&looked_at, &to));
    let finished = crashes(by_driver()?.with("--name").with(&name), "stop")?;
    look.join().map_err(|_| anyhow!("nobody looked"))??;
    finished.prints(&["driver loaded"])?;
    ensure!(finished.messages.contains(&format!("ring3 gdb {name}")), "{}", finished.messages);
    let said = b"Kernel panic - not syncing: sysrq triggered crash";
    let core = fs::read(&core)?;
    ensure!(core.windows(said.len()).any(|part| part == said), "the panic is not in the core");
    Ok(())
}
