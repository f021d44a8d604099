//! The probes, one file per risky mechanism.

mod apart;
mod frame;
mod handover;
mod keys;
mod leaks;
mod mappings;
mod odd;
mod primitives;
mod round_trip;
mod state;
mod syscall;
mod user32;
mod window;

/// A probe's name, title and body.
pub type Probe = (&'static str, &'static str, fn());

/// Every probe, in the order of docs/probes.md.
pub const ALL: &[Probe] = &[
    ("syscall", "guest system calls caught by seccomp and user dispatch", syscall::run),
    ("primitives", "what single instructions and host calls cost", primitives::run),
    ("state", "nothing is lost on the ways back without sigreturn", state::run),
    ("frame", "what the size of the signal frame costs", frame::run),
    ("keys", "protection keys around signals", keys::run),
    ("leaks", "what unprivileged instructions tell guest user code", leaks::run),
    ("odd", "odd ways out of guest user code, and what the wedge sees", odd::run),
    ("window", "the guest's kernel half at guest + BIAS", window::run),
    ("round_trip", "a null system call end to end", round_trip::run),
    ("handover", "giving the vCPU to another process", handover::run),
    ("apart", "user code in a process of its own", apart::run),
    ("user32", "32-bit code", user32::run),
    ("mappings", "changing host mappings", mappings::run),
];
