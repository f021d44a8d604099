//! Far JMP and CALL: code segments, call gates, tasks (SDM 5.8).

use crate::{
    cpu::Cpu,
    descriptor::{Descriptor, is_null, selector_fault},
    exec::Choice,
    op::Op,
    system::System,
    task::TaskSwitch,
    tlb::View,
};
use iced_x86::{Code, Instruction};
use x86::{
    Fault, Gate, Segment, paging, reg, seg,
    segment::{attr, kind},
    vector,
};

/// Offset of RSP0 in the 64-bit TSS.
const TSS_RSP0: u64 = 4;

/// What a far transfer does besides jumping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Transfer {
    Jump,
    /// CALL, pushing words of this many bytes.
    Call(usize),
}

/// A code segment and an offset in it.
struct FarTarget {
    cs: Segment,
    rip: u64,
}

impl<S: System> Cpu<S> {
    /// What goes into RIP together with this code segment: compatibility mode takes the lower half
    /// of a 64-bit offset.
    pub(crate) fn check_far_target(&self, cs: &Segment, offset: u64) -> Result<u64, Fault> {
        let long = cs.attr & attr::L != 0;
        let (rip, fits) = match self.vcpu.long_mode() {
            true if long => (offset, paging::canonical(offset)),
            true => (offset & 0xffff_ffff, offset & 0xffff_ffff <= u64::from(cs.limit)),
            false => (offset, offset <= u64::from(cs.limit)),
        };
        if fits { Ok(rip) } else { Err(Fault::gp(0)) }
    }

    /// Pushes the words of a far call on the current stack, all or none.
    fn push_words(&mut self, sys: &mut S, size: usize, words: &[u64]) -> Result<(), Fault> {
        let rsp = self.vcpu.gpr[reg::RSP];
        for word in words {
            let pushed = match size {
                2 => self.push::<2>(sys, *word),
                4 => self.push::<4>(sys, *word),
                _ => self.push::<8>(sys, *word),
            };
            if let Err(fault) = pushed {
                self.vcpu.gpr[reg::RSP] = rsp;
                return Err(fault);
            }
        }
        Ok(())
    }

    /// A far JMP or CALL to what a selector names.
    fn far(&mut self, sys: &mut S, selector: u16, offset: u64, how: Transfer) -> Result<(), Fault> {
        if self.real_style() {
            let cs = self.real_segment(seg::CS, selector);
            return self.go(sys, FarTarget { cs, rip: offset }, how);
        }
        if is_null(selector) {
            return Err(Fault::gp(0));
        }
        let found = self.descriptor(sys, selector, vector::GP)?;
        if !found.segment.is_system() {
            let cs = self.far_code_segment(sys, &found)?;
            return self.go(sys, FarTarget { cs, rip: offset }, how);
        }
        self.far_system(sys, &found, how)
    }

    /// Pushes the return address if it is a call, and jumps, without a change of level.
    fn go(&mut self, sys: &mut S, target: FarTarget, how: Transfer) -> Result<(), Fault> {
        // The return address is stored first and stays below RSP if the target is none: so do CPUs.
        let rsp = self.vcpu.gpr[reg::RSP];
        if let Transfer::Call(size) = how {
            let back = self.vcpu.seg[seg::CS].selector.into();
            self.push_words(sys, size, &[back, self.vcpu.rip])?;
        }
        let rip = self.check_far_target(&target.cs, target.rip);
        let rip = rip.inspect_err(|_| self.vcpu.gpr[reg::RSP] = rsp)?;
        self.vcpu.seg[seg::CS] = target.cs;
        self.jump(rip);
        Ok(())
    }

    /// A code segment reached directly: the level stays.
    fn far_code_segment(&mut self, sys: &mut S, found: &Descriptor) -> Result<Segment, Fault> {
        let (s, cpl) = (found.segment, self.vcpu.cpl());
        let level =
            if s.is_conforming() { s.dpl() <= cpl } else { s.rpl() <= cpl && s.dpl() == cpl };
        if !s.is_code() || !level || self.impossible_size(&s) {
            return Err(selector_fault(vector::GP, s.selector));
        }
        self.commit_code_segment(sys, found, cpl)
    }

