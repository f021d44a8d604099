//! Multiplication and division.

use super::{alu::zsp, is_memory, operand_size, set_status};
use crate::{
    cpu::Cpu,
    op::{Dst, Handler, Mem, Op, RegRef, Source, Src, by_size, mask, sign_extend},
    system::System,
};
use iced_x86::{Instruction, Mnemonic};
use x86::{Fault, flags, reg, vector};

const RAX: RegRef = RegRef { index: reg::RAX as u8, shift: 0 };
const RDX: RegRef = RegRef { index: reg::RDX as u8, shift: 0 };
const AH: RegRef = RegRef { index: reg::RAX as u8, shift: 8 };

/// Where the upper half of a product or dividend is: AH for bytes, else RDX.
const fn upper<const SIZE: usize>() -> RegRef {
    if SIZE == 1 { AH } else { RDX }
}

/// CF and OF tell that the product did not fit; the others follow the low half as on real CPUs.
fn product_flags<const SIZE: usize>(rflags: &mut u64, low: u64, lost: bool) {
    let overflow = if lost { flags::CF | flags::OF } else { 0 };
    set_status(rflags, zsp::<SIZE>(low) | overflow);
}

fn mul<S: System, R: Source, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let b = R::get::<S, SIZE>(cpu, sys, op)?;
    let product = u128::from(cpu.reg::<SIZE>(RAX)) * u128::from(b);
    store_product::<S, SIZE>(cpu, product, product >> (SIZE * 8) != 0);
    Ok(())
}

fn imul<S: System, R: Source, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let b = R::get::<S, SIZE>(cpu, sys, op)?;
    let product = signed_product::<SIZE>(cpu.reg::<SIZE>(RAX), b);
    store_product::<S, SIZE>(cpu, product as u128, !fits::<SIZE>(product));
    Ok(())
}

fn signed_product<const SIZE: usize>(a: u64, b: u64) -> i128 {
    i128::from(sign_extend::<SIZE>(a) as i64) * i128::from(sign_extend::<SIZE>(b) as i64)
}

fn fits<const SIZE: usize>(value: i128) -> bool {
    i128::from(sign_extend::<SIZE>(value as u64) as i64) == value
}

fn store_product<S: System, const SIZE: usize>(cpu: &mut Cpu<S>, product: u128, lost: bool) {
    let low = product as u64 & mask::<SIZE>();
    cpu.set_reg::<SIZE>(RAX, low);
    cpu.set_reg::<SIZE>(upper::<SIZE>(), (product >> (SIZE * 8)) as u64);
    product_flags::<SIZE>(&mut cpu.vcpu.rflags, low, lost);
}

/// IMUL with two or three operands.
fn imul_into<S: System, R: Source, const IMMEDIATE: bool, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let a = R::get::<S, SIZE>(cpu, sys, op)?;
    let b = if IMMEDIATE { op.imm } else { cpu.reg::<SIZE>(op.dst) };
    let product = signed_product::<SIZE>(a, b);
    let low = product as u64 & mask::<SIZE>();
    cpu.set_reg::<SIZE>(op.dst, low);
    product_flags::<SIZE>(&mut cpu.vcpu.rflags, low, !fits::<SIZE>(product));
    Ok(())
}

fn dividend<S: System, const SIZE: usize>(cpu: &Cpu<S>) -> u128 {
    let (high, low) = (cpu.reg::<SIZE>(upper::<SIZE>()), cpu.reg::<SIZE>(RAX));
    u128::from(high) << (SIZE * 8) | u128::from(low)
}

fn store_quotient<S: System, const SIZE: usize>(cpu: &mut Cpu<S>, quotient: u64, rest: u64) {
    cpu.set_reg::<SIZE>(RAX, quotient);
    cpu.set_reg::<SIZE>(upper::<SIZE>(), rest);
}

fn div<S: System, R: Source, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let divisor = u128::from(R::get::<S, SIZE>(cpu, sys, op)?);
    let dividend = dividend::<S, SIZE>(cpu);
    let quotient = dividend.checked_div(divisor).unwrap_or(u128::MAX);
    if quotient > u128::from(mask::<SIZE>()) {
        return Err(Fault::new(vector::DE));
    }
    store_quotient::<S, SIZE>(cpu, quotient as u64, (dividend % divisor) as u64);
    Ok(())
}

fn idiv<S: System, R: Source, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let divisor = i128::from(sign_extend::<SIZE>(R::get::<S, SIZE>(cpu, sys, op)?) as i64);
    let unused = 128 - SIZE * 16;
    let dividend = (dividend::<S, SIZE>(cpu) << unused) as i128 >> unused;
    match dividend.checked_div(divisor) {
        Some(quotient) if fits::<SIZE>(quotient) => {
            let rest = dividend.wrapping_rem(divisor);
            store_quotient::<S, SIZE>(cpu, quotient as u64, rest as u64);
            Ok(())
        }
        _ => Err(Fault::new(vector::DE)),
    }
}

pub(super) fn select<S: System>(insn: &Instruction) -> Option<Handler<S>> {
    let size = operand_size(insn, 0);
    let memory = is_memory(insn, 0);
    Some(match insn.mnemonic() {
        Mnemonic::Mul if memory => by_size!(size, mul, S, Mem),
        Mnemonic::Mul => by_size!(size, mul, S, Dst),
        Mnemonic::Div if memory => by_size!(size, div, S, Mem),
        Mnemonic::Div => by_size!(size, div, S, Dst),
        Mnemonic::Idiv if memory => by_size!(size, idiv, S, Mem),
        Mnemonic::Idiv => by_size!(size, idiv, S, Dst),
        Mnemonic::Imul if insn.op_count() == 1 && memory => by_size!(size, imul, S, Mem),
        Mnemonic::Imul if insn.op_count() == 1 => by_size!(size, imul, S, Dst),
        Mnemonic::Imul => choose_imul(insn, size),
        _ => return None,
    })
}

fn choose_imul<S: System>(insn: &Instruction, size: usize) -> Handler<S> {
    match (is_memory(insn, 1), insn.op_count() == 3) {
        (true, true) => sized_imul::<S, Mem, true>(size),
        (true, false) => sized_imul::<S, Mem, false>(size),
        (false, true) => sized_imul::<S, Src, true>(size),
        (false, false) => sized_imul::<S, Src, false>(size),
    }
}

fn sized_imul<S: System, R: Source, const IMMEDIATE: bool>(size: usize) -> Handler<S> {
    match size {
        2 => imul_into::<S, R, IMMEDIATE, 2>,
        4 => imul_into::<S, R, IMMEDIATE, 4>,
        _ => imul_into::<S, R, IMMEDIATE, 8>,
    }
}
