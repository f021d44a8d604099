//! The virtual CPUs beside the first. The kernel has left them off (`maxcpus=1`): so it starts as fast as with one, its work is not
//! spread over CPUs that have to get to know its code first, and a CPU that does not come up in time is one less, not the end.

use std::{
    fs,
    thread::{self, JoinHandle},
};

const CPUS: &str = "/sys/devices/system/cpu";
/// Whether the kernel waits for its other CPUs by interrupting them, rather than until each has come by.
const HURRY: &str = "/sys/kernel/rcu_expedited";

/// Starts them while the machine is set up.
pub fn start() -> Option<JoinHandle<()>> {
    let off = off();
    if off.is_empty() {
        return None;
    }
    Some(thread::spawn(move || bring_up(&off)))
}

/// Waits for them: the command is to see as many as were asked for.
pub fn wait(starting: Option<JoinHandle<()>>) {
    // A thread that panicked has ended the machine.
    starting.into_iter().for_each(|starting| drop(starting.join()));
}

/// Those that are there and do not run, in the order of their numbers. A CPU that the kernel cannot start later has no such file.
fn off() -> Vec<String> {
    let entries = fs::read_dir(CPUS).into_iter().flatten().flatten();
    let number = |name: String| name.strip_prefix("cpu")?.parse::<u32>().ok();
    let mut numbers: Vec<_> =
        entries.filter_map(|entry| number(entry.file_name().into_string().ok()?)).collect();
    numbers.sort_unstable();
    let switches = numbers.iter().map(|number| format!("{CPUS}/cpu{number}/online"));
    switches.filter(|path| fs::read(path).is_ok_and(|value| value.first() == Some(&b'0'))).collect()
}

fn bring_up(off: &[String]) {
    let usual = fs::read(HURRY).unwrap_or_default();
    // A kernel without it takes longer.
    let _ = fs::write(HURRY, "1");
    for path in off {
        if let Err(error) = fs::write(path, "1") {
            eprintln!("ring3-agent: {path}: {error}: the machine goes on without this CPU");
        }
    }
    // As above.
    let _ = fs::write(HURRY, usual);
}
