//! Delivery in protected mode outside long mode: 8-byte gates, 16-bit and 32-bit frames, task
//! gates, and entry from virtual-8086 mode (SDM 6.12, 20.3.1).

use super::Event;
use crate::{cpu::Cpu, system::System, task::TaskSwitch};
use x86::{Fault, Gate, Segment, flags, reg, seg, segment::kind, vector};

impl<S: System> Cpu<S> {
    pub(super) fn deliver_legacy(&mut self, sys: &mut S, event: &Event) -> Result<(), Fault> {
        let gate = self.legacy_gate(sys, event)?;
        if gate.kind == kind::TASK {
            self.switch_task(sys, gate.selector, TaskSwitch::Gate, event.rflags)?;
            return event.code.map_or(Ok(()), |code| self.push_task_code(sys, code));
        }
        let cs = self.handler_code_segment(sys, gate.selector, false)?;
        let virtual_8086 = self.vcpu.rflags & flags::VM != 0;
        if virtual_8086 && cs.rpl() != 0 {
            return Err(crate::descriptor::selector_fault(vector::GP, gate.selector));
        }
        if gate.offset > u64::from(cs.limit) {
            return Err(Fault::gp(0));
        }
        let inner = cs.rpl() < self.vcpu.cpl();
        let (ss, sp, blame) = if inner {
            let (ss, sp) = self.legacy_tss_stack(sys, cs.rpl())?;
            (ss, sp, ss.selector)
        } else {
            (self.vcpu.seg[seg::SS], self.vcpu.gpr[reg::RSP], 0)
        };
        let (frame, len) = self.legacy_frame(event, inner);
        let wide = if gate.kind & 8 != 0 { 4 } else { 2 };
        let sp = self.push_legacy(sys, (ss, sp, blame), cs.rpl(), wide, &frame[..len])?;

        if virtual_8086 {
            for register in [seg::ES, seg::DS, seg::FS, seg::GS] {
                self.vcpu.seg[register] = Segment::null(0, 0);
            }
        }
        self.vcpu.seg[seg::SS] = ss;
        self.vcpu.gpr[reg::RSP] = sp;
        self.vcpu.seg[seg::CS] = cs;
        self.vcpu.rip = gate.offset;
        let interrupt_gate = matches!(gate.kind, kind::INTERRUPT | kind::INTERRUPT16);
        self.vcpu.rflags = Event::handler_flags(self.vcpu.rflags, interrupt_gate);
        Ok(())
    }

    fn legacy_gate(&mut self, sys: &mut S, event: &Event) -> Result<Gate, Fault> {
        let code = event.gate_code();
        let offset = u64::from(event.vector) * 8;
        if offset + 7 > u64::from(self.vcpu.idtr.limit) {
            return Err(Fault::gp(code));
        }
        let address = self.wrap_linear(self.vcpu.idtr.base.wrapping_add(offset));
        let gate = Gate::from_descriptor(self.load_system::<8>(sys, address)?);
        let right_kind = matches!(
            gate.kind,
            kind::TASK | kind::INTERRUPT16 | kind::TRAP16 | kind::INTERRUPT | kind::TRAP
        );
        if !right_kind || event.software && gate.dpl < self.vcpu.cpl() {
            return Err(Fault::gp(code));
        }
        if !gate.present {
            return Err(Fault::with_code(vector::NP, code));
        }
        Ok(gate)
    }

    /// The words to push, in that order: \[GS FS DS ES\] \[SS ESP\] EFLAGS CS EIP \[code\].
    fn legacy_frame(&self, event: &Event, inner: bool) -> ([u64; 10], usize) {
        let v = &self.vcpu;
        let selector = |register: usize| u64::from(v.seg[register].selector);
        let mut frame = [0; 10];
        let mut len = 0;
        let mut add = |words: &[u64]| {
            frame[len..len + words.len()].copy_from_slice(words);
            len += words.len();
        };
        if v.rflags & flags::VM != 0 {
            add(&[seg::GS, seg::FS, seg::DS, seg::ES].map(selector));
        }
        if inner {
            add(&[selector(seg::SS), v.gpr[reg::RSP]]);
        }
        add(&[event.rflags, selector(seg::CS), v.rip]);
        if let Some(code) = event.code {
            add(&[code.into()]);
        }
        (frame, len)
    }
}
