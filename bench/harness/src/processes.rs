//! What a process and everything it started takes of the host: CPU time and memory.
//!
//! Peers differ in how many processes they are (ring3 has one per guest address space), so all
//! are summed. Time is that of every thread's schedstat, which counts nanoseconds where
//! `/proc/PID/stat` counts hundredths of a second.

use std::{collections::BTreeSet, fs, iter, sync::LazyLock, time::Duration};

use host_linux::usage::{self, numbers};
use rustix::{
    process::Pid,
    thread::{CpuSet, sched_getaffinity, sched_setaffinity},
};

/// The CPUs that we had when we began.
static ALL: LazyLock<CpuSet> = LazyLock::new(|| sched_getaffinity(None).unwrap_or_default());

/// The ids of a process, its living descendants and the members of its group.
pub fn descendants(root: u32) -> BTreeSet<u32> {
    let found = usage::descendants(root, |process| process.group == root);
    iter::once(root).chain(found.iter().map(|process| process.id)).collect()
}

/// CPU time that these processes' living threads have used.
pub fn cpu_time(descendants: &BTreeSet<u32>) -> Duration {
    let threads = descendants.iter().flat_map(|id| {
        let tasks = format!("/proc/{id}/task");
        numbers(&tasks).map(move |thread| format!("{tasks}/{thread}/schedstat")).collect::<Vec<_>>()
    });
    let ran = |file: String| fs::read_to_string(file).ok()?.split(' ').next()?.parse::<u64>().ok();
    Duration::from_nanos(threads.filter_map(ran).sum())
}

/// Memory in bytes: private pages, and of shared ones their share.
pub fn memory(descendants: &BTreeSet<u32>) -> u64 {
    descendants.iter().filter_map(|id| usage::memory(*id)).sum()
}

/// The CPUs that we may use.
pub fn all_cpus() -> CpuSet {
    *ALL
}

/// The last of them: the first one often has the host's interrupts.
pub fn one_cpu() -> CpuSet {
    let mut one = CpuSet::new();
    let last = (0..CpuSet::MAX_CPU).rev().find(|cpu| ALL.is_set(*cpu));
    last.into_iter().for_each(|cpu| one.set(cpu));
    one
}

/// Has a process, all it started, and what they will start, run on these CPUs alone. Twice, as a
/// thread that was not asked yet may start another while others are.
pub fn confine(root: u32, cpus: &CpuSet) {
    for _ in 0..2 {
        for thread in descendants(root).iter().flat_map(|id| numbers(&format!("/proc/{id}/task"))) {
            // The thread may have ended.
            let _ = sched_setaffinity(Pid::from_raw(thread as i32), cpus);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        io::{BufRead, BufReader, Write},
        process::{Command, Stdio},
    };

    #[test]
    fn what_is_confined_has_one_cpu_and_so_has_what_it_starts() {
        let mut command = Command::new("sh");
        command.args(["-c", "while read line; do sh -c 'nproc; :'; done"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("a shell");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let mut input = child.stdin.take().expect("piped");
        let mut cpus_with = |mask: &CpuSet| -> u32 {
            confine(child.id(), mask);
            input.write_all(b"\n").expect("it reads");
            lines.next().expect("an answer").expect("text").parse().expect("a number")
        };
        assert_eq!(cpus_with(&one_cpu()), 1);
        assert_eq!(cpus_with(&all_cpus()), all_cpus().count(), "and back");
        drop(input);
        child.wait().expect("ended");
    }

    #[test]
    fn a_family_is_found_and_measured() {
        let mut command = Command::new("sh");
        command.args(["-c", "sh -c 'echo; while :; do :; done' & wait"]).stdout(Stdio::piped());
        let mut child = command.spawn().expect("a shell");
        std::thread::sleep(Duration::from_millis(300));
        let descendants = descendants(child.id());
        let (time, memory) = (cpu_time(&descendants), memory(&descendants));
        for id in descendants.iter().rev() {
            let id = rustix::process::Pid::from_raw(*id as i32).expect("not zero");
            rustix::process::kill_process(id, rustix::process::Signal::KILL).expect("killed");
        }
        child.wait().expect("ended");
        assert_eq!(descendants.len(), 2, "a shell and its child: {descendants:?}");
        assert!(time > Duration::from_millis(20), "it was busy: {time:?}");
        assert!(memory > 100_000, "two shells take more than {memory} bytes");
    }
}
