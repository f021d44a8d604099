//! Segment registers: MOV, PUSH, POP, the far pointer loads, and the FS and GS bases.

use super::{put16, second16};
use crate::{
    cpu::Cpu,
    debug::TrapRule,
    exec::{Choice, is_memory},
    op::{Op, segment_index},
    system::System,
};
use iced_x86::{Instruction, Mnemonic, Register};
use x86::{Fault, control::cr4, paging, reg, seg};

impl<S: System> Cpu<S> {
    /// Loads a segment register for MOV and POP: SS holds off interrupts and traps until after
    /// the next instruction, which is expected to load RSP.
    fn move_to_segment(
        &mut self,
        sys: &mut S,
        register: usize,
        selector: u16,
    ) -> Result<(), Fault> {
        self.load_segment(sys, register, selector)?;
        if register == seg::SS {
            self.vcpu.interrupt_shadow = true;
            self.trap_rule = TrapRule::Hold;
        }
        Ok(())
    }
}

fn mov_to<S: System>(cpu: &mut Cpu<S>, sys: &mut S, op: &Op<S>) -> Result<(), Fault> {
    let register = segment_index(op.insn.op0_register());
    let selector = second16(cpu, sys, op)?;
    cpu.move_to_segment(sys, register, selector)
}

fn mov_from<S: System>(cpu: &mut Cpu<S>, sys: &mut S, op: &Op<S>) -> Result<(), Fault> {
    let register = segment_index(op.insn.op1_register());
    put16(cpu, sys, op, cpu.vcpu.seg[register].selector.into())
}

fn push<S: System, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let register = segment_index(op.insn.op0_register());
    let selector = cpu.vcpu.seg[register].selector.into();
    if SIZE != 4 {
        return cpu.push::<SIZE>(sys, selector);
    }
    // Of a doubleword only the lower half is written (SDM vol. 2, PUSH).
    let rsp = cpu.vcpu.gpr[reg::RSP];
    cpu.set_sp(rsp.wrapping_sub(2));
    let pushed = cpu.push::<2>(sys, selector);
    if pushed.is_err() {
        cpu.vcpu.gpr[reg::RSP] = rsp;
    }
    pushed
}

fn pop<S: System, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let register = segment_index(op.insn.op0_register());
    // Only the selector is read, whatever RSP moves by.
    let selector = cpu.peek::<2>(sys, 0)? as u16;
    let rsp = cpu.vcpu.gpr[reg::RSP];
    cpu.drop_stack(SIZE as u64);
    let loaded = cpu.move_to_segment(sys, register, selector);
    if loaded.is_err() {
        cpu.vcpu.gpr[reg::RSP] = rsp;
    }
    loaded
}

/// LDS, LES, LSS, LFS, LGS.
fn load_far<S: System, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let register = match op.insn.mnemonic() {
        Mnemonic::Lds => seg::DS,
        Mnemonic::Les => seg::ES,
        Mnemonic::Lss => seg::SS,
        Mnemonic::Lfs => seg::FS,
        _ => seg::GS,
    };
    let (selector, offset) = cpu.load_pointer::<SIZE>(sys, op)?;
    cpu.load_segment(sys, register, selector)?;
    cpu.set_reg::<SIZE>(op.dst, offset);
    Ok(())
}

fn check_base<S: System>(cpu: &Cpu<S>) -> Result<(), Fault> {
    if cpu.vcpu.cr4 & cr4::FSGSBASE == 0 { Err(Fault::ud()) } else { Ok(()) }
}

fn read_base<S: System, const SEGMENT: usize>(
    cpu: &mut Cpu<S>,
    _: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    check_base(cpu)?;
    let base = cpu.vcpu.seg[SEGMENT].base;
    match op.insn.op0_register().size() {
        4 => cpu.set_reg::<4>(op.dst, base),
        _ => cpu.set_reg::<8>(op.dst, base),
    }
    Ok(())
}

fn write_base<S: System, const SEGMENT: usize>(
    cpu: &mut Cpu<S>,
    _: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    check_base(cpu)?;
    let base = match op.insn.op0_register().size() {
        4 => cpu.reg::<4>(op.dst),
        _ => cpu.reg::<8>(op.dst),
    };
    if !paging::canonical(base) {
        return Err(Fault::gp(0));
    }
    cpu.vcpu.seg[SEGMENT].base = base;
    Ok(())
}

macro_rules! by_slot {
    ($insn:expr, $f:ident) => {
        match $insn.stack_pointer_increment().unsigned_abs() {
            2 => $f::<S, 2>,
            4 => $f::<S, 4>,
            _ => $f::<S, 8>,
        }
    };
}

pub(super) fn select<S: System>(insn: &Instruction) -> Option<Choice<S>> {
    let (first, second) = (insn.op0_register(), insn.op1_register());
    // A loaded SS changes what the stack is, and asks for single steps.
    Some(match insn.mnemonic() {
        Mnemonic::Mov if first == Register::CS => return None,
        Mnemonic::Mov if first.is_segment_register() && !is_memory(insn, 0) => (mov_to, true),
        Mnemonic::Mov if second.is_segment_register() && !is_memory(insn, 1) => (mov_from, false),
        Mnemonic::Push if first.is_segment_register() => (by_slot!(insn, push), false),
        Mnemonic::Pop if first == Register::CS => return None,
        Mnemonic::Pop if first.is_segment_register() => (by_slot!(insn, pop), true),
        Mnemonic::Lds | Mnemonic::Les | Mnemonic::Lss | Mnemonic::Lfs | Mnemonic::Lgs => {
            let handler = match first.size() {
                2 => load_far::<S, 2>,
                4 => load_far::<S, 4>,
                _ => load_far::<S, 8>,
            };
            (handler, true)
        }
        Mnemonic::Rdfsbase => (read_base::<S, { seg::FS }>, false),
        Mnemonic::Rdgsbase => (read_base::<S, { seg::GS }>, false),
        Mnemonic::Wrfsbase => (write_base::<S, { seg::FS }>, false),
        Mnemonic::Wrgsbase => (write_base::<S, { seg::GS }>, false),
        _ => return None,
    })
}
