//! Disks that lose and tear what file systems write, bits that flip on the way and in the page cache, and file systems that notice
//! or do not.
//!
//! All of it takes minutes: `cargo test -p guests --test file_systems -- --include-ignored`.

use anyhow::{Context, Result, ensure};
use guests::{
    campaign::{Campaign, FILES, Results},
    file_systems::{BTRFS, EXT4, FileSystem, XFS},
};
use tempfile::TempDir;

static MAPPED: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/mapped"));

/// Half of the writes go wrong, on a file system that its own checker looks at afterwards.
fn with_half_of_the_writes(kind: &FileSystem, fault: &str) -> Result<Results> {
    let folder = TempDir::new()?;
    let rest = format!(
        "[check]\ncommand = ['./check']\n\
         [expect]\nmasked = ['files read']\nwrong = ['is WRONG']\n\
         detected = ['checker finds damage', 'cat: ', 'EXT4-fs error', 'mount: ']\n\
         [[fault]]\non = 'disk0'\nop = 'write'\nprobability = 0.5\ndo = '{fault}'\n"
    );
    let disk = kind.image(folder.path())?;
    let campaign = Campaign::new(&kind.guest(FILES)?, &disk, &rest)?.with("iterations = 2");
    campaign.has("check", kind.check()?.as_bytes())?.runs()
}

fn is_found(kind: &FileSystem) -> Result<()> {
    for fault in ["lost", "torn"] {
        let results = with_half_of_the_writes(kind, fault)?;
        ensure!(results.say("checker finds damage"), "{fault}: {}", results.said);
    }
    Ok(())
}

#[test]
#[ignore = "minutes"]
fn e2fsck_finds_lost_and_torn_writes() -> Result<()> {
    is_found(&EXT4)
}

#[test]
#[ignore = "minutes"]
fn xfs_repair_finds_lost_and_torn_writes() -> Result<()> {
    is_found(&XFS)
}

#[test]
#[ignore = "minutes"]
fn btrfs_check_finds_lost_and_torn_writes() -> Result<()> {
    is_found(&BTRFS)
}

/// Says of a file with which bits are flipped what comes of reading it, and whether the kernel says a word.
const FLIPS: &str = "mounts || exit
fresh() { dd if=/dev/urandom of=/mnt/file bs=1M count=32 2>/dev/null; sync; right=$(md5sum < /mnt/file); }
forget() { sync; echo 3 > /proc/sys/vm/drop_caches; }
has() { : > /tmp/said; mapped /mnt/file > /tmp/said & holder=$!; while ! grep -q mapped /tmp/said; do sleep 0.1; done; }
is_right() { [ \"$(md5sum < /mnt/file)\" = \"$right\" ]; }
waits() { for n in $(seq 150); do is_right || return; sleep 0.1; done; }
look() {
    if ! cat /mnt/file > /dev/null 2>&1; then what=refused; elif is_right; then what=right; else what=wrong; fi
    dmesg -c | grep -qE 'csum failed|EXT4-fs error|XFS.*[Cc]orrupt|I/O error' && what=\"$what and told of\"
    echo \"$1: $what\"
}
fresh; forget; dmesg -c > /dev/null
has; echo 'flip it clean'; waits; look 'in the cache'
sync; look 'after a sync'
kill $holder; forget; look 'read anew'
has; echo 'flip it before'; waits; mapped /mnt/file dirty > /dev/null
kill $holder; forget; look 'flipped and written'
fresh; has; mapped /mnt/file dirty > /dev/null; echo 'delay it'; sleep 0.2; sync
kill $holder; forget; look 'flipped while it is written'
fresh; forget; echo 'corrupt reads'; sleep 0.2; look 'flipped as it is read'
";
/// The disk's thread waits with the first request, and takes the others from memory after that. The first reads are of what says
/// where the file is, of which ext4 has checksums too.
const FLIPPED: &str = "
[[fault]]
on = 'ram'
do = { flip = { process = 'mapped', bits = 3 } }
console = 'flip it clean'
[[fault]]
on = 'ram'
do = { flip = { process = 'mapped', bits = 3 } }
console = 'flip it before'
[[fault]]
name = 'late'
on = 'disk0'
op = 'write'
do = { latency = '4s' }
console = 'delay it'
times = 1
[[fault]]
on = 'ram'
do = { flip = { process = 'mapped', bits = 3 } }
follows = 'late'
after = '2s'
[[fault]]
on = 'disk0'
op = 'read'
do = { corrupt = 1 }
console = 'corrupt reads'
request = 40
times = 200
";

/// What comes of bits that flip before and after a file system has summed a file, or without sums.
fn flips(kind: &FileSystem, late: &str) -> Result<()> {
    let folder = TempDir::new()?;
    let guest = kind.guest(FLIPS)?.has_program("mapped", MAPPED);
    let guest = guest.has_disk(&kind.image(folder.path())?);
    let (finished, records) = guest.boots_with_faults(FLIPPED)?;
    let expected = [
        "in the cache: wrong",
        "after a sync: wrong",
        "read anew: right",
        "flipped and written: wrong",
        &format!("flipped while it is written: {late}"),
        &format!("flipped as it is read: {late}"),
    ];
    finished.prints(&expected).with_context(|| format!("{}: {records}", kind.name))
}

#[test]
fn btrfs_notices_bits_that_flip_after_it_has_summed_them() -> Result<()> {
    flips(&BTRFS, "refused and told of")
}

#[test]
#[ignore = "minutes"]
fn ext4_and_xfs_notice_no_flipped_bits_of_files() -> Result<()> {
    flips(&EXT4, "wrong")?;
    flips(&XFS, "wrong")
}
