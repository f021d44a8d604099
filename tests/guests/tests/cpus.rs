//! Guests with several virtual CPUs.

use std::{fs, os::unix::fs::PermissionsExt, process::Command};

use anyhow::{Context, Result, bail, ensure};
use guests::{Guest, counter, ring3};
use tempfile::TempDir;
use xtask::assets::Kernel;

static THREADS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/threads"));

/// Runs programs on all CPUs at once, and takes the last CPU away and gives it back.
const SCRIPT: &str = "
echo cpus $(grep -c ^processor /proc/cpuinfo)
last=/sys/devices/system/cpu/cpu$(($(grep -c ^processor /proc/cpuinfo) - 1))
work() { for n in 1 2 3; do seq 300 | sort -n | sha256sum | cut -c1-8; done; }
for n in 1 2 3 4 5 6; do work & done | sort -u
wait
echo 0 > $last/online && echo without it $(grep -c ^processor /proc/cpuinfo)
work | sort -u
echo 1 > $last/online && echo with it $(grep -c ^processor /proc/cpuinfo)
for n in 1 2 3 4; do work & done | sort -u
wait
echo done
";

fn boots_with(kernel: Kernel, engine: &str, cpus: u32) -> Result<()> {
    boots(Guest::new(kernel).with("--engine").with(engine), cpus)
}

fn boots(guest: Guest, cpus: u32) -> Result<()> {
    let guest = guest.runs(SCRIPT).with("--cpus").with(&cpus.to_string()).boots()?;
    let (all, less) = (format!("cpus {cpus}"), format!("without it {}", cpus - 1));
    guest.prints(&[
        &all,
        "1255c394",
        &less,
        "1255c394",
        &format!("with it {cpus}"),
        "1255c394",
        "done",
    ])?;
    guest.is_content()?;
    guest.powers_off()
}

#[test]
fn linux_6_1_with_two() -> Result<()> {
    boots_with(Kernel::BookwormCloud, "fast", 2)
}

#[test]
fn linux_6_12_with_four() -> Result<()> {
    boots_with(Kernel::TrixieCloud, "fast", 4)
}

#[test]
fn linux_6_12_with_two_that_translate_for_themselves() -> Result<()> {
    boots(Guest::new(Kernel::TrixieCloud).with("--translations").with("own"), 2)
}

#[test]
fn linux_6_1_with_two_interpreted() -> Result<()> {
    boots_with(Kernel::BookwormCloud, "interp", 2)
}

#[test]
fn linux_6_12_with_two_and_programs_interpreted() -> Result<()> {
    boots_with(Kernel::TrixieCloud, "jit", 2)
}

#[test]
fn linux_6_1_with_two_and_the_kernel_interpreted() -> Result<()> {
    boots_with(Kernel::BookwormCloud, "direct", 2)
}

/// `programs/threads.rs` tries what threads on several CPUs rely on.
fn threads_agree(engine: &str, cpus: u32) -> Result<()> {
    let directory = TempDir::new()?;
    let program = directory.path().join("threads");
    fs::write(&program, THREADS)?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
    let mut command = Command::new(ring3()?);
    command.args([
        "exec",
        "--engine",
        engine,
        "--cpus",
        &cpus.to_string(),
        "--timeout",
        "400",
        "--",
    ]);
    let output = command.arg(&program).current_dir(directory.path()).output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    let messages = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{:?}: {said}{messages}", output.status);
    let last = said.lines().last().context("it says nothing")?;
    ensure!(last == format!("{cpus} threads: all is well"), "{said}");
    Ok(())
}

#[test]
fn threads_agree_on_two() -> Result<()> {
    threads_agree("fast", 2)
}

#[test]
fn threads_agree_on_three() -> Result<()> {
    threads_agree("fast", 3)
}

/// More than most hosts of tests have: they take turns on those, and leave each other notes.
#[test]
fn threads_agree_where_virtual_cpus_outnumber_the_hosts() -> Result<()> {
    threads_agree("fast", 2 * host_cpus()?)
}

