//! Stock Debian kernels from power-on to power-off.

use std::{fs, path::Path, process::Command, time::UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use guests::{Guest, counter, ring3};
use tempfile::TempDir;
use xtask::assets::Kernel;

const USERLAND: &str = include_str!("../src/userland.sh");

/// What the userland script must have printed, whatever the kernel.
const EXPECTED: [&str; 13] = [
    "child exited with 7",
    "50 processes",
    "pipe: 1048576 bytes",
    "sort: 1 2 3",
    "caught SIGUSR1",
    "killed: 143",
    "copies are equal",
    "sha256 037170e9534d3b8cceed4646a595ebced648da872baa594bb602debd51f42e3e",
    "gunzip ring3",
    "integer: 121932631112635269",
    "floating: 3.141592920354",
    "userland done",
    "init: script ended with 0",
];

fn boots_and_works(guest: Guest) -> Result<()> {
    let guest = guest.runs(USERLAND).boots()?;
    guest.prints(&EXPECTED)?;
    guest.powers_off()?;
    let slept: u64 = guest.line("slept ")?.parse()?;
    ensure!((2..=4).contains(&slept), "sleep 2 took {slept} s");
    let date: u64 = guest.line("date ")?.parse()?;
    let host = guest.time_of("date ")?.duration_since(UNIX_EPOCH)?.as_secs();
    ensure!(host.abs_diff(date) <= 2, "the guest says {date}, the host {host}");
    Ok(())
}

#[test]
fn linux_6_1_cloud() -> Result<()> {
    boots_and_works(Guest::new(Kernel::BookwormCloud))
}

#[test]
fn linux_6_1_cloud_interpreted() -> Result<()> {
    boots_and_works(Guest::new(Kernel::BookwormCloud).interpreted())
}

#[test]
fn linux_6_12_cloud() -> Result<()> {
    boots_and_works(Guest::new(Kernel::TrixieCloud))
}

#[test]
fn linux_6_12_cloud_interpreted() -> Result<()> {
    boots_and_works(Guest::new(Kernel::TrixieCloud).interpreted())
}

#[test]
fn linux_6_12_full() -> Result<()> {
    boots_and_works(Guest::new(Kernel::TrixieFull))
}

/// A 32-bit kernel and its programs are translated, whether or not programs have processes of their own, on one virtual CPU and on several.
#[test]
fn linux_6_1_for_32_bits() -> Result<()> {
    for [isolation, cpus] in [
        ["--guest-isolation=fast", "--cpus=1"],
        ["--guest-isolation=strict", "--cpus=1"],
        ["--guest-isolation=fast", "--cpus=2"],
        ["--guest-isolation=strict", "--cpus=3"],
    ] {
        let guest = Guest::new(Kernel::Bookworm32).with("--stats").with(isolation).with(cpus);
        let guest = guest.runs(USERLAND).boots()?;
        guest.prints(&EXPECTED)?;
        guest.powers_off()?;
        let [translated, interpreted] =
            ["blocks translated", "instructions"].map(|name| counter(&guest.messages, name));
        ensure!(translated? > 50_000, "little was translated:\n{}", guest.messages);
        ensure!(interpreted? < 100_000_000, "much was interpreted:\n{}", guest.messages);
    }
    Ok(())
}

/// Every block of the kernel's that runs is compared with the interpreter; a difference ends the machine.
#[test]
fn linux_6_1_cloud_in_lock_step() -> Result<()> {
    is_the_same_in_lock_step(Kernel::BookwormCloud)
}

#[test]
fn linux_6_1_for_32_bits_in_lock_step() -> Result<()> {
    is_the_same_in_lock_step(Kernel::Bookworm32)
}

fn is_the_same_in_lock_step(kernel: Kernel) -> Result<()> {
    let guest = Guest::new(kernel).with("--lock-step").with("--stats");
    let guest = guest.runs(USERLAND).boots()?;
    guest.prints(&EXPECTED)?;
    guest.powers_off()?;
    let mut counts =
        guest.messages.lines().filter_map(|line| line.trim().strip_prefix("blocks compared"));
    let count = counts.next().and_then(|columns| columns.split_whitespace().next());
    let compared: u64 = count.context("no blocks were compared")?.parse()?;
    ensure!(compared > 50_000, "only {compared} blocks were compared");
    Ok(())
}

/// The blocks of a kernel's code in a machine.
#[derive(Clone, Copy, Debug)]
struct Blocks {
    /// How often the kernel asked for a block that was not there.
    asked: u64,
    translated: u64,
    /// How many translated blocks of an earlier machine this machine has used.
    woken: u64,
}

/// The blocks of the kernel of a machine with this cache.
fn blocks_of(cache: &Path) -> Result<Blocks> {
    let mut ring3 = Command::new(ring3()?);
    ring3.env("XDG_CACHE_HOME", cache);
    let guest = Guest::new(Kernel::BookwormCloud).runs("echo ran; ls -l /").with("--stats");
    let guest = guest.with("--engine=fast").with("--cpus=1").boots_by(&mut ring3)?;
    guest.prints(&["ran"])?;
    guest.powers_off()?;
    let [asked, translated, woken] = ["misses", "blocks translated", "known blocks woken"]
        .map(|name| counter(&guest.messages, name));
    Ok(Blocks { asked: asked?, translated: translated?, woken: woken? })
}

/// The first machine with a kernel leaves the blocks of the kernel's code, translated, and the second machine translates hardly
/// any. If the file is cut off, the next machine has it written anew; if it is damaged, it is removed.
#[test]
fn a_second_machine_has_the_blocks_that_the_first_one_has_run() -> Result<()> {
    let cache = TempDir::new()?;
    let [first, second] = [(); 2].map(|()| blocks_of(cache.path()));
    let (first, second) = (first?, second?);
    let hardly_any = |blocks: Blocks| blocks.translated * 4 < first.translated;
    ensure!(first.woken == 0 && second.woken > 40_000, "{first:?}, then {second:?}");
    ensure!(hardly_any(second) && second.asked * 2 < first.asked, "{first:?}, then {second:?}");
    let mut files = fs::read_dir(cache.path().join("ring3/v2/blocks"))?;
    let file = files.next().context("no file")??.path();
    let whole = fs::read(&file)?;
    fs::write(&file, &whole[..100_000])?;
    let [third, fourth] = [(); 2].map(|()| blocks_of(cache.path()));
    let (third, fourth) = (third?, fourth?);
    ensure!(third.woken == 0 && hardly_any(fourth), "cut off: {third:?}, then {fourth:?}");
    let mut damaged = whole;
    damaged[1_000_000] ^= 1;
    fs::write(&file, damaged)?;
    let fifth = blocks_of(cache.path())?;
    ensure!(fifth.woken == 0 && !file.exists(), "damaged: {fifth:?}");
    Ok(())
}

/// Its programs, too, are translated rather than run directly.
#[test]
fn linux_6_1_cloud_with_translated_programs() -> Result<()> {
    boots_and_works(Guest::new(Kernel::BookwormCloud).with("--translate-user"))
}

/// The same, with each of their accesses looked up, as those of programs with many scattered pages are.
#[test]
fn linux_6_1_cloud_with_programs_whose_accesses_are_looked_up() -> Result<()> {
    boots_and_works(Guest::new(Kernel::BookwormCloud).with("--scattered=always"))
}

/// The host hands their system calls over in the other way.
#[test]
fn linux_6_1_cloud_with_user_dispatch() -> Result<()> {
    boots_and_works(Guest::new(Kernel::BookwormCloud).with("--system-calls=dispatch"))
}

/// Each call comes by trap, and a tracer hears of it first: the stages of a paper, which are slow and right.
#[test]
fn linux_6_1_cloud_with_calls_by_trap_and_by_ptrace() -> Result<()> {
    boots_and_works(Guest::new(Kernel::BookwormCloud).with("--system-calls=trap"))?;
    let traced = Guest::new(Kernel::BookwormCloud).with("--system-calls=ptrace");
    boots_and_works(traced.with("--sandbox=off"))?;
    let shut_in = Guest::new(Kernel::BookwormCloud).with("--system-calls=ptrace").boots()?;
    ensure!(shut_in.code == Some(2) && shut_in.messages.contains("--sandbox off"), "{shut_in:?}");
    Ok(())
}

/// Its host mappings are taken away with each flush, and made anew.
#[test]
fn linux_6_1_cloud_with_flushed_pages_unmapped() -> Result<()> {
    boots_and_works(Guest::new(Kernel::BookwormCloud).with("--flushed=unmap"))
}

/// The loader's identity that Linux shows tells by which door it came in.
#[test]
fn both_of_linux_s_doors() -> Result<()> {
    for (protocol, loader) in [("linux", "loader 255"), ("pvh", "loader 176")] {
        let guest = Guest::new(Kernel::BookwormCloud).with("--boot-protocol").with(protocol);
        let script = "echo loader $(cat /proc/sys/kernel/bootloader_type)";
        let guest = guest.runs(script).boots()?;
        guest.prints(&[loader])?;
        guest.powers_off()?;
    }
    Ok(())
}

#[test]
fn the_kernel_trusts_its_clocks() -> Result<()> {
    let script = "cat /sys/devices/system/clocksource/clocksource0/current_clocksource";
    for (choice, source) in [("exact", "kvm-clock"), ("rtc", "tsc")] {
        let guest = Guest::new(Kernel::BookwormCloud).with("--clock").with(choice);
        let guest = guest.runs(script).boots()?;
        guest.prints(&[source])?;
        ensure!(!guest.console.contains("unstable"), "a clock was found unstable");
        guest.powers_off()?;
    }
    Ok(())
}

#[test]
fn a_virtio_console_prints_and_hears() -> Result<()> {
    let script = "exec 3<> /dev/hvc0; echo speak >&3; read word <&3; echo heard $word >&3";
    let guest = Guest::new(Kernel::BookwormCloud).runs(script).with("--console").with("virtio");
    let guest = guest.is_typed_after("speak", "friend\n").boots()?;
    guest.prints(&["heard friend", "init: script ended with 0"])?;
    guest.powers_off()
}

#[test]
fn a_shell_obeys_what_is_typed() -> Result<()> {
    let shell = Guest::new(Kernel::BookwormCloud).runs("setsid cttyhack sh -i");
    let guest = shell
        .is_typed_after("# ", "echo $((6 * 7)) > /tmp/answer\n")
        .is_typed_after("# ", "cat /tmp/answer\n")
        .is_typed_after("# ", "exit\n")
        .boots()?;
    guest.prints(&["42", "init: script ended with 0"])?;
    guest.powers_off()
}
