//! Faults on purpose find what is wrong with programs, and nothing where nothing is wrong.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use guests::{
    Guest, LEASE,
    campaign::{COMPARE, CUT_AFTER_TWENTY_ROWS, Campaign, FILES, Results},
    power_cut,
};
use tempfile::TempDir;
use xtask::{assets::Kernel, command::output};

static JOURNAL: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/journal"));

fn guest() -> Guest {
    Guest::new(Kernel::BookwormCloud)
}

fn empty_disk(folder: &Path, size: u64) -> Result<PathBuf> {
    let path = folder.join("disk.img");
    File::create(&path)?.set_len(size)?;
    Ok(path)
}

/// Loses the power at each write of a journalling program, one after the other.
fn journal(folder: &TempDir, how: &str, transfers: u64) -> Result<Results> {
    let results = journal_with(folder, how, transfers, "")?;
    ensure!(results.count() as u64 == transfers * 4, "{}", results.said);
    Ok(results)
}

/// The same, by a campaign with further keys.
fn journal_with(folder: &TempDir, how: &str, transfers: u64, keys: &str) -> Result<Results> {
    let disk = empty_disk(folder.path(), 1 << 20)?;
    let script = format!("dmesg -n 1\njournal /dev/vda {transfers} {how}\n");
    let guest = guest().has_program("journal", JOURNAL).runs(&script);
    let writes = transfers * 4;
    let rest = format!(
        "[check]\ncommand = ['./journal', 'check', 'disk0', 'console']\n\
         [expect]\nmasked = ['journal sound']\nwrong = ['journal LOST', 'journal BROKEN']\n\
         [[fault]]\non = 'disk0'\ndo = 'power-cut'\nop = 'write'\nrequest = {{ from = 1, to = {writes} }}\n"
    );
    Campaign::new(&guest, &disk, &rest)?.with(keys).has("journal", JOURNAL)?.runs()
}

#[test]
fn power_cuts_find_a_journal_that_commits_too_early() -> Result<()> {
    let folder = TempDir::new()?;
    let results = journal(&folder, "hasty", 3)?;
    let wrong = results.first("wrong")?;
    ensure!(results.of("wrong") + results.of("masked") == results.count(), "{}", results.said);
    ensure!(results.repeats(wrong)?, "iteration {wrong} came to something else");
    let (xml, page) = (results.file("junit.xml")?, results.file("report.html")?);
    ensure!(xml.contains(&format!("failures=\"{}\"", results.of("wrong"))), "{xml}");
    ensure!(page.contains("journal BROKEN"), "{page}");
    Ok(())
}

#[test]
fn power_cuts_find_nothing_wrong_with_one_that_flushes_first() -> Result<()> {
    let results = journal(&TempDir::new()?, "", 3)?;
    ensure!(results.of("masked") == results.count(), "{}", results.said);
    Ok(())
}

/// Six results of one kind say by Wilson's interval that its share is known to 0.2; two machines run at a time.
#[test]
fn a_campaign_ends_when_its_shares_are_known() -> Result<()> {
    let results = journal_with(&TempDir::new()?, "", 3, "precision = 0.2")?;
    ensure!(results.of("masked") == results.count(), "{}", results.said);
    ensure!((6..=7).contains(&results.count()), "{} iterations", results.count());
    Ok(())
}

