//! Delivery in long mode: 16-byte gates, 64-bit handlers, IST (SDM 6.14).

use super::Event;
use crate::{
    cpu::Cpu,
    descriptor::{is_null, selector_fault},
    system::System,
    tlb::View,
};
use x86::{
    Fault, Gate, Segment, paging, reg, seg,
    segment::{attr, kind},
    vector,
};

/// Offset of RSP0 in the 64-bit TSS; IST1 (SDM figure 8-11).
const TSS_RSP0: u64 = 4;
const TSS_IST1: u64 = 36;

impl<S: System> Cpu<S> {
    pub(super) fn deliver_long(&mut self, sys: &mut S, event: &Event) -> Result<(), Fault> {
        let gate = self.long_gate(sys, event)?;
        let cs = self.handler_code_segment(sys, gate.selector, true)?;
        if !paging::canonical(gate.offset) {
            return Err(Fault::gp(0));
        }
        let (old, new) = (self.vcpu.cpl(), cs.rpl());
        let rsp = match gate.ist {
            0 if new == old => self.vcpu.gpr[reg::RSP],
            0 => self.tss_stack(sys, TSS_RSP0 + 8 * u64::from(new))?,
            ist => self.tss_stack(sys, TSS_IST1 + 8 * u64::from(ist - 1))?,
        };
        let v = &self.vcpu;
        let (ss, back) = (v.seg[seg::SS].selector, v.seg[seg::CS].selector);
        let frame = [ss.into(), v.gpr[reg::RSP], event.rflags, back.into(), v.rip];
        let view = View::at_level(new);
        let top = self.push_long(sys, view, rsp & !15, &frame, event.code)?;

        self.vcpu.gpr[reg::RSP] = top;
        self.vcpu.seg[seg::CS] = cs;
        if new != old {
            self.vcpu.seg[seg::SS] = Segment::null(new.into(), new);
        }
        self.vcpu.rip = gate.offset;
        let interrupt_gate = gate.kind == kind::INTERRUPT;
        self.vcpu.rflags = Event::handler_flags(self.vcpu.rflags, interrupt_gate);
        Ok(())
    }

    /// The gate of the event, checked.
    fn long_gate(&mut self, sys: &mut S, event: &Event) -> Result<Gate, Fault> {
        let code = event.gate_code();
        let offset = u64::from(event.vector) * 16;
        if offset + 15 > u64::from(self.vcpu.idtr.limit) {
            return Err(Fault::gp(code));
        }
        let address = self.vcpu.idtr.base.wrapping_add(offset);
        let low = self.load_system::<8>(sys, address)?;
        let high = self.load_system::<8>(sys, address.wrapping_add(8))?;
        let gate = Gate::from_descriptor(low).with_high(high);
        let wrong_kind = !matches!(gate.kind, kind::INTERRUPT | kind::TRAP);
        if wrong_kind || event.software && gate.dpl < self.vcpu.cpl() {
            return Err(Fault::gp(code));
        }
        if !gate.present {
            return Err(Fault::with_code(vector::NP, code));
        }
        Ok(gate)
    }

    /// The code segment a gate leads to; its RPL is the privilege level of the handler.
    pub(super) fn handler_code_segment(
        &mut self,
        sys: &mut S,
        selector: u16,
        long: bool,
    ) -> Result<Segment, Fault> {
        if is_null(selector) {
            return Err(Fault::gp(0));
        }
        let found = self.descriptor(sys, selector, vector::GP)?;
        let (s, cpl) = (found.segment, self.vcpu.cpl());
        let sized = !long || s.attr & (attr::L | attr::DB) == attr::L;
        if !s.is_code() || s.dpl() > cpl || !sized {
            return Err(selector_fault(vector::GP, selector));
        }
        if !s.present() {
            return Err(selector_fault(vector::NP, selector));
        }
        self.mark_accessed(sys, &found)?;
        let level = if s.is_conforming() { cpl } else { s.dpl() };
        let selector = selector & !3 | u16::from(level);
        Ok(Segment { selector, attr: s.attr | attr::ACCESSED, ..s })
    }

    /// Reads a stack pointer of the 64-bit TSS.
    pub(crate) fn tss_stack(&mut self, sys: &mut S, offset: u64) -> Result<u64, Fault> {
        let tr = self.vcpu.tr;
        if offset + 7 > u64::from(tr.limit) {
            return Err(selector_fault(vector::TS, tr.selector));
        }
        self.load_system::<8>(sys, tr.base.wrapping_add(offset))
    }

    /// Writes a frame, first word highest, and an error code below it; returns the new RSP.
    pub(crate) fn push_long(
        &mut self,
        sys: &mut S,
        view: View,
        rsp: u64,
        frame: &[u64],
        code: Option<u32>,
    ) -> Result<u64, Fault> {
        let mut bytes = [0; 48];
        let mut at = bytes.len();
        for word in frame.iter().copied().chain(code.map(u64::from)) {
            at -= 8;
            bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
        }
        let top = rsp.wrapping_sub((bytes.len() - at) as u64);
        match self.write_view(sys, view, top, &bytes[at..]) {
            Err(fault) if fault.vector == vector::GP => Err(Fault::with_code(vector::SS, 0)),
            done => done.map(|()| top),
        }
    }
}
