//! Probes: breakpoints and watched memory of a debugger that the guest does not know of.
//!
//! Breakpoints are compared before each block, and before each instruction in a page that has one. Watched pages never
//! enter the TLB, as with the guest's own data breakpoints (`debug`).

use crate::{
    cpu::Cpu,
    system::System,
    tlb::{Right, View},
};
use contract::{Probes, Reached};
use x86::{reg, seg};

/// The probes, and what was reached.
#[derive(Clone, Debug, Default)]
pub(crate) struct Probing {
    probes: Probes,
    /// There are probes, or something was reached.
    on: bool,
    reached: Option<Reached>,
    /// The instruction at this RIP, with this RSP, has been stepped over and has faulted: it is no news when it comes again.
    faulted: Option<(u64, u64)>,
}

impl Probing {
    #[inline]
    pub fn is_on(&self) -> bool {
        self.on
    }

    /// The code at RIP is not to be left to an observer. User code runs by pages there, kernel code by instructions.
    pub fn stays(&self, rip: u64, user: bool) -> bool {
        self.reached.is_some()
            || if user { self.probes.has_page(rip) } else { self.probes.has(rip) }
    }

    pub fn watches(&self) -> bool {
        !self.probes.watches.is_empty()
    }

    pub fn watches_page(&self, page: u64) -> bool {
        self.probes.watches.iter().any(|watch| watch.covers(page, 4096))
    }

    /// Notes an access; true if it is one that is watched.
    pub fn access(&mut self, gva: u64, len: u64, write: bool) -> bool {
        let counts = self.probes.watches.iter().any(|watch| watch.counts(gva, len, write));
        if counts {
            self.reached = Some(Reached::Watch { gva, len, write });
        }
        counts
    }
}

impl<S: System> Cpu<S> {
    /// From now on [`Cpu::run`] ends at these probes and no other.
    pub fn set_probes(&mut self, probes: &Probes) {
        let reached = self.probing.reached;
        let on = reached.is_some() || !probes.is_empty();
        self.probing =
            Probing { probes: probes.clone(), on, reached, faulted: self.probing.faulted };
        self.update_watch();
    }

    /// From outside: this probe has been reached.
    pub fn reach(&mut self, reached: Reached) {
        (self.probing.on, self.probing.reached) = (true, Some(reached));
    }

    /// The probe that was reached: a breakpoint at RIP, or watched memory that the last instruction has accessed.
    pub fn take_reached(&mut self, sys: &mut S) -> Option<Reached> {
        if let Some(reached) = self.probing.reached.take() {
            self.probing.on = !self.probing.probes.is_empty();
            return Some(reached);
        }
        self.is_at_breakpoint(sys).then_some(Reached::Breakpoint)
    }

    /// The code at RIP shares its page with a breakpoint.
    #[inline]
    pub(crate) fn is_among_breakpoints(&self) -> bool {
        self.probing.on && self.probing.probes.has_page(self.linear_of(self.vcpu.rip))
    }

    /// The instruction at RIP has a breakpoint, can be fetched, and has not been stepped over before.
    pub fn is_at_breakpoint(&mut self, sys: &mut S) -> bool {
        let (rip, rsp) = (self.vcpu.rip, self.vcpu.gpr[reg::RSP]);
        if !self.probing.on || !self.probing.probes.has(self.linear_of(rip)) {
            return false;
        }
        if self.probing.faulted == Some((rip, rsp)) {
            self.probing.faulted = None;
            return false;
        }
        let user = self.vcpu.cpl() == 3;
        let view = if user { View::User } else { View::Supervisor };
        self.translate(sys, view, self.linear_of(rip), Right::Execute).is_ok()
    }

    /// Executes one instruction, whatever probes are there, and has the guest take its exception. Returns the watched memory that it has
    /// accessed.
    pub fn step_over(&mut self, sys: &mut S) -> Option<Reached> {
        let here = (self.vcpu.rip, self.vcpu.gpr[reg::RSP]);
        self.probing.faulted = None;
        if let Err(fault) = self.step(sys) {
            self.probing.faulted = (self.vcpu.rip == here.0).then_some(here);
            self.exception(sys, fault);
        }
        self.probing.reached.take()
    }

    fn linear_of(&self, rip: u64) -> u64 {
        if self.vcpu.is_64bit() {
            return rip;
        }
        self.vcpu.seg[seg::CS].base.wrapping_add(rip) & 0xffff_ffff
    }
}
