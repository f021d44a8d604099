//! Delivery of exceptions and interrupts (SDM chapter 6).
//!
//! Delivery either succeeds as a whole or changes nothing: everything that can fault (the gate,
//! the descriptors, the new stack) is done before the first register changes. A fault on the
//! way is then combined with the event that was being delivered by the rules of table 6-5.

mod legacy;
mod long;
mod real;

use crate::{
    cpu::Cpu,
    debug::{TrapRule, dr6, dr7},
    system::System,
};
use x86::{
    Activity, Fault,
    control::{cr0, cr4},
    flags, vector,
};

/// Something the CPU vectors to through the IDT.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Event {
    pub vector: u8,
    /// Error code to push.
    pub code: Option<u32>,
    /// INT n, INT3 or INTO: the gate's DPL counts, and errors on the way are the program's own.
    pub software: bool,
    /// RFLAGS to push.
    pub rflags: u64,
}

impl Event {
    /// Error code for a fault caused by the event's own gate.
    pub fn gate_code(&self) -> u32 {
        u32::from(self.vector) << 3 | 2
    }

    /// The gate is an interrupt gate: IF is cleared too.
    pub fn handler_flags(rflags: u64, interrupt_gate: bool) -> u64 {
        let cleared = flags::TF | flags::NT | flags::RF | flags::VM;
        let masked = if interrupt_gate { flags::IF } else { 0 };
        rflags & !(cleared | masked)
    }
}

/// How exceptions add up (SDM table 6-5).
#[derive(Clone, Copy, PartialEq, Eq)]
enum Severity {
    Benign,
    Contributory,
    PageFault,
    DoubleFault,
}

fn class(v: u8) -> Severity {
    match v {
        vector::DE | vector::TS | vector::NP | vector::SS | vector::GP => Severity::Contributory,
        vector::PF => Severity::PageFault,
        vector::DF => Severity::DoubleFault,
        _ => Severity::Benign,
    }
}

/// What a fault while delivering `first` becomes; `None` is a triple fault.
fn combine(first: u8, second: Fault) -> Option<Fault> {
    use Severity::*;
    match (class(first), class(second.vector)) {
        (DoubleFault, Contributory | PageFault) => None,
        (Contributory, Contributory) | (PageFault, Contributory | PageFault) => {
            Some(Fault::with_code(vector::DF, 0))
        }
        _ => Some(second),
    }
}

/// An error while delivering something that came from outside the program: EXT is set.
fn external(fault: Fault) -> Fault {
    match fault.vector {
        vector::TS | vector::NP | vector::SS | vector::GP => {
            Fault { code: fault.code.map(|code| code | 1), ..fault }
        }
        _ => fault,
    }
}

/// The exception reports the state before an instruction, which RF then keeps from hitting its
/// breakpoint again (SDM 17.3.1.1). A breakpoint's own #DB leaves that to its handler.
fn is_fault(fault: &Fault) -> bool {
    match fault.vector {
        vector::DB => fault.address & dr6::BD != 0,
        vector::BP | vector::OF | vector::NMI | vector::DF | vector::MC => false,
        _ => true,
    }
}

impl<S: System> Cpu<S> {
    /// Delivers an exception an instruction ended in, with RIP as [`Cpu::step`] left it.
    pub fn exception(&mut self, sys: &mut S, fault: Fault) {
        let mut current = fault;
        loop {
            self.record(&current);
            let resume = if is_fault(&current) { flags::RF } else { 0 };
            let event = Event {
                vector: current.vector,
                code: current.code,
                software: false,
                rflags: self.vcpu.rflags | resume,
            };
            let Err(next) = self.deliver(sys, &event) else { return };
            match combine(current.vector, external(next)) {
                Some(combined) => {
                    self.record_address(&next);
                    current = combined;
                }
                None => {
                    self.vcpu.activity = Activity::Shutdown;
                    return;
                }
            }
        }
    }

    /// Delivers a maskable interrupt. The caller has made sure it is allowed, see
    /// [`Vcpu::interruptible`](x86::Vcpu::interruptible).
    pub fn interrupt(&mut self, sys: &mut S, vector: u8) {
        self.counters.interrupts += 1;
        self.deliver_external(sys, vector);
    }

    /// Delivers an NMI; further ones wait for IRET.
    pub fn nmi(&mut self, sys: &mut S) {
        self.counters.interrupts += 1;
        self.vcpu.nmi_blocked = true;
        self.deliver_external(sys, vector::NMI);
    }

    /// Delivers #MC (SDM 15.8). A CPU shuts down that has it off in CR4, or is still busy with the last one.
    pub fn machine_check(&mut self, sys: &mut S, busy: bool) {
        if busy || self.vcpu.cr4 & cr4::MCE == 0 {
            self.vcpu.activity = Activity::Shutdown;
            return;
        }
        self.counters.exceptions[usize::from(vector::MC)] += 1;
        self.deliver_external(sys, vector::MC);
    }

    fn deliver_external(&mut self, sys: &mut S, vector: u8) {
        self.vcpu.activity = Activity::Running;
        let event = Event { vector, code: None, software: false, rflags: self.vcpu.rflags };
        if let Err(fault) = self.deliver(sys, &event) {
            self.exception(sys, external(fault));
        }
    }

    /// INT n, INT3, INTO (`software`) and INT1, as an instruction: RIP is already behind it.
    pub(crate) fn software_interrupt(
        &mut self,
        sys: &mut S,
        vector: u8,
        software: bool,
    ) -> Result<(), Fault> {
        let event = Event { vector, code: None, software, rflags: self.vcpu.rflags };
        self.deliver(sys, &event).map_err(|f| if software { f } else { external(f) })?;
        if !software {
            // INT1 is itself a debug exception: one that waited since MOV SS is part of it.
            let waited = std::mem::take(&mut self.traps);
            self.record_debug(waited);
        }
        self.trap_rule = TrapRule::NoStep;
        Ok(())
    }

    /// Side effects of an exception that happen before its handler is called.
    fn record(&mut self, fault: &Fault) {
        if let Some(count) = self.counters.exceptions.get_mut(usize::from(fault.vector)) {
            *count += 1;
        }
        self.record_address(fault);
        if fault.vector == vector::DB {
            self.record_debug(fault.address);
        }
    }

    /// What a debug exception leaves in the debug registers; INT1 alone leaves DR6 as it is.
    fn record_debug(&mut self, bits: u64) {
        if bits != 0 {
            self.vcpu.dr[6] = self.vcpu.dr[6] & !dr6::HITS | dr6::ONES | bits;
        }
        self.vcpu.dr[7] &= !dr7::GD;
    }

    fn record_address(&mut self, fault: &Fault) {
        if fault.vector == vector::PF {
            self.vcpu.cr2 = fault.address;
        }
    }

    fn deliver(&mut self, sys: &mut S, event: &Event) -> Result<(), Fault> {
        if self.vcpu.long_mode() {
            self.deliver_long(sys, event)?;
        } else if self.vcpu.cr0 & cr0::PE != 0 {
            self.deliver_legacy(sys, event)?;
        } else {
            self.deliver_real(sys, event)?;
        }
        self.vcpu.interrupt_shadow = false;
        self.trap_rule = TrapRule::Normal;
        // A single-step trap behind HLT ends it like an interrupt.
        self.vcpu.activity = Activity::Running;
        self.update_view();
        self.leave_block = true;
        Ok(())
    }
}
