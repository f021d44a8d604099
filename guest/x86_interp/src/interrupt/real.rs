//! Delivery in real mode: the interrupt vector table (SDM 20.1.4).

use super::Event;
use crate::{cpu::Cpu, system::System};
use x86::{Fault, flags, reg, seg};

impl<S: System> Cpu<S> {
    pub(super) fn deliver_real(&mut self, sys: &mut S, event: &Event) -> Result<(), Fault> {
        let offset = u64::from(event.vector) * 4;
        if offset + 3 > u64::from(self.vcpu.idtr.limit) {
            return Err(Fault::gp(event.gate_code()));
        }
        let address = self.wrap_linear(self.vcpu.idtr.base.wrapping_add(offset));
        let target = self.load_system::<4>(sys, address)?;
        let rsp = self.vcpu.gpr[reg::RSP];
        let frame = [event.rflags, self.vcpu.seg[seg::CS].selector.into(), self.vcpu.rip];
        for word in frame {
            if let Err(fault) = self.push::<2>(sys, word) {
                self.vcpu.gpr[reg::RSP] = rsp;
                return Err(fault);
            }
        }
        self.vcpu.seg[seg::CS] = self.real_segment(seg::CS, (target >> 16) as u16);
        self.vcpu.rip = target & 0xffff;
        self.vcpu.rflags &= !(flags::IF | flags::TF | flags::RF | flags::AC);
        Ok(())
    }
}
