//! BMI1, BMI2 and ADX: general registers, but mostly VEX-encoded.
//!
//! String functions chosen for AVX2 use them a lot, so they are done here rather than by the vector
//! unit. Status flags the manual calls undefined come out as Intel CPUs leave them.

use super::permit::{self, VectorClass};
use crate::{
    cpu::Cpu,
    op::{Handler, Mem, Op, RegRef, Source, Src, mask, sign_extend},
    system::System,
};
use iced_x86::{Instruction, Mnemonic, OpKind};
use x86::{Fault, flags, reg};

/// An operation on the register-or-memory operand `a` and the other operand `b`.
trait Operation {
    /// Status flags it changes.
    const FLAGS: u64 = 0;
    /// Result (cut to the size by the caller) and flags.
    fn apply<const SIZE: usize>(a: u64, b: u64) -> (u64, u64);
}

/// SF and ZF of a result.
fn sign_zero<const SIZE: usize>(value: u64) -> u64 {
    let value = value & mask::<SIZE>();
    let sign = value >> (SIZE * 8 - 1);
    if value == 0 { flags::ZF } else { sign * flags::SF }
}

const fn bits<const SIZE: usize>() -> u64 {
    SIZE as u64 * 8
}

macro_rules! operations {
    ($($name:ident changes $flags:expr, |$a:ident, $b:ident| $body:expr;)*) => {$(
        struct $name;
        impl Operation for $name {
            const FLAGS: u64 = $flags;
            #[inline(always)]
            fn apply<const SIZE: usize>($a: u64, $b: u64) -> (u64, u64) {
                $body
            }
        }
    )*};
}

operations! {
    AndNot changes flags::STATUS, |a, b| {
        let result = a & !b;
        (result, sign_zero::<SIZE>(result))
    };
    BitFieldExtract changes flags::STATUS, |a, b| {
        let (start, length) = (b & 0xff, b >> 8 & 0xff);
        let shifted = if start < 64 { a >> start } else { 0 };
        let result = if length < 64 { shifted & !(u64::MAX << length) } else { shifted };
        (result, sign_zero::<SIZE>(result) & flags::ZF)
    };
    LowestSetBit changes flags::STATUS, |a, _b| {
        let result = a & a.wrapping_neg();
        (result, sign_zero::<SIZE>(result) | u64::from(a != 0))
    };
    MaskUpToLowest changes flags::STATUS, |a, _b| {
        let result = a ^ a.wrapping_sub(1);
        (result, sign_zero::<SIZE>(result) | u64::from(a == 0))
    };
    ResetLowest changes flags::STATUS, |a, _b| {
        let result = a & a.wrapping_sub(1);
        (result, sign_zero::<SIZE>(result) | u64::from(a == 0))
    };
    ZeroHigh changes flags::STATUS, |a, b| {
        let index = b & 0xff;
        let kept = index >= bits::<SIZE>();
        let result = if kept { a } else { a & !(u64::MAX << index) };
        (result, sign_zero::<SIZE>(result) | u64::from(kept))
    };
    Deposit changes 0, |a, b| (deposit(b, a), 0);
    Extract changes 0, |a, b| (extract(b, a), 0);
    RotateRight changes 0, |a, b| {
        let count = (b & (bits::<SIZE>() - 1)) as u32;
        let result = match SIZE {
            4 => u64::from((a as u32).rotate_right(count)),
            _ => a.rotate_right(count),
        };
        (result, 0)
    };
    ShiftRightSigned changes 0, |a, b| {
        (((sign_extend::<SIZE>(a) as i64) >> (b & (bits::<SIZE>() - 1))) as u64, 0)
    };
    ShiftLeft changes 0, |a, b| (a << (b & (bits::<SIZE>() - 1)), 0);
    ShiftRight changes 0, |a, b| (a >> (b & (bits::<SIZE>() - 1)), 0);
}

/// PDEP: the low bits of `value` go where `mask` has ones.
fn deposit(value: u64, mut mask: u64) -> u64 {
    let (mut result, mut rest) = (0, value);
    while mask != 0 {
        let bit = mask & mask.wrapping_neg();
        result |= if rest & 1 != 0 { bit } else { 0 };
        rest >>= 1;
        mask ^= bit;
    }
    result
}

/// PEXT: the bits of `value` where `mask` has ones come together at the low end.
fn extract(value: u64, mut mask: u64) -> u64 {
    let (mut result, mut to) = (0, 0);
    while mask != 0 {
        let at = mask.trailing_zeros();
        result |= (value >> at & 1) << to;
        to += 1;
        mask &= mask - 1;
    }
    result
}

/// `dst = src (register or memory) OP other`; `imm` is the other register's number.
fn apply<S: System, O: Operation, R: Source, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    permit::check(cpu, VectorClass::VexGeneral)?;
    let a = R::get::<S, SIZE>(cpu, sys, op)?;
    let b = cpu.vcpu.gpr[op.imm as usize & 15] & mask::<SIZE>();
    finish::<S, O, SIZE>(cpu, op, a, b)
}

