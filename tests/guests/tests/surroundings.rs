//! `ring3 exec` in surroundings that are short of something, and what a command finds around it.

use std::{
    fs,
    io::{BufRead, BufReader, Read},
    os::unix::fs::{MetadataExt, PermissionsExt, chown},
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use anyhow::{Context, Result, ensure};
use guests::{compile, hand_over, ring3};
use harness::processes::descendants;
use tempfile::TempDir;

const TIMEOUT: &str = "200";
/// Nobody's user.
const NOBODY: u32 = 65_534;

/// What an ordinary user may see of this program and of its cache.
struct Place(TempDir);

impl Place {
    fn new() -> Result<Self> {
        let place = Self(TempDir::new()?);
        hand_over(place.0.path())?;
        fs::create_dir(place.inside("work"))?;
        // Where this test is an ordinary user's, that one it stays.
        let _ = chown(place.inside("work"), Some(NOBODY), Some(NOBODY));
        fs::set_permissions(place.0.path(), fs::Permissions::from_mode(0o755))?;
        Ok(place)
    }

    fn inside(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// The shell does this as an ordinary user, with ring3 in place of `EXEC`.
    fn runs(&self, script: &str) -> Result<Output> {
        let program = self.inside("ring3");
        let exec = format!("{} exec --memory 256M --timeout {TIMEOUT} --", program.display());
        let mut command = if fs::metadata(self.0.path())?.uid() == 0 {
            let mut setpriv = Command::new("setpriv");
            setpriv.args(["--no-new-privs", "--clear-groups"]);
            setpriv.args([format!("--reuid={NOBODY}"), format!("--regid={NOBODY}")]).arg("bash");
            setpriv
        } else {
            Command::new("bash")
        };
        command.args(["-c", &script.replace("EXEC", &exec)]).current_dir(self.inside("work"));
        command.env("XDG_CACHE_HOME", self.inside("cache")).env_remove("XDG_RUNTIME_DIR");
        Ok(command.stdin(Stdio::null()).output()?)
    }
}

/// What a limit does: it works, or there is one line with these words, and nothing else on standard error.
enum Then {
    Works,
    Says(&'static [&'static str]),
    /// Which of the two depends on the host.
    Either(&'static [&'static str]),
}

const LIMITS: &[(&str, Then)] = &[
    ("ulimit -u 1", Then::Says(&["(os error 11)", "ulimit -u"])),
    ("ulimit -u 3", Then::Says(&["(os error 11)", "ulimit -u"])),
    ("ulimit -u 5", Then::Says(&["(os error 11)", "ulimit -u"])),
    ("ulimit -u 8", Then::Says(&["(os error 11)", "ulimit -u"])),
    ("ulimit -u 11", Then::Says(&["(os error 11)", "ulimit -u"])),
    ("ulimit -u 14", Then::Either(&["(os error 11)", "ulimit -u"])),
    ("ulimit -n 20", Then::Says(&["open files are limited to 20 (ulimit -n)"])),
    ("ulimit -n 60", Then::Says(&["open files are limited to 60 (ulimit -n)"])),
    ("ulimit -Sn 20", Then::Works),
    ("ulimit -n 128", Then::Works),
    ("ulimit -f 1000", Then::Says(&["files are limited to", "(ulimit -f)", "256 MiB"])),
    ("ulimit -Sf 1000", Then::Works),
    ("ulimit -v 500000", Then::Says(&["addresses are limited to 500000 KiB (ulimit -v)"])),
    ("ulimit -v 1100000", Then::Either(&["(ulimit -v)"])),
    ("ulimit -m 1000", Then::Works),
    ("ulimit -l 0", Then::Works),
    ("ulimit -s 128", Then::Says(&["stacks are limited to 128 KiB (ulimit -s)"])),
    ("ulimit -Ss 128", Then::Works),
    ("ulimit -s 1024", Then::Works),
    ("ulimit -s unlimited", Then::Works),
    ("ulimit -c 0", Then::Works),
    ("export HOME=/nonexistent TMPDIR=/nonexistent XDG_RUNTIME_DIR=/nonexistent", Then::Works),
    ("export HOME=/nonexistent; unset XDG_CACHE_HOME", Then::Says(&["/nonexistent/.cache"])),
];

