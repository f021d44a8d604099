//! The law of the shadow MMU: no host mapping grants what the guest's page tables, and the stale entries
//! that a TLB may hold, do not.
//!
//! Tested is the code that runs: the monitor's half (`fast::Slots`, `fast::Space`) and the wedge's half (`stub::mmu`,
//! `stub::orders`). Both change a table of mappings ([`process`]) in place of the wedge's process;
//! `stub::model` leads them to it. A guest that does random things to random page tables
//! ([`guest`], [`tables`]) runs on both, and beside it a model of an x86 TLB that knows nothing of either
//! ([`tlb`]): it remembers every translation that the tables have allowed since the guest flushed it.
//! Whenever guest code is about to run, every mapping of its wedge must be covered by that memory:
//!
//! - the page, the rights, dirty before writable, executable only if so allowed;
//! - kernel pages behind the protection key, user pages not;
//! - no page writable that code was made from, no changed copy older than its page;
//! - in every other run, nothing executable for user code but copies, and in these no bytes that open protection keys, across
//!   their borders neither. Pages are full of such bytes, and of such as make them with what is beside them.
//!
//! Where the model is narrower than the architecture: lower-half pages are not global (ring3 keeps them
//! per PCID), and the kernel has touched its regions before user pages appear in them (CAVEATS.md).

mod guest;
mod monitor;
mod process;
mod tables;
mod tlb;

#[cfg(test)]
mod text_tests;

pub use monitor::Run;

host::choose!(host_fake::Fake);
