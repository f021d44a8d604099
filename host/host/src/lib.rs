//! The host vocabulary: what ring3 asks of the system it runs on.
//!
//! Plain types and traits only. `host_linux` implements them over Linux, `host_fake` in memory and
//! deterministically for tests. Guest, machine and engine layers ask for nothing but by these: no crate of
//! theirs links a C library (`cargo xtask layers`).
//!
//! A program has one host, as it has one allocator, and chooses it in the same way: by one line in the
//! program ([`choose!`]). Libraries ask [`current`]. What a program may want of its own, a clock that fails on
//! purpose, say, is passed to whoever uses it as a trait object.

mod locks;
mod memory;
mod process;
mod processor;
mod time;

pub use locks::Locks;
pub use memory::{Access, Mapping, Memory, MemoryObject, Piece, Seal};
pub use process::{Body, Child, End, Part, Processes, Supervision};
pub use processor::{Delays, Facts, Processors};
pub use time::{Clock, Entropy};

/// All that a host does.
pub trait Host: Memory + Processes + Processors + Entropy {}

impl<T: Memory + Processes + Processors + Entropy> Host for T {}

/// Names the host of a program: a constant or static whose reference lives for ever. Once in a program, or in
/// the test of a library.
#[macro_export]
macro_rules! choose {
    ($host:expr) => {
        const _: () = {
            // UNSAFETY: a name that the linker finds; nothing else has it.
            #[allow(unsafe_code)]
            #[unsafe(no_mangle)]
            fn ring3_host_of_this_program() -> &'static dyn $crate::Host {
                &$host
            }
        };
    };
}

/// The host of this program. One that has not chosen ([`choose!`]) does not link.
// UNSAFETY: calls what the linker has found.
#[allow(unsafe_code)]
#[inline]
pub fn current() -> &'static dyn Host {
    unsafe extern "Rust" {
        safe fn ring3_host_of_this_program() -> &'static dyn Host;
    }
    ring3_host_of_this_program()
}
