//! Devices that break virtio's rules on purpose, and what Linux makes of each.

use std::fs::File;

use anyhow::{Result, ensure};
use guests::{Finished, Guest, LEASE};
use tempfile::TempDir;
use xtask::assets::Kernel;

/// Says of a disk whether it reads, fails or does not answer while it is struck, and afterwards.
const STRIKES: &str = "dmesg -n 1
reads() { dd if=/dev/$1 of=/dev/null bs=4096 count=1 iflag=direct 2>/dev/null; }
becomes() {
    for n in $(seq 50); do
        kill -0 $1 2>/dev/null || { wait $1 && echo \"$2 read\" || echo \"$2 failed\"; return; }
        sleep 0.1
    done
    echo \"$2 silent\"
}
strike() {
    echo \"strike $1\"; sleep 1
    reads $1 & becomes $! $1
    reads $1 & becomes $! \"$1 again\"
}
for disk in vda vdb vdc vdd vde; do strike $disk; done
answers() { ping -c 1 -W 2 $(cat /router) > /dev/null && echo \"$1 answered\" || echo \"$1 silent\"; }
answers before; echo 'strike net'; sleep 1; answers struck
dmesg | grep -E 'virtio_(blk|net)|I/O error, dev vdd|out of range|not a head' | sed 's/^/kernel: /'
echo finished
";
/// What happens to each disk.
const BREACHES: [&str; 5] = [
    "{ used-id = 65535 }",
    "{ used-index = 1 }",
    "{ used-length = 0 }",
    "{ status = 7 }",
    "'spurious'",
];
const FURTHER: &str = "[[fault]]
on = 'disk4'
do = 'config-change'
console = 'strike vde'
[[fault]]
on = 'net0'
do = { used-id = 4000 }
op = 'receive'
times = 1
console = 'strike net'
";

fn faults() -> String {
    let of_disk = |(number, breach): (usize, &&str)| {
        let name = ["vda", "vdb", "vdc", "vdd", "vde"][number];
        format!(
            "[[fault]]\non = 'disk{number}'\ndo = {breach}\nop = 'read'\ntimes = 1\n\
             console = 'strike {name}'\n"
        )
    };
    BREACHES.iter().enumerate().map(of_disk).chain([FURTHER.to_owned()]).collect()
}

/// Boots a guest whose devices are served so; returns what became of it, and the records.
fn struck(devices: &str) -> Result<(Finished, String)> {
    let folder = TempDir::new()?;
    let mut guest = Guest::new(Kernel::BookwormCloud).runs(&format!("{LEASE}{STRIKES}"));
    for number in 0..BREACHES.len() {
        let disk = folder.path().join(format!("disk{number}.img"));
        File::create(&disk)?.set_len(1 << 20)?;
        guest = guest.has_disk(&disk);
    }
    let guest = guest.with("--net").with("user").with("--devices").with(devices);
    guest.boots_with_faults(&faults())
}

/// A queue with a request that is none is broken for good; a length nobody asked for is not looked at; a status that means nothing is a
/// failure; an interrupt and a change for nothing do nothing.
#[test]
fn linux_tells_of_devices_that_break_the_rules() -> Result<()> {
    for devices in ["processes", "inline"] {
        let (finished, records) = struck(devices)?;
        finished.prints(&[
            "vda silent",
            "vda again failed",
            "vdb read",
            "vdb again failed",
            "vdc read",
            "vdc again read",
            "vdd failed",
            "vdd again read",
            "vde read",
            "vde again read",
            "before answered",
            "struck silent",
            "finished",
        ])?;
        finished.powers_off()?;
        for words in [
            "id 65535 out of range",
            "is not a head",
            "dev vdd",
            "[vde] new size: 2048",
            "id 4000 out",
        ] {
            let said = finished
                .console
                .lines()
                .any(|line| line.starts_with("kernel: ") && line.contains(words));
            ensure!(said, "{devices}: the kernel does not say `{words}`: {}", finished.console);
        }
        for effect in [
            ",65535]}",
            "{\"used-index\":1}",
            ",0]}",
            "{\"status\":7}",
            "\"interrupted\"",
            "\"config-change\"",
        ] {
            ensure!(records.contains(effect), "{devices}: no {effect} in {records}");
        }
    }
    Ok(())
}
