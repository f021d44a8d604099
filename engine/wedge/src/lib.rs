//! Wedges: processes that are nothing but guest code and what it takes to run it.
//!
//! A wedge maps guest user pages at their own addresses and guest kernel pages at a fixed distance
//! from theirs. A small blob (`engine/stub`) in a window that user programs do not use enters guest
//! code and brings what it cannot do back to the monitor; beside it, in that window, lie the pages
//! that all wedges of a vCPU share ([`Pages`]), and those that all of a machine do ([`Common`]): the translator's code. Everything else
//! of the process is gone, and a filter admits only the host calls the blob needs, from its own text,
//! with a secret guest code cannot read.
//!
//! Why guest code cannot reach the host: it has no host call but those of the filter, which concern its own
//! process (`stub/src/filter.rs`); no descriptor but guest RAM's, no memory but the guest's and the window,
//! of which what others execute or believe is sealed against writing; and registers are all it gets back.
//! What it writes to shared pages the monitor takes as a guest's registers, never as addresses or sizes of
//! its own. `docs/isolation.md` has the argument at length.

pub mod affinity;
mod child;
mod code;
mod cpuid;
mod features;
mod memory;
mod pages;
mod process;
mod starter;
mod strict;
mod turns;

#[cfg(test)]
mod order_tests;
#[cfg(test)]
host::choose!(host_linux::Linux);

pub use code::{Call, CallSites, CodeArea};
pub use frame::{MapCommand, MapReport, Owner, Rights};
pub use pages::{Common, Pages};
pub use process::{Error, Ram, Wedge};
pub use starter::{Process, become_wedge, prepare, start_by};
pub use turns::Turns;

/// Protection keys can be used: the CPU and the host have them, and the host delivers signals to
/// a stack with a key (since Linux 6.12).
pub fn keys() -> bool {
    static KEYS: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    *KEYS.get_or_init(|| {
        let os_keys = std::arch::x86_64::__cpuid_count(7, 0).ecx >> 4 & 1 == 1;
        os_keys && release() >= (6, 12)
    })
}

/// Mappings the host allows a process, if it does not say.
const DEFAULT_MAP_COUNT: usize = 65_530;
/// More than these are of no use: they are as many pages as 1.7 GiB have, and cost the host a hundred
/// megabytes of its own.
const ENOUGH: usize = 450_000;

static LIMIT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(usize::MAX);

/// No more mappings than these, whatever the host allows.
pub fn limit_mappings(most: usize) {
    LIMIT.store(most, std::sync::atomic::Ordering::Relaxed);
}

/// So many mappings may be made in a wedge: what the host allows, but for some that come of cutting others.
pub fn max_mappings() -> usize {
    static MOST: std::sync::OnceLock<usize> = std::sync::OnceLock::new();
    let allowed = *MOST.get_or_init(|| {
        let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap_or_default();
        most_of(text.trim().parse().unwrap_or(DEFAULT_MAP_COUNT))
    });
    allowed.min(LIMIT.load(std::sync::atomic::Ordering::Relaxed))
}

fn most_of(allowed: usize) -> usize {
    (allowed - allowed / 9).min(ENOUGH)
}

/// Below this address no host need let a process map anything: the least that Linux's security modules ask
/// for.
const LOWEST: u64 = 0x1_0000;

/// The lowest address at which memory can be mapped in a wedge.
pub fn lowest_address() -> u64 {
    static FIRST: std::sync::OnceLock<u64> = std::sync::OnceLock::new();
    *FIRST.get_or_init(|| {
        let text = std::fs::read_to_string("/proc/sys/vm/mmap_min_addr").unwrap_or_default();
        text.trim().parse().unwrap_or(0).max(LOWEST).next_multiple_of(4096)
    })
}

/// The host lets programs read and write the segment bases.
pub fn bases_are_ours() -> bool {
    features::has_fsgsbase()
}

/// The host can make CPUID fault in user code.
pub fn cpuid_faults() -> bool {
    static FAULTS: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    *FAULTS.get_or_init(features::can_fault_cpuid)
}

/// The host runs 32-bit code, and has thread-local segments for it and calls by INT 0x80. Tried, by a child.
pub fn runs_narrow() -> bool {
    static RUNS: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    *RUNS.get_or_init(features::can_narrow)
}

/// The host has vector state enabled beyond x87, SSE and AVX.
pub fn has_more_vectors() -> bool {
    static MORE: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    *MORE.get_or_init(|| features::enabled_vectors() & !7 != 0)
}

/// The host's Linux version.
fn release() -> (u32, u32) {
    let text = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = text.split(['.', '-', '\n']).map_while(|part| part.parse().ok());
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    #[test]
    fn what_the_host_allows_is_used_but_for_some() {
        assert_eq!(super::most_of(65_530), 58_249);
        assert_eq!(super::most_of(1 << 20), super::ENOUGH);
    }
}