const DATABASE: &str = "dmesg -n 1
mount -t ext4 $OPTIONS /dev/vda /mnt && mount -t devtmpfs dev /mnt/dev && cd /mnt || exit
mkdir -p load
database() { chroot /mnt /usr/bin/sqlite3 -batch /load/db \"$@\" 2>&1; }
";
/// Cuts the power of a database that flushes as these settings say, when it has acknowledged twenty rows.
fn database(settings: &str) -> Result<Results> {
    database_on("", settings)
}

/// The same on a file system that is mounted with these options.
fn database_on(options: &str, settings: &str) -> Result<Results> {
    let write = format!(
        "OPTIONS='{options}'\n{DATABASE}database 'create table t (i integer primary key, x blob)'\nsync\n\
         {{ echo '{settings}'\n for i in $(seq 30); do\n \
         echo \"insert into t values ($i, randomblob(2000)); select 'done $i';\"\n done; }} | database\n\
         cd /; umount /mnt/dev /mnt\n"
    );
    let look = format!("{DATABASE}echo \"found $(database 'select count(*) from t')\"\n");
    let campaign =
        Campaign::new(&guest().runs(&write), &power_cut::image()?, CUT_AFTER_TWENTY_ROWS)?;
    let campaign = campaign.with("iterations = 2").verified_by(&guest().runs(&look))?;
    campaign.has("compare", COMPARE.as_bytes())?.runs()
}

#[test]
fn a_database_that_does_not_flush_loses_rows_when_the_power_goes() -> Result<()> {
    let results = database("pragma synchronous = off;")?;
    ensure!(results.of("wrong") == results.count(), "{}", results.said);
    Ok(())
}

#[test]
fn a_database_that_flushes_its_log_keeps_them() -> Result<()> {
    let results = database("pragma journal_mode = wal; pragma synchronous = full;")?;
    ensure!(results.of("masked") == results.count(), "{}", results.said);
    Ok(())
}

/// Without a log a transaction ends when its journal is deleted; with `full` alone the last ones can come undone, as SQLite's
/// documentation says.
#[test]
fn a_database_that_flushes_its_folder_keeps_them() -> Result<()> {
    let results = database("pragma synchronous = extra;")?;
    ensure!(results.of("masked") == results.count(), "{}", results.said);
    Ok(())
}

/// The database says fsync, the file system writes, and nobody tells the disk to flush its cache. What is left may not be readable.
#[test]
#[ignore = "minutes"]
fn a_database_on_ext4_without_barriers_loses_rows() -> Result<()> {
    let results = database_on("-o barrier=0", "pragma synchronous = extra;")?;
    ensure!(results.of("wrong") == results.count(), "{}", results.said);
    Ok(())
}

/// Half of the writes go wrong, on a file system that is checked afterwards. Which of them matter depends on the order in which
/// the guest writes, so one alone might be missed.
fn file_system(fault: &str) -> Result<Results> {
    let folder = TempDir::new()?;
    let disk = empty_disk(folder.path(), 16 << 20)?;
    output(Command::new("mke2fs").args(["-q", "-t", "ext4", "-O", "^has_journal"]).arg(&disk))?;
    let rest = format!(
        "[check]\ncommand = ['e2fsck', '-fn', 'disk0']\n\
         [expect]\nmasked = ['files read']\nwrong = ['is WRONG']\n\
         detected = ['Filesystem still has errors', 'EXT4-fs error', 'cat: ']\n\
         [[fault]]\non = 'disk0'\nop = 'write'\nprobability = 0.5\ndo = '{fault}'\n"
    );
    let script = format!("dmesg -n 1\nmounts() {{ mount -t ext4 /dev/vda /mnt; }}\n{FILES}");
    Campaign::new(&guest().runs(&script), &disk, &rest)?.with("iterations = 2").runs()
}

#[test]
fn lost_and_torn_writes_damage_file_systems() -> Result<()> {
    for fault in ["lost", "torn"] {
        let results = file_system(fault)?;
        ensure!(results.say("Filesystem still has errors"), "{}", results.said);
    }
    Ok(())
}

#[test]
fn retransmission_masks_loss() -> Result<()> {
    let folder = TempDir::new()?;
    let page: String = (0..40_000).map(|n| format!("{n:07}\n")).collect();
    let (server, address) = web_server(page.clone())?;
    let script = format!(
        "dmesg -n 1\nifconfig eth0 10.0.2.15 mtu 1500 up\nroute add default gw 10.0.2.2\n\
         wget -q -O /tmp/page http://10.0.2.2:{address}/ && echo \"page $(md5sum < /tmp/page)\"\n"
    );
    let loss = "[[fault]]\non = 'net0'\ndo = 'loss'\nprobability = 0.1\n";
    let guest = guest().runs(&script).with("--net").with("user");
    let (finished, records) = guest.boots_with_faults(loss)?;
    drop(server);
    let sent = folder.path().join("page");
    fs::write(&sent, &page)?;
    let sum = output(Command::new("md5sum").arg(&sent))?;
    let sum = sum.split_whitespace().next().context("no sum")?;
    finished.prints(&[&format!("page {sum}  -")])?;
    let lost = records.lines().filter(|line| line.contains("\"effect\":\"dropped\"")).count();
    ensure!(lost > 10, "{lost} frames were lost");
    Ok(())
}

/// Serves a page at a port of this host, for as long as the thread is wanted.
fn web_server(page: String) -> Result<(std::thread::JoinHandle<()>, u16)> {
    use std::io::{Read, Write};
    let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    let port = listener.local_addr()?.port();
    let serve = move || {
        let Ok((mut visitor, _)) = listener.accept() else { return };
        let header = format!("HTTP/1.0 200 OK\r\nContent-Length: {}\r\n\r\n", page.len());
        // Whoever left early finds that the page is not there.
        let _ = visitor.read(&mut [0; 4096]);
        let _ = visitor.write_all((header + &page).as_bytes());
        let _ = visitor.read(&mut [0; 1]);
    };
    Ok((std::thread::spawn(serve), port))
}

const PARTS: &str = "dmesg -n 1
devmem 0x8000000 32 0
echo \"memory is $(devmem 0x8000000 32)\"
echo 'flip now'; sleep 0.5
echo \"memory is $(devmem 0x8000000 32)\"
uptime() { cut -d. -f1 /proc/uptime; }
before=$(uptime); echo 'step now'; sleep 0.5
[ $(($(uptime) - before)) -ge 15 ] && echo 'the clock was set ahead'
echo 'pause now'; sleep 0.1; echo 'paused'
echo 'spurious now'; sleep 0.3
dmesg | grep -c 'No irq handler for vector' | sed 's/^/spurious: /'
echo 'lose now'; sleep 0.3
dd if=/dev/vda of=/dev/null bs=4096 count=1 2>/dev/null & sleep 1
kill -0 $! && echo 'the disk does not answer'
echo 'cut now'; sleep 5; echo 'still there'
";
const PARTS_FAULTS: &str = "
[[fault]]
on = 'ram'
do = { flip = { address = 0x8000000, bit = 5 } }
console = 'flip now'
[[fault]]
on = 'clock'
do = { step = '20s' }
console = 'step now'
[[fault]]
name = 'pause'
on = 'machine'
do = { pause = '2s' }
console = 'pause now'
[[fault]]
on = 'interrupts'
do = { spurious = 0x7d }
console = 'spurious now'
times = 3
every = '20ms'
[[fault]]
on = 'interrupts'
do = 'lost'
console = 'lose now'
[[fault]]
on = 'machine'
do = 'power-cut'
console = 'cut now'
";

#[test]
fn memory_clock_cpu_and_interrupts_fail() -> Result<()> {
    let folder = TempDir::new()?;
    let disk = empty_disk(folder.path(), 1 << 20)?;
    let guest = guest().is_told("clocksource=hpet memmap=1M$0x8000000").runs(PARTS).has_disk(&disk);
    let (finished, records) = guest.boots_with_faults(PARTS_FAULTS)?;
    finished.prints(&[
        "memory is 0x00000000",
        "memory is 0x00000020",
        "the clock was set ahead",
        "paused",
        "the disk does not answer",
        "cut now",
    ])?;
    let spurious: u32 = finished.line("spurious: ")?.parse()?;
    ensure!(spurious > 0, "no spurious interrupt arrived");
    let paused = finished.time_of("paused")?.duration_since(finished.time_of("pause now")?)?;
    ensure!(paused > Duration::from_millis(1800), "paused for {paused:?}");
    ensure!(finished.code == Some(5), "ended with {:?}", finished.code);
    ensure!(!finished.console.contains("still there"), "the power did not go");
    for effect in ["[[134217728,0,32]]", "\"stepped\":20000", "\"paused\":2000", "\"spurious\":125"]
    {
        ensure!(records.contains(effect), "no {effect} in {records}");
    }
    Ok(())
}

/// A script of the guest's: says whether the network interface has a cable, and whether the gateway answers.
const LINK: &str = "carrier() { echo \"$1 $(cat /sys/class/net/eth0/carrier)\"; }
answers() { ping -c 1 -W 1 $(cat /router) > /dev/null && echo \"$1 answered\" || echo \"$1 silent\"; }
waits() { for n in $(seq 100); do [ $(cat /sys/class/net/eth0/carrier) = $1 ] && return; sleep 0.1; done; }
carrier before; answers before
echo 'pull it'; waits 0; carrier pulled; answers pulled
waits 1; carrier after; answers after
";
const LINK_DOWN: &str = "[[fault]]\non = 'net0'\ndo = { link-down = '4s' }\nconsole = 'pull it'\n";

#[test]
fn a_guest_is_told_of_a_link_that_goes_down_and_comes_back() -> Result<()> {
    for devices in ["processes", "inline"] {
        let guest = guest().runs(&format!("{LEASE}{LINK}")).with("--net").with("user");
        let guest = guest.with("--devices").with(devices);
        let (finished, records) = guest.boots_with_faults(LINK_DOWN)?;
        let pulled = ["before 1", "before answered", "pulled 0", "pulled silent", "after 1"];
        finished.prints(&pulled)?;
        finished.prints(&["after answered"])?;
        ensure!(records.contains("{\"link-down\":4000}"), "{records}");
    }
    Ok(())
}

/// Waits a while for a condition, and says what it has come to.
const OWN_CODE: &str = "dmesg -n 1
waits() { for n in $(seq 100); do eval \"$1\" && echo \"$2\" && return; sleep 0.1; done; echo \"not $2\"; }
read_disk() { dd if=/dev/vda of=/dev/null bs=4096 count=1 iflag=direct 2>/dev/null && echo \"$1 read\"; }
read_disk before; sync; read_disk behind || echo 'the disk fails'
echo 'flip now'; waits '[ \"$(cat /proc/sys/kernel/panic)\" = 128 ]' 'symbol flipped'
devmem 0x8000000 8 0
echo 'stick now'; waits '[ $(devmem 0x8000000 8) = 0x08 ]' 'bit set'
devmem 0x8000000 8 0; sleep 0.5; echo \"stuck is $(devmem 0x8000000 8)\"
sleep 1000 & echo 'strike now'; sleep 2
chroot / true; sleep 20; echo 'still there'
";
/// The last ones may crash the kernel, which then stands (`panic=0`, or 128 seconds) until the power goes.
const OWN_CODE_FAULTS: &str = "
[[fault]]
on = 'disk0'
do = 'read-error'
syscall = 'sync'
[[fault]]
on = 'ram'
do = { flip = { symbol = 'panic_timeout', bit = 7 } }
console = 'flip now'
[[fault]]
on = 'ram'
do = { stuck-bit = { address = 0x8000000, bit = 3, value = 1 } }
console = 'stick now'
[[fault]]
name = 'register'
on = 'machine'
do = { register = { name = 'r11', bit = 7 } }
reached = '__x64_sys_chroot'
[[fault]]
name = 'result'
on = 'machine'
do = { wrong-result = 'mov' }
follows = 'register'
after = '300ms'
[[fault]]
name = 'process'
on = 'ram'
do = { flip = { process = 'sleep', bits = 5 } }
follows = 'result'
[[fault]]
on = 'machine'
do = 'power-cut'
follows = 'process'
";
const VAIN: &str = "sleep 3; echo 'still there'";
const VAIN_FAULT: &str = "[[fault]]\non = 'machine'\ndo = 'stuck'\nreached = 'no_such_function'\n";

/// Boots a guest with a disk, some memory that its kernel leaves alone, and faults; what became of it, and the records.
fn faulty(script: &str, faults: &str) -> Result<(guests::Finished, String)> {
    let folder = TempDir::new()?;
    let disk = empty_disk(folder.path(), 1 << 20)?;
    let guest = guest().is_told("memmap=1M$0x8000000 panic=0").runs(script).has_disk(&disk);
    guest.boots_with_faults(faults)
}

#[test]
fn a_fault_that_waits_for_no_function_is_told_of() -> Result<()> {
    let (finished, _) = faulty(VAIN, VAIN_FAULT)?;
    ensure!(finished.messages.contains("no symbol `no_such_function`"), "{}", finished.messages);
    finished.prints(&["still there"])?;
    ensure!(finished.code == Some(0), "ended with {:?}", finished.code);
    Ok(())
}

#[test]
fn faults_strike_where_the_guests_own_code_is() -> Result<()> {
    let (finished, records) = faulty(OWN_CODE, OWN_CODE_FAULTS)?;
    let printed =
        finished.prints(&["before read", "the disk fails", "symbol flipped", "stuck is 0x08"]);
    printed.with_context(|| records.clone())?;
    ensure!(finished.code == Some(5), "ended with {:?}: {}", finished.code, finished.console);
    let of = |name: &str| records.lines().find(|line| line.contains(name)).context("no record");
    let register: serde_json::Value = serde_json::from_str(of("\"register\"")?)?;
    let number = |key: &str| register["effect"]["register"][key].as_u64().unwrap_or_default();
    ensure!(number("before") ^ number("after") == 1 << 7, "{register}");
    ensure!(of("\"result\"")?.contains("\"instruction\":\"mov "), "{records}");
    let of_process = of("\"process\"")?;
    ensure!(of_process.matches("],[").count() == 4, "five bits: {of_process}");
    Ok(())
}
