//! Requests of virtio devices as events of `ring3 trace`: as many as the guest's own drivers and programs count.

use std::{collections::BTreeMap, fs, fs::File, process::Command};

use anyhow::{Context, Result, ensure};
use guests::{Finished, Guest, LEASE, ring3};
use ring3_trace::Event;
use tempfile::TempDir;
use xtask::assets::Kernel;

/// The disk is written and read past the page cache's end, the network asked, and files made, read and removed in the folder.
const SCRIPT: &str = r#"
dd if=/dev/zero of=/dev/vda bs=64k count=30 conv=fsync 2>/dev/null
echo 3 > /proc/sys/vm/drop_caches
dd if=/dev/vda of=/dev/null bs=64k skip=100 count=50 2>/dev/null
cat > /lease <<'END'
LEASE
END
chmod +x /lease
ifconfig eth0 up
udhcpc -q -f -n -i eth0 -s /lease 2>/dev/null
ping -c 5 -i 0.2 10.0.2.2 | grep transmitted
mount -t virtiofs work /mnt
mkdir /mnt/made
i=0; while [ $i -lt 20 ]; do echo $i > /mnt/made/$i; i=$((i + 1)); done
cat /mnt/made/* | wc -l
rm /mnt/made/7 /mnt/made/8; rmdir /mnt/made 2>/dev/null || echo not empty
cat /mnt/nothing 2>/dev/null || echo nothing
umount /mnt; ifconfig eth0 down
echo sent $(cat /sys/class/net/eth0/statistics/tx_packets)
echo received $(cat /sys/class/net/eth0/statistics/rx_packets)
echo disk $(cat /sys/block/vda/stat)
"#;

/// A guest with all three, traced from its start to its end.
fn traced(devices: &str, filter: &[&str]) -> Result<(Finished, Vec<Event>)> {
    let folder = TempDir::new()?;
    let (image, work) = (folder.path().join("disk.img"), folder.path().join("work"));
    fs::create_dir(&work)?;
    File::create(&image)?.set_len(16 << 20)?;
    let told = folder.path().join("events");
    let mut command = Command::new(ring3()?);
    command.args(["trace", "-e", "virtio", "--format", "json", "-o"]).arg(&told);
    command.args(filter).arg("--");
    let share = format!("{}:work", work.display());
    let guest = Guest::new(Kernel::BookwormCloud).runs(&SCRIPT.replace("LEASE", LEASE));
    let guest = guest.has_disk(&image).with("--share").with(&share).with("--net").with("user");
    let finished = guest.with("--devices").with(devices).boots_by(&mut command)?;
    finished.prints(&["20", "not empty", "nothing"])?;
    ensure!(!finished.messages.contains("lost"), "{}", finished.messages);
    let text = fs::read_to_string(&told)?;
    let events = text.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    Ok((finished, events))
}

/// The numbers behind a word that the guest says.
fn numbers(finished: &Finished, word: &str) -> Result<Vec<u64>> {
    let line = finished.line(word)?;
    line.split_whitespace().map(|number| Ok(number.parse()?)).collect()
}

/// The number before or behind words in an event's arguments.
fn bytes(event: &Event, before: &str, behind: &str) -> Result<u64> {
    let arguments = &event.arguments;
    let found = arguments.split(before).nth(1).and_then(|rest| rest.split(behind).next());
    let number = found.and_then(|found| found.rsplit(' ').next());
    number.and_then(|number| number.parse().ok()).with_context(|| format!("{event:?}"))
}

fn counts_agree(devices: &str) -> Result<()> {
    let (finished, events) = traced(devices, &[])?;
    let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
    let (mut read, mut written) = (0, 0);
    for event in &events {
        ensure!(event.kind == "virtio" && event.took.is_some(), "{event:?}");
        *counts.entry(&event.name).or_default() += 1;
        match event.name.as_str() {
            // A status behind the data, and a header before it.
            "block:read" => read += bytes(event, "room for ", ",")? - 1,
            "block:write" => written += bytes(event, ", queue ", " bytes out")? - 16,
            _ => {}
        }
    }
    let count = |name: &str| counts.get(name).copied().unwrap_or_default();
    let of_disk = numbers(&finished, "disk ")?;
    let [reads, _, sectors_read, _, writes, _, sectors_written] = of_disk[..7] else {
        anyhow::bail!("{of_disk:?}")
    };
    // A flush is an empty write of the block layer's.
    let counted = [count("block:read"), count("block:write") + count("block:flush")];
    ensure!(counted == [reads, writes], "{counts:?} {of_disk:?}");
    ensure!([read, written] == [sectors_read, sectors_written].map(|sectors| 512 * sectors));
    ensure!(count("block:flush") == of_disk[15] && of_disk[15] > 0, "{counts:?} {of_disk:?}");
    let of_network = [numbers(&finished, "sent ")?, numbers(&finished, "received ")?].concat();
    ensure!(
        [count("net:send"), count("net:receive")] == of_network[..],
        "{counts:?} {of_network:?}"
    );
    ensure!(of_network[0] >= 7, "{of_network:?}");
    for (name, times) in [("fs:create", 20), ("fs:mkdir", 1), ("fs:unlink", 2), ("fs:rmdir", 1)] {
        ensure!(count(name) == times, "{name}: {counts:?}");
    }
    ensure!(count("fs:open") >= 20 && count("fs:release") >= 40, "{counts:?}");
    let removed = events.iter().find(|event| event.name == "fs:rmdir").context("no rmdir")?;
    ensure!(
        removed.result.as_deref().is_some_and(|said| said.contains("ENOTEMPTY")),
        "{removed:?}"
    );
    Ok(())
}

#[test]
fn requests_are_told_as_the_guest_counts_them() -> Result<()> {
    counts_agree("inline")
}

#[test]
fn requests_to_device_processes_are_told_as_the_guest_counts_them() -> Result<()> {
    counts_agree("processes")
}

#[test]
fn a_filter_chooses_requests() -> Result<()> {
    let filter =
        ["--filter", "name == \"block:write\" and out >= 4096 and ret == 1 and sector < 4096"];
    let (_, events) = traced("processes", &filter)?;
    ensure!(!events.is_empty());
    for event in &events {
        ensure!(event.name == "block:write" && bytes(event, "sector ", ",")? < 4096, "{event:?}");
        ensure!(event.result.as_deref() == Some("1, OK"), "{event:?}");
    }
    Ok(())
}
