//! Every boundary of ring3 that takes bytes somebody hostile may have made, each as a [`Target`] of the fuzzer.
//!
//! Tests run each for some seconds; `cargo run --profile fuzz -p hostile` does for hours; the folder `fuzz/` runs the same targets with
//! coverage. The boundaries inside of programs and of the engine have their targets beside them: the control socket's JSON and
//! configuration files in `app/ring3`, a wedge's pages under way in `engine/fast`.
//!
//! | target | input | fails when |
//! |---|---|---|
//! | `kernel` | a kernel file, modules, a command line | a panic, or parts outside of RAM |
//! | `qcow2` | an image | a panic, or data beyond the disk |
//! | `block`, `net`, `fs`, `vsock`, `rng`, `console` | guest memory, rings, registers and doorbells | a panic; a reset does not mend it |
//! | `pci` | accesses to configuration space, BARs and MSI-X tables | a panic; identities change |
//! | `fuse` | requests of a guest's kernel to a shared folder | a panic; something outside of the folder has changed |
//! | `usernet` | frames | a panic; the gateway does not answer any more |
//! | `sockets` | vsock packets to the host's ends of streams | a panic |
//! | `monitor` | what a vhost-user monitor says to a server of ours | a panic, a hang, descriptors left |
//! | `server` | what a vhost-user server says to our monitor | a panic, a hang |
//! | `agent` | a request to the agent, and its messages | a panic; what is read is not what was said |
//! | `chipset` | accesses to ports and MMIO, and time | a panic |
//! | `interpreter` | registers and code | a panic |
//! | `translator` | code at any address | a panic; blocks that do not lie in the cache |
//! | `keeper` | what a machine has noted of its kernel's blocks | a panic; code that opens protection keys |
//! | `wedge` | an exit, reports of mappings | what is believed is no whole page of the guest's |
//! | `debugger` | packets of GDB's protocol | a panic; the machine hangs |
//! | `services` | requests and orders of those who trace, sample and watch | a panic; the machine hangs |
//! | `linux` | guest memory with the tables of a Linux kernel | a panic, a hang |
//! | `scenario` | TOML that says which faults there are | a panic; nothing is said of what is wrong |

mod devices;
mod machine;
mod targets;

pub use fuzzer::Target;

host::choose!(host_linux::Linux);

/// All of them.
pub const TARGETS: &[Target] = &[
    targets::kernel::TARGET,
    targets::qcow2::TARGET,
    targets::virtio::BLOCK,
    targets::virtio::NET,
    targets::virtio::FS,
    targets::virtio::VSOCK,
    targets::virtio::RNG,
    targets::virtio::CONSOLE,
    targets::pci::TARGET,
    targets::fuse::TARGET,
    targets::usernet::TARGET,
    targets::sockets::TARGET,
    targets::monitor::TARGET,
    targets::server::TARGET,
    targets::agent::TARGET,
    targets::chipset::TARGET,
    targets::interpreter::TARGET,
    targets::translator::TARGET,
    targets::keeper::TARGET,
    targets::wedge::TARGET,
    targets::scenario::TARGET,
    targets::debugger::TARGET,
    targets::services::TARGET,
    targets::linux::TARGET,
];

/// The target of a name.
pub fn find(name: &str) -> Option<Target> {
    TARGETS.iter().find(|target| target.name == name).copied()
}
