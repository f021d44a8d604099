//! `stress-ng --verify`: loads that check what they compute, read and are told, one class after the
//! other. It is the host's own program; the kernel below it is the guest's.

use anyhow::{Result, ensure};
use tempfile::TempDir;

use crate::{
    in_guest::{self, Ended},
    machine::Limits,
};

/// Classes, and the stressors of each.
const CLASSES: [(&str, &[&str]); 8] = [
    ("cpu", &["cpu"]),
    ("vm", &["vm"]),
    ("fork", &["fork", "vfork", "clone"]),
    (
        "signal",
        &[
            "signal",
            "signest",
            "sigfd",
            "sigfpe",
            "sigpending",
            "sigq",
            "sigrt",
            "sigsegv",
            "sigsuspend",
            "sigtrap",
        ],
    ),
    ("mmap", &["mmap", "mmapaddr", "mmapfixed", "mmapfork", "mmapmany", "mremap", "mprotect"]),
    ("futex", &["futex"]),
    ("pipe", &["pipe", "pipeherd"]),
    ("switch", &["switch", "yield"]),
];

/// Memory a stressor takes.
const SIZES: &str = "--vm-bytes 64M --mmap-bytes 64M --mremap-bytes 64M";
/// What stress-ng says at the end of a run in which every check held.
const SUCCESS: &str = "successful run completed";
/// What it says where a check did not.
const FAILURE: &str = "stress-ng: fail:";

/// Runs every class for its share of the seconds.
///
/// # Errors
/// A check of a stressor failed, or it could not be run.
pub fn run(seconds: u64, limits: Limits<'_>) -> Result<String> {
    let share = seconds / CLASSES.len() as u64;
    let mut figures = Vec::new();
    for (class, stressors) in CLASSES {
        let each = (share / stressors.len() as u64).max(1);
        let ended = stress(stressors, each, limits)?;
        verdict(class, stressors.len(), &ended)?;
        println!("stress: {class}: {} for {each} s each", stressors.join(", "));
        figures.push(format!("{class} {} s", each * stressors.len() as u64));
    }
    Ok(figures.join(", "))
}

/// One stressor after the other, as long as their checks hold.
fn stress(stressors: &[&str], seconds: u64, limits: Limits<'_>) -> Result<Ended> {
    let directory = TempDir::new()?;
    let command = |stressor: &&str| {
        let each = format!("--timeout {seconds}s {SIZES} --{stressor} {}", limits.cpus);
        format!("stress-ng --verify --metrics-brief {each}")
    };
    let script = stressors.iter().map(command).collect::<Vec<_>>().join(" && ");
    in_guest::run(directory.path(), limits, &["sh", "-c", &script])
}

fn verdict(class: &str, stressors: usize, ended: &Ended) -> Result<()> {
    let count = |what: &str| ended.said.lines().filter(|line| line.contains(what)).count();
    let sound = ended.code == Some(0) && count(FAILURE) == 0 && count(SUCCESS) == stressors;
    ensure!(sound, "{class} ended with {:?}:\n{}", ended.code, ended.tail());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_check_fails_the_class() {
        let ended = |code, said: &str| Ended { code: Some(code), said: said.to_owned() };
        let good = "stress-ng: info:  [7] successful run completed in 10.00s\n";
        verdict("cpu", 1, &ended(0, good)).expect("sound");
        verdict("cpu", 1, &ended(2, good)).expect_err("exit status");
        verdict("cpu", 1, &ended(0, "")).expect_err("it never came to its end");
        let said = format!("stress-ng: fail:  [8] cpu: a wrong result\n{good}");
        let error = verdict("cpu", 1, &ended(0, &said)).expect_err("a check").to_string();
        assert!(error.contains("a wrong result"), "{error}");
    }
}
