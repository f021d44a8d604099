//! The first process of a guest that runs one command for the host.
//!
//! The agent itself (`agent/`) is a static program without dependencies, embedded here as [`AGENT`].
//! It is `/init` of the guest's first root file system: it mounts what it was told to, runs the
//! command, and carries its standard streams, signals, window sizes and exit status over vsock.
//! [`protocol`] is what both sides agree on, [`lists`] reads the lists of a kernel's modules for it, [`busy`] the kernel's counts.

pub mod busy;
pub mod lists;
pub mod protocol;

/// The agent, a static ELF executable.
pub const AGENT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/agent"));

#[cfg(test)]
mod tests {
    use super::AGENT;

    #[test]
    fn the_agent_needs_no_other_file() {
        assert_eq!(&AGENT[..4], b"\x7fELF");
        let interpreter = b"/lib64/ld-linux-x86-64.so.2";
        assert!(!AGENT.windows(interpreter.len()).any(|window| window == interpreter));
    }
}
