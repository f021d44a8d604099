//! The Linux Test Project's tests of system calls, in ring3 and in QEMU, one boot each: what passes there
//! has to pass here. They are built and installed by the user; nothing of theirs is in this tree.
//!
//! Chosen are the families that depend on the processor, its memory management and its interrupts:
//! processes, memory, signals, timers, futexes, pipes; and of files and sockets what every program uses.
//! Other file systems, networks and users are the kernel's own affair.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use tempfile::NamedTempFile;
use xtask::{
    assets::{Assets, Kernel},
    command::output,
    initramfs::File,
};

use crate::{
    console::Console,
    in_kernel::{self, Userland},
    is_wanted,
    machine::Limits,
    outcome::{Outcome, side_by_side},
};

/// Seconds a test may take: those that wait for real time need some, whatever runs them.
const SECONDS: u32 = 60;
/// Guest memory, in MiB: some of the tests take hundreds, and the files lie in memory, too.
const MEMORY: u32 = 2048;
/// Exit status of a test that found nothing to test (LTP's include/tst_res_flags.h).
const SKIPPED: i32 = 32;
/// Names of tests begin with one of these, and go on with digits or an underscore.
const FAMILIES: [&str; 150] = [
    "abort",
    "alarm",
    "arch_prctl",
    "brk",
    "clock_getres",
    "clock_gettime",
    "clock_nanosleep",
    "clone",
    "close_range",
    "epoll_create",
    "epoll_ctl",
    "epoll_pwait",
    "epoll_wait",
    "eventfd",
    "execl",
    "execle",
    "execlp",
    "execv",
    "execve",
    "execveat",
    "execvp",
    "exit",
    "exit_group",
    "fork",
    "futex_cmp_requeue",
    "futex_wait",
    "futex_wait_bitset",
    "futex_waitv",
    "futex_wake",
    "get_robust_list",
    "getcontext",
    "getcpu",
    "getitimer",
    "getpid",
    "getppid",
    "getrusage",
    "gettid",
    "gettimeofday",
    "ioperm",
    "iopl",
    "kcmp",
    "kill",
    "madvise",
    "mallinfo",
    "mallopt",
    "membarrier",
    "memcmp",
    "memcpy",
    "memfd_create",
    "memset",
    "mincore",
    "mlock",
    "mlockall",
    "mmap",
    "modify_ldt",
    "mprotect",
    "mremap",
    "mseal",
    "msgctl",
    "msgget",
    "msgrcv",
    "msgsnd",
    "msgstress",
    "msync",
    "munlock",
    "munmap",
    "nanosleep",
    "open",
    "openat",
    "pause",
    "personality",
    "pidfd_open",
    "pidfd_send_signal",
    "pipe",
    "pipeio",
    "pkey",
    "poll",
    "ppoll",
    "prctl",
    "process_vm_readv",
    "process_vm_writev",
    "pselect",
    "ptrace",
    "read",
    "readv",
    "remap_file_pages",
    "rename",
    "renameat",
    "rt_sigaction",
    "rt_sigprocmask",
    "rt_sigqueueinfo",
    "rt_sigsuspend",
    "rt_sigtimedwait",
    "sbrk",
    "sched_get_priority_max",
    "sched_get_priority_min",
    "sched_getaffinity",
    "sched_getattr",
    "sched_getparam",
    "sched_getscheduler",
    "sched_rr_get_interval",
    "sched_setaffinity",
    "sched_setattr",
    "sched_setparam",
    "sched_setscheduler",
    "sched_yield",
    "select",
    "semctl",
    "semget",
    "semop",
    "set_robust_list",
    "set_thread_area",
    "set_tid_address",
    "setitimer",
    "shmat",
    "shmctl",
    "shmdt",
    "shmget",
    "sigaction",
    "sigaltstack",
    "signal",
    "sigpending",
    "sigprocmask",
    "sigsuspend",
    "sigtimedwait",
    "sigwait",
    "sigwaitinfo",
    "socket",
    "socketpair",
    "stat",
    "string",
    "tgkill",
    "timer_create",
    "timer_delete",
    "timer_getoverrun",
    "timer_gettime",
    "timer_settime",
    "timerfd",
    "timerfd_create",
    "timerfd_gettime",
    "timerfd_settime",
    "times",
    "tkill",
    "userfaultfd",
    "vfork",
    "wait",
    "waitid",
    "waitpid",
    "write",
    "writev",
];

