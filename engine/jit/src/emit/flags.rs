//! RFLAGS: the status flags, DF and ID are the host's; IF and AC are words of the vCPU page.

use super::{Emitter, Shadow};
use crate::{
    asm::{Slot, biased, plus, slot, spill},
    recover::Fixes,
    rules::Rule,
    translate::Flow,
};
use iced_x86::{Code, Instruction, MemoryOperand, Register};
use wedge_abi::{BlockExit, VcpuPage};
use x86::flags;

/// Flags that translated code keeps in the host's RFLAGS.
pub(crate) const IN_HOST: u64 = flags::STATUS | flags::DF | flags::ID;
/// Bits POPFQ may load without a call-out.
const POPPABLE: u64 = IN_HOST | flags::IF | flags::FIXED;

impl Emitter<'_> {
    pub(super) fn clear_interrupts(&mut self) -> Flow {
        self.asm.store_imm(slot!(regs.interrupt_flag), 0);
        Flow::On
    }

    /// No interrupt is taken between STI and the instruction that follows it. Where that one leaves the
    /// block, they are looked for before both; where it is interpreted, which may be to halt, or is the
    /// wedge's, or can be interrupted itself, the STI is interpreted.
    pub(super) fn set_interrupts(&mut self, insn: &Instruction, follower: Option<Rule>) -> Flow {
        let Some(follower) = follower.filter(|rule| !is_interruptible(*rule)) else {
            return self.call_out(insn);
        };
        self.shadow = if stays(follower) {
            Shadow::Checked
        } else {
            self.unless_pending(|e| {
                e.call_out(insn);
            });
            Shadow::Unchecked
        };
        self.asm.store_imm(slot!(regs.interrupt_flag), flags::IF as i32);
        Flow::On
    }

    /// STAC and CLAC. STAC opens the user's memory: if an invalidation there was put off, STAC is interpreted,
    /// and the wedge carries out the invalidation before it hands over.
    pub(super) fn set_alignment(&mut self, insn: &Instruction, on: bool) -> Flow {
        if on {
            self.unless(slot!(paging.deferred), |e| {
                e.call_out(insn);
            });
        }
        let value = if on { flags::AC as i32 } else { 0 };
        self.asm.store_imm(slot!(regs.ac), value);
        self.ac = on;
        Flow::On
    }

    /// Leaves if an interrupt is pending; the virtual IF is set.
    pub(super) fn check_pending(&mut self, next: u64) {
        self.mark_restored();
        self.unless_pending(|e| e.exit(BlockExit::InterruptWindow, 0, next));
    }

    /// Goes on if no interrupt is pending; what is emitted for the other case leaves.
    fn unless_pending(&mut self, leave: impl FnOnce(&mut Self)) {
        self.unless(slot!(run.pending), leave);
    }

    /// Code that pauses waits for another CPU, by looking. Every so often that is interpreted: whoever does so lets
    /// others have the CPU. Changes no flag.
    pub(super) fn pause(&mut self, insn: &Instruction, bytes: &[u8]) -> Flow {
        let (left, minus_one) = (Register::RCX, plus(Register::RCX, -1));
        let mut fixes = Fixes::default();
        self.put_aside(&mut fixes, 0, left);
        self.asm.load(left, slot!(run.pauses));
        self.asm.lea(left, minus_one);
        self.asm.store(slot!(run.pauses), left);
        let enough = self.asm.jrcxz();
        self.asm.load(left, spill(0));
        self.mark(false, Fixes::default());
        self.asm.raw(bytes);
        let on = self.asm.jmp_short();
        self.asm.bind_short(enough);
        self.asm.load(left, spill(0));
        self.call_out(insn);
        self.asm.bind_short(on);
        Flow::On
    }

    /// Goes on if a word is zero; what is emitted for the other case leaves. Changes no flag.
    fn unless(&mut self, word: Slot, leave: impl FnOnce(&mut Self)) {
        self.asm.store(spill(0), Register::RCX);
        self.asm.load(Register::RCX, word);
        let none = self.asm.jrcxz();
        self.asm.load(Register::RCX, spill(0));
        leave(self);
        self.asm.bind_short(none);
        self.asm.load(Register::RCX, spill(0));
    }

    /// The following bytes belong to the end of the instruction: no fault can happen in them.
    fn mark_restored(&mut self) {
        self.mark(false, Fixes::default());
    }

    pub(super) fn push_flags(&mut self) -> Flow {
        let mut fixes = Fixes::default();
        self.put_aside(&mut fixes, 0, Register::RAX);
        self.put_aside(&mut fixes, 1, Register::RCX);
        self.load_flags(&mut fixes, Register::RAX, Register::RCX);
        self.asm.store_mem(biased(Register::RSP, -8), Register::RAX);
        self.asm.load(Register::RAX, spill(0));
        self.asm.load(Register::RCX, spill(1));
        self.lower_stack();
        Flow::On
    }

    /// Emits code that puts into a register the flags that PUSHF would push. What the register `other` held is lost.
    pub(super) fn load_flags(&mut self, fixes: &mut Fixes, into: Register, other: Register) {
        self.on_own_stack(fixes, |e| {
            e.asm.op(Code::Pushfq);
            e.asm.reg1(Code::Pop_r64, into);
        });
        self.asm.load(other, slot!(regs.interrupt_flag));
        // In user mode PUSHF always shows IF set.
        let constant = if self.ac { flags::AC } else { 0 } as i64 - flags::IF as i64;
        let merged = MemoryOperand::with_base_index_scale_displ_size(into, other, 1, constant, 8);
        self.asm.lea(into, merged);
    }

    pub(super) fn pop_flags(&mut self, insn: &Instruction) -> Flow {
        self.pop_flags_by(
            insn,
            |e| e.asm.load_mem(Register::RAX, biased(Register::RSP, 0)),
            |e| e.raise_stack(8),
        )
    }

    /// `load` emits a load of the flags from the stack into RAX, and `raise` takes them off the stack. All status flags are replaced, so
    /// they are free once it is clear that the value is usual.
    pub(super) fn pop_flags_by(
        &mut self,
        insn: &Instruction,
        load: impl FnOnce(&mut Self),
        raise: impl FnOnce(&mut Self),
    ) -> Flow {
        if self.ac {
            return self.call_out(insn);
        }
        let mut fixes = Fixes::default();
        self.put_aside(&mut fixes, 0, Register::RAX);
        self.put_aside(&mut fixes, 1, Register::RCX);
        load(self);
        // Any other bit? Extracting them makes zero or not, without flags.
        self.asm.mov_imm(Register::RCX, u64::from(!(POPPABLE as u32)));
        let (all, other) = (Register::RAX, Register::RCX);
        self.asm.op3(Code::VEX_Pext_r64_r64_rm64, other, all, other);
        let usual = self.asm.jrcxz();
        self.asm.load(Register::RAX, spill(0));
        self.asm.load(Register::RCX, spill(1));
        self.call_out(insn);
        self.asm.bind_short(usual);
        self.asm.mov(Register::RCX, Register::RAX);
        self.with_imm(Code::And_rm32_imm32, Register::ECX, flags::IF as u32);
        self.asm.store(slot!(regs.interrupt_flag), Register::RCX);
        self.with_imm(Code::And_rm32_imm32, Register::EAX, IN_HOST as u32);
        self.on_own_stack(&mut fixes, |e| {
            e.asm.reg1(Code::Push_r64, Register::RAX);
            e.asm.op(Code::Popfq);
        });
        raise(self);
        self.leave_if_open(insn.next_ip());
        Flow::On
    }

    /// RCX holds the new IF, RAX and RCX are put aside: leaves if an interrupt can be taken.
    fn leave_if_open(&mut self, next: u64) {
        let closed = self.asm.jrcxz();
        self.asm.load(Register::RCX, slot!(run.pending));
        let none = self.asm.jrcxz();
        self.asm.load(Register::RAX, spill(0));
        self.asm.load(Register::RCX, spill(1));
        self.exit(BlockExit::InterruptWindow, 0, next);
        self.asm.bind_short(closed);
        self.asm.bind_short(none);
        self.asm.load(Register::RAX, spill(0));
        self.asm.load(Register::RCX, spill(1));
    }

    fn with_imm(&mut self, code: Code, register: Register, value: u32) {
        let insn = Instruction::with2(code, register, value);
        self.asm.put(&insn.expect("an immediate form"));
    }

    /// Runs host stack instructions on the vCPU page's small stack: RSP is put aside.
    fn on_own_stack(&mut self, fixes: &mut Fixes, body: impl FnOnce(&mut Self)) {
        self.put_aside(fixes, 2, Register::RSP);
        let top = self.layout.vcpu_page
            + (core::mem::offset_of!(VcpuPage, block.stack) + size_of::<[u64; 8]>()) as u64;
        self.asm.lea_hva(Register::RSP, top);
        body(self);
        self.asm.load(Register::RSP, spill(2));
        fixes.spilled[2] = None;
        self.mark(false, *fixes);
    }
}

/// The interpreter or the wedge may come between the instruction before one with this rule and its end.
fn is_interruptible(rule: Rule) -> bool {
    // Who has come to SYSEXIT leaves by it, whether the wedge carries the instruction out or the monitor.
    let leaves = rule == Rule::ExitSystem;
    matches!(rule, Rule::String | Rule::SetAlignment(true) | Rule::Pause)
        || rule.is_left_to_others() && !leaves
}

/// The block goes on after an instruction with this rule, so a check can follow it.
fn stays(rule: Rule) -> bool {
    matches!(
        rule,
        Rule::Copy
            | Rule::Memory
            | Rule::PerCpu
            | Rule::Push
            | Rule::Pop
            | Rule::Leave
            | Rule::PushFlags
            | Rule::SetAlignment(false)
            | Rule::SwapGs
            | Rule::ReadSelector
            | Rule::ReadBase
            | Rule::WriteBase
    )
}
