//! One boot of one guest.

use std::{
    fs,
    io::{Read, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    str::FromStr,
    thread,
    time::SystemTime,
};

use anyhow::{Context, Result, ensure};
use tempfile::{NamedTempFile, TempDir};
use xtask::{
    assets::{Assets, Kernel},
    checks,
    initramfs::{self, File, Purpose},
};

/// A script's beginning: a guest's only network interface gets an address by DHCP, and `/router` has the gateway's.
pub const LEASE: &str = r#"
cat > /lease <<'END'
[ "$1" = bound ] || exit 0
ifconfig $interface $ip netmask $subnet
ip route add $router dev $interface; ip route add default via $router
echo $router > /router
END
chmod +x /lease
ifconfig eth0 up
udhcpc -q -f -n -i eth0 -s /lease 2>/dev/null
"#;

/// What Linux says when a CPU does not do what it should.
const COMPLAINTS: [&str; 7] = [
    "BUG:",
    "WARNING:",
    "soft lockup",
    "rcu_preempt detected",
    "rcu_sched detected",
    "failed to wake",
    "do_boot_cpu failed",
];

/// Seconds a guest may take; the reference interpreter on a busy machine needs some.
const TIMEOUT: u32 = 400;

/// A guest to boot: a kernel, and a script that is its userland.
#[derive(Debug)]
pub struct Guest {
    kernel: Kernel,
    script: String,
    dialogue: Vec<(String, String)>,
    files: Vec<File>,
    cmdline: String,
    options: Vec<String>,
}

/// A guest that ended.
#[derive(Debug)]
pub struct Finished {
    /// ring3's exit code; `None` if a signal killed it.
    pub code: Option<i32>,
    /// What the guest's serial console printed, without carriage returns.
    pub console: String,
    /// What ring3 itself said.
    pub messages: String,
    /// How much of the console there was at which time.
    arrivals: Vec<(usize, SystemTime)>,
}

impl Guest {
    /// A kernel from Debian with nothing to do but power off.
    pub fn new(kernel: Kernel) -> Self {
        let cmdline = "console=ttyS0 panic=-1".to_owned();
        let (script, dialogue, files, options) = Default::default();
        Self { kernel, script, dialogue, files, cmdline, options }
    }

    /// What its userland does before powering off.
    pub fn runs(mut self, script: &str) -> Self {
        self.script = script.to_owned();
        self
    }

    /// What is typed at its console once it has printed `prompt` (since what was typed before):
    /// like a real serial port, it does not hear what comes before it listens.
    pub fn is_typed_after(mut self, prompt: &str, input: &str) -> Self {
        self.dialogue.push((prompt.to_owned(), input.to_owned()));
        self
    }

    /// A program its userland can call.
    pub fn has_program(mut self, name: &str, content: &[u8]) -> Self {
        let (path, permissions) = (format!("bin/{name}"), 0o755);
        self.files.push(File { path, permissions, content: content.to_vec() });
        self
    }

    /// A disk it has.
    pub fn has_disk(mut self, image: &Path) -> Self {
        self.options.extend(["--disk".to_owned(), image.display().to_string()]);
        self
    }

    /// More of its kernel's command line.
    pub fn is_told(mut self, parameters: &str) -> Self {
        self.cmdline = format!("{} {parameters}", self.cmdline);
        self
    }

    /// The reference interpreter runs it, whatever this host could do.
    pub fn interpreted(self) -> Self {
        self.with("--engine").with("interp")
    }

    /// A further option of ring3.
    pub fn with(mut self, option: &str) -> Self {
        self.options.push(option.to_owned());
        self
    }

    /// Boots it and waits for its end.
    ///
    /// # Errors
    /// It cannot be fetched, packed or started. How it ends is no error.
    pub fn boots(self) -> Result<Finished> {
        let mut command = Command::new(ring3()?);
        self.boots_by(&mut command)
    }

    /// Boots it with these faults of `--fault` and waits for its end. Returns the faults' records, too.
    ///
    /// # Errors
    /// As for [`Guest::boots`]; or there are no records.
    pub fn boots_with_faults(self, faults: &str) -> Result<(Finished, String)> {
        let folder = TempDir::new()?;
        let path = |name: &str| folder.path().join(name).display().to_string();
        fs::write(path("faults.toml"), faults)?;
        let guest = self.with("--fault").with(&path("faults.toml"));
        let finished = guest.with("--fault-log").with(&path("log")).boots()?;
        Ok((finished, fs::read_to_string(path("log")).context("no records")?))
    }

    /// As [`Guest::boots`], but by another program that is given ring3 and its options.
    ///
    /// # Errors
    /// As for [`Guest::boots`].
    pub fn boots_by(self, command: &mut Command) -> Result<Finished> {
        let _initrd = self.prepares(command)?;
        converse(command, &self.dialogue)
    }

    /// Gives `command`, which is ring3 or runs it, the options that boot this guest, for callers that
    /// watch over it themselves. The file must live until the guest has started.
    ///
    /// # Errors
    /// It cannot be fetched or packed.
    pub fn prepares(&self, command: &mut Command) -> Result<NamedTempFile> {
        let BootFiles { kernel, initrd } = self.boot_files()?;
        let timeout = TIMEOUT.to_string();
        command.arg("run").arg("--kernel").arg(&kernel).arg("--initrd").arg(initrd.path());
        command.args(["--append", &self.cmdline, "--memory", "512M", "--timeout", &timeout]);
        command.args(&self.options);
        Ok(initrd)
    }

    /// What it boots from, for other programs that run machines.
    ///
    /// # Errors
    /// It cannot be fetched or packed.
    pub fn boot_files(&self) -> Result<BootFiles> {
        let assets = Assets::open()?;
        let kernel = assets.kernel(self.kernel)?;
        let purpose = Purpose::Script(&self.script);
        let (busybox, modules) = (assets.busybox_for(self.kernel)?, &kernel.modules);
        let initrd = initramfs::build_with(&busybox, modules, &self.files, purpose);
        Ok(BootFiles { initrd: temporary(&initrd)?, kernel: kernel.image })
    }
}

/// What a guest boots from.
#[derive(Debug)]
pub struct BootFiles {
    /// The kernel's image.
    pub kernel: PathBuf,
    /// Its first root file system, for as long as this lives.
    pub initrd: NamedTempFile,
}

impl Finished {
    /// The first line of the console that begins with `prefix`, without it.
    ///
    /// # Errors
    /// There is none; the error shows the end of the console.
    pub fn line(&self, prefix: &str) -> Result<&str> {
        let line = self.console.lines().find_map(|line| line.strip_prefix(prefix));
        line.with_context(|| format!("no line begins with `{prefix}`:\n{}", self.tail()))
    }

    /// When the first line that begins with `prefix` had been printed to its end.
    ///
    /// # Errors
    /// There is none; the error shows the end of the console.
    pub fn time_of(&self, prefix: &str) -> Result<SystemTime> {
        let rest = self.line(prefix)?;
        let end = rest.as_ptr().addr() + rest.len() - self.console.as_ptr().addr();
        let arrival = self.arrivals.iter().find(|(length, _)| *length >= end);
        arrival.map(|(_, time)| *time).context("the line never arrived")
    }

    /// Checks that every one of `lines` was printed, in this order.
    ///
    /// # Errors
    /// Names the first one missing, and shows the end of the console and how the machine ended.
    pub fn prints(&self, lines: &[&str]) -> Result<()> {
        let mut printed = self.console.lines();
        for line in lines {
            let found = printed.any(|printed| printed.trim_end() == *line);
            let (code, messages, tail) = (self.code, &self.messages, self.tail());
            ensure!(
                found,
                "the guest did not print `{line}`, ended with {code:?}: {messages}\n{tail}"
            );
        }
        Ok(())
    }

    /// Checks that the guest's kernel had nothing to complain about.
    ///
    /// # Errors
    /// It had; the error shows all of the console.
    pub fn is_content(&self) -> Result<()> {
        let complaint = COMPLAINTS.iter().find(|complaint| self.console.contains(**complaint));
        ensure!(complaint.is_none(), "{complaint:?} in\n{}", self.console);
        Ok(())
    }

    /// Checks that the guest switched the machine off.
    ///
    /// # Errors
    /// It ended otherwise; the error shows how.
    pub fn powers_off(&self) -> Result<()> {
        let code = self.code;
        ensure!(code == Some(0), "ended with {code:?}: {}\n{}", self.messages, self.tail());
        Ok(())
    }

    fn tail(&self) -> String {
        let lines: Vec<_> = self.console.lines().collect();
        lines[lines.len().saturating_sub(40)..].join("\n")
    }
}

/// The value of a counter of `--stats`, which is in a machine's messages under this name.
///
/// # Errors
/// There is none of this name.
pub fn counter(messages: &str, name: &str) -> Result<u64> {
    figure(messages, name)
}

/// A figure of `--stats` that need not be a count, such as the seconds of `executing`. The figure is in a machine's messages under
/// this name.
///
/// # Errors
/// There is none of this name.
pub fn figure<T: FromStr>(messages: &str, name: &str) -> Result<T> {
    let of_line = |line: &str| {
        let (found, rest) = line.trim().split_once("  ")?;
        (found == name).then(|| rest.split_whitespace().next()?.parse().ok()).flatten()
    };
    messages.lines().find_map(of_line).with_context(|| format!("no {name:?}: {messages}"))
}

/// The released program.
///
/// # Errors
/// It has not been built.
pub fn ring3() -> Result<PathBuf> {
    let program = checks::ring3();
    ensure!(
        program.exists(),
        "{} does not exist: run `cargo build --release -p ring3`, or `make test`",
        program.display()
    );
    Ok(program)
}

fn temporary(content: &[u8]) -> Result<NamedTempFile> {
    let file = NamedTempFile::new()?;
    fs::write(file.path(), content)?;
    Ok(file)
}

/// Runs the command to its end, typing what the dialogue says: inputs, each with what is printed
/// before it.
///
/// # Errors
/// It cannot be run. How it ends is no error.
pub fn converse(command: &mut Command, dialogue: &[(String, String)]) -> Result<Finished> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("cannot run {command:?}"))?;
    let mut stdin = child.stdin.take().context("no standard input")?;
    let mut stdout = child.stdout.take().context("no standard output")?;
    let mut stderr = child.stderr.take().context("no standard error")?;
    let messages = thread::spawn(move || {
        let mut text = Vec::new();
        stderr.read_to_end(&mut text).map(|_| text)
    });
    let mut console = Console::default();
    for (prompt, input) in dialogue {
        if !console.reads_past(&mut stdout, prompt)? {
            break;
        }
        // A guest that ends without reading its input is not our failure.
        let _ = stdin.write_all(input.as_bytes());
    }
    drop(stdin);
    while console.reads(&mut stdout)? {}
    let messages = messages.join().ok().context("the reader failed")??;
    let messages = String::from_utf8_lossy(&messages).replace('\r', "");
    let Console { text: console, arrivals, .. } = console;
    Ok(Finished { code: child.wait()?.code(), console, messages, arrivals })
}

/// What has been read of a console, without carriage returns.
#[derive(Default)]
struct Console {
    text: String,
    /// Where the last prompt ended.
    answered: usize,
    arrivals: Vec<(usize, SystemTime)>,
}

impl Console {
    /// Reads what there is; false at the end.
    fn reads(&mut self, from: &mut impl Read) -> Result<bool> {
        let mut bytes = [0; 4096];
        let count = from.read(&mut bytes)?;
        self.text += &String::from_utf8_lossy(&bytes[..count]).replace('\r', "");
        self.arrivals.push((self.text.len(), SystemTime::now()));
        Ok(count > 0)
    }

    /// Reads until `prompt` comes after the one before; false if the end does.
    fn reads_past(&mut self, from: &mut impl Read, prompt: &str) -> Result<bool> {
        loop {
            if let Some(at) = self.text[self.answered..].find(prompt) {
                self.answered += at + prompt.len();
                return Ok(true);
            }
            if !self.reads(from)? {
                return Ok(false);
            }
        }
    }
}