/// Each limit of a process that a machine may meet, for an ordinary user.
#[test]
fn every_limit_works_or_is_told_of() -> Result<()> {
    let place = Place::new()?;
    for (limit, then) in LIMITS {
        let output = place.runs(&format!("{limit}; exec EXEC echo ran"))?;
        let said = String::from_utf8_lossy(&output.stderr);
        let works = output.status.success() && output.stdout == b"ran\n" && said.is_empty();
        let refuses = |words: &[&str]| {
            let line = said.strip_prefix("ring3: ").unwrap_or_default();
            // What keeps ring3 from reading its command line has no code of exec's.
            matches!(output.status.code(), Some(1 | 125))
                && line.lines().count() == 1
                && words.iter().all(|word| line.contains(word))
        };
        let right = match then {
            Then::Works => works,
            Then::Says(words) => refuses(words),
            Then::Either(words) => works || refuses(words),
        };
        ensure!(right, "{limit}: {:?}: {said}", output.status);
    }
    Ok(())
}

#[test]
fn cpu_time_that_is_used_up_is_told_of() -> Result<()> {
    let output = Place::new()?.runs("ulimit -t 3; exec EXEC sh -c 'while :; do :; done'")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(said.lines().count() == 1 && said.contains("ulimit -t"), "{:?}: {said}", output.status);
    ensure!(matches!(output.status.code(), Some(125 | 152)), "{:?}", output.status);
    Ok(())
}

#[test]
fn a_host_without_proc_is_told_of() -> Result<()> {
    let mut command = Command::new("unshare");
    let script = "mount -t tmpfs none /proc && exec \"$0\" exec -- true";
    command.args(["--map-root-user", "--mount", "sh", "-c", script]).arg(ring3()?);
    let output = command.stdin(Stdio::null()).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.code() == Some(125), "{:?}: {said}", output.status);
    ensure!(said.starts_with("ring3: /proc is not mounted"), "{said}");
    Ok(())
}

/// What is done to the host's folders, in name spaces of the test's own, before a machine is started there.
const FOLDERS: &[(&str, &str)] = &[
    ("a read-only /dev/shm", "mount -t tmpfs -o ro none /dev/shm"),
    (
        "no /dev/shm",
        "old=/mnt; mount --rbind /dev $old && mount -t tmpfs none /dev && cd /dev && \
         for node in null zero full random urandom tty; do : > $node; mount --bind $old/$node $node || exit 9; done && cd /",
    ),
    ("an empty, read-only /run", "mount -t tmpfs -o ro none /run && unset XDG_RUNTIME_DIR"),
    ("a read-only /tmp", "mount -t tmpfs -o ro none /tmp && unset TMPDIR XDG_RUNTIME_DIR"),
    (
        "a read-only HOME",
        "export XDG_CACHE_HOME=${XDG_CACHE_HOME:-$HOME/.cache} && mount -t tmpfs -o ro none /mnt && export HOME=/mnt",
    ),
    ("no TMPDIR", "export TMPDIR=/nonexistent"),
];

/// Folders that most hosts have, and not all.
#[test]
fn folders_that_are_not_there_are_not_needed() -> Result<()> {
    for (what, action) in FOLDERS {
        let script = format!("{action} && exec \"$0\" exec --memory 256M -- echo ran");
        let mut command = Command::new("unshare");
        command.args(["--map-root-user", "--mount", "sh", "-c", &script]).arg(ring3()?);
        let output = command.current_dir("/").stdin(Stdio::null()).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(
            output.stdout == b"ran\n" && said.is_empty(),
            "{what}: {:?}: {said}",
            output.status
        );
    }
    Ok(())
}

/// A cgroup with a limit, which is gone with this; where the host lets us make one.
struct Group(PathBuf);

impl Group {
    fn new(controller: &str) -> Option<Self> {
        let root = Path::new("/sys/fs/cgroup");
        let own = root.join(controller);
        let parent = if own.is_dir() { own } else { root.to_owned() };
        let group = parent.join(format!("ring3-test-{}", std::process::id()));
        fs::create_dir(&group).ok()?;
        let group = Self(group);
        let file = if controller == "pids" { "pids.max" } else { "memory.max" };
        let has = group.0.join(file).exists() || group.0.join("memory.limit_in_bytes").exists();
        has.then_some(group)
    }

