//! What an engine that runs part of the guest itself must hear from the interpreter.
//!
//! Such an engine keeps translations and code of its own. It turns recording on and drains the record
//! before it runs anything: every flush the guest asked for, and every page the interpreter
//! decoded code from (which must not be written behind its back).

use crate::{cpu::Cpu, system::System};
use x86::control::cr4;

/// Translations the guest has declared stale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flush {
    /// One page (a GVA) in the address space with this PCID.
    Page {
        /// Process-context identifier, zero if there are none.
        pcid: u16,
        /// Linear address.
        linear: u64,
    },
    /// All but global pages of the address space with this PCID.
    Space {
        /// Process-context identifier, zero if there are none.
        pcid: u16,
    },
    /// Everything.
    All,
}

/// The record.
#[derive(Clone, Debug, Default)]
pub struct Record {
    /// Flushes, in order.
    pub flushes: Vec<Flush>,
    /// RAM offsets of pages that now hold decoded code.
    pub code_pages: Vec<u64>,
}

/// Whether to record, and what has been.
#[derive(Clone, Debug, Default)]
pub(crate) struct Observer {
    on: bool,
    record: Record,
}

impl Observer {
    pub fn flush(&mut self, flush: Flush) {
        if self.on {
            self.record.flushes.push(flush);
        }
    }
    pub fn code_page(&mut self, offset: u64) {
        if self.on {
            self.record.code_pages.push(offset);
        }
    }
}

impl<S: System> Cpu<S> {
    /// Records from now on, and ends [`Cpu::run`] with [`crate::Exit::UserCode`] whenever 64-bit
    /// user code is about to run.
    pub fn observe(&mut self) {
        self.observer.on = true;
    }

    /// Takes the record.
    pub fn take_record(&mut self) -> Record {
        std::mem::take(&mut self.observer.record)
    }

    /// Somebody observes, and 64-bit user code comes next that needs no watching by instruction.
    pub(crate) fn leaves_to_observer(&self) -> bool {
        self.observer.on && self.vcpu.cpl() == 3 && self.vcpu.is_64bit() && !self.must_step()
    }

    /// The current PCID, zero while there are none.
    pub(crate) fn pcid(&self) -> u16 {
        if self.vcpu.cr4 & cr4::PCIDE != 0 { (self.vcpu.cr3 & 0xfff) as u16 } else { 0 }
    }
}