    /// Both L and D: reserved in long mode.
    pub(super) fn impossible_size(&self, s: &Segment) -> bool {
        let both = attr::L | attr::DB;
        self.vcpu.long_mode() && s.attr & both == both
    }

    /// Checks presence and marks accessed a code segment that will run at `level`.
    pub(super) fn commit_code_segment(
        &mut self,
        sys: &mut S,
        found: &Descriptor,
        level: u8,
    ) -> Result<Segment, Fault> {
        let s = found.segment;
        if !s.present() {
            return Err(selector_fault(vector::NP, s.selector));
        }
        self.mark_accessed(sys, found)?;
        let selector = s.selector & !3 | u16::from(level);
        Ok(Segment { selector, attr: s.attr | attr::ACCESSED, ..s })
    }

    /// Call gates, and outside long mode task gates and TSSs.
    fn far_system(&mut self, sys: &mut S, found: &Descriptor, how: Transfer) -> Result<(), Fault> {
        let selector = found.segment.selector;
        let level = self.vcpu.cpl().max(found.segment.rpl());
        let long = self.vcpu.long_mode();
        let known = match found.segment.kind() {
            kind::CALL => true,
            kind::CALL16 | kind::TASK | kind::TSS16 | kind::TSS => !long,
            _ => false,
        };
        if !known || found.segment.dpl() < level {
            return Err(selector_fault(vector::GP, selector));
        }
        if !found.segment.present() {
            return Err(selector_fault(vector::NP, selector));
        }
        match found.segment.kind() {
            kind::CALL | kind::CALL16 => self.call_gate(sys, found, how),
            kind::TASK => self.far_task(sys, found.gate().selector, how),
            _ => self.far_task(sys, selector, how),
        }
    }

    fn far_task(&mut self, sys: &mut S, selector: u16, how: Transfer) -> Result<(), Fault> {
        let reason = if how == Transfer::Jump { TaskSwitch::Jump } else { TaskSwitch::Call };
        self.switch_task(sys, selector, reason, self.vcpu.rflags)
    }

    fn call_gate(&mut self, sys: &mut S, found: &Descriptor, how: Transfer) -> Result<(), Fault> {
        let (long, cpl) = (self.vcpu.long_mode(), self.vcpu.cpl());
        let mut gate = found.gate();
        if long {
            let high = self.descriptor_high(sys, found.segment.selector, vector::GP)?;
            gate = gate.with_high(high);
        }
        if is_null(gate.selector) {
            return Err(Fault::gp(0));
        }
        let code = self.descriptor(sys, gate.selector, vector::GP)?;
        let s = code.segment;
        let inward = how != Transfer::Jump && !s.is_conforming();
        let level = if s.is_conforming() || inward { s.dpl() <= cpl } else { s.dpl() == cpl };
        let sized = !long || s.attr & (attr::L | attr::DB) == attr::L;
        if !s.is_code() || !level || !sized {
            return Err(selector_fault(vector::GP, gate.selector));
        }
        let new = if inward { s.dpl() } else { cpl };
        let cs = self.commit_code_segment(sys, &code, new)?;
        let target = FarTarget { cs, rip: gate.offset };
        if new < cpl {
            return self.call_inward(sys, target, &gate);
        }
        let size = if long { 8 } else { gate_word(&gate) };
        let how = if how == Transfer::Jump { how } else { Transfer::Call(size) };
        self.go(sys, target, how)
    }