/// Linux learns the topology from ACPI and CPUID, and takes the TSC as its clock, where it is told to, only if all CPUs have the same.
#[test]
fn four_are_the_cores_of_one_socket() -> Result<()> {
    let looks = "lscpu -p=CPU,CORE,SOCKET,NODE | grep -v '#'
        cat /sys/devices/system/clocksource/clocksource0/current_clocksource";
    let mut command = Command::new(ring3()?);
    command.args(["exec", "--cpus", "4", "--timeout", "200", "--append", "clocksource=tsc"]);
    let output = command.args(["--", "sh", "-c", looks]).output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure!(said == "0,0,0,0\n1,1,0,0\n2,2,0,0\n3,3,0,0\ntsc\n", "{output:?}");
    Ok(())
}

/// What the kernel says of how its CPUs share the host's, and whether it has seen that they do.
const SHARING: &str = "
work() { for n in 1 2 3; do seq 300 | sort -n | sha256sum | cut -c1-8; done; }
for n in 1 2 3 4 5 6; do work & done | sort -u
wait
echo known $(dmesg | grep -c -e 'setup pv remote TLB flush' -e 'PV sched yield' -e 'PV spinlocks enabled' -e 'PV IPIs')
set -- $(grep '^cpu ' /proc/stat)
[ $9 -gt 0 ] && echo stolen
echo done
";

/// The kernel knows whom it is run by, uses what it is offered, and is told how long its CPUs have waited.
#[test]
fn linux_knows_that_its_cpus_take_turns() -> Result<()> {
    let cpus = 2 * host_cpus()?;
    let guest = Guest::new(Kernel::TrixieCloud).runs(SHARING);
    let guest = guest.with("--cpus").with(&cpus.to_string()).boots()?;
    guest.prints(&["1255c394", "known 4", "stolen", "done"])?;
    guest.powers_off()
}

fn host_cpus() -> Result<u32> {
    let cpus = std::thread::available_parallelism()?.get();
    Ok(u32::try_from(cpus)?.min(8))
}

#[test]
fn threads_agree_on_two_interpreted() -> Result<()> {
    threads_agree("interp", 2)
}

#[test]
fn threads_agree_on_two_with_a_translated_kernel() -> Result<()> {
    threads_agree("jit", 2)
}

/// Page faults on each of two vCPUs come to the kernel without the monitor. Kernel code never reads the interrupt
/// descriptor table of the second vCPU, so no access of the kernel's maps that table.
#[test]
fn page_faults_are_delivered_directly_on_each_of_two() -> Result<()> {
    for cpu in ["0", "1"] {
        let mut command = Command::new(ring3()?);
        command.args(["exec", "--engine=fast", "--cpus=2", "--stats", "--timeout=200", "--"]);
        command.args(["taskset", "-c", cpu, "sh", "-c", "for n in $(seq 50); do /bin/true; done"]);
        let output = command.output()?;
        let messages = String::from_utf8_lossy(&output.stderr);
        let fast = counter(&messages, "fast page faults")?;
        let slow = counter(&messages, "exception 14")?;
        ensure!(
            output.status.success() && fast > 2000 && slow < 1000,
            "{fast}, {slow}: {messages}"
        );
    }
    Ok(())
}

/// A script: programs on one CPU after the other ask a shared folder, and the script prints to which CPU the folder's interrupts came
/// meanwhile. At last it sends the interrupts to both CPUs itself, and prints where they go once programs on each have asked again.
/// If the agent has overwritten that at the same moment, the script writes once more.
const STEERED: &str = "
line() { grep -e '-requests[.]0' /proc/interrupts | tail -n 1; }
count() { line | awk -v field=$(($1 + 2)) '{ print $field }'; }
ask() { taskset -c $1 sh -c 'for n in $(seq 300); do stat -f . > asked; done'; }
for cpu in 1 0 1; do
    ask $cpu; before=$(count $cpu)
    ask $cpu; [ $(($(count $cpu) - before)) -ge 300 ] && echo steered to $cpu
