//! Errors of the hardware as a guest's kernel is told of them: by the banks of its CPUs, as Intel's manual has them.

use anyhow::{Context, Result, ensure};
use guests::{Finished, Guest};
use xtask::assets::Kernel;

/// A guest with two CPUs and faults; and the records of these. Its kernel is to print corrected errors of memory, not to
/// collect them.
fn struck(kernel: Kernel, script: &str, faults: &str) -> Result<(Finished, String)> {
    let guest = Guest::new(kernel).is_told("ras=cec_disable").runs(script);
    guest.with("--cpus").with("2").boots_with_faults(faults)
}

/// The script waits for each error in the kernel's messages. The program that loses a page has a hundred megabytes of its own and stands
/// still. So the page that is lost is hardly ever one that init has, too; init's death would be the guest's end.
const ALL: &str = "waits() { for n in $(seq 100); do dmesg | grep -q \"$1\" && return; sleep 0.1; done; }
interrupts() { echo \"threshold interrupts $1 $(sed -n 's/ *THR: *\\([0-9]*\\).*/\\1/p' /proc/interrupts)\"; }
interrupts before
echo 'correct now'; waits 'Bank 7: '
interrupts after
mkfifo pipe; sleep 1000 < pipe & dd if=/dev/zero of=pipe bs=100M 2>/dev/null &
for n in $(seq 100); do grep -q 'VmRSS:.*1..... kB' /proc/$!/status && break; sleep 0.1; done
echo 'lose now'; waits 'recovery action'
echo 'end now'; sleep 60; echo 'still there'
";
/// The machine checks that strike both CPUs come when the serial line is quiet. In the exception Linux prints that an event was logged.
/// That print never ends if the exception has struck the other CPU while that CPU had the lock of the line.
const ALL_FAULTS: &str = "
[[fault]]
name = 'corrected'
on = 'ram'
do = { memory-error = { severity = 'corrected', address = 0x1234560 } }
console = 'correct now'
[[fault]]
name = 'lost'
on = 'ram'
do = { memory-error = { severity = 'action-optional', process = 'dd' } }
console = 'lose now'
after = '200ms'
[[fault]]
name = 'fatal'
on = 'machine'
do = { machine-check = { severity = 'fatal', bank = 2, code = 0x0400, address = 0x4321000 } }
console = 'end now'
after = '200ms'
";

fn is_told_of_errors(kernel: Kernel) -> Result<()> {
    let (finished, records) = struck(kernel, ALL, ALL_FAULTS)?;
    let (console, code) = (&finished.console, finished.code);
    let says = |words: &str| ensure_says(console, words).with_context(|| records.clone());
    finished.prints(&["threshold interrupts before 0", "threshold interrupts after 1"])?;
    // A corrected error: valid, enabled, with an address, counted once, of a memory controller's read.
    says("CPU 0: Machine Check: 0 Bank 7: 9c0000400000009f")?;
    // The address is exact to a line of a cache.
    says("ADDR 1234540 MISC 86")?;
    // An uncorrected one that nobody has used yet: the kernel gives the page up.
    says(&format!("Memory failure: {:#x}: recovery action for ", lost(&records)? >> 12))?;
    // One that cost the CPU its state, which the other CPU is told of too: the kernel's end.
    says("CPU 0: Machine Check Exception: 4 Bank 2: be00000000000400")?;
    says("ADDR 4321000")?;
    says("Kernel panic - not syncing: Fatal")?;
    ensure!(code == Some(4), "ended with {code:?}: {console}");
    let exceptions = records.matches("\"exception\":true").count();
    ensure!(exceptions == 2 && records.contains("\"exception\":false"), "{records}");
    Ok(())
}

/// Where the memory of the process was lost (GPA).
fn lost(records: &str) -> Result<u64> {
    let record = records.lines().find(|line| line.contains("\"lost\"")).context("no record")?;
    let record: serde_json::Value = serde_json::from_str(record)?;
    record["effect"]["machine-check"]["address"].as_u64().context("no address")
}

fn ensure_says(console: &str, words: &str) -> Result<()> {
    ensure!(console.contains(words), "nobody says `{words}`:\n{console}");
    Ok(())
}

#[test]
fn linux_6_12_is_told_of_errors() -> Result<()> {
    is_told_of_errors(Kernel::TrixieCloud)
}

#[test]
fn the_newest_linux_is_told_of_errors() -> Result<()> {
    is_told_of_errors(Kernel::SidCloud)
}

/// Debian 12's kernel for clouds is built without machine checks, so CR4 has them off: the CPU shuts down.
#[test]
fn a_kernel_without_machine_checks_ends_like_a_cpu() -> Result<()> {
    let faults = "[[fault]]\non = 'machine'\ndo = { machine-check = { severity = 'fatal' } }\nconsole = 'end now'";
    let script = "echo 'end now'; sleep 60; echo 'still there'";
    let (finished, _) = struck(Kernel::BookwormCloud, script, faults)?;
    ensure!(finished.code == Some(6), "ended with {:?}: {}", finished.code, finished.console);
    ensure!(!finished.console.contains("still there"), "{}", finished.console);
    Ok(())
}
