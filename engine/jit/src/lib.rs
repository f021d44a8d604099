//! The same-ISA translator for guest kernel code, and for user code if asked for.
//!
//! Kernel addresses cannot exist in a host process, so the kernel half of the guest's address
//! space appears at `guest + bias`, and the host's GS base holds the bias. Translated code keeps
//! every guest register in the same host register with its exact guest value; a memory operand
//! needs only a `gs:` prefix, and most instructions are copied. What would behave differently in
//! user mode becomes a short sequence on the [`wedge_abi::VcpuPage`], or a call-out to the interpreter.
//!
//! - [`rules`] says what becomes of an instruction; it is the one table.
//! - [`translate()`] turns the bytes at a guest address into a [`Block`].
//! - [`recover`] turns a host PC back into exact guest state.
//! - [`stubs`] are the fixed routines: entry, exit, indirect jumps.
//! - [`cache`] places blocks, links them and drops them.
//!
//! Two laws hold for every sequence. No status flag is changed unless the guest instruction
//! changes it. Nothing of the guest's state is changed before the last host instruction of a
//! sequence that can fault, except as the sequence's [`recover::Fixes`] say: so a fault anywhere
//! can be undone to the start of the guest instruction.
//!
//! User code can have its memory operands looked up in a software TLB ([`wedge_abi::Lookup`]) and executed on the
//! wedge's view of guest RAM, so that pages need no mappings of their own. So can single instructions of a 32-bit kernel's.

pub mod asm;
pub mod block;
pub mod cache;
mod copied;
mod emit;
pub mod recover;
pub mod rules;
pub mod stubs;
mod translate;

pub use block::{Block, JumpLookup, Link, Version};
pub use rules::Level;
pub use translate::{Request, Untranslatable, translate};

/// Where things are in every wedge process. All addresses are HVAs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Whose code is translated.
    pub level: Level,
    /// Several vCPUs execute it, some of them while others change it.
    pub several: bool,
    /// Added to a GVA to get its HVA, modulo 2^64: what the host's GS base is.
    pub bias: u64,
    /// What to add to an address that may be the user's or the kernel's: a table of words, within 2 GiB of
    /// the bias, by those bits of the address that `BlockState::region_mask` holds. An entry may be one that makes
    /// the address non-canonical.
    pub regions: u64,
    /// What to add to an address of the user's that is read: a table of words, as near, by those bits of the address
    /// that `BlockState::copy_index` holds. An entry makes the address non-canonical where the user's page is mapped changed.
    pub copies: Option<u64>,
    /// Programs are translated that must not reach what `regions` poisons: what they access and do not look up is checked, and
    /// so it is with what `copies` says. The two tables are one behind the other.
    pub checks: bool,
    /// The code cache.
    pub cache: u64,
    /// Bytes of the code cache.
    pub cache_len: u64,
    /// The [`wedge_abi::VcpuPage`]; within 2 GiB of the cache.
    pub vcpu_page: u64,
    /// The tables that jumps find blocks by ([`cache`]), within 2 GiB of the cache.
    pub table: u64,
    /// The table of landings ([`wedge_abi::landing_slot`]), within 2 GiB of the bias, where jumps are by landings.
    pub landings: Option<u64>,
    /// The table of look-ups ([`wedge_abi::Lookup`]), within 2 GiB of the cache, if memory operands of user code, or those of a 32-bit
    /// kernel's that are sought ([`Request::sought`]), are looked up there.
    pub lookups: Option<u64>,
    /// The words that say which pages of user code may be executed ([`wedge_abi::Lookups::verify`]), within 2 GiB of the
    /// cache, if blocks have gates.
    pub verified: Option<u64>,
    /// The origins of texts (GVAs, [`wedge_abi::Lookups::resolve`]), within 2 GiB of the cache, if blocks are for places
    /// ([`wedge_abi::place`]) and not for addresses: then what is a GVA elsewhere in this crate is a place.
    pub origins: Option<u64>,
}

impl Layout {
    /// Added to a 32-bit kernel's GVA to get its HVA, modulo 2^64.
    fn narrow_bias(&self) -> u64 {
        wedge_abi::narrow_bias(self.bias)
    }
}
