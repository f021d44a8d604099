//! Machines that lose their power: ring3 is killed at random moments while its guest writes, and what the guest
//! had been told to be on the disk must be there after the next boot.
//!
//! The guest writes files by rename and rows into a database, each followed by fsync, and says so on its
//! console. A round boots it on the disk of the round before, compares what it finds with what was last said,
//! and kills it. What survives is what ring3 gave to the host; what would be lost is what it kept for itself: requests
//! acknowledged too early, qcow2 tables not yet written.

use std::{
    fs,
    io::{self, BufRead, BufReader},
    iter,
    path::PathBuf,
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use fastrand::Rng;
use tempfile::{NamedTempFile, TempDir};
use xtask::{
    archive::Suite,
    assets::{Assets, Kernel, Manifest},
    bench::packages::unpack_all,
    command::output,
};

use crate::{Guest, ring3};

const SCRIPT: &str = include_str!("power_cut.sh");
/// Name in the cache of the root file system the database program runs in.
const ENTRY: &str = "power-cut-1";
const PACKAGE: &str = "sqlite3";
const IMAGE: &str = "disk.ext4";
const IMAGE_SIZE: &str = "256M";
/// Rounds are killed after at most so many acknowledged writes...
const MOST_WRITES: usize = 60;
/// ... and this much longer, to be anywhere in what comes next.
const MOST_DELAY: Duration = Duration::from_millis(60);
/// One round of so many is killed before it writes: while it boots, or recovers the disk.
const EARLY: usize = 4;
const MOST_EARLY_DELAY: Duration = Duration::from_secs(3);

/// What was acknowledged, or found: the number of the last file and of the last row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// Files.
    pub files: u64,
    /// Rows of the database.
    pub rows: u64,
}

/// A running machine, killed when forgotten. Its first root file system is a file for as long.
struct Machine {
    process: Child,
    _initrd: NamedTempFile,
}

