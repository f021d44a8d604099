//! What a process and all it started take of the host.
//!
//! A machine is many processes: the monitor's, one for each address space of the guest, and one for each device. Time is what `/proc/PID/stat`
//! counts, to a hundredth of a second; memory is proportional, so that RAM they share counts once.

use std::{collections::BTreeSet, fs, time::Duration};

/// Of all the processes together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Usage {
    /// How many there are.
    pub processes: usize,
    /// CPU time they have used, and those before them that have ended.
    pub cpu: Duration,
    /// Bytes of the host's memory.
    pub memory: u64,
}

/// Now, of a process and its descendants. One that ends meanwhile, or hides what it takes, counts as nothing.
pub fn of(process: u32) -> Usage {
    let descendants = descendants(process, |_| false);
    let ticks: u64 = descendants.iter().map(|process| process.ticks).sum();
    let cpu = Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second());
    let memory = descendants.iter().filter_map(|process| memory(process.id)).sum();
    Usage { processes: descendants.len(), cpu, memory }
}

/// A process and its living descendants. Processes for which `also` holds count like descendants.
pub fn descendants(root: u32, also: impl Fn(&Process) -> bool) -> Vec<Process> {
    let all: Vec<_> = numbers("/proc").filter_map(Process::read).collect();
    let mut ids = BTreeSet::from([root]);
    loop {
        let before = ids.len();
        let joins = |process: &&Process| ids.contains(&process.parent) || also(process);
        let joined: Vec<_> = all.iter().filter(joins).map(|process| process.id).collect();
        ids.extend(joined);
        if ids.len() == before {
            return all.into_iter().filter(|process| ids.contains(&process.id)).collect();
        }
    }
}

/// What `/proc/PID/stat` says of a process.
pub struct Process {
    /// Its number.
    pub id: u32,
    /// Its parent's.
    pub parent: u32,
    /// Its process group's.
    pub group: u32,
    /// CPU time of its own and of children it has waited for, in the host's clock ticks.
    pub ticks: u64,
}

impl Process {
    fn read(id: u32) -> Option<Self> {
        Self::parse(id, &fs::read_to_string(format!("/proc/{id}/stat")).ok()?)
    }

    /// The second field may contain anything but ends at the last `)`; the fourth is the parent, the fifth the group, 14 to 17 are times.
    fn parse(id: u32, text: &str) -> Option<Self> {
        let fields: Vec<_> = text.rsplit_once(") ")?.1.split_ascii_whitespace().collect();
        let times = fields.get(11..15)?.iter().map(|time| time.parse::<u64>().ok());
        let number = |at: usize| fields.get(at)?.parse().ok();
        Some(Self { id, parent: number(1)?, group: number(2)?, ticks: times.sum::<Option<u64>>()? })
    }
}

/// A process's memory in bytes: private pages, and of shared ones its share.
pub fn memory(id: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{id}/smaps_rollup")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? * 1024)
}

/// Names in a directory that are numbers.
pub fn numbers(directory: &str) -> impl Iterator<Item = u32> + use<> {
    let entries = fs::read_dir(directory).into_iter().flatten();
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        io::Read,
        process::{Command, Stdio},
    };

    #[test]
    fn a_process_is_read_whatever_its_name() {
        let text = "7 (a) (b) 9) S 3 7 7 0 -1 4194304 90 0 0 0 11 5 2 1 20 0 1 0 100";
        let process = Process::parse(7, text).expect("a process");
        assert_eq!((process.parent, process.group, process.ticks), (3, 7, 19));
        assert!(Process::parse(7, "7 (cut) S 3").is_none());
    }

    #[test]
    fn what_was_started_is_counted() {
        let usage = || of(std::process::id());
        let before = usage();
        let script = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; echo; cat";
        let mut shell = Command::new("sh");
        shell.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = shell.spawn().expect("a shell");
        child.stdout.as_mut().expect("piped").read_exact(&mut [0]).expect("it has counted");
        let after = usage();
        drop(child.stdin.take());
        child.wait().expect("it ended");
        // Other tests' children come and go.
        assert!(after.processes >= 2, "{before:?} {after:?}");
        assert!(after.cpu > before.cpu && after.memory > 100_000, "{before:?} {after:?}");
    }
}
