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

mod body;
mod code;
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

pub use code::{CallSites, CodeArea, SiteCall};
pub use pages::{Common, Pages};
pub use process::{Error, Wedge, WedgeRam};
pub use starter::{become_wedge, prepare, start_by};
pub use turns::{Move, Turns};
pub use wedge_abi::{MapCommand, MapReport, Owner, Rights};

/// The host has protection keys, which close the kernel's memory to user code unless they are left alone.
pub fn keys() -> bool {
    host::current().facts().keys
}

/// WRPKRU and its like are instructions: a guest's programs must not come to execute them.
pub fn keys_load() -> bool {
    host::current().facts().keys_load
}

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
    let allowed = most_of(host::current().facts().max_mappings);
    allowed.min(LIMIT.load(std::sync::atomic::Ordering::Relaxed))
}

fn most_of(allowed: usize) -> usize {
    (allowed - allowed / 9).min(ENOUGH)
}

#[cfg(test)]
mod tests {
    #[test]
    fn what_the_host_allows_is_used_but_for_some() {
        assert_eq!(super::most_of(65_530), 58_249);
        assert_eq!(super::most_of(1 << 20), super::ENOUGH);
    }
}