/// The same with an immediate.
fn apply_immediate<S: System, O: Operation, R: Source, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    permit::check(cpu, VectorClass::VexGeneral)?;
    let a = R::get::<S, SIZE>(cpu, sys, op)?;
    finish::<S, O, SIZE>(cpu, op, a, op.imm)
}

#[inline(always)]
fn finish<S: System, O: Operation, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    op: &Op<S>,
    a: u64,
    b: u64,
) -> Result<(), Fault> {
    let (result, status) = O::apply::<SIZE>(a, b);
    cpu.set_reg::<SIZE>(op.dst, result);
    cpu.vcpu.rflags = cpu.vcpu.rflags & !O::FLAGS | status;
    Ok(())
}

/// MULX: the high half to `dst`, the low half to the register in `imm`; the same one: high.
fn multiply<S: System, R: Source, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    permit::check(cpu, VectorClass::VexGeneral)?;
    let a = R::get::<S, SIZE>(cpu, sys, op)?;
    let product = u128::from(a) * u128::from(cpu.vcpu.gpr[reg::RDX] & mask::<SIZE>());
    let low = RegRef { index: op.imm as u8, shift: 0 };
    cpu.set_reg::<SIZE>(low, product as u64);
    cpu.set_reg::<SIZE>(op.dst, (product >> (SIZE * 8)) as u64);
    Ok(())
}

/// ADCX and ADOX: addition with a carry of its own, `FLAG`.
fn add_carry<S: System, R: Source, const FLAG: u64, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let a = R::get::<S, SIZE>(cpu, sys, op)?;
    let carry = u128::from(cpu.vcpu.rflags & FLAG != 0);
    let sum = u128::from(cpu.reg::<SIZE>(op.dst)) + u128::from(a) + carry;
    cpu.set_reg::<SIZE>(op.dst, sum as u64);
    let carries = sum >> (SIZE * 8) != 0;
    cpu.vcpu.rflags = cpu.vcpu.rflags & !FLAG | if carries { FLAG } else { 0 };
    Ok(())
}

/// Where an instruction has its register-or-memory operand, and the other source.
enum Shape {
    /// Operand 1, and none.
    One,
    /// Operand 1, and operand 2.
    Two,
    /// Operand 2, and operand 1.
    Swapped,
}

/// Chooses a handler and sets its operand fields; `None` if the instruction is not one of these.
pub(super) fn prepare<S: System>(op: &mut Op<S>) -> Option<Handler<S>> {
    use Mnemonic as M;
    let insn = op.insn;
    let shape = match insn.mnemonic() {
        M::Blsi | M::Blsmsk | M::Blsr | M::Rorx | M::Adcx | M::Adox => Shape::One,
        M::Bextr | M::Bzhi | M::Sarx | M::Shlx | M::Shrx => Shape::Two,
        M::Andn | M::Pdep | M::Pext | M::Mulx => Shape::Swapped,
        _ => return None,
    };
    let (source, other) = match shape {
        Shape::One => (1, None),
        Shape::Two => (1, Some(2)),
        Shape::Swapped => (2, Some(1)),
    };
    op.dst = RegRef::of(insn.op0_register());
    op.src = RegRef::of(insn.op_register(source));
    if let Some(other) = other {
        op.imm = RegRef::of(insn.op_register(other)).index.into();
    }
    let wide = insn.op0_register().size() == 8;
    match (insn.op_kind(source) == OpKind::Memory, wide) {
        (false, false) => choose::<S, Src, 4>(&insn),
        (false, true) => choose::<S, Src, 8>(&insn),
        (true, false) => choose::<S, Mem, 4>(&insn),
        (true, true) => choose::<S, Mem, 8>(&insn),
    }
}

fn choose<S: System, R: Source, const SIZE: usize>(insn: &Instruction) -> Option<Handler<S>> {
    use Mnemonic as M;
    Some(match insn.mnemonic() {
        M::Andn => apply::<S, AndNot, R, SIZE>,
        M::Bextr => apply::<S, BitFieldExtract, R, SIZE>,
        M::Blsi => apply::<S, LowestSetBit, R, SIZE>,
        M::Blsmsk => apply::<S, MaskUpToLowest, R, SIZE>,
        M::Blsr => apply::<S, ResetLowest, R, SIZE>,
        M::Bzhi => apply::<S, ZeroHigh, R, SIZE>,
        M::Pdep => apply::<S, Deposit, R, SIZE>,
        M::Pext => apply::<S, Extract, R, SIZE>,
        M::Rorx => apply_immediate::<S, RotateRight, R, SIZE>,
        M::Sarx => apply::<S, ShiftRightSigned, R, SIZE>,
        M::Shlx => apply::<S, ShiftLeft, R, SIZE>,
        M::Shrx => apply::<S, ShiftRight, R, SIZE>,
        M::Mulx => multiply::<S, R, SIZE>,
        M::Adcx => add_carry::<S, R, { flags::CF }, SIZE>,
        M::Adox => add_carry::<S, R, { flags::OF }, SIZE>,
        _ => return None,
    })
}
