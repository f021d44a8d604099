//! Monitors that say anything to a server, and hang up: none of its threads stays, nor a descriptor.

mod monitor;

use std::{fs, thread, time::Duration};

use monitor::connection;

host::choose!(host_linux::Linux);

const CONNECTIONS: u64 = 1000;

fn count(folder: &str) -> usize {
    fs::read_dir(folder).expect("listed").count()
}

#[test]
fn a_thousand_hostile_monitors_leave_nothing_behind() {
    connection(0, &[]);
    let before = (count("/proc/self/fd"), count("/proc/self/task"));
    (1..=CONNECTIONS).for_each(|seed| connection(seed, &[]));
    // A thread that has sent its last word may still be there for a moment.
    for _ in 0..100 {
        if count("/proc/self/task") <= before.1 {
            break;
        }
        thread::sleep(Duration::from_millis(10));
    }
    let after = (count("/proc/self/fd"), count("/proc/self/task"));
    assert!(after.0 <= before.0 && after.1 <= before.1, "{before:?} became {after:?}");
}