    /// Runs `echo ran` in a machine in it.
    fn runs(&self, limit: &str) -> Result<Output> {
        let files = ["pids.max", "memory.max", "memory.limit_in_bytes"];
        let file = files.iter().map(|file| self.0.join(file)).find(|file| file.exists());
        fs::write(file.context("no limit")?, limit)?;
        let procs = self.0.join("cgroup.procs");
        let script =
            format!("echo $$ > {} && exec \"$0\" exec --memory 256M -- echo ran", procs.display());
        let mut command = Command::new("sh");
        command.args(["-c", &script]).arg(ring3()?).current_dir("/");
        Ok(command.stdin(Stdio::null()).output()?)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // What ran in it has ended.
        let _ = fs::remove_dir(&self.0);
    }
}

/// As containers set them.
#[test]
fn limits_of_cgroups_are_told_of() -> Result<()> {
    let (Some(processes), Some(memory)) = (Group::new("pids"), Group::new("memory")) else {
        eprintln!("SKIPPED: this user can make no cgroups with limits; run the test as root");
        return Ok(());
    };
    for limit in ["4", "6", "9", "13", "17", "25"] {
        let output = processes.runs(limit)?;
        let said = String::from_utf8_lossy(&output.stderr);
        let told = said.lines().count() == 1 && said.contains(&format!("{limit} (pids.max)"));
        let ran = output.stdout == b"ran\n" && said.is_empty();
        ensure!(
            ran || told && !said.contains("bug"),
            "{limit} processes: {:?}: {said}",
            output.status
        );
    }
    for (limit, runs) in [("64M", false), ("200M", true), ("900M", true)] {
        let output = memory.runs(limit)?;
        let said = String::from_utf8_lossy(&output.stderr);
        let warned = said.starts_with("ring3: memory is limited to") && said.contains("--memory");
        ensure!(warned == (limit != "900M"), "{limit}: {said}");
        ensure!((output.stdout == b"ran\n") == runs, "{limit}: {:?}: {said}", output.status);
    }
    Ok(())
}

/// `ring3 exec` with these options, on a host whose seccomp knows no filters; devices in processes of their own would have none either.
fn without_filters(options: &[&str]) -> Result<Output> {
    let mut command = Command::new("strace");
    command.args(["--quiet=all", "--follow-forks", "--output=/dev/null", "--trace=seccomp"]);
    command.arg("--inject=seccomp:error=EINVAL").arg(ring3()?);
    command.args(["exec", "--devices", "inline", "--memory", "256M", "--timeout", "3"]);
    Ok(command.args(options).args(["--", "true"]).stdin(Stdio::null()).output()?)
}

#[test]
fn a_fallback_to_the_interpreter_is_told_of() -> Result<()> {
    let output = without_filters(&[])?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(said.starts_with("ring3: guest code is interpreted"), "{:?}: {said}", output.status);
    Ok(())
}

#[test]
fn strict_isolation_that_cannot_be_had_is_refused() -> Result<()> {
    let output = without_filters(&["--guest-isolation", "strict"])?;
    let said = String::from_utf8_lossy(&output.stderr);
    let refused = said
        .starts_with("ring3: --guest-isolation strict: this host has no seccomp's notifications");
    // Keys, where there are any, do without.
    let keys = fs::read_to_string("/proc/cpuinfo")?.contains(" ospke");
    ensure!(keys || refused && !output.status.success(), "{:?}: {said}", output.status);
    Ok(())
}

/// A filter of the host's answers before any of ours: with EPERM where it does not know a call.
#[test]
fn a_container_s_filter_is_no_obstacle() -> Result<()> {
    let directory = TempDir::new()?;
    let container = compile(directory.path(), "container", include_str!("container.c"), STATIC)?;
    for isolation in ["fast", "strict"] {
        let mut command = Command::new(&container);
        command.arg(ring3()?).args(["exec", "--engine", "fast", "--guest-isolation", isolation]);
        command.args(["--memory", "256M", "--timeout", TIMEOUT, "--", "echo", "ran"]);
        let output = command.stdin(Stdio::null()).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        let ran = output.status.success() && output.stdout == b"ran\n" && said.is_empty();
        ensure!(ran, "{isolation}: {:?}: {said}", output.status);
    }
    Ok(())
}

