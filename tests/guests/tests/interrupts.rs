//! A kernel that is told to leave ACPI, the APICs or messages alone still hears its disk and its network, by the wires
//! that firmware has routed to the 8259s.

use std::fs::File;

use anyhow::{Context, Result, ensure};
use guests::Guest;
use tempfile::TempDir;
use xtask::assets::Kernel;

/// Ends by a reset: without ACPI there is no way to switch the machine off.
const SCRIPT: &str = "
dd if=/dev/vda bs=1M 2>/dev/null | wc -c
dd if=/dev/zero of=/dev/vda bs=1M count=2 conv=fsync 2>/dev/null && echo written
ifconfig eth0 10.0.2.15 netmask 255.255.255.0 up; ping -c 2 -w 20 10.0.2.2 | grep transmitted
grep virtio /proc/interrupts | sed 's/^/interrupts:/'
echo done; reboot -f
";

fn hears_its_devices(kernel: Kernel, parameters: &str, by: &str) -> Result<()> {
    let directory = TempDir::new()?;
    let image = directory.path().join("disk.img");
    File::create(&image)?.set_len(8 << 20)?;
    let guest = Guest::new(kernel).is_told(parameters).runs(SCRIPT).has_disk(&image);
    let guest = guest.with("--net").with("user").boots()?;
    let answered = "2 packets transmitted, 2 packets received, 0% packet loss";
    guest.prints(&["8388608", "written", answered, "done"]).context(parameters.to_owned())?;
    let lines: Vec<_> =
        guest.console.lines().filter(|line| line.starts_with("interrupts:")).collect();
    let right = !lines.is_empty() && lines.iter().all(|line| line.contains(by));
    ensure!(right, "{parameters}: not by {by}: {lines:#?}");
    ensure!(guest.code == Some(4), "{parameters}: ended with {:?}", guest.code);
    Ok(())
}

#[test]
fn without_acpi_s_routes() -> Result<()> {
    hears_its_devices(Kernel::TrixieCloud, "pci=noacpi", "XT-PIC")
}

/// As above with the newest kernel. Linux 7.2, of November 2026, once waited for ever here.
#[test]
fn the_newest_kernel_without_acpi_s_routes() -> Result<()> {
    hears_its_devices(Kernel::SidCloud, "pci=noacpi", "XT-PIC")
}

#[test]
fn without_acpi_s_routes_and_messages() -> Result<()> {
    hears_its_devices(Kernel::BookwormCloud, "pci=noacpi,nomsi", "XT-PIC")
}

#[test]
fn without_acpi() -> Result<()> {
    hears_its_devices(Kernel::TrixieCloud, "acpi=off", "XT-PIC")
}

/// ACPI says then where the wires go to the 8259s.
#[test]
fn without_an_io_apic_and_messages() -> Result<()> {
    hears_its_devices(Kernel::TrixieCloud, "noapic pci=nomsi", "XT-PIC")
}

#[test]
fn without_messages() -> Result<()> {
    hears_its_devices(Kernel::BookwormCloud, "pci=nomsi", "IO-APIC")
}