impl Drop for Machine {
    fn drop(&mut self) {
        // One that has ended needs no killing.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A disk that outlives its machines.
pub struct PowerCut {
    directory: TempDir,
    disk: PathBuf,
    options: &'static str,
    random: Rng,
    acknowledged: Written,
}

impl PowerCut {
    /// A fresh disk, with a name in `format` and these further options of `--disk`.
    ///
    /// # Errors
    /// The database program cannot be fetched, or the disk not be made.
    pub fn new(format: &str, options: &'static str, seed: u64) -> Result<Self> {
        let directory = TempDir::new()?;
        let base = directory.path().join("base.img");
        fs::copy(image()?, &base)?;
        let disk = match format {
            "raw" => base,
            _ => {
                let disk = directory.path().join("disk").with_extension(format);
                let mut create = Command::new(ring3()?);
                output(create.args(["image", "create", "--backing"]).arg(&base).arg(&disk))?;
                disk
            }
        };
        let (random, acknowledged) = (Rng::with_seed(seed), Written::default());
        Ok(Self { directory, disk, options, random, acknowledged })
    }

    /// Boots the machine, checks what it finds, and kills it.
    ///
    /// # Errors
    /// Something acknowledged was lost.
    pub fn round(&mut self) -> Result<()> {
        let mut machine = self.start("")?;
        if self.random.usize(..EARLY) == 0 {
            thread::sleep(MOST_EARLY_DELAY.mul_f64(self.random.f64()));
            machine.process.kill()?;
        }
        let writes = self.random.usize(1..MOST_WRITES);
        let delay = MOST_DELAY.mul_f64(self.random.f64());
        let mut console = String::new();
        let mut done = 0;
        for line in lines(&mut machine)? {
            let line = line?;
            console.push_str(&line);
            console.push('\n');
            self.hears(&line).with_context(|| tail(&console))?;
            done += usize::from(line.starts_with("done"));
            if done == writes {
                thread::sleep(delay);
                machine.process.kill()?;
            }
        }
        let status = machine.process.wait()?;
        ensure!(status.code().is_none(), "it ended by itself, {status}:\n{}", tail(&console));
        Ok(())
    }

    /// Boots the machine once more, undisturbed; what it finds must be whole, and its file system sound.
    ///
    /// # Errors
    /// Something was lost, or the file system is damaged.
    pub fn finish(mut self) -> Result<Written> {
        let mut machine = self.start("touch /only-look\n")?;
        let mut found = 0;
        for line in lines(&mut machine)? {
            let line = line?;
            self.hears(&line)?;
            found += usize::from(line.starts_with("found"));
        }
        ensure!(machine.process.wait()?.success() && found == 2, "the last boot failed");
        if self.disk == self.directory.path().join("base.img") {
            output(Command::new("e2fsck").arg("-fn").arg(&self.disk))?;
        }
        Ok(self.acknowledged)
    }

    fn start(&self, before: &str) -> Result<Machine> {
        let guest = Guest::new(Kernel::BookwormCloud).runs(&format!("{before}{SCRIPT}"));
        let disk = format!("{}{}", self.disk.display(), self.options);
        let mut command = Command::new(ring3()?);
        let _initrd = guest.with("--disk").with(&disk).prepares(&mut command)?;
        let process = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
        Ok(Machine { process, _initrd })
    }

    /// Takes note of what the guest says, and compares what it found with what it said before.
    fn hears(&mut self, line: &str) -> Result<()> {
        let words: Vec<_> = line.split_whitespace().collect();
        match *words.as_slice() {
            ["done", kind, number] => *self.last(kind)? = number.parse()?,
            ["found", kind, number, "of", all] => {
                let (number, last): (u64, _) = (number.parse()?, self.last(kind)?);
                ensure!(number >= *last, "{last} was acknowledged, {number} is there");
                ensure!(number.to_string() == all, "{line}: not all are as they were written");
                *last = number;
            }
            ["integrity", result] => ensure!(result == "ok", "{line}"),
            _ => ensure!(!line.contains("EXT4-fs error"), "the file system is damaged: {line}"),
        }
        Ok(())
    }

    fn last(&mut self, kind: &str) -> Result<&mut u64> {
        match kind {
            "f" => Ok(&mut self.acknowledged.files),
            "s" => Ok(&mut self.acknowledged.rows),
            _ => bail!("the guest wrote `{kind}`, which is unknown"),
        }
    }
}

fn tail(console: &str) -> String {
    let lines: Vec<_> = console.lines().collect();
    lines[lines.len().saturating_sub(30)..].join("\n")
}

/// What the machine prints, but for a line that its end cut off.
fn lines(machine: &mut Machine) -> Result<impl Iterator<Item = io::Result<String>> + use<>> {
    let mut console = BufReader::new(machine.process.stdout.take().context("no console")?);
    Ok(iter::from_fn(move || {
        let mut line = String::new();
        let read = console.read_line(&mut line);
        read.map(|_| line.ends_with('\n').then(|| line.trim_end().to_owned())).transpose()
    }))
}

/// A file system with the database program in it.
///
/// # Errors
/// It cannot be fetched or made.
pub fn image() -> Result<PathBuf> {
    let assets = Assets::open()?;
    assets.entry(ENTRY, |fresh| {
        let root = fresh.join("root");
        fs::create_dir_all(root.join("dev"))?;
        unpack_all(&assets.archive(Suite::Bookworm)?, &[PACKAGE], &root)?;
        let mut make = Command::new("mke2fs");
        output(
            make.args(["-q", "-t", "ext4", "-d"]).arg(&root).arg(fresh.join(IMAGE)).arg(IMAGE_SIZE),
        )?;
        fs::remove_dir_all(&root)?;
        Manifest::of(PACKAGE, fresh, &[IMAGE.to_owned()])
    })?;
    Ok(assets.directory(ENTRY).join(IMAGE))
}