done
file=/proc/irq/$(line | cut -d: -f1 | tr -d ' ')/smp_affinity_list
echo 0-1 > $file; sleep 0.2; [ $(cat $file) = 0-1 ] || echo 0-1 > $file
ask 0; ask 1; cat $file
";

/// Linux 6.1 has one queue for a folder, whose interrupts can be sent to another CPU.
#[test]
fn a_folders_interrupts_come_to_the_cpu_that_asks() -> Result<()> {
    let folder = TempDir::new()?;
    let mut command = Command::new(ring3()?);
    let options = ["--kernel=debian-12", "--cpus=2", "--timeout=200"];
    command.arg("exec").args(options).args(["--", "sh", "-c", STEERED]);
    let output = command.current_dir(&folder).output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    let messages = String::from_utf8_lossy(&output.stderr);
    ensure!(said == "steered to 1\nsteered to 0\nsteered to 1\n0-1\n", "{said}{messages}");
    Ok(())
}

/// A script: programs on one CPU after the other ask a shared folder, and the script prints to which CPU the interrupts of all
/// folders came meanwhile.
const ANSWERED: &str = "
count() { awk -v field=$(($1 + 2)) '/-requests/ { sum += $field } END { print sum }' /proc/interrupts; }
for cpu in 0 1 0 1; do
    own=$(count $cpu) other=$(count $((1 - cpu)))
    taskset -c $cpu sh -c 'for n in $(seq 100); do stat -f . > asked; done'
    [ $(($(count $cpu) - own)) -ge 100 ] && [ $(($(count $((1 - cpu))) - other)) -lt 50 ] && echo answered on $cpu
done
";

/// Linux 6.12 uses a folder's queue for each CPU, and lets nobody send a queue's interrupts elsewhere.
#[test]
fn a_folder_answers_the_cpu_that_asks() -> Result<()> {
    let folder = TempDir::new()?;
    let mut command = Command::new(ring3()?);
    command.args(["exec", "--kernel=debian-13", "--cpus=2", "--timeout=200"]);
    let output = command.args(["--", "sh", "-c", ANSWERED]).current_dir(&folder).output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    let messages = String::from_utf8_lossy(&output.stderr);
    ensure!(said == "answered on 0\nanswered on 1\n".repeat(2), "{said}{messages}");
    Ok(())
}

/// While a folder's server looks at its queue, the process that runs the guest waits for answers itself.
#[test]
fn requests_to_a_folder_take_no_turn_of_the_monitor() -> Result<()> {
    if std::thread::available_parallelism()?.get() == 1 {
        println!("SKIPPED: this host has one CPU");
        return Ok(());
    }
    ensure!(rung_by("monitor")? == [0; 2]);
    // The server needs a CPU of its own for that, and other tests may have both.
    let mut counts = Vec::new();
    for _ in 0..5 {
        counts.push(rung_by("wedge")?);
        if counts.last().is_some_and(|last| last.iter().all(|count| *count >= 500)) {
            return Ok(());
        }
    }
    bail!("doorbells and interrupts in each run: {counts:?}")
}

/// How many doorbells and interrupts of a folder take no turn of the monitor when a file is written 1,000 times.
fn rung_by(who: &str) -> Result<[u64; 2]> {
    let (folder, doorbells) = (TempDir::new()?, format!("--doorbells={who}"));
    let script = "for n in $(seq 1000); do echo $n > asked; done; cat asked";
    let mut command = Command::new(ring3()?);
    command.args(["exec", "--cpus=1", "--stats", "--timeout=200", &doorbells, "--"]);
    let output = command.args(["sh", "-c", script]).current_dir(&folder).output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    let counters = String::from_utf8_lossy(&output.stderr);
    ensure!(said == "1000\n", "{said}{counters}");
    Ok([counter(&counters, "fast doorbells")?, counter(&counters, "fast interrupts")?])
}

