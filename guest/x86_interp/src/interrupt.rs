//! Delivery of exceptions and interrupts.
use crate::{cpu::Cpu, system::System};
use x86::Fault;

impl<S: System> Cpu<S> {
    /// Delivers an exception.
    pub(crate) fn exception(&mut self, _sys: &mut S, _fault: Fault) {
        self.vcpu.activity = x86::Activity::Shutdown;
    }
    pub(crate) fn check_port(&mut self, _sys: &mut S, _port: u16, _size: u64) -> Result<(), Fault> {
        Ok(())
    }
    pub(crate) fn check_segment(
        &self,
        segment: usize,
        offset: u64,
        _size: u64,
        _write: bool,
    ) -> Result<u64, Fault> {
        Ok(self.vcpu.seg[segment].base.wrapping_add(offset) & 0xffff_ffff)
    }
    pub(crate) fn update_watch(&mut self) {}
    pub(crate) fn page_is_watched(&self, _linear: u64) -> bool {
        false
    }
    pub(crate) fn watch(&mut self, _linear: u64, _len: u64, _write: bool) {}
}
