//! Campaigns of faults with a guest of ours.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use crate::{Guest, guest::BootFiles, ring3};

/// A program for `[check]`: says how the rows of a database that are there compare with those that were acknowledged.
pub const COMPARE: &str = "#!/bin/sh
number() { tr -d '\\r' < console | sed -n \"s/^$1 \\\\([0-9]*\\\\)$/\\\\1/p\" | tail -1; }
done=$(number done) found=$(number found)
if [ -z \"$done\" ] || [ -z \"$found\" ]; then echo \"rows UNKNOWN\"; exit 1; fi
if [ \"$found\" -ge \"$done\" ]; then echo \"rows SOUND\"; else echo \"rows LOST: $found of $done\"; fi
";

/// The rest of a campaign's file: the power is cut when twenty rows of a database have been acknowledged, and [`COMPARE`] is its
/// program `compare`.
pub const CUT_AFTER_TWENTY_ROWS: &str = "[check]
command = ['./compare']
[expect]
masked = ['rows SOUND']
wrong = ['rows LOST']
[[fault]]
on = 'machine'
do = 'power-cut'
console = 'done 20'
";

/// A guest's script that writes files, mounts their file system anew and reads them. A shell's function `mounts` mounts it at `/mnt`.
pub const FILES: &str = "mounts || exit
for i in $(seq 200); do mkdir -p /mnt/$((i % 10)); echo $i > /mnt/$((i % 10))/$i; done
umount /mnt; mounts || exit
for i in $(seq 200); do [ \"$(cat /mnt/$((i % 10))/$i)\" = $i ] || echo \"file $i is WRONG\"; done
umount /mnt
echo \"files read\"
";

/// A campaign's folder, with what its file names.
pub struct Campaign {
    folder: TempDir,
    text: String,
    _boot: Vec<BootFiles>,
}

/// What a campaign came to.
pub struct Results {
    lines: Vec<String>,
    /// What it said.
    pub said: String,
    folder: PathBuf,
    _campaign: Campaign,
}

impl Campaign {
    /// A campaign with this machine; `further` is the rest of its file.
    ///
    /// # Errors
    /// The guest cannot be packed.
    pub fn new(guest: &Guest, disk: &Path, further: &str) -> Result<Self> {
        let (folder, boot) = (TempDir::new()?, guest.boot_files()?);
        let (kernel, initrd) = (boot.kernel.display(), boot.initrd.path().display());
        let text = format!(
            "timeout = 100\n{{TOP}}\n[machine]\nkernel = '{kernel}'\ninitrd = '{initrd}'\n\
             append = 'console=ttyS0 panic=-1'\nmemory = '256M'\ndisk = ['{}']\n{further}",
            disk.display()
        );
        Ok(Self { folder, text, _boot: vec![boot] })
    }

    /// Keys that stand before its tables.
    #[must_use]
    pub fn with(mut self, keys: &str) -> Self {
        self.text = self.text.replace("{TOP}", &format!("{keys}\n{{TOP}}"));
        self
    }

    /// A second machine that looks at the first one's disks.
    ///
    /// # Errors
    /// It cannot be packed.
    pub fn verified_by(mut self, guest: &Guest) -> Result<Self> {
        let boot = guest.boot_files()?;
        let initrd = boot.initrd.path().display();
        self.text = format!("{}\n[verify]\ninitrd = '{initrd}'\n", self.text);
        self._boot.push(boot);
        Ok(self)
    }

    /// A file beside the campaign's own, that may be executed.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn has(self, name: &str, content: &[u8]) -> Result<Self> {
        use std::os::unix::fs::PermissionsExt;
        let path = self.folder.path().join(name);
        fs::write(&path, content)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        Ok(self)
    }

    /// Runs it, two machines at a time.
    ///
    /// # Errors
    /// It ends otherwise than with results.
    pub fn runs(self) -> Result<Results> {
        let (file, folder) =
            (self.folder.path().join("it.toml"), self.folder.path().join("results"));
        fs::write(&file, self.text.replace("{TOP}", ""))?;
        let mut command = Command::new(ring3()?);
        command.args(["fault", "campaign", "--jobs", "2", "--output"]).arg(&folder).arg(&file);
        let output = command.output()?;
        let messages = String::from_utf8_lossy(&output.stderr);
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure!(output.status.success(), "{:?}: {messages}{said}", output.status);
        println!("{messages}{said}");
        let lines = fs::read_to_string(folder.join("iterations.jsonl"))?;
        let lines = lines.lines().map(str::to_owned).collect();
        Ok(Results { lines, said, folder, _campaign: self })
    }
}

impl Results {
    /// How many iterations there were.
    pub fn count(&self) -> usize {
        self.lines.len()
    }

    /// How many came to this.
    pub fn of(&self, verdict: &str) -> usize {
        let word = format!("\"verdict\":\"{verdict}\"");
        self.lines.iter().filter(|line| line.contains(&word)).count()
    }

    /// Whether a machine or a check of some iteration printed these words.
    pub fn say(&self, words: &str) -> bool {
        self.lines.iter().any(|line| line.contains(words))
    }

    /// The number of an iteration that came to this.
    ///
    /// # Errors
    /// None did.
    pub fn first(&self, verdict: &str) -> Result<u64> {
        let word = format!("\"verdict\":\"{verdict}\"");
        let line = self.lines.iter().find(|line| line.contains(&word));
        let line = line.with_context(|| format!("no iteration was {verdict}: {}", self.said))?;
        let number = line.strip_prefix("{\"iteration\":").and_then(|rest| rest.split_once(','));
        Ok(number.context("no number")?.0.parse()?)
    }

    /// A file of the results.
    ///
    /// # Errors
    /// It is not there.
    pub fn file(&self, name: &str) -> Result<String> {
        fs::read_to_string(self.folder.join(name)).with_context(|| name.to_owned())
    }

    /// Runs an iteration again; true if it comes to the same.
    ///
    /// # Errors
    /// It cannot be run.
    pub fn repeats(&self, iteration: u64) -> Result<bool> {
        let mut command = Command::new(ring3()?);
        command.args(["fault", "replay"]).arg(&self.folder).arg(iteration.to_string());
        let output = command.output()?;
        let said = [output.stdout, output.stderr].concat();
        println!("{}", String::from_utf8_lossy(&said));
        Ok(output.status.success())
    }
}
