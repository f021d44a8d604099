//! What stands for the process where this crate is linked by tests.
//!
//! The usual base is assumed: RAM, marks, tables, regions and look-ups have the addresses that [`wedge_abi`] says, and lie
//! where the model does ([`Model::reach`]).

#[cfg(not(freestanding))]
use core::sync::atomic::{AtomicPtr, Ordering};

pub use crate::filter::{MAP_EMPTY, MAP_PRIVATE, MPROTECT, MUNMAP, PKEY_MPROTECT};

/// A process: its host calls, and its memory as far as the code here reaches it by address.
#[derive(Debug)]
pub struct Model {
    /// Any host call but mmap: number and five arguments.
    pub call: fn(u64, u64, u64, u64, u64, u64) -> i64,
    /// Maps guest RAM, or memory without content: address, bytes, protection, flags, offset.
    pub map: fn(u64, u64, u64, u64, u64) -> i64,
    /// Writes bytes into a private copy: address, how many, which.
    pub poke: fn(u64, u64, u64) -> i64,
    /// Where the bytes of the page that is mapped at an HVA can be read.
    pub shown: fn(u64) -> u64,
    /// Eight bytes of the user's memory, if they are mapped.
    pub user_word: fn(u64) -> Option<u64>,
    /// Where RAM, marks, tables, regions or look-ups can be reached that have this address.
    pub reach: fn(usize) -> usize,
}

// The linker script of a wedge has these, and assembly names them. With a model nothing leads there.
#[cfg(not(freestanding))]
core::arch::global_asm!(
    ".pushsection .rodata.absent, \"a\"",
    ".globl shared_page, vcpu_page, gate_page, user_page, journal_page",
    ".globl stack_top, alt_stack, code_cache",
    "shared_page: vcpu_page: gate_page: user_page: journal_page:",
    "stack_top: alt_stack: code_cache:",
    ".quad 0",
    ".popsection",
);

#[cfg(not(freestanding))]
static MODEL: AtomicPtr<Model> = AtomicPtr::new(core::ptr::null_mut());

/// From now on this is the process.
#[cfg(not(freestanding))]
pub fn install(model: &'static Model) {
    MODEL.store(core::ptr::from_ref(model).cast_mut(), Ordering::Release);
}

/// The one that was installed.
#[cfg(not(freestanding))]
pub(crate) fn model() -> Option<&'static Model> {
    // SAFETY: null, or what `install` was given, which lives for ever and is not written.
    unsafe { MODEL.load(Ordering::Acquire).as_ref() }
}

/// A wedge is a process.
#[cfg(freestanding)]
#[inline(always)]
pub(crate) const fn model() -> Option<&'static Model> {
    None
}
