//! The probes, one file per risky mechanism.

mod syscall;

/// A probe's name, title and body.
pub type Probe = (&'static str, &'static str, fn());

/// Every probe, in the order of docs/probes.md.
pub const ALL: &[Probe] =
    &[("syscall", "guest system calls caught by seccomp and user dispatch", syscall::run)];
