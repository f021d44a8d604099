//! The host's processors: which there are, who runs on which, and what they and the host's kernel can do.

use std::fmt;

/// The host's processors.
pub trait Processors: Sync {
    /// The numbers of those that this thread may run on.
    fn allowed(&self) -> Vec<usize>;
    /// The one this thread runs on now.
    fn current(&self) -> usize;
    /// Has a process, or with zero this thread, run on one only. Best effort.
    fn pin(&self, process: i32, processor: usize);
    /// Has a process run where this thread may. Best effort.
    fn share(&self, process: i32);
    /// Nanoseconds that this host has run, of a clock that nobody sets: the same in all of its processes.
    fn uptime_ns(&self) -> u64;
    /// What keeps this thread waiting. To be asked while the host's files are open.
    fn delays(&self) -> Box<dyn Delays>;
    /// What is possible here. Found out once, while the host's files are open.
    fn facts(&self) -> &Facts;
    /// Programs run 32-bit code, with thread-local segments and calls by INT 0x80. Found out once, by a child of this
    /// process.
    fn runs_32_bit(&self) -> bool;
    /// From now on CPUID faults in this thread as it does in every [`Body`](crate::Body), and is answered for it.
    /// Nothing happens where it cannot ([`Facts::cpuid_faults`]).
    fn fault_cpuid(&self);
}

/// What keeps a thread waiting.
pub trait Delays: fmt::Debug + Send {
    /// Time that it has been ready and not running, ns; zero where the host does not say.
    fn waited_ns(&self) -> u64;
}

/// What the host's CPU and kernel can do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Memory can be closed to parts of a process by protection keys.
    pub keys: bool,
    /// Programs can load protection keys, whether these are of use to us or not.
    pub keys_load: bool,
    /// Programs may read and write the segment bases.
    pub bases: bool,
    /// CPUID can be made to fault in user code.
    pub cpuid_faults: bool,
    /// User code's system calls can be handed to the process itself.
    pub user_dispatch: bool,
    /// There is vector state beyond x87, SSE and AVX.
    pub more_vectors: bool,
    /// Mappings a process may have.
    pub max_mappings: usize,
    /// The lowest HVA at which memory can be mapped.
    pub lowest_address: u64,
}
