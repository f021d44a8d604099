//! What far RET and IRET share, and far RET itself: a code segment at the same or an outer level,
//! and the stack of that level.

use crate::{
    cpu::Cpu,
    descriptor::{is_null, selector_fault},
    exec::Choice,
    op::Op,
    system::System,
};
use iced_x86::{Code, Instruction};
use x86::{Fault, Segment, seg, segment::attr, vector};

/// A destination popped from the stack and found good.
pub(super) struct Return {
    pub cs: Segment,
    pub rip: u64,
    /// SS and RSP, if they come from the stack too.
    pub stack: Option<(Segment, u64)>,
}

impl<S: System> Cpu<S> {
    /// The code segment to return to: never a more privileged one.
    pub(super) fn return_segment(&mut self, sys: &mut S, selector: u16) -> Result<Segment, Fault> {
        if is_null(selector) {
            return Err(Fault::gp(0));
        }
        let found = self.descriptor(sys, selector, vector::GP)?;
        let s = found.segment;
        let level = if s.is_conforming() { s.dpl() <= s.rpl() } else { s.dpl() == s.rpl() };
        let inward = s.rpl() < self.vcpu.cpl();
        if !s.is_code() || !level || inward || self.impossible_size(&s) {
            return Err(selector_fault(vector::GP, selector));
        }
        self.commit_code_segment(sys, &found, s.rpl())
    }

    /// The stack segment to return to along with `cs`.
    pub(super) fn return_stack(
        &mut self,
        sys: &mut S,
        cs: &Segment,
        selector: u16,
    ) -> Result<Segment, Fault> {
        let long = self.vcpu.long_mode() && cs.attr & attr::L != 0;
        self.stack_segment(sys, selector, cs.rpl(), long, vector::GP)
    }

    /// Commits a return; `released` more bytes of the outer stack are dropped.
    pub(super) fn finish_return(&mut self, to: Return, released: u64) {
        let outward = to.cs.rpl() > self.vcpu.cpl();
        self.vcpu.seg[seg::CS] = to.cs;
        if let Some((ss, rsp)) = to.stack {
            self.vcpu.seg[seg::SS] = ss;
            // A 16-bit stack segment takes SP only: the rest of RSP stays.
            self.set_sp(rsp);
        }
        self.drop_stack(released);
        if outward {
            self.drop_inner_segments();
        }
        self.update_view();
        self.jump(to.rip);
    }

    /// Word `index` of `SIZE` bytes on the stack.
    pub(super) fn word<const SIZE: usize>(
        &mut self,
        sys: &mut S,
        index: u64,
    ) -> Result<u64, Fault> {
        self.peek::<SIZE>(sys, index * SIZE as u64)
    }
}

/// RETF, with the bytes of arguments to drop in the immediate (zero without one).
fn retf<S: System, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let size = SIZE as u64;
    // CS first, and of the word it is in only the selector: both show when an access faults.
    let selector = cpu.peek::<2>(sys, size)? as u16;
    let rip = cpu.word::<SIZE>(sys, 0)?;
    if cpu.real_style() {
        let cs = cpu.real_segment(seg::CS, selector);
        cpu.check_far_target(&cs, rip)?;
        cpu.drop_stack(2 * size + op.imm);
        cpu.vcpu.seg[seg::CS] = cs;
        cpu.jump(rip);
        return Ok(());
    }
    let cs = cpu.return_segment(sys, selector)?;
    let rip = cpu.check_far_target(&cs, rip)?;
    if cs.rpl() == cpu.vcpu.cpl() {
        cpu.drop_stack(2 * size);
        cpu.finish_return(Return { cs, rip, stack: None }, op.imm);
        return Ok(());
    }
    let rsp = cpu.peek::<SIZE>(sys, 2 * size + op.imm)?;
    let selector = cpu.peek::<SIZE>(sys, 3 * size + op.imm)? as u16;
    let ss = cpu.return_stack(sys, &cs, selector)?;
    cpu.finish_return(Return { cs, rip, stack: Some((ss, rsp)) }, op.imm);
    Ok(())
}

pub(super) fn select<S: System>(insn: &Instruction) -> Option<Choice<S>> {
    Some(match insn.code() {
        Code::Retfw | Code::Retfw_imm16 => (retf::<S, 2>, true),
        Code::Retfd | Code::Retfd_imm16 => (retf::<S, 4>, true),
        Code::Retfq | Code::Retfq_imm16 => (retf::<S, 8>, true),
        _ => return None,
    })
}
