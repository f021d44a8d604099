//! Who runs this process.

use rustix::process::{getgid, getgroups, getuid};

/// The user, and the groups, the primary one first.
pub fn current() -> (u32, Vec<u32>) {
    let primary = getgid().as_raw();
    let others = getgroups().unwrap_or_default();
    let others = others.into_iter().map(|group| group.as_raw()).filter(|&group| group != primary);
    (getuid().as_raw(), std::iter::once(primary).chain(others).collect())
}
