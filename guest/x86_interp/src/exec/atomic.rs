//! Exchange, exchange-and-add, compare-and-exchange: atomic when the operand is memory.

use super::{
    alu::{add, locked, sub},
    is_memory, operand_size,
};
use crate::{
    cpu::Cpu,
    memory::Target,
    op::{Handler, Op, RegRef, by_size},
    system::System,
};
use contract::GuestRam;
use iced_x86::{Instruction, Mnemonic};
use std::cell::Cell;
use x86::{Fault, flags, reg};

const RAX: RegRef = RegRef { index: reg::RAX as u8, shift: 0 };

/// XCHG with memory is atomic with or without LOCK. The register may be either operand.
fn xchg_memory<S: System, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let register = if is_memory(&op.insn, 0) { op.src } else { op.dst };
    let new = cpu.reg::<SIZE>(register);
    let found = Cell::new(0);
    locked::<S, SIZE>(cpu, sys, op, |_, old| {
        found.set(old);
        new
    })?;
    cpu.set_reg::<SIZE>(register, found.get());
    Ok(())
}

fn xchg_registers<S: System, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    _: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let (a, b) = (cpu.reg::<SIZE>(op.dst), cpu.reg::<SIZE>(op.src));
    cpu.set_reg::<SIZE>(op.dst, b);
    cpu.set_reg::<SIZE>(op.src, a);
    Ok(())
}

fn xadd_memory<S: System, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let b = cpu.reg::<SIZE>(op.src);
    let found = Cell::new(0);
    locked::<S, SIZE>(cpu, sys, op, |f, a| {
        found.set(a);
        add::<SIZE>(f, a, b, 0)
    })?;
    cpu.set_reg::<SIZE>(op.src, found.get());
    Ok(())
}

fn xadd_registers<S: System, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    _: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let (a, b) = (cpu.reg::<SIZE>(op.dst), cpu.reg::<SIZE>(op.src));
    let sum = add::<SIZE>(&mut cpu.vcpu.rflags, a, b, 0);
    cpu.set_reg::<SIZE>(op.src, a);
    cpu.set_reg::<SIZE>(op.dst, sum);
    Ok(())
}

/// CMPXCHG writes a destination in memory in either case; the accumulator only when it differed.
fn cmpxchg_memory<S: System, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let (expected, new) = (cpu.reg::<SIZE>(RAX), cpu.reg::<SIZE>(op.src));
    let found = Cell::new(0);
    locked::<S, SIZE>(cpu, sys, op, |f, old| {
        found.set(old);
        sub::<SIZE>(f, expected, old, 0);
        if old == expected { new } else { old }
    })?;
    if found.get() != expected {
        cpu.set_reg::<SIZE>(RAX, found.get());
    }
    Ok(())
}

/// A destination register that differed is not written: of a 32-bit one the upper half stays too.
fn cmpxchg_register<S: System, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    _: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let (expected, old) = (cpu.reg::<SIZE>(RAX), cpu.reg::<SIZE>(op.dst));
    sub::<SIZE>(&mut cpu.vcpu.rflags, expected, old, 0);
    if old == expected {
        let new = cpu.reg::<SIZE>(op.src);
        cpu.set_reg::<SIZE>(op.dst, new);
    } else {
        cpu.set_reg::<SIZE>(RAX, old);
    }
    Ok(())
}

fn set_zero(rflags: &mut u64, zero: bool) {
    *rflags = *rflags & !flags::ZF | u64::from(zero) << 6;
}

fn cmpxchg8b<S: System>(cpu: &mut Cpu<S>, sys: &mut S, op: &Op<S>) -> Result<(), Fault> {
    let pair = |cpu: &Cpu<S>, high: usize, low: usize| {
        cpu.vcpu.gpr[high] << 32 | cpu.vcpu.gpr[low] & 0xffff_ffff
    };
    let expected = pair(cpu, reg::RDX, reg::RAX);
    let new = pair(cpu, reg::RCX, reg::RBX);
    let found = Cell::new(0);
    locked::<S, 8>(cpu, sys, op, |f, old| {
        found.set(old);
        set_zero(f, old == expected);
        if old == expected { new } else { old }
    })?;
    if found.get() != expected {
        cpu.vcpu.gpr[reg::RDX] = found.get() >> 32;
        cpu.vcpu.gpr[reg::RAX] = found.get() & 0xffff_ffff;
    }
    Ok(())
}

fn cmpxchg16b<S: System>(cpu: &mut Cpu<S>, sys: &mut S, op: &Op<S>) -> Result<(), Fault> {
    let linear = cpu.linear(op, 16, true)?;
    if linear & 15 != 0 {
        return Err(Fault::gp(0));
    }
    let g = &cpu.vcpu.gpr;
    let expected = u128::from(g[reg::RDX]) << 64 | u128::from(g[reg::RAX]);
    let new = u128::from(g[reg::RCX]) << 64 | u128::from(g[reg::RBX]);
    let found = match cpu.target(sys, linear, 16).map_err(|fault| cpu.blame_stack(op, fault))? {
        Target::Ram(offset) => sys.ram().cas128(offset, expected, new),
        Target::Code(offset) => {
            let found = sys.ram().cas128(offset, expected, new);
            cpu.code_written(sys, offset, 16);
            found
        }
        Target::Slow(linear) => {
            let mut bytes = [0; 16];
            cpu.read_bytes(sys, linear, &mut bytes)?;
            let found = u128::from_le_bytes(bytes);
            let stored = if found == expected { new } else { found };
            cpu.write_bytes(sys, linear, &stored.to_le_bytes())?;
            found
        }
    };
    set_zero(&mut cpu.vcpu.rflags, found == expected);
    if found != expected {
        cpu.vcpu.gpr[reg::RDX] = (found >> 64) as u64;
        cpu.vcpu.gpr[reg::RAX] = found as u64;
    }
    Ok(())
}

pub(super) fn select<S: System>(insn: &Instruction) -> Option<Handler<S>> {
    let size = operand_size(insn, 0);
    let memory = is_memory(insn, 0) || is_memory(insn, 1);
    Some(match insn.mnemonic() {
        Mnemonic::Xchg if memory => by_size!(size, xchg_memory, S),
        Mnemonic::Xchg => by_size!(size, xchg_registers, S),
        Mnemonic::Xadd if memory => by_size!(size, xadd_memory, S),
        Mnemonic::Xadd => by_size!(size, xadd_registers, S),
        Mnemonic::Cmpxchg if memory => by_size!(size, cmpxchg_memory, S),
        Mnemonic::Cmpxchg => by_size!(size, cmpxchg_register, S),
        Mnemonic::Cmpxchg8b => cmpxchg8b,
        Mnemonic::Cmpxchg16b => cmpxchg16b,
        _ => return None,
    })
}
