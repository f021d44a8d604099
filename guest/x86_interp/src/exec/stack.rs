//! PUSH, POP, ENTER, LEAVE, and the stack accesses everything else uses.

use super::{is_gpr, is_memory};
use crate::{
    cpu::Cpu,
    op::{Destination, Dst, Handler, Imm, Mem, Op, RegRef, Source},
    system::System,
};
use iced_x86::{Instruction, Mnemonic, OpKind};
use x86::{Fault, reg, seg, segment::attr, vector};

const RBP: RegRef = RegRef { index: reg::RBP as u8, shift: 0 };

impl<S: System> Cpu<S> {
    /// Bits of RSP that address the stack: by mode and SS.B.
    #[inline(always)]
    pub(crate) fn stack_mask(&self) -> u64 {
        if self.vcpu.is_64bit() {
            u64::MAX
        } else if self.vcpu.seg[seg::SS].attr & attr::DB != 0 {
            0xffff_ffff
        } else {
            0xffff
        }
    }

    /// Sets the part of RSP that addresses the stack.
    #[inline(always)]
    pub(crate) fn set_sp(&mut self, value: u64) {
        let mask = self.stack_mask();
        let rsp = &mut self.vcpu.gpr[reg::RSP];
        *rsp = if mask == 0xffff { *rsp & !mask | value & mask } else { value & mask };
    }

    /// Linear address of `offset` bytes above the top of stack.
    #[inline(always)]
    fn stack_linear(&self, offset: u64, size: u64, write: bool) -> Result<u64, Fault> {
        let at = self.vcpu.gpr[reg::RSP].wrapping_add(offset) & self.stack_mask();
        self.segmented(seg::SS, at, size, write)
    }

    /// Pushes the low `SIZE` bytes.
    #[inline(always)]
    pub(crate) fn push<const SIZE: usize>(&mut self, sys: &mut S, value: u64) -> Result<(), Fault> {
        let below = (SIZE as u64).wrapping_neg();
        let linear = self.stack_linear(below, SIZE as u64, true)?;
        self.store::<SIZE>(sys, linear, value).map_err(stack_fault)?;
        self.set_sp(self.vcpu.gpr[reg::RSP].wrapping_sub(SIZE as u64));
        Ok(())
    }

    /// Reads `SIZE` bytes at `offset` above the top of stack, without popping.
    #[inline(always)]
    pub(crate) fn peek<const SIZE: usize>(
        &mut self,
        sys: &mut S,
        offset: u64,
    ) -> Result<u64, Fault> {
        let linear = self.stack_linear(offset, SIZE as u64, false)?;
        self.load::<SIZE>(sys, linear).map_err(stack_fault)
    }

    /// Drops bytes from the top of stack.
    #[inline(always)]
    pub(crate) fn drop_stack(&mut self, bytes: u64) {
        self.set_sp(self.vcpu.gpr[reg::RSP].wrapping_add(bytes));
    }
}

/// A non-canonical stack address is #SS(0).
fn stack_fault(fault: Fault) -> Fault {
    if fault.vector == vector::GP { Fault::with_code(vector::SS, 0) } else { fault }
}

fn push<S: System, R: Source, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let value = R::get::<S, SIZE>(cpu, sys, op)?;
    cpu.push::<SIZE>(sys, value)
}

fn pop_register<S: System, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let value = cpu.peek::<SIZE>(sys, 0)?;
    cpu.drop_stack(SIZE as u64);
    cpu.set_reg::<SIZE>(op.dst, value);
    Ok(())
}

/// POP to memory computes the address with RSP already incremented.
fn pop_memory<S: System, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let value = cpu.peek::<SIZE>(sys, 0)?;
    let rsp = cpu.vcpu.gpr[reg::RSP];
    cpu.drop_stack(SIZE as u64);
    let stored = Mem::put::<S, SIZE>(cpu, sys, op, value);
    if stored.is_err() {
        cpu.vcpu.gpr[reg::RSP] = rsp;
    }
    stored
}

fn leave<S: System, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    _: &Op<S>,
) -> Result<(), Fault> {
    let rsp = cpu.vcpu.gpr[reg::RSP];
    cpu.set_sp(cpu.vcpu.gpr[reg::RBP]);
    match cpu.peek::<SIZE>(sys, 0) {
        Ok(value) => {
            cpu.drop_stack(SIZE as u64);
            cpu.set_reg::<SIZE>(RBP, value);
            Ok(())
        }
        Err(fault) => {
            cpu.vcpu.gpr[reg::RSP] = rsp;
            Err(fault)
        }
    }
}

