//! Which CPU of a guest works, by the kernel's own counts, and which interrupts are shared folders'.

/// What a CPU has done since the kernel started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuTime {
    /// The CPU's number.
    pub cpu: usize,
    /// How long tasks have run on the CPU, in ns. The time of a task counts once another task has followed it.
    pub worked: u64,
}

/// Which CPUs have run tasks between two looks at their times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// All CPUs together have hardly run any tasks.
    Little,
    /// No CPU has done three fifths of the work.
    Shared,
    /// The CPU of this number has done three fifths of the work or more.
    Mostly(usize),
}

impl CpuTime {
    /// The time of each CPU, from the text of `/proc/schedstat` (Linux, Documentation/scheduler/sched-stats.rst).
    pub fn of_all(schedstat: &str) -> Vec<Self> {
        schedstat.lines().filter_map(Self::parse).collect()
    }

    fn parse(line: &str) -> Option<Self> {
        let (cpu, counts) = line.strip_prefix("cpu")?.split_once(' ')?;
        let worked = counts.split_whitespace().nth(6)?;
        Some(Self { cpu: cpu.parse().ok()?, worked: worked.parse().ok()? })
    }
}

impl Work {
    /// Time in ns: if the CPUs have run tasks for less than this, all together, that is [`Self::Little`].
    const LITTLE: u64 = 5_000_000;

    /// Compares the times of CPUs at an earlier look with those at a later one.
    pub fn between(before: &[CpuTime], now: &[CpuTime]) -> Self {
        let since = |now: &CpuTime| {
            let before = before.iter().find(|before| before.cpu == now.cpu)?;
            Some((now.worked.saturating_sub(before.worked), now.cpu))
        };
        let worked: Vec<_> = now.iter().filter_map(since).collect();
        let all: u64 = worked.iter().map(|(worked, _)| worked).sum();
        match worked.into_iter().max() {
            Some((most, cpu)) if all >= Self::LITTLE && most * 5 >= all * 3 => Self::Mostly(cpu),
            Some(_) if all >= Self::LITTLE => Self::Shared,
            _ => Self::Little,
        }
    }
}

/// The numbers of the interrupts of shared folders' queues, from `/proc/interrupts`.
pub fn folder_interrupts(interrupts: &str) -> impl Iterator<Item = &str> {
    interrupts.lines().filter_map(|line| {
        let is_a_folders = |name: &str| name.starts_with("virtio") && name.contains("-requests.");
        line.split_whitespace().next_back().filter(|name| is_a_folders(name))?;
        Some(line.split_once(':')?.0.trim())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_tasks_is_the_seventh_count() {
        let schedstat = "version 15\ntimestamp 4294\ncpu0 0 0 0 0 0 0 902797793 494140337 1265\n\
                         domain0 3 0 0 0 0 0 0 8 9 10\ncpu11 1 2 3 4 5 6 7 8 9\ncpu12 1 2 3\ncpux 1 2 3 4 5 6 7\n";
        let first = CpuTime { cpu: 0, worked: 902_797_793 };
        assert_eq!(CpuTime::of_all(schedstat), [first, CpuTime { cpu: 11, worked: 7 }]);
    }

    #[test]
    fn one_cpu_works_or_several_do_or_none() {
        let times = |worked: [u64; 3]| -> Vec<_> {
            let ms = worked.map(|worked| worked * 1_000_000);
            (0..).zip(ms).map(|(cpu, worked)| CpuTime { cpu, worked }).collect()
        };
        let before = times([100, 50, 0]);
        let since = |worked| Work::between(&before, &times(worked));
        assert_eq!(since([104, 56, 0]), Work::Mostly(1), "three fifths");
        assert_eq!(since([105, 57, 0]), Work::Shared);
        assert_eq!(since([100, 54, 0]), Work::Little);
        assert_eq!(
            Work::between(&before[..2], &times([100, 60, 900])),
            Work::Mostly(1),
            "one is new"
        );
        assert_eq!(Work::between(&[], &before), Work::Little, "all are");
    }

    #[test]
    fn folders_are_told_from_other_devices() {
        let interrupts = "           CPU0       CPU1\n  0:  44 0  IO-APIC  2-edge  timer\n 25:  0  0  PCI-MSI 1-edge  virtio1-hiprio\n \
                          26:  141  0  PCI-MSI 2-edge  virtio1-requests.0\n 31:  4  0  PCI-MSI 3-edge  virtio3-rx\n131:  4  0  \
                          PCI-MSI 3-edge  virtio12-requests.1\nNMI:  0  0  Non-maskable interrupts\n";
        assert_eq!(folder_interrupts(interrupts).collect::<Vec<_>>(), ["26", "131"]);
    }
}
