//! What an engine that runs part of the guest itself must hear from the interpreter.
//!
//! Such an engine keeps translations and code of its own. It turns recording on and drains the record
//! before it runs anything: every flush the guest asked for, every page the interpreter decoded
//! code from (which must not be written behind its back), and every such page that was written.

use crate::{cpu::Cpu, system::System};
use contract::GuestRam;
use x86::{Segment, control::cr4, flags, narrow, paging, seg};

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
    /// RAM offsets of pages that held code and have been written.
    pub stale_pages: Vec<u64>,
    /// For each entry of `stale_pages`, the number of its write ([`contract::CodeNews::writes`]).
    pub writes: Vec<u64>,
}

impl Record {
    /// Nothing has been recorded.
    pub fn is_empty(&self) -> bool {
        self.flushes.is_empty() && self.code_pages.is_empty() && self.stale_pages.is_empty()
    }
}

/// The code that [`Cpu::run`] leaves to the observer: 64-bit, but for what is said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Leave {
    /// User code below this GVA.
    pub user: Option<u64>,
    /// User code that is narrow ([`narrow::is_narrow`]), too.
    pub narrow: bool,
    /// Kernel code at this GVA or above.
    pub kernel: Option<u64>,
    /// The code of 32-bit guests ([`narrow::is_of_narrow_guest`]), too: the kernel's, and programs'.
    pub narrow_guest: [bool; 2],
}

/// Entries of a kind in a record that is to be taken.
const LONG: usize = 1024;

/// RFLAGS bits with which kernel code can be left to the observer. RF is one of them: the IRET of each exception handler
/// sets it.
const PLAIN: u64 =
    flags::STATUS | flags::DF | flags::IF | flags::RF | flags::AC | flags::ID | flags::FIXED;

/// Whether to record, and what has been.
#[derive(Clone, Debug, Default)]
pub(crate) struct Observer {
    on: bool,
    leave: Leave,
    record: Record,
    /// The record has [`LONG`] entries of a kind.
    long: bool,
}

impl Observer {
    pub fn flush(&mut self, flush: Flush) {
        if self.on {
            self.record.flushes.push(flush);
            self.long |= self.record.flushes.len() >= LONG;
        }
    }
    pub fn code_page(&mut self, offset: u64) {
        if self.on {
            self.record.code_pages.push(offset);
            self.long |= self.record.code_pages.len() >= LONG;
        }
    }
    pub fn stale_page(&mut self, offset: u64, write: u64) {
        if self.on {
            self.record.writes.push(write);
            self.record.stale_pages.push(offset);
            self.long |= self.record.stale_pages.len() >= LONG;
        }
    }
}

impl<S: System> Cpu<S> {
    /// Records from now on, and ends [`Cpu::run`] with [`crate::Exit::Leave`] whenever such code is
    /// about to run.
    pub fn observe(&mut self, leave: Leave) {
        self.observer.on = true;
        self.observer.leave = leave;
    }

    /// The observer has made code from a RAM page (by offset): writes to it are to be reported.
    pub fn forbid_writes(&mut self, page: u64) {
        self.tlb.forbid_writes(page);
    }

    /// The observer has dropped the translation of a page for the guest: so does the interpreter.
    pub fn forget_page(&mut self, linear: u64) {
        self.tlb.flush_page(linear);
        self.blocks.forget_addresses();
    }

    /// A MOV to CR3 that keeps all translations has been executed elsewhere.
    pub fn adopt_space(&mut self, cr3: u64) {
        if cr3 != self.vcpu.cr3 {
            self.vcpu.cr3 = cr3 & ((1 << paging::PHYS_BITS) - 1);
            self.forget_translations();
        }
    }

    /// The record is to be taken before more code runs: as long as code does not leave to the observer, nobody else would, and a guest
    /// can have it grow for ever. [`Cpu::run`] ends with [`crate::Exit::Budget`] then.
    pub fn has_long_record(&self) -> bool {
        self.observer.long
    }

    /// Takes the record.
    pub fn take_record(&mut self, sys: &mut S) -> Record {
        if sys.ram().has_stale_code() {
            self.hear_of_code(sys);
        }
        self.observer.long = false;
        std::mem::take(&mut self.observer.record)
    }

    /// Hears of code pages in the middle of what the observer runs: RAM pages (by offset) that it may not write
    /// unnoticed any more. They stay in the record, too. True if something that was made from code is stale.
    pub fn hear_midway(&mut self, sys: &mut S) -> (Vec<u64>, bool) {
        let before = self.observer.record.code_pages.len();
        if sys.ram().has_stale_code() {
            self.hear_of_code(sys);
        }
        let record = &self.observer.record;
        (record.code_pages[before..].to_vec(), !record.stale_pages.is_empty())
    }

    /// Code run by the observer has loaded a data segment register by itself: it now holds what the
    /// guest's tables say, nothing if they refuse.
    pub fn adopt_selector(&mut self, sys: &mut S, register: usize, selector: u16) {
        if self.vcpu.seg[register].selector != selector
            && self.load_segment(sys, register, selector).is_err()
        {
            self.vcpu.seg[register] = Segment::null(0, 0);
        }
    }

    /// The same for SS. If the tables refuse, it stays as it was: its rights are the privilege level.
    pub fn adopt_stack_selector(&mut self, sys: &mut S, selector: u16) {
        let _ = self.load_segment(sys, seg::SS, selector);
    }

    /// The observer has the code that comes next, and it needs no watching by instruction.
    pub fn leaves_to_observer(&self) -> bool {
        let v = &self.vcpu;
        let leave = &self.observer.leave;
        let known = v.is_64bit() || leave.narrow && v.cpl() == 3 && narrow::is_narrow(v);
        let known = known || self.is_left_of_narrow_guest();
        if !self.observer.on || !known || self.watches_each() || self.watching {
            return false;
        }
        if self.probing.is_on() && self.probing.stays(v.rip, v.cpl() == 3) {
            return false;
        }
        match v.cpl() {
            3 => leave.user.is_some_and(|end| v.rip < end),
            0 if v.rflags & !PLAIN != 0 => false,
            0 => leave.kernel.is_some_and(|start| v.rip >= start || !v.long_mode()),
            _ => false,
        }
    }

    fn is_left_of_narrow_guest(&self) -> bool {
        let (v, [kernel, programs]) = (&self.vcpu, self.observer.leave.narrow_guest);
        let left = if v.cpl() == 0 { kernel } else { programs && v.cpl() == 3 };
        left && narrow::is_of_narrow_guest(v)
    }

    /// The current PCID, zero while there are none.
    pub fn pcid(&self) -> u16 {
        if self.vcpu.cr4 & cr4::PCIDE != 0 { (self.vcpu.cr3 & 0xfff) as u16 } else { 0 }
    }
}
