//! No environment outlives us: each has a process group of its own, which a terminal's Ctrl-C does
//! not reach, so signals that end us end them first.

use std::{
    collections::BTreeSet,
    sync::{Mutex, MutexGuard, Once, PoisonError},
    thread,
};

use rustix::process::{Pid, Signal, kill_process_group};
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    iterator::Signals,
};

/// Groups that run, by their leaders' process ids.
static GROUPS: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());
static WATCH: Once = Once::new();

/// A group was started.
pub(crate) fn add(group: u32) {
    WATCH.call_once(watch);
    groups().insert(group);
}

/// Ends a group.
pub(crate) fn end(group: u32) {
    groups().remove(&group);
    kill(group);
}

fn groups() -> MutexGuard<'static, BTreeSet<u32>> {
    GROUPS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn kill(group: u32) {
    if let Some(group) = Pid::from_raw(group as i32) {
        // It may have ended by itself.
        let _ = kill_process_group(group, Signal::KILL);
    }
}

fn watch() {
    // Without a handler, signals end us as they always do.
    let Ok(mut signals) = Signals::new([SIGHUP, SIGINT, SIGTERM]) else { return };
    thread::spawn(move || {
        if let Some(signal) = signals.forever().next() {
            groups().iter().copied().for_each(kill);
            std::process::exit(128 + signal);
        }
    });
}
