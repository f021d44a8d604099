//! A kernel that attacks its machine (`programs/hostile_kernel`) gets what a machine would give it, on every engine, and harms nobody.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    process::{Child, Command, Stdio},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use guests::ring3;
use tempfile::TempDir;

static KERNEL: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/hostile_kernel"));

/// What the kernel leaves by: it writes 0x10 to the debug exit port.
const DONE: i32 = 0x10 << 1 | 1;
/// Engines, and whether programs are closed off by processes of their own where there are no keys.
const ENGINES: [(&str, &str); 5] =
    [("interp", "fast"), ("jit", "fast"), ("direct", "fast"), ("fast", "fast"), ("fast", "strict")];
/// MiB of guest RAM.
const MEMORY: u64 = 128;
/// KiB of memory of its own that the monitor has at the most: 64 MiB, and a sixteenth of guest RAM.
const MOST: u64 = (64 << 10) + (MEMORY << 10) / 16;
/// The monitor, and a server each for the disk, the network and the folder.
const PROCESSES: u64 = 4;
/// How often that is looked at.
const GLANCE: Duration = Duration::from_millis(20);

/// KiB of memory that a process has and no file.
fn anonymous(process: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    line.trim().strip_suffix(" kB")?.parse().ok()
}

/// Waits for the monitor's end; what it said, and the most memory it was seen to have.
fn watch(monitor: Child) -> Result<(std::process::Output, u64)> {
    let (process, over) = (monitor.id(), AtomicBool::new(false));
    thread::scope(|scope| {
        let seen = scope.spawn(|| {
            let mut most = 0;
            while !over.load(Ordering::Relaxed) {
                most = most.max(anonymous(process).unwrap_or(0));
                thread::sleep(GLANCE);
            }
            most
        });
        let output = monitor.wait_with_output();
        over.store(true, Ordering::Relaxed);
        let most = seen.join().ok().context("who watches panicked")?;
        Ok((output?, most))
    })
}

/// Runs so many attacks; what the kernel and ring3 said.
fn machine((engine, isolation): (&str, &str), seed: u64, count: u64) -> Result<(String, String)> {
    let folder = TempDir::new()?;
    let (kernel, disk) = (folder.path().join("kernel"), folder.path().join("disk.img"));
    let share = folder.path().join("share");
    fs::write(&kernel, KERNEL)?;
    File::create(&disk)?.set_len(4 << 20)?;
    fs::create_dir(&share)?;
    let mut command = Command::new(ring3()?);
    command.arg("run").arg("--kernel").arg(&kernel).arg("--disk").arg(&disk);
    command.arg("--share").arg(format!("{}:tag", share.display())).args(["--net", "user"]);
    command.args(["--append", &format!("{seed} {count}"), "--memory", &format!("{MEMORY}M")]);
    command.args(["--engine", engine, "--guest-isolation", isolation, "--timeout", "1800"]);
    command.env_remove("RING3_LOG");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let (output, most) = watch(command.spawn()?)?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let messages = String::from_utf8_lossy(&output.stderr).into_owned();
    let code = output.status.code();
    ensure!(code == Some(DONE), "{engine}, seed {seed}: {:?}: {messages}\n{said}", output.status);
    println!("{engine}, {isolation}: {most} KiB at the most");
    ensure!((1..MOST).contains(&most), "{engine}, {isolation}, seed {seed}: {most} KiB of {MOST}");
    Ok((said, messages))
}

/// Runs so many attacks; returns how many of each kind were refused.
fn attacks(engine: (&str, &str), seed: u64, count: u64) -> Result<Vec<u64>> {
    let (said, _) = machine(engine, seed, count)?;
    let last = said.lines().rev().find_map(|line| {
        line.split_once(&format!("hostile: {count} actions, faults ["))?.1.split_once(']')
    });
    let (faults, _) = last.with_context(|| format!("{engine:?}, seed {seed}: no sum: {said}"))?;
    Ok(faults.split(", ").map(str::parse).collect::<Result<_, _>>()?)
}

/// A library that serves queues logs a line for each rule of virtio that the guest's kernel breaks. Each of our processes shows twenty
/// such lines in ten seconds, and then says how many there were more.
#[test]
fn rules_that_are_broken_without_end_fill_no_terminal() -> Result<()> {
    const BROKEN: u64 = 20_000;
    let since = Instant::now();
    let (_, messages) = machine(ENGINES[3], 0, BROKEN)?;
    let complaints = messages.lines().filter(|line| line.contains("virtio queue")).count() as u64;
    let whiles = since.elapsed().as_secs() / 10 + 1;
    println!("{complaints} complaints in {:?}", since.elapsed());
    ensure!((1..=20 * PROCESSES * whiles).contains(&complaints), "{complaints}: {messages}");
    let left_out: Vec<_> = messages.lines().filter(|line| line.contains("were left out")).collect();
    ensure!(!left_out.is_empty(), "{messages}");
    Ok(())
}

/// Runs all of these, two at a time, since each leaves a CPU idle half of the time. Returns the results in their order.
fn by_two<T: Send>(all: [impl FnOnce() -> Result<T> + Send; ENGINES.len()]) -> Result<Vec<T>> {
    let (left, results) = (Mutex::new(all.into_iter().enumerate()), Mutex::new(BTreeMap::new()));
    let next = || left.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || {
        while let Some((number, one)) = next() {
            let result = one();
            results.lock().unwrap_or_else(PoisonError::into_inner).insert(number, result);
        }
    };
    thread::scope(|scope| {
        scope.spawn(work);
        work();
    });
    results.into_inner().unwrap_or_else(PoisonError::into_inner).into_values().collect()
}

/// All engines refuse the same, but for what depends on when a device has written something, when an interrupt comes, or what a TLB
/// still has of a page that is not there any more (one in two thousand: global pages that nobody has invalidated).
fn all_engines_agree(seed: u64, count: u64) -> Result<()> {
    let all = by_two(ENGINES.map(|engine| move || attacks(engine, seed, count)))?;
    let (expected, others) = all.split_first().context("no engine")?;
    for (engine, faults) in ENGINES[1..].iter().zip(others) {
        println!("{engine:?}: {faults:?}");
        let alike = |(a, b): (&u64, &u64)| a.abs_diff(*b) <= 3 + a / 100;
        let same = faults.len() == expected.len() && faults.iter().zip(expected).all(alike);
        ensure!(same, "{engine:?}: {faults:?}, the interpreter: {expected:?}");
    }
    let kinds = expected.iter().filter(|faults| **faults > count / 200).count();
    ensure!(kinds >= 4, "too little was refused: {expected:?}");
    Ok(())
}

/// Ten times twenty thousand on each of five engines.
#[test]
fn a_million_attacks() -> Result<()> {
    (1..11).try_for_each(|seed| all_engines_agree(seed, 20_000))
}

#[test]
#[ignore = "minutes"]
fn millions_of_attacks() -> Result<()> {
    (11..21).try_for_each(|seed| all_engines_agree(seed, 100_000))
}