    /// A call to a more privileged level, on that level's stack from the TSS.
    fn call_inward(&mut self, sys: &mut S, target: FarTarget, gate: &Gate) -> Result<(), Fault> {
        self.check_far_target(&target.cs, target.rip)?;
        let level = target.cs.rpl();
        let (old_ss, old_sp) = (self.vcpu.seg[seg::SS], self.vcpu.gpr[reg::RSP]);
        let back = [self.vcpu.seg[seg::CS].selector.into(), self.vcpu.rip];
        let (ss, sp) = if self.vcpu.long_mode() {
            let rsp = self.tss_stack(sys, TSS_RSP0 + 8 * u64::from(level))?;
            let frame = [old_ss.selector.into(), old_sp, back[0], back[1]];
            let top = self.push_long(sys, View::at_level(level), rsp, &frame, None)?;
            (Segment::null(level.into(), level), top)
        } else {
            let (ss, sp) = self.legacy_tss_stack(sys, level)?;
            let mut frame = vec![old_ss.selector.into(), old_sp];
            self.copy_parameters(sys, gate, &mut frame)?;
            frame.extend(back);
            let size = gate_word(gate) as u64;
            let top = self.push_legacy(sys, (ss, sp, ss.selector), level, size, &frame)?;
            (ss, top)
        };
        self.vcpu.seg[seg::SS] = ss;
        self.vcpu.gpr[reg::RSP] = sp;
        self.vcpu.seg[seg::CS] = target.cs;
        self.update_view();
        self.jump(target.rip);
        Ok(())
    }

    /// The caller's stack words a legacy call gate copies, the highest first.
    fn copy_parameters(
        &mut self,
        sys: &mut S,
        gate: &Gate,
        frame: &mut Vec<u64>,
    ) -> Result<(), Fault> {
        let size = gate_word(gate);
        for n in (0..u64::from(gate.parameters)).rev() {
            frame.push(match size {
                2 => self.peek::<2>(sys, 2 * n)?,
                _ => self.peek::<4>(sys, 4 * n)?,
            });
        }
        Ok(())
    }
}

/// Bytes of the stack words a legacy gate pushes.
fn gate_word(gate: &Gate) -> usize {
    if gate.kind & 8 != 0 { 4 } else { 2 }
}

/// The far pointer an instruction names: selector and offset.
fn pointer<S: System, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(u16, u64), Fault> {
    use Code::*;
    match op.insn.code() {
        Jmp_ptr1616 | Call_ptr1616 => {
            Ok((op.insn.far_branch_selector(), op.insn.far_branch16().into()))
        }
        Jmp_ptr1632 | Call_ptr1632 => {
            Ok((op.insn.far_branch_selector(), op.insn.far_branch32().into()))
        }
        _ => cpu.load_pointer::<SIZE>(sys, op),
    }
}

impl<S: System> Cpu<S> {
    /// Loads a far pointer from memory: an offset of `SIZE` bytes, then the selector.
    pub(super) fn load_pointer<const SIZE: usize>(
        &mut self,
        sys: &mut S,
        op: &Op<S>,
    ) -> Result<(u16, u64), Fault> {
        let linear = self.linear(op, SIZE as u64, false)?;
        let offset = self.load::<SIZE>(sys, linear);
        let offset = offset.map_err(|fault| self.blame_stack(op, fault))?;
        let linear = self.part_address(op, SIZE, 2, false)?;
        let selector = self.load::<2>(sys, linear);
        let selector = selector.map_err(|fault| self.blame_stack(op, fault))?;
        Ok((selector as u16, offset))
    }
}

fn jmp<S: System, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let (selector, offset) = pointer::<S, SIZE>(cpu, sys, op)?;
    cpu.far(sys, selector, offset, Transfer::Jump)
}

fn call<S: System, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let (selector, offset) = pointer::<S, SIZE>(cpu, sys, op)?;
    cpu.far(sys, selector, offset, Transfer::Call(SIZE))
}

pub(super) fn select<S: System>(insn: &Instruction) -> Option<Choice<S>> {
    Some(match insn.code() {
        Code::Jmp_ptr1616 | Code::Jmp_m1616 => (jmp::<S, 2>, true),
        Code::Jmp_ptr1632 | Code::Jmp_m1632 => (jmp::<S, 4>, true),
        Code::Jmp_m1664 => (jmp::<S, 8>, true),
        Code::Call_ptr1616 | Code::Call_m1616 => (call::<S, 2>, true),
        Code::Call_ptr1632 | Code::Call_m1632 => (call::<S, 4>, true),
        Code::Call_m1664 => (call::<S, 8>, true),
        _ => return None,
    })
}
