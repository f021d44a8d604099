//! The wedge: alone in its process with the guest's memory, it runs guest user code directly and
//! guest kernel code as the translator made it, and hands what it cannot do itself to the monitor.
//!
//! No libc, no heap, no thread-local storage, no writable statics, no panics, no vector registers.
//! User code comes back by signals only. Host calls are possible only from this text and only with
//! a secret; it lies, like all that user code must not touch, in pages with a protection key.
//!
//! Whatever ends guest code puts the state into the [`wedge_abi::VcpuPage`] and comes to [`context`] on a fresh stack: that
//! takes one step after the other until guest code goes on, and gives each the [`Context`] to work on.
//!
//! - `setup` makes the process a wedge: memory, signal handlers; `filter` says which host calls it has.
//! - `run` goes on with guest code as `RunControl::go` says, `gates` are the last instructions of that.
//! - `signal` is where guest code comes back.
//! - `assist` does SYSCALL, SYSRET and IRET without the monitor.
//! - `narrow` has what 32-bit user code needs besides, `narrow_kernel` what a 32-bit kernel does.
//! - `blocks` finds translated code by its guest address.
//! - `fault` takes page faults, `mmu` walks the guest's page tables and maps.
//! - `claims` knows whether the program has memory where the wedge's or the kernel's lies.
//! - `cpuid` answers CPUID; `taps` records that translated code has come by a point.
//! - `text` tells which pages of user code it may map; `keys` are bytes that must not be in them.
//! - `patched` is where patched system calls arrive, `sites` keeps their table out of the program's way.
//! - Where user code has a process of its own, `strict` has it run there, and `user` is that process.
//! - `turns` talks to the monitor, `orders` does what it says.
//!
//! **This crate is compiled twice.** As a member of the workspace it is an ordinary library: formatted,
//! linted, and linked by tests, for which a [`model`] stands for the process. `engine/wedge/build.rs`
//! compiles the same files once more, with `cfg(freestanding)`, and links them as the image of a wedge. What
//! differs is the panic handler, and whether there can be a model.
#![no_std]
#![cfg_attr(freestanding, no_main)]
// UNSAFETY: all of it is assembly, host calls, and memory at fixed addresses.
#![allow(unsafe_code)]

mod assist;
mod bells;
mod blocks;
mod claims;
mod context;
mod cpuid;
mod fault;
mod filter;
#[cfg(test)]
mod filter_tests;
mod gates;
mod hints;
mod host;
pub mod invlpg;
mod larges;
pub mod lookup;
pub mod mmu;
pub mod model;
mod narrow;
mod narrow_crossing;
mod narrow_kernel;
mod narrow_segments;
mod narrow_strings;
pub mod orders;
mod patched;
mod run;
mod search;
#[cfg(test)]
mod search_tests;
mod setup;
mod signal;
mod sites;
mod strict;
mod taps;
pub mod text;
mod turns;
mod user;
mod walk;

pub use context::Context;
use core::{
    arch::asm,
    sync::atomic::{AtomicU64, Ordering},
};
use model::model;
use wedge_abi::{BIAS, SHARED};

#[cfg(freestanding)]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    die()
}

/// Raises #UD in the wedge itself, which ends this process.
fn die() -> ! {
    assert!(model().is_none(), "the wedge ends itself");
    // SAFETY: an instruction that does not return.
    unsafe { asm!("ud2", options(noreturn)) }
}

/// Where something lies in this process that has the address `usual` with the usual base ([`wedge_abi::Base`]).
fn here(usual: usize) -> usize {
    if model().is_some() {
        return usual;
    }
    let shared: usize;
    // SAFETY: only computes an address.
    unsafe {
        asm!("lea {}, [rip + shared_page]", out(reg) shared,
            options(pure, nomem, nostack, preserves_flags));
    }
    shared.wrapping_add(usual.wrapping_sub(SHARED))
}

/// Where this code can reach what has the address `usual` with the usual base: here, but for a model's memory.
fn reach(usual: usize) -> usize {
    match model() {
        Some(model) => (model.reach)(usual),
        None => here(usual),
    }
}

/// A word at an HVA that the monitor may be changing.
///
/// # Safety
/// It is mapped, and aligned.
unsafe fn word(at: usize) -> u64 {
    // SAFETY: as asked of the caller.
    unsafe { &*(at as *const AtomicU64) }.load(Ordering::Relaxed)
}

/// Added to a kernel GVA to get its HVA.
fn bias() -> u64 {
    here(BIAS as usize) as u64
}

/// The first kernel GVA that has an HVA.
fn kernel_start() -> u64 {
    bias().wrapping_neg()
}
