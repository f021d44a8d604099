//! Breakpoints and single step (SDM 17.2, 17.3).
//!
//! Instruction breakpoints are compared before each instruction; while any is enabled the CPU
//! steps instead of running blocks. Data breakpoints work through the TLB: a watched page is never
//! cached, so every access to it takes the slow path, which reports here. What an instruction
//! hits collects in `Cpu::traps` and becomes one #DB after it.

use crate::{cpu::Cpu, system::System};
use x86::{Fault, control::cr4, flags, seg};

/// DR6 bits.
pub(crate) mod dr6 {
    /// The four breakpoint hits.
    pub const HITS: u64 = 0xf;
    /// General detect: a debug register was touched with DR7.GD set.
    pub const BD: u64 = 1 << 13;
    /// Single step.
    pub const BS: u64 = 1 << 14;
    /// Task switch to a TSS with its T flag set.
    pub const BT: u64 = 1 << 15;
    /// Bits that always read as one.
    pub const ONES: u64 = 0xffff_0ff0;
}

/// DR7 bits.
pub(crate) mod dr7 {
    /// Always one.
    pub const ONE: u64 = 1 << 10;
    /// General detect enable.
    pub const GD: u64 = 1 << 13;
    /// Bits software may set.
    pub const WRITABLE: u64 = 0xffff_23ff;
    /// The local enables, which a task switch clears.
    pub const LOCAL: u64 = 0x155;
}

/// Single-step traps around one instruction that treats them specially.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum TrapRule {
    /// RFLAGS.TF before the instruction decides.
    #[default]
    Normal,
    /// The instruction cleared TF on its way into a handler: no single-step trap.
    NoStep,
    /// MOV SS or POP SS: traps wait for the next instruction, and it has no breakpoint.
    Hold,
}

/// What a breakpoint waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wait {
    Execute,
    Write,
    Io,
    Access,
}

/// An enabled breakpoint: its DR6 bit, condition, linear (or port) address and length in bytes.
#[derive(Clone, Copy, Debug)]
struct Breakpoint {
    hit: u64,
    wait: Wait,
    address: u64,
    len: u64,
}

impl Breakpoint {
    fn covers(&self, address: u64, len: u64) -> bool {
        let (first, last) = (self.address, self.address.wrapping_add(self.len - 1));
        address <= last && address.wrapping_add(len - 1) >= first
    }
}

impl<S: System> Cpu<S> {
    fn breakpoints(&self) -> impl Iterator<Item = Breakpoint> + use<S> {
        let (dr, dr7) = (self.vcpu.dr, self.vcpu.dr[7]);
        (0..4).filter(move |n| dr7 >> (2 * n) & 3 != 0).map(move |n| {
            let len = [1, 2, 8, 4][(dr7 >> (18 + 4 * n) & 3) as usize];
            let wait = match dr7 >> (16 + 4 * n) & 3 {
                0 => Wait::Execute,
                1 => Wait::Write,
                2 => Wait::Io,
                _ => Wait::Access,
            };
            let address = dr[n as usize] & !(len - 1);
            Breakpoint { hit: 1 << n, wait, address, len }
        })
    }

    /// Recomputes what DR0 to DR7 ask for; after every change of them.
    pub(crate) fn update_watch(&mut self) {
        let is_data = |b: &Breakpoint| matches!(b.wait, Wait::Write | Wait::Access);
        let watching = self.breakpoints().any(|b| is_data(&b)) || self.probing.watches();
        self.stepping = self.breakpoints().any(|b| b.wait == Wait::Execute);
        if watching || self.watching {
            self.flush_tlb();
        }
        self.watching = watching;
    }

    /// The page of a linear address has a data breakpoint, so it must not enter the TLB.
    pub(crate) fn page_is_watched(&self, linear: u64) -> bool {
        let page = linear & !0xfff;
        self.watching
            && (self.probing.watches_page(page) || self.breakpoints().any(|b| b.covers(page, 4096)))
    }

    /// Notes the data breakpoints an access hits.
    pub(crate) fn watch(&mut self, linear: u64, len: u64, write: bool) {
        if !self.watching || len == 0 {
            return;
        }
        if self.probing.access(linear, len, write) {
            self.leave_block = true;
        }
        let counts = |w: Wait| w == Wait::Access || write && w == Wait::Write;
        let hit = self.breakpoints().filter(|b| counts(b.wait) && b.covers(linear, len));
        self.hit(hit.fold(0, |bits, b| bits | b.hit));
    }

    /// Notes the I/O breakpoints a port access hits (they need CR4.DE).
    pub(crate) fn watch_port(&mut self, port: u16, size: u64) {
        if self.vcpu.cr4 & cr4::DE == 0 || self.vcpu.dr[7] & 0xff == 0 {
            return;
        }
        let hit = self.breakpoints().filter(|b| b.wait == Wait::Io && b.covers(port.into(), size));
        self.hit(hit.fold(0, |bits, b| bits | b.hit));
    }

    /// A #DB with these DR6 bits is due right after the current instruction.
    fn hit(&mut self, bits: u64) {
        if bits != 0 {
            self.traps |= bits;
            self.leave_block = true;
        }
    }

    /// The instruction breakpoint at RIP, unless RFLAGS.RF suppresses it.
    pub(crate) fn check_breakpoint(&self) -> Result<(), Fault> {
        if !self.stepping || self.vcpu.rflags & flags::RF != 0 {
            return Ok(());
        }
        let linear = if self.vcpu.is_64bit() {
            self.vcpu.rip
        } else {
            self.wrap_linear(self.vcpu.seg[seg::CS].base.wrapping_add(self.vcpu.rip))
        };
        let hits = self.breakpoints().filter(|b| b.wait == Wait::Execute && b.covers(linear, 1));
        match hits.fold(0, |bits, b| bits | b.hit) {
            0 => Ok(()),
            bits => Err(Fault::debug(bits)),
        }
    }

    /// An instruction must be executed alone: something happens before or after it.
    #[inline]
    pub(crate) fn must_step(&self) -> bool {
        self.watches_each() || self.vcpu.rflags & flags::RF != 0
    }

    /// A breakpoint, a single-step trap or the end of an interrupt shadow can come at each instruction. RFLAGS.RF does not
    /// count: it only suppresses breakpoints, and without any the flag has no effect.
    #[inline]
    pub(crate) fn watches_each(&self) -> bool {
        let v = &self.vcpu;
        v.interrupt_shadow || self.stepping || v.rflags & flags::TF != 0
    }
}
