//! Executable memory and the call into it.
//!
//! The memory is one memory object mapped twice: a writable mapping to put stubs into and an executable
//! one to run them from. No page is ever writable and executable at the same address.
//!
//! Why calls are sound: an [`Entry`] is an offset below `used` of one `StubMemory` at which a whole
//! [`Stub`] was written, or the memory was cleared since and then something else may be there; so
//! `clear` is to be followed by forgetting all entries, which `HostVectorUnit` does by its
//! generation. To keep the argument local, an entry carries the epoch it was made in and `call`
//! checks it. What a stub does is argued in `stub`.
#![allow(unsafe_code)]
// UNSAFETY: running generated code needs raw mappings and a call through a function pointer.

use core::ptr;
use std::io;

use host::{Access, Mapping, Piece};
use x86::fpu::FpuState;
use x86_interp::VectorOperands;

use crate::stub::Stub;

/// Stubs start at multiples of this: half a cache line.
const ALIGN: usize = 32;

type Function = unsafe extern "sysv64" fn(*mut FpuState, *mut VectorOperands, u32) -> u32;

/// A stub in a [`StubMemory`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    offset: u32,
    epoch: u32,
}

/// Memory that holds stubs.
pub(crate) struct StubMemory {
    writable: Mapping,
    executable: Mapping,
    used: usize,
    epoch: u32,
}

impl StubMemory {
    /// `size` bytes, a multiple of the page size.
    pub(crate) fn new(size: usize) -> io::Result<Self> {
        let object = host::current().object("ring3-stubs", size as u64)?;
        let all = [Piece { offset: 0, len: size }];
        Ok(Self {
            writable: object.map(&all, Access::Write)?,
            executable: object.map(&all, Access::Execute)?,
            used: 0,
            epoch: 0,
        })
    }

    /// Copies a stub in; `None` if there is no room left.
    pub(crate) fn install(&mut self, stub: &Stub) -> Option<Entry> {
        let code = stub.code();
        let start = self.used;
        let end = start.checked_add(code.len())?.checked_next_multiple_of(ALIGN)?;
        if end > self.writable.len() {
            return None;
        }
        // SAFETY: [start, start + len) is inside the mapping, checked above, and disjoint from
        // every stub installed before, so nothing that can be executed changes.
        unsafe {
            let target = self.writable.base().as_ptr().add(start);
            ptr::copy_nonoverlapping(code.as_ptr(), target, code.len());
        }
        self.used = end;
        Some(Entry { offset: u32::try_from(start).ok()?, epoch: self.epoch })
    }

    /// Makes room; entries made before are refused from now on.
    pub(crate) fn clear(&mut self) {
        self.used = 0;
        self.epoch += 1;
    }

    /// Runs a stub and returns what it returns.
    #[inline]
    pub(crate) fn call(
        &self,
        entry: Entry,
        fpu: &mut FpuState,
        operands: &mut VectorOperands,
        mxcsr: u32,
    ) -> u32 {
        assert!(entry.epoch == self.epoch, "entry of a stub that is gone");
        // SAFETY: since `clear` was not called in between, a whole stub is at the offset. Stubs
        // follow the System V convention, access only what the two references cover, leave MXCSR,
        // the x87 state and the direction flag as Rust has them, and cannot fault.
        unsafe {
            let code = self.executable.base().as_ptr().add(entry.offset as usize);
            let function: Function = core::mem::transmute(code);
            function(fpu, operands, mxcsr)
        }
    }
}
