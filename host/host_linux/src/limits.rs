//! Limits that this process was given (`ulimit`), and what they mean for a machine.

use std::{path::Path, sync::OnceLock};

use crate::{cgroup, inherited};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Descriptors that a machine with a few devices has open.
const DESCRIPTORS: u64 = 128;
/// Bytes of stack of the main thread.
const STACK: u64 = 1 << 20;
/// Bytes of addresses that the monitor needs beside twice the guest's memory.
const ADDRESSES: u64 = 512 << 20;

/// Takes what is there to be taken: as many descriptors as are allowed, and a warning a second before the CPU time is over.
pub fn prepare() {
    inherited::ignore_file_size_signal();
    let mut files = getrlimit(Resource::Nofile);
    files.current = files.maximum;
    let mut time = getrlimit(Resource::Cpu);
    if let (Some(current), true) = (time.current, time.current == time.maximum) {
        time.current = Some(current.saturating_sub(1).max(1));
    }
    // What the host refuses stays as it was.
    let _ = setrlimit(Resource::Nofile, files);
    let _ = setrlimit(Resource::Cpu, time);
}

/// Why this program cannot run at all; asked before anything else.
pub fn stack_refusal() -> Option<String> {
    let limit = raised(Resource::Stack, STACK)? >> 10;
    Some(format!("stacks are limited to {limit} KiB (ulimit -s); ring3 needs {} KiB", STACK >> 10))
}

/// Why there can be no machine with so many bytes of memory, if that is plain at once.
pub fn refusal(memory: u64) -> Option<String> {
    if !Path::new("/proc/self/exe").exists() {
        let why = "ring3 starts its devices by way of it; mount -t proc proc /proc";
        return Some(format!("/proc is not mounted here: {why}"));
    }
    let files = getrlimit(Resource::Nofile).current.filter(|&limit| limit < DESCRIPTORS);
    if let Some(limit) = files {
        return Some(format!(
            "open files are limited to {limit} (ulimit -n); a machine needs {DESCRIPTORS}"
        ));
    }
    let mib = memory >> 20;
    // The guest's memory is a file that has no name.
    if let Some(limit) = raised(Resource::Fsize, memory) {
        let limit = limit >> 10;
        return Some(format!(
            "files are limited to {limit} KiB (ulimit -f), and the guest's memory is one of {mib} MiB"
        ));
    }
    let needed = memory.saturating_mul(2).saturating_add(ADDRESSES);
    let limit = raised(Resource::As, needed)? >> 10;
    let needed = needed >> 10;
    Some(format!(
        "addresses are limited to {limit} KiB (ulimit -v); a guest of {mib} MiB takes {needed} KiB"
    ))
}

/// Raises a limit that is below `needed` as far as that is allowed; returns it if it still is.
fn raised(resource: Resource, needed: u64) -> Option<u64> {
    let Rlimit { current, maximum } = getrlimit(resource);
    current.filter(|&limit| limit < needed)?;
    let enough = maximum.is_none_or(|limit| limit >= needed);
    let to = Rlimit { current: maximum, maximum };
    if enough && setrlimit(resource, to).is_ok() { None } else { maximum.or(current) }
}

/// The limit that an error of the host's may come from.
pub fn hint(problem: &str) -> Option<String> {
    let has = |number: i32| problem.contains(&format!("(os error {number})"));
    if has(libc::EMFILE) {
        return told(Resource::Nofile, 1, "open files are limited to", "ulimit -n");
    }
    if has(libc::EAGAIN) {
        let own = told(
            Resource::Nproc,
            1,
            "processes and threads of this user are limited to",
            "ulimit -u",
        );
        return own.into_iter().chain(cgroup_processes()).reduce(|one, other| one + "; " + &other);
    }
    if has(libc::ENOMEM) {
        let addresses = told(Resource::As, 1024, "KiB of addresses are limited to", "ulimit -v");
        let data = told(Resource::Data, 1024, "KiB of data are limited to", "ulimit -d");
        return addresses.into_iter().chain(data).reduce(|one, other| one + "; " + &other);
    }
    if has(libc::EFBIG) {
        return told(Resource::Fsize, 1024, "KiB of a file are limited to", "ulimit -f");
    }
    cpu_time().filter(|_| problem.contains("signal 9") || problem.contains("signal 24"))
}

fn cpu_time() -> Option<String> {
    let seconds = getrlimit(Resource::Cpu).maximum?;
    Some(format!("each process may run for {seconds} s (ulimit -t)"))
}

fn told(resource: Resource, unit: u64, what: &str, how: &str) -> Option<String> {
    let limit = getrlimit(resource).current? / unit;
    Some(format!("{what} {limit} ({how})"))
}

/// Looks at what [`hint`] may have to tell of cgroups. To be called before this process shuts itself in: then it can open
/// nothing any more.
pub fn remember() {
    cgroup_processes();
}

fn cgroup_processes() -> Option<String> {
    static TOLD: OnceLock<Option<String>> = OnceLock::new();
    let tell = || {
        let limit = cgroup::processes()?;
        Some(format!("those of its cgroup to {} ({})", limit.amount, limit.file))
    };
    TOLD.get_or_init(tell).clone()
}

/// What a machine with so many bytes of memory may come to, though it can be made.
pub fn warning(memory: u64) -> Option<String> {
    let limit = cgroup::memory().filter(|limit| limit.amount < memory)?;
    let (has, wants, file) = (limit.amount >> 20, memory >> 20, limit.file);
    Some(format!(
        "memory is limited to {has} MiB by a cgroup ({file}), the guest may take {wants} MiB: the host kills the \
         machine if it takes too much; give less --memory"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_behind_an_error_is_named() {
        let hint = |number: i32| hint(&std::io::Error::from_raw_os_error(number).to_string());
        assert!(hint(libc::EMFILE).is_some_and(|hint| hint.contains("ulimit -n")));
        assert_eq!(hint(libc::ENOENT), None);
    }

    #[test]
    fn a_machine_fits_here() {
        assert_eq!(refusal(16 << 20), None);
    }
}
