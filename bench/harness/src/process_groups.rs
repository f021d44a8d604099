//! Process groups of running environments. Each environment has a process group of its own, which a terminal's Ctrl-C does
//! not reach. A signal that ends the benchmark therefore kills the groups first.

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
static WATCH_SIGNALS: Once = Once::new();

/// Remembers a group that was started.
pub(crate) fn add(group: u32) {
    WATCH_SIGNALS.call_once(watch_signals);
    groups().insert(group);
}

/// Kills a group.
pub(crate) fn kill(group: u32) {
    groups().remove(&group);
    send_sigkill(group);
}

fn groups() -> MutexGuard<'static, BTreeSet<u32>> {
    GROUPS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn send_sigkill(group: u32) {
    if let Some(group) = Pid::from_raw(group as i32) {
        // The group may have ended by itself.
        let _ = kill_process_group(group, Signal::KILL);
    }
}

fn watch_signals() {
    // Without a handler, signals end us as they always do.
    let Ok(mut signals) = Signals::new([SIGHUP, SIGINT, SIGTERM]) else { return };
    thread::spawn(move || {
        if let Some(signal) = signals.forever().next() {
            groups().iter().copied().for_each(send_sigkill);
            std::process::exit(128 + signal);
        }
    });
}