/// One CPU's translated code is compared while the other one changes memory.
#[test]
fn one_of_two_in_lock_step() -> Result<()> {
    for cpu in ["--lock-step=cpu=0", "--lock-step=cpu=1"] {
        let script = "for n in 1 2 3 4; do seq 300 | sort -n | sha256sum | cut -c1-8 & done; wait";
        let mut command = Command::new(ring3()?);
        command.args(["exec", "--cpus", "2", "--stats", "--timeout", "200", cpu, "--"]);
        let output = command.args(["sh", "-c", script]).output()?;
        let said = String::from_utf8_lossy(&output.stdout);
        let counters = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{:?}: {said}{counters}", output.status);
        ensure!(said == "1255c394\n".repeat(4), "{said}");
        ensure!(counter(&counters, "blocks compared")? > 1000, "{counters}");
    }
    Ok(())
}

/// Disk, network and folder have a queue for each CPU, all of which are used, and whose interrupts come to different CPUs.
const QUEUES: &str = "
echo disk queues $(ls /sys/block/vda/mq | wc -l)
echo network queues $(ls -d /sys/class/net/eth0/queues/rx-* | wc -l)
for cpu in 0 1; do
    taskset $((1 << cpu)) dd if=/dev/vda of=/dev/null bs=4k count=500 skip=$((cpu * 1000)) iflag=direct 2>/dev/null
done
used() { grep $1 /proc/interrupts | while read number first second rest; do [ $first != 0 -o $second != 0 ] && echo $number; done | wc -l; }
echo disk interrupts $(used virtio.-req[.])
echo CPUs $(grep virtio.-req[.] /proc/interrupts | while read number first second rest; do [ $first -gt $second ] && echo first || echo second; done | sort -u | wc -l)
ifconfig eth0 10.0.2.15 netmask 255.255.255.0 up
for cpu in 0 1; do taskset $((1 << cpu)) ping -c 3 10.0.2.2 | grep -o '3 packets received'; done
echo network interrupts $(used virtio.-output | sed 's/[1-9]/some/')
mkdir -p /work; mount -t virtiofs work /work
count() { awk -v field=$(($1 + 2)) '/virtio.-requests/ { sum += $field } END { print sum }' /proc/interrupts; }
for cpu in 0 1; do
    before=$(count $cpu)
    taskset $((1 << cpu)) sh -c 'for n in $(seq 300); do echo $n > /work/numbers; done'
    [ $(($(count $cpu) - before)) -ge 300 ] && echo folder answers on $cpu
done
echo folder interrupts $(used virtio.-requests)
";

fn has_a_queue_for_each_cpu(devices: &str) -> Result<()> {
    let directory = TempDir::new()?;
    let image = directory.path().join("disk.img");
    fs::File::create(&image)?.set_len(16 << 20)?;
    let folder = TempDir::new()?;
    let share = format!("{}:work", folder.path().display());
    let guest = Guest::new(Kernel::TrixieCloud).runs(QUEUES).has_disk(&image);
    let guest = guest.with("--share").with(&share);
    let guest = guest.with("--cpus").with("2").with("--net").with("user");
    let guest = guest.with("--devices").with(devices).boots()?;
    guest.prints(&[
        "disk queues 2",
        "network queues 2",
        "disk interrupts 2",
        "CPUs 2",
        "3 packets received",
        "3 packets received",
        "network interrupts some",
        "folder answers on 0",
        "folder answers on 1",
        "folder interrupts 2",
    ])?;
    guest.is_content()?;
    guest.powers_off()
}

#[test]
fn devices_in_processes_have_a_queue_for_each_cpu() -> Result<()> {
    has_a_queue_for_each_cpu("processes")
}

#[test]
fn devices_in_the_monitor_have_a_queue_for_each_cpu() -> Result<()> {
    has_a_queue_for_each_cpu("inline")
}
