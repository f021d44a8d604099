//! A monitor that was taken over: a debugger has the process of a machine that runs make calls of our choice.

use std::{
    fs,
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use guests::ring3;
use nix::{
    errno::Errno,
    libc::{self, c_long},
    sys::{
        ptrace,
        wait::{WaitStatus, waitpid},
    },
    unistd::Pid,
};

/// Of root's capabilities: to say on which CPU another runs.
const SYS_NICE: u64 = 1 << 23;
const PATH: &[u8; 16] = b"/etc/passwd\0\0\0\0\0";
/// A name without a file, for a socket.
const SOCKET: [u8; 16] =
    [1, 0, 0, b'r', b'i', b'n', b'g', b'3', b'-', b'n', b'o', b'b', b'o', b'd', b'y', 0];

/// A machine with a program that waits.
struct Machine(Child);

impl Machine {
    fn new(options: &[&str]) -> Result<Self> {
        let mut command = Command::new(ring3()?);
        command.args(["exec", "--memory", "256M", "--timeout", "200"]).args(options);
        command.args(["--", "sh", "-c", "echo ready; while :; do sleep 1; done"]);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut machine = Self(command.spawn()?);
        let mut line = String::new();
        let stdout = machine.0.stdout.take().context("no standard output")?;
        BufReader::new(stdout).read_line(&mut line)?;
        ensure!(line == "ready\n", "it said `{line}`");
        Ok(machine)
    }

    /// What the host says of each of its threads: the thread's name, and the value of a line.
    fn of_threads(&self, line: &str) -> Result<Vec<(String, u64)>> {
        let mut found = Vec::new();
        for thread in fs::read_dir(format!("/proc/{}/task", self.0.id()))?.flatten() {
            let status = match fs::read_to_string(thread.path().join("status")) {
                Err(_) if !thread.path().exists() => continue, // it has ended meanwhile
                status => status?,
            };
            let value = |name: &str| {
                status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
            };
            let word = value(line).context(line.to_owned())?.trim();
            let name = value("Name").context("a name")?.trim().to_owned();
            found.push((name, u64::from_str_radix(word, 16)?));
        }
        Ok(found)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // One that has ended needs no killing.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The main thread of a machine, which does what we want until this is dropped.
struct Prisoner {
    thread: Pid,
    before: libc::user_regs_struct,
    /// 32 bytes of its stack that nobody uses.
    room: u64,
}

impl Prisoner {
    fn of(machine: &Machine) -> Result<Self> {
        let thread = Pid::from_raw(machine.0.id().cast_signed());
        ptrace::attach(thread)?;
        stopped(thread)?;
        let before = ptrace::getregs(thread)?;
        let call = ptrace::read(thread, (before.rip - 2) as _)?.to_le_bytes();
        ensure!(call[..2] == [0x0f, 0x05], "its main thread does not wait in a call: {call:x?}");
        Ok(Self { thread, before, room: before.rsp - 1024 })
    }

    fn put(&self, at: u64, bytes: &[u8; 16]) -> Result<()> {
        for (n, word) in bytes.as_chunks::<8>().0.iter().enumerate() {
            ptrace::write(
                self.thread,
                (self.room + at + 8 * n as u64) as _,
                c_long::from_le_bytes(*word),
            )?;
        }
        Ok(())
    }

    /// Makes a call; what it returns, or an error.
    fn calls(
        &self,
        number: c_long,
        arguments: [u64; 4],
    ) -> Result<std::result::Result<u64, Errno>> {
        let [rdi, rsi, rdx, r10] = arguments;
        let (rip, rax) = (self.before.rip - 2, number.cast_unsigned());
        let regs = libc::user_regs_struct {
            rip,
            rax,
            rdi,
            rsi,
            rdx,
            r10,
            r8: 0,
            r9: 0,
            orig_rax: u64::MAX,
            ..self.before
        };
        ptrace::setregs(self.thread, regs)?;
        ptrace::step(self.thread, None)?;
        stopped(self.thread)?;
        let result = ptrace::getregs(self.thread)?.rax.cast_signed();
        Ok(match result {
            -4095..0 => Err(Errno::from_raw(-result as i32)),
            _ => Ok(result.cast_unsigned()),
        })
    }
}

impl Drop for Prisoner {
    fn drop(&mut self) {
        // A machine that has ended has nothing to go on with.
        let _ = ptrace::setregs(self.thread, self.before);
        let _ = ptrace::detach(self.thread, None);
    }
}

fn stopped(thread: Pid) -> Result<()> {
    let status = waitpid(thread, None)?;
    ensure!(matches!(status, WaitStatus::Stopped(..)), "{status:?}");
    Ok(())
}

/// Calls that a machine's process has no need of, and their arguments.
fn attempts(room: u64, parent: u64) -> Vec<(&'static str, c_long, [u64; 4])> {
    let here = i64::from(libc::AT_FDCWD).cast_unsigned();
    let (unix, internet) = (libc::AF_UNIX as u64, libc::AF_INET as u64);
    let (stream, executable) =
        (libc::SOCK_STREAM as u64, (libc::PROT_READ | libc::PROT_EXEC) as u64);
    vec![
        ("to open a file", libc::SYS_openat, [here, room, 0, 0]),
        ("to open one the old way", libc::SYS_open, [room, 0, 0, 0]),
        ("to make one", libc::SYS_openat, [here, room, (libc::O_CREAT | libc::O_WRONLY) as u64, 0]),
        ("to remove one", libc::SYS_unlinkat, [here, room + 8, 0, 0]),
        ("to execute one", libc::SYS_execve, [room, 0, 0, 0]),
        ("to copy itself", libc::SYS_fork, [0; 4]),
        ("the same by clone", libc::SYS_clone, [libc::SIGCHLD as u64, 0, 0, 0]),
        ("a local socket", libc::SYS_socket, [unix, stream, 0, 0]),
        ("a socket", libc::SYS_socket, [internet, stream, 0, 0]),
        ("to connect", libc::SYS_connect, [0, room + 16, 16, 0]),
        ("to listen", libc::SYS_listen, [0, 1, 0, 0]),
        ("to signal another", libc::SYS_kill, [parent, 0, 0, 0]),
        ("to trace another", libc::SYS_ptrace, [16, parent, 0, 0]),
        ("another's memory", libc::SYS_process_vm_readv, [parent, 0, 0, 0]),
        ("executable memory", libc::SYS_mmap, [0, 4096, executable, 0x22]),
        ("to mount", libc::SYS_mount, [room, room, 0, 0]),
        ("a namespace", libc::SYS_unshare, [libc::CLONE_NEWNS as u64, 0, 0, 0]),
    ]
}

#[test]
fn a_monitor_that_was_taken_over_reaches_nothing() -> Result<()> {
    let machine = Machine::new(&["--as-root"])?;
    for (thread, mode) in machine.of_threads("Seccomp")? {
        ensure!(mode == 2, "{thread} has no filter");
    }
    for (thread, capabilities) in machine.of_threads("CapEff")? {
        let runs = thread.starts_with("vcpu") || thread == "timer";
        ensure!(!runs || capabilities & !SYS_NICE == 0, "{thread} can {capabilities:x}");
    }
    let prisoner = Prisoner::of(&machine)?;
    prisoner.put(0, PATH)?;
    prisoner.put(16, &SOCKET)?;
    let own = prisoner.calls(libc::SYS_getpid, [0; 4])?;
    ensure!(own == Ok(machine.0.id().into()), "calls are not made: {own:?}");
    for (what, number, arguments) in attempts(prisoner.room, std::process::id().into()) {
        let outcome = prisoner.calls(number, arguments)?;
        ensure!(outcome == Err(Errno::EPERM), "{what}: {outcome:?}");
    }
    Ok(())
}

/// The same attempts at a monitor that is not shut in: they are made well enough to succeed.
#[test]
fn without_the_box_it_reaches_files_and_networks() -> Result<()> {
    let machine = Machine::new(&["--as-root", "--sandbox", "off"])?;
    let prisoner = Prisoner::of(&machine)?;
    prisoner.put(0, PATH)?;
    let all = attempts(prisoner.room, std::process::id().into());
    let harmless = ["to open a file", "to open one the old way", "a local socket", "a socket"];
    for (what, number, arguments) in all.into_iter().filter(|(what, ..)| harmless.contains(what)) {
        let outcome = prisoner.calls(number, arguments)?;
        ensure!(outcome.is_ok(), "{what}: {outcome:?}");
    }
    let executable = (libc::PROT_READ | libc::PROT_EXEC) as u64;
    let outcome = prisoner.calls(libc::SYS_mmap, [0, 4096, executable, 0x22])?;
    ensure!(outcome.is_ok() || outcome == Err(Errno::EBADF), "executable memory: {outcome:?}");
    Ok(())
}
