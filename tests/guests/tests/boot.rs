//! Stock Debian kernels from power-on to power-off.

use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Result, ensure};
use guests::Guest;
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

fn boots_and_works(kernel: Kernel) -> Result<()> {
    let guest = Guest::new(kernel).runs(USERLAND).boots()?;
    guest.prints(&EXPECTED)?;
    guest.powers_off()?;
    let slept: u64 = guest.line("slept ")?.parse()?;
    ensure!((2..=4).contains(&slept), "sleep 2 took {slept} s");
    let date: u64 = guest.line("date ")?.parse()?;
    let host = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    ensure!(host.abs_diff(date) <= 2, "the guest says {date}, the host {host}");
    Ok(())
}

#[test]
fn linux_6_1_cloud() -> Result<()> {
    boots_and_works(Kernel::BookwormCloud)
}

#[test]
fn linux_6_12_cloud() -> Result<()> {
    boots_and_works(Kernel::TrixieCloud)
}

#[test]
fn linux_6_12_full() -> Result<()> {
    boots_and_works(Kernel::TrixieFull)
}

#[test]
fn the_kernel_trusts_its_clocks() -> Result<()> {
    let script = "cat /sys/devices/system/clocksource/clocksource0/current_clocksource";
    let guest = Guest::new(Kernel::BookwormCloud).runs(script).boots()?;
    guest.prints(&["tsc"])?;
    ensure!(!guest.console.contains("unstable"), "a clock was found unstable");
    guest.powers_off()
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