/// A test of the list `runtest/syscalls`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Test {
    name: String,
    command: String,
}

/// Runs the tests installed in `directory` whose names have one of `parts`, or all of them if
/// there are none, in both machines.
///
/// # Errors
/// A test that passes in QEMU did not pass in ring3.
pub fn run(
    assets: &Assets,
    directory: Option<&Path>,
    parts: &[String],
    limits: Limits<'_>,
) -> Result<String> {
    let directory = directory.context("say --ltp DIR: where LTP is installed (/opt/ltp, say)")?;
    let mut tests = tests(directory)?;
    tests.retain(|test| is_wanted(&test.name, parts));
    ensure!(!tests.is_empty(), "no test has one of {parts:?} in its name: leave out --filter");
    let files = files(directory, &tests)?;
    let here = outcomes(assets, &files, &tests, Limits { qemu: false, ..limits })?;
    let there = outcomes(assets, &files, &tests, Limits { qemu: true, ..limits })?;
    let names = tests.iter().map(|test| &*test.name);
    let rows: Vec<_> = names.zip(here).zip(there).map(|((name, a), b)| (name, a, b)).collect();
    println!("{}", side_by_side(["LTP", "ring3", "QEMU"], &rows));
    verdict(&rows)
}

/// The chosen ones, in the list's order.
fn tests(directory: &Path) -> Result<Vec<Test>> {
    let path = directory.join("runtest/syscalls");
    let list = fs::read_to_string(&path);
    let list = list.with_context(|| format!("cannot read {}", path.display()))?;
    let lines = list.lines().map(str::trim).filter(|line| !line.starts_with('#'));
    let pairs = lines.filter_map(|line| line.split_once(char::is_whitespace));
    let all =
        pairs.map(|(name, command)| Test { name: name.into(), command: command.trim().into() });
    Ok(all.filter(|test| is_chosen(&test.name)).collect())
}

fn is_chosen(name: &str) -> bool {
    let rest = FAMILIES.iter().filter_map(|family| name.strip_prefix(family));
    rest.into_iter().any(|rest| rest.starts_with(|c: char| c.is_ascii_digit() || c == '_'))
}

/// The programs of the tests and of whatever they start (named alike), and the libraries they load.
fn files(directory: &Path, tests: &[Test]) -> Result<Vec<File>> {
    let programs = directory.join("testcases/bin");
    let mut files = Vec::new();
    let mut libraries = BTreeSet::new();
    for entry in fs::read_dir(&programs).with_context(|| format!("no {}", programs.display()))? {
        let path = entry?.path();
        let name = path.file_name().context("no name")?.to_string_lossy().into_owned();
        let wanted = is_chosen(&name) || tests.iter().any(|test| test.command.contains(&name));
        if wanted && path.is_file() {
            libraries.extend(loaded(&path)?);
            files.push(packed(stripped(&path)?, &name));
        }
    }
    for library in libraries {
        let name = library.file_name().context("no name")?.to_string_lossy().into_owned();
        let content = fs::read(&library)?;
        files.push(packed(content, &name));
    }
    let list: String =
        tests.iter().map(|test| format!("{} {}\n", test.name, test.command)).collect();
    let list = File { path: "root/tests".into(), permissions: 0o644, content: list.into_bytes() };
    Ok(files.into_iter().chain([list]).collect())
}

fn packed(content: Vec<u8>, name: &str) -> File {
    File { path: format!("root/{name}"), permissions: 0o755, content }
}

/// A program without what debuggers want, which is most of it; a script as it is.
fn stripped(program: &Path) -> Result<Vec<u8>> {
    let content = fs::read(program)?;
    if !content.starts_with(b"\x7fELF") {
        return Ok(content);
    }
    let smaller = NamedTempFile::new()?;
    let mut strip = Command::new("strip");
    output(strip.arg("-o").arg(smaller.path()).arg(program)).context("strip is of binutils")?;
    Ok(fs::read(smaller.path())?)
}

/// The libraries a program loads, its loader included.
fn loaded(program: &Path) -> Result<Vec<PathBuf>> {
    let Ok(text) = output(Command::new("ldd").arg(program)) else { return Ok(Vec::new()) };
    let paths = text.split_whitespace().filter(|word| word.starts_with('/'));
    Ok(paths.map(PathBuf::from).collect())
}

