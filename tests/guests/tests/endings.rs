//! Endings of `ring3 exec`: what the command could not write, who cannot be ended, what stands still.

use std::{
    collections::HashSet,
    fs,
    io::{BufRead, BufReader, Read},
    process::{Child, ChildStdout, Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use guests::ring3;
use harness::processes::descendants;

/// Far longer than anything here takes.
const TIMEOUT: &str = "200";

/// The shell does this with ring3 in place of `EXEC`; what is said on both outputs, and how the shell ends.
fn shell(script: &str) -> Result<Output> {
    let program = ring3()?;
    let exec = format!("{} exec --memory 512M --timeout {TIMEOUT} --", program.display());
    let script = script.replace("EXEC", &exec);
    Ok(Command::new("sh").args(["-c", &script]).output()?)
}

/// The shell ends so, having said this.
fn ends(script: &str, code: i32, said: &[&str]) -> Result<()> {
    let output = shell(script)?;
    let text = [&*output.stdout, &*output.stderr].map(String::from_utf8_lossy).concat();
    ensure!(output.status.code() == Some(code), "{script}: {:?}: {text}", output.status);
    for part in said {
        ensure!(text.contains(part), "{script}: no `{part}` in: {text}");
    }
    Ok(())
}

/// As without ring3: the command is told of what it cannot write, by the error it would have had.
#[test]
fn a_command_learns_what_it_cannot_write() -> Result<()> {
    ends("EXEC id >/dev/full", 1, &["id: write error: No space left on device"])?;
    ends("EXEC id >&-", 1, &["id: write error: Bad file descriptor"])?;
    ends("EXEC id 1</dev/null", 1, &["id: write error: Bad file descriptor"])
}

#[test]
fn a_command_learns_what_it_cannot_read() -> Result<()> {
    ends("EXEC cat <&-", 1, &["Bad file descriptor"])?;
    ends("EXEC cat </", 1, &["Is a directory"])?;
    // As nohup leaves it; who does not read it does not mind.
    ends("EXEC cat 0>/dev/null", 1, &["Bad file descriptor"])?;
    ends("EXEC true 0>/dev/null", 0, &[])
}

/// Nothing has been written when its reader goes, so that the first byte finds that out.
#[test]
fn a_command_learns_that_its_reader_has_gone() -> Result<()> {
    let script = "{ EXEC sh -c 'sleep 0.5; id'; echo status $? >&2; } | true";
    ends(script, 0, &["status 141"])
}

/// Nor does ring3 itself fail for want of somebody to tell of its failure.
#[test]
fn what_cannot_be_said_is_a_status_all_the_same() -> Result<()> {
    ends("EXEC no-such-command 2>/dev/full", 127, &[])?;
    ends("EXEC no-such-command 2>&-", 127, &[])
}

#[test]
fn a_command_has_what_its_starter_left_it() -> Result<()> {
    let script = "umask 27; trap '' HUP; ulimit -Sn 300; ulimit -Ss 2048
        EXEC sh -c 'umask; grep SigIgn: /proc/self/status; ulimit -Sn; ulimit -Ss; ulimit -Hn'";
    // A test in the background has more signals ignored. SIGPIPE is std's doing, and the C library has those from 32 on.
    let status = fs::read_to_string("/proc/self/status")?;
    let own = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let own = u64::from_str_radix(own.context("no signals")?.trim(), 16)?;
    let expected = format!("SigIgn:\t{:016x}\n", own & 0x7fff_efff | 1);
    let most = Command::new("sh").args(["-c", "ulimit -Hn"]).output()?.stdout;
    // No guest's kernel knows more than a million.
    let most = String::from_utf8(most)?.trim().parse().unwrap_or(u64::MAX).min(1 << 20);
    ends(script, 0, &["0027\n", &expected, "\n300\n2048\n", &format!("\n{most}\n")])
}

/// A command under way.
struct Started {
    ring3: Child,
    /// Held, that it has a reader.
    _stdout: BufReader<ChildStdout>,
}

impl Drop for Started {
    fn drop(&mut self) {
        // One that has ended needs no killing.
        let _ = self.ring3.kill();
        let _ = self.ring3.wait();
    }
}

impl Started {
    /// Runs a script that says `ready`, and waits until it has.
    fn new(script: &str) -> Result<Self> {
        Self::within(script, TIMEOUT)
    }

    /// The same, for so many seconds.
    fn within(script: &str, timeout: &str) -> Result<Self> {
        // In a shell's background SIGINT is ignored, and what is ignored stays so.
        let mut command = Command::new("env");
        command.arg("--default-signal=INT").arg(ring3()?);
        command.args(["exec", "--memory", "512M", "--timeout", timeout, "--grace", "2", "--"]);
        command.args(["sh", "-c", script]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut ring3 = command.spawn()?;
        let mut stdout = BufReader::new(ring3.stdout.take().context("no standard output")?);
        let mut line = String::new();
        stdout.read_line(&mut line)?;
        ensure!(line == "ready\n", "it said `{line}`");
        Ok(Self { ring3, _stdout: stdout })
    }

    /// Has all its processes stopped of which `choose` says so by their command lines, and those they have begun
    /// meanwhile: a wedge that was left out would have the guest take a signal.
    fn stops(&self, choose: impl Fn(&str) -> bool) -> Result<()> {
        let mut stopped = HashSet::from([self.ring3.id()]);
        loop {
            let chosen = descendants(self.ring3.id()).into_iter().filter(|process| {
                let words = fs::read_to_string(format!("/proc/{process}/cmdline"));
                choose(&words.unwrap_or_default())
            });
            let new: Vec<u32> = chosen.filter(|process| stopped.insert(*process)).collect();
            if new.is_empty() {
                return Ok(());
            }
            new.into_iter().try_for_each(|process| kill("STOP", process))?;
        }
    }

    /// Waits for its end; how it ended, what it said about that, and how long after `since`.
    fn ends(mut self, since: Instant) -> Result<(Option<i32>, String, Duration)> {
        let code = self.ring3.wait()?.code();
        let (time, mut said) = (since.elapsed(), String::new());
        self.ring3.stderr.take().context("no standard error")?.read_to_string(&mut said)?;
        Ok((code, said, time))
    }
}

fn kill(signal: &str, process: u32) -> Result<()> {
    let sent = Command::new("kill").args([&format!("-{signal}"), &process.to_string()]).status()?;
    ensure!(sent.success(), "SIG{signal} for {process}");
    Ok(())
}

/// The grace time.
const GRACE: Duration = Duration::from_secs(2);
/// How long an end may take where the host has nothing else to do.
const PROMISED: Duration = Duration::from_secs(2);
/// How long an end may take where the host is busy.
const LONGEST: Duration = Duration::from_secs(8);

/// Checks that an end, which begins after `waits`, is on time in one of three tries, since a busy host makes some late, and that none
/// is later than [`LONGEST`].
fn ends_in(waits: Duration, end: impl Fn() -> Result<Duration>) -> Result<()> {
    let mut took = Vec::new();
    for _ in 0..3 {
        let time = end()?;
        ensure!(time >= waits && time < waits + LONGEST, "after {time:?}");
        if time < waits + PROMISED {
            return Ok(());
        }
        took.push(time);
    }
    bail!("after {took:?}")
}

#[test]
fn a_command_that_will_not_end_is_ended() -> Result<()> {
    ends_in(GRACE, || {
        let started = Started::new("trap '' TERM; echo ready; while :; do sleep 1; done")?;
        let since = Instant::now();
        kill("TERM", started.ring3.id())?;
        let (code, said, time) = started.ends(since)?;
        ensure!(code == Some(143), "{code:?}: {said}");
        ensure!(said.contains("signal 15: the command was still running after 2 s"), "{said}");
        Ok(time)
    })
}

/// Its wedges run guest code, so nothing in the guest hears the signal.
#[test]
fn a_machine_whose_wedges_stand_still_is_ended() -> Result<()> {
    ends_in(GRACE, || {
        let started = Started::new("echo ready; while :; do :; done")?;
        started.stops(|words| !words.contains("device"))?;
        let since = Instant::now();
        kill("INT", started.ring3.id())?;
        let (code, said, time) = started.ends(since)?;
        ensure!(code == Some(130), "{code:?}: {said}");
        ensure!(said.contains("signal 2: the guest had not taken it"), "{said}");
        Ok(time)
    })
}

/// Waits, reading files of the host's without end, until no answer comes any more.
fn waits_for_its_files(timeout: &str) -> Result<Started> {
    let script = "echo ready; while :; do cat /usr/bin/* >/dev/null 2>&1; done";
    let started = Started::within(script, timeout)?;
    started.stops(|words| words.contains("device"))?;
    thread::sleep(Duration::from_millis(500));
    Ok(started)
}

#[test]
fn a_machine_whose_servers_stand_still_is_ended() -> Result<()> {
    ends_in(GRACE, || {
        let started = waits_for_its_files(TIMEOUT)?;
        let since = Instant::now();
        kill("TERM", started.ring3.id())?;
        let (code, said, time) = started.ends(since)?;
        ensure!(code == Some(143), "{code:?}: {said}");
        Ok(time)
    })
}

/// The time is over, whatever the machine waits for.
#[test]
fn a_timeout_is_one_whatever_servers_do() -> Result<()> {
    const SECONDS: u64 = 15;
    ends_in(Duration::from_secs(SECONDS), || {
        let since = Instant::now();
        let (code, said, time) = waits_for_its_files(&SECONDS.to_string())?.ends(since)?;
        ensure!(code == Some(124), "{code:?}: {said}");
        Ok(time)
    })
}

/// Stops a command's machine, as a user would; how long its end took.
fn stopped(started: Started) -> Result<Duration> {
    let since = Instant::now();
    let id = started.ring3.id().to_string();
    ensure!(Command::new(ring3()?).args(["stop", &id]).status()?.success());
    let (code, said, time) = started.ends(since)?;
    ensure!(code == Some(137), "{code:?}: {said}");
    Ok(time)
}

/// `ring3 ps` and the others know it, and a stop is one whatever its servers do.
#[test]
fn a_command_is_a_machine_that_can_be_stopped() -> Result<()> {
    ends_in(Duration::ZERO, || {
        let started = waits_for_its_files(TIMEOUT)?;
        let id = started.ring3.id().to_string();
        let ring3 =
            |arguments: &[&str]| Command::new(ring3()?).args(arguments).output().context("ring3");
        let listed = String::from_utf8_lossy(&ring3(&["ps"])?.stdout).into_owned();
        ensure!(listed.lines().any(|line| line.starts_with(&id)), "{listed}");
        let used = ring3(&["stats", &id])?;
        ensure!(String::from_utf8_lossy(&used.stdout).contains("CPU time"), "{used:?}");
        stopped(started)
    })
}

/// A trace tells the rest when its machine has ended; who has stopped the machine does not wait for one that nobody reads.
#[test]
fn a_trace_that_nobody_reads_holds_up_no_stop() -> Result<()> {
    ends_in(Duration::ZERO, || {
        let started = Started::new("echo ready; while :; do cat /proc/self/maps >/dev/null; done")?;
        let id = started.ring3.id().to_string();
        let mut trace = Command::new(ring3()?)
            .args(["trace", &id, "-e", "syscall"])
            .stdout(Stdio::piped())
            .spawn()?;
        // What nobody takes from the pipe fills it, and then all before it.
        thread::sleep(Duration::from_secs(2));
        let time = stopped(started);
        trace.kill()?;
        trace.wait()?;
        time
    })
}

/// What it has written waits for a reader that does not read.
#[test]
fn a_signal_ends_the_wait_for_a_reader() -> Result<()> {
    ends_in(Duration::ZERO, || {
        let started = Started::new("echo ready; head -c 100000 /dev/zero; kill -9 $$")?;
        thread::sleep(Duration::from_secs(1));
        let since = Instant::now();
        kill("TERM", started.ring3.id())?;
        let (code, said, time) = started.ends(since)?;
        ensure!(code == Some(143), "{code:?}: {said}");
        Ok(time)
    })
}