/// Kills those processes of a machine that `choose` says of by their command lines; what is said at its end.
fn killed(script: &str, choose: impl Fn(&str) -> bool) -> Result<(Option<i32>, String)> {
    let mut command = Command::new(ring3()?);
    command.args(["exec", "--memory", "256M", "--timeout", TIMEOUT, "--", "sh", "-c", script]);
    let directory = TempDir::new()?;
    command.current_dir(directory.path()).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.stderr(Stdio::piped()).spawn()?;
    let mut stdout = BufReader::new(child.stdout.take().context("no standard output")?);
    let mut line = String::new();
    stdout.read_line(&mut line)?;
    ensure!(line == "ready\n", "{line}");
    for process in descendants(child.id()) {
        let words = fs::read_to_string(format!("/proc/{process}/cmdline")).unwrap_or_default();
        if process != child.id() && choose(&words) {
            // One may have ended with another.
            Command::new("kill").args(["-KILL", &process.to_string()]).status()?;
        }
    }
    let mut said = String::new();
    child.stderr.take().context("no standard error")?.read_to_string(&mut said)?;
    Ok((child.wait()?.code(), said))
}

/// As by the host's kernel when memory is short. Wedges have no command line: they unmapped the page that it was on.
#[test]
fn a_wedge_that_was_killed_is_told_of() -> Result<()> {
    let (code, said) = killed("echo ready; while :; do :; done", str::is_empty)?;
    ensure!(code == Some(125), "{code:?}: {said}");
    ensure!(said.contains("was killed by signal 9") && said.contains("--memory"), "{said}");
    ensure!(said.lines().count() == 1, "{said}");
    Ok(())
}

#[test]
fn a_folder_whose_process_was_killed_is_told_of() -> Result<()> {
    let script = "echo ready; while :; do :; done";
    let (code, said) = killed(script, |words| words.contains("ring3-root"))?;
    ensure!(code == Some(125), "{code:?}: {said}");
    ensure!(said.contains("was killed by signal 9") && said.lines().count() == 1, "{said}");
    Ok(())
}

/// What a script says in a guest, in a folder.
fn said_in(directory: &Path, script: &str) -> Result<String> {
    let mut command = Command::new(ring3()?);
    command.args(["exec", "--memory", "512M", "--timeout", TIMEOUT, "--", "sh", "-c", script]);
    let output = command.current_dir(directory).stdin(Stdio::null()).output()?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{:?}: {errors}", output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
fn loopback_is_there() -> Result<()> {
    let script = "cat /sys/class/net/lo/flags /proc/net/if_inet6; \
                  grep -A1 '127.0.0.1' /proc/net/fib_trie | head -2";
    let said = said_in(Path::new("/tmp"), script)?;
    ensure!(said.starts_with("0x9\n"), "it is not up: {said}");
    ensure!(said.contains("00000000000000000000000000000001 01 80 10 80"), "no ::1: {said}");
    ensure!(said.contains("127.0.0.1") && said.contains("host LOCAL"), "no 127.0.0.1: {said}");
    Ok(())
}

/// A folder's entries have the numbers that the files have by themselves.
#[test]
fn inode_numbers_are_the_same_by_either_way() -> Result<()> {
    let directory = TempDir::new()?;
    compile(directory.path(), "numbers", include_str!("numbers.c"), "")?;
    let script = "mkdir -p here/there /tmp/here/there; echo x > /etc/made-here 2>/dev/null; \
                  ./numbers / /usr /usr/bin /etc /tmp /tmp/here . here";
    let said = said_in(directory.path(), script)?;
    ensure!(said.ends_with(" entries, 0 differ\n"), "{said}");
    Ok(())
}

/// How a program is made that needs no libraries.
const STATIC: &str = "-O1 -static";

/// As `ring3 exec ... &` in a shell that people type at: it runs on, where it would be stopped for changing the terminal.
#[test]
fn a_job_in_the_background_runs_on() -> Result<()> {
    let program = ring3()?;
    let job = format!("{} exec --memory 256M -- sh -c 'echo in; exit 7'", program.display());
    let shell = format!("bash -ic \"{job} & wait \\$!; echo status \\$?\"");
    let mut script = Command::new("timeout");
    script.args(["100", "script", "--quiet", "--return", "--command", &shell, "/dev/null"]);
    let output = script.stdin(Stdio::null()).output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure!(said.contains("status 7"), "{said}");
    Ok(())
}