/// What happens in the guest. Some tests start programs with an empty environment, which have to find their
/// libraries all the same, and some look for theirs where LTP is installed.
fn script() -> String {
    format!(
        "mkdir -p /lib /lib64 /dev/shm /dev/pts /root/testcases\n\
         ln -s /root/ld-linux-x86-64.so.2 /lib64\n\
         ln -s /root/*.so* /lib\n\
         ln -s /root /root/testcases/bin\n\
         mount -t tmpfs shm /dev/shm\n\
         mount -t devpts pts /dev/pts\n\
         echo nobody:x:65534:65534::/:/bin/sh >> /etc/passwd\n\
         echo nogroup:x:65534: >> /etc/group\n\
         export PATH=/root:$PATH LTPROOT=/root TMPDIR=/tmp KCONFIG_SKIP_CHECK=1\n\
         cd /tmp\n\
         while read -r name command; do\n\
             timeout -k 5 {SECONDS} sh -c \"$command\" < /dev/null > /run/log 2>&1\n\
             status=$?\n\
             case $status in 0|32) ;; *) grep -hE 'TFAIL|TBROK|TWARN' /run/log | head -4;; esac\n\
             echo \"ltp: $name $status\"\n\
         done < /root/tests\n"
    )
}

fn outcomes(
    assets: &Assets,
    files: &[File],
    tests: &[Test],
    limits: Limits<'_>,
) -> Result<Vec<Outcome>> {
    let image = assets.kernel(Kernel::TrixieFull)?.image;
    let script = script();
    let userland = Userland { files, script: &script, options: "", memory: MEMORY };
    let console = in_kernel::boot(assets, &image, &userland, limits)?;
    Ok(tests.iter().map(|test| ended(&console, test)).collect())
}

fn ended(console: &Console, test: &Test) -> Outcome {
    let status = console.after(&format!("ltp: {} ", test.name));
    Outcome::shown(status, SKIPPED)
}

fn verdict(rows: &[(&str, Outcome, Outcome)]) -> Result<String> {
    let worse = rows.iter().filter(|(_, here, there)| there.is_good() && !here.is_good());
    let worse: Vec<_> = worse.map(|(name, here, _)| format!("{name} {here}")).collect();
    ensure!(worse.is_empty(), "pass in QEMU but not in ring3: {}", worse.join(", "));
    let count = |outcomes: &mut dyn Iterator<Item = Outcome>| {
        let all: Vec<_> = outcomes.collect();
        let passed = all.iter().filter(|outcome| **outcome == Outcome::Passed).count();
        let skipped = all.iter().filter(|outcome| **outcome == Outcome::Skipped).count();
        format!("{passed} passed, {skipped} skipped, {} not", all.len() - passed - skipped)
    };
    let here = count(&mut rows.iter().map(|row| row.1));
    let there = count(&mut rows.iter().map(|row| row.2));
    Ok(format!("{} tests: {here}; in QEMU {there}", rows.len()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use Outcome::{Failed, Lost, Passed, Skipped};

    #[test]
    fn families_are_whole_names() {
        assert!(is_chosen("fork01") && is_chosen("futex_wait_bitset01"));
        assert!(!is_chosen("forkbomb") && !is_chosen("mount01") && !is_chosen("readdir01"));
    }

    #[test]
    fn only_what_qemu_passes_is_asked() {
        let rows = [("a", Passed, Passed), ("b", Failed(1), Failed(1)), ("c", Passed, Skipped)];
        let said = verdict(&rows).expect("as good");
        assert_eq!(said, "3 tests: 2 passed, 0 skipped, 1 not; in QEMU 1 passed, 1 skipped, 1 not");
        verdict(&[("a", Failed(1), Passed)]).expect_err("worse");
        verdict(&[("a", Lost, Passed)]).expect_err("lost");
    }

    #[test]
    fn statuses_are_read_from_the_console() {
        let mut console = Console::default();
        console.print(b"x TFAIL: no\nltp: fork01 32\nltp: fork02 1\n");
        let test = |name: &str| Test { name: name.to_owned(), command: String::new() };
        assert_eq!(ended(&console, &test("fork01")), Skipped);
        assert_eq!(ended(&console, &test("fork02")), Failed(1));
        assert_eq!(ended(&console, &test("fork03")), Lost);
    }
}