/// ENTER size, level (SDM vol. 2): undone as a whole if any access faults.
fn enter<S: System, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let (rsp, rbp) = (cpu.vcpu.gpr[reg::RSP], cpu.vcpu.gpr[reg::RBP]);
    let done = enter_steps::<S, SIZE>(cpu, sys, op);
    if done.is_err() {
        cpu.vcpu.gpr[reg::RSP] = rsp;
        cpu.vcpu.gpr[reg::RBP] = rbp;
    }
    done
}

fn enter_steps<S: System, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let level = op.insn.immediate8_2nd() & 31;
    cpu.push::<SIZE>(sys, cpu.vcpu.gpr[reg::RBP])?;
    let frame = cpu.vcpu.gpr[reg::RSP];
    if level > 0 {
        for step in 1..level {
            let at = cpu.vcpu.gpr[reg::RBP].wrapping_sub(u64::from(step) * SIZE as u64);
            let linear = cpu.segmented(seg::SS, at & cpu.stack_mask(), SIZE as u64, false)?;
            let link = cpu.load::<SIZE>(sys, linear).map_err(stack_fault)?;
            cpu.push::<SIZE>(sys, link)?;
        }
        cpu.push::<SIZE>(sys, frame)?;
    }
    cpu.set_sp(cpu.vcpu.gpr[reg::RSP].wrapping_sub(op.insn.immediate16().into()));
    // The final write check: ENTER touches the new top of stack.
    let top = cpu.stack_linear(0, SIZE as u64, true)?;
    cpu.target(sys, top, SIZE as u64).map_err(stack_fault)?;
    cpu.set_reg::<SIZE>(RBP, frame);
    Ok(())
}

/// PUSHA: AX, CX, DX, BX, original SP, BP, SI, DI.
fn pusha<S: System, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    _: &Op<S>,
) -> Result<(), Fault> {
    let rsp = cpu.vcpu.gpr[reg::RSP];
    for index in 0..8 {
        let value = if index == reg::RSP { rsp } else { cpu.vcpu.gpr[index] };
        if let Err(fault) = cpu.push::<SIZE>(sys, value) {
            cpu.vcpu.gpr[reg::RSP] = rsp;
            return Err(fault);
        }
    }
    Ok(())
}

fn popa<S: System, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    _: &Op<S>,
) -> Result<(), Fault> {
    let mut values = [0; 8];
    for (slot, value) in values.iter_mut().enumerate() {
        *value = cpu.peek::<SIZE>(sys, (slot * SIZE) as u64)?;
    }
    cpu.drop_stack(8 * SIZE as u64);
    for index in (0..8usize).filter(|index| *index != reg::RSP) {
        let register = RegRef { index: index as u8, shift: 0 };
        cpu.set_reg::<SIZE>(register, values[7 - index]);
    }
    Ok(())
}

macro_rules! by_slot {
    ($insn:expr, $f:ident, $($t:ty),*) => {
        match slot_size($insn) {
            2 => $f::<$($t,)* 2>,
            4 => $f::<$($t,)* 4>,
            _ => $f::<$($t,)* 8>,
        }
    };
}

/// Bytes of the stack slot an instruction works with.
fn slot_size(insn: &Instruction) -> u32 {
    use iced_x86::Code::*;
    match insn.code() {
        Leavew | Enterw_imm16_imm8 | Pushaw | Popaw => 2,
        Leaved | Enterd_imm16_imm8 | Pushad | Popad => 4,
        Leaveq | Enterq_imm16_imm8 => 8,
        _ => insn.stack_pointer_increment().unsigned_abs(),
    }
}

pub(super) fn select<S: System>(insn: &Instruction) -> Option<Handler<S>> {
    Some(match insn.mnemonic() {
        Mnemonic::Push if is_gpr(insn, 0) => by_slot!(insn, push, S, Dst),
        Mnemonic::Push if is_memory(insn, 0) => by_slot!(insn, push, S, Mem),
        Mnemonic::Push if insn.op0_kind() != OpKind::Register => by_slot!(insn, push, S, Imm),
        Mnemonic::Pop if is_gpr(insn, 0) => by_slot!(insn, pop_register, S),
        Mnemonic::Pop if is_memory(insn, 0) => by_slot!(insn, pop_memory, S),
        Mnemonic::Leave => by_slot!(insn, leave, S),
        Mnemonic::Enter => by_slot!(insn, enter, S),
        Mnemonic::Pusha | Mnemonic::Pushad => by_slot!(insn, pusha, S),
        Mnemonic::Popa | Mnemonic::Popad => by_slot!(insn, popa, S),
        _ => return None,
    })
}
