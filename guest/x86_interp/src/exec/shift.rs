//! Shifts and rotates, single and double.

use super::{alu::zsp, is_memory, operand_size, set_status};
use crate::{
    cpu::Cpu,
    op::{
        Destination, Dst, Handler, Imm, Mem, Op, RegRef, Source, Src, by_size, mask, sign_extend,
    },
    system::System,
};
use iced_x86::{Instruction, Mnemonic, OpKind, Register};
use x86::{Fault, flags, reg};

const CL: RegRef = RegRef { index: reg::RCX as u8, shift: 0 };

/// A shift by a count already masked and not zero.
trait Shift {
    fn apply<const SIZE: usize>(rflags: &mut u64, a: u64, count: u32) -> u64;
}

struct Shl;
struct Shr;
struct Sar;
struct Rol;
struct Ror;
struct Rcl;
struct Rcr;

fn flag(condition: bool, flag: u64) -> u64 {
    if condition { flag } else { 0 }
}

/// Bit `n` of `value`, false beyond 63.
fn bit(value: u64, n: u32) -> bool {
    n < 64 && value >> n & 1 != 0
}

impl Shift for Shl {
    fn apply<const SIZE: usize>(rflags: &mut u64, a: u64, count: u32) -> u64 {
        let bits = SIZE as u32 * 8;
        let wide = u128::from(a) << count;
        let result = wide as u64 & mask::<SIZE>();
        let carry = wide >> bits & 1 != 0;
        let overflow = carry != bit(result, bits - 1);
        let status = flag(carry, flags::CF) | flag(overflow, flags::OF);
        set_status(rflags, zsp::<SIZE>(result) | status);
        result
    }
}

impl Shift for Shr {
    fn apply<const SIZE: usize>(rflags: &mut u64, a: u64, count: u32) -> u64 {
        let result = a.checked_shr(count).unwrap_or(0);
        let overflow = bit(a, SIZE as u32 * 8 - 1);
        let status = flag(bit(a, count - 1), flags::CF) | flag(overflow && count == 1, flags::OF);
        set_status(rflags, zsp::<SIZE>(result) | status);
        result
    }
}

impl Shift for Sar {
    fn apply<const SIZE: usize>(rflags: &mut u64, a: u64, count: u32) -> u64 {
        let wide = sign_extend::<SIZE>(a) as i64;
        let result = (wide >> count.min(63)) as u64 & mask::<SIZE>();
        let carry = bit((wide >> (count - 1).min(63)) as u64, 0);
        set_status(rflags, zsp::<SIZE>(result) | flag(carry, flags::CF));
        result
    }
}

/// Rotates leave ZF, SF, PF and AF alone.
fn set_rotate_flags(rflags: &mut u64, carry: bool, overflow: bool) {
    *rflags &= !(flags::CF | flags::OF);
    *rflags |= flag(carry, flags::CF) | flag(overflow, flags::OF);
}

fn rotate_left<const SIZE: usize>(a: u64, count: u32) -> u64 {
    let bits = SIZE as u32 * 8;
    let count = count % bits;
    if count == 0 { a } else { (a << count | a >> (bits - count)) & mask::<SIZE>() }
}

impl Shift for Rol {
    fn apply<const SIZE: usize>(rflags: &mut u64, a: u64, count: u32) -> u64 {
        let result = rotate_left::<SIZE>(a, count);
        let carry = bit(result, 0);
        set_rotate_flags(rflags, carry, carry != bit(result, SIZE as u32 * 8 - 1));
        result
    }
}

impl Shift for Ror {
    fn apply<const SIZE: usize>(rflags: &mut u64, a: u64, count: u32) -> u64 {
        let bits = SIZE as u32 * 8;
        let result = rotate_left::<SIZE>(a, bits - count % bits);
        let (top, next) = (bit(result, bits - 1), bit(result, bits - 2));
        set_rotate_flags(rflags, top, top != next);
        result
    }
}

impl Shift for Rcl {
    fn apply<const SIZE: usize>(rflags: &mut u64, a: u64, count: u32) -> u64 {
        let bits = SIZE as u32 * 8;
        let count = count % (bits + 1);
        if count == 0 {
            let carry = *rflags & flags::CF != 0;
            set_rotate_flags(rflags, carry, carry != bit(a, bits - 1));
            return a;
        }
        let joined = u128::from(*rflags & flags::CF) << bits | u128::from(a);
        let turned = joined << count | joined >> (bits + 1 - count);
        let result = turned as u64 & mask::<SIZE>();
        let carry = turned >> bits & 1 != 0;
        set_rotate_flags(rflags, carry, carry != bit(result, bits - 1));
        result
    }
}

impl Shift for Rcr {
    fn apply<const SIZE: usize>(rflags: &mut u64, a: u64, count: u32) -> u64 {
        let bits = SIZE as u32 * 8;
        let count = count % (bits + 1);
        if count == 0 {
            let overflow = bit(a, bits - 1) != bit(a, bits - 2);
            let carry = *rflags & flags::CF != 0;
            set_rotate_flags(rflags, carry, overflow);
            return a;
        }
        let joined = u128::from(*rflags & flags::CF) << bits | u128::from(a);
        let turned = joined >> count | joined << (bits + 1 - count);
        let result = turned as u64 & mask::<SIZE>();
        let carry = turned >> bits & 1 != 0;
        set_rotate_flags(rflags, carry, bit(result, bits - 1) != bit(result, bits - 2));
        result
    }
}

fn count_mask<const SIZE: usize>() -> u64 {
    if SIZE == 8 { 63 } else { 31 }
}

fn shift<S: System, O: Shift, D: Destination, R: Source, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let count = R::get::<S, 1>(cpu, sys, op)? & count_mask::<SIZE>();
    let handle = D::open::<S, SIZE>(cpu, sys, op)?;
    let a = D::load::<S, SIZE>(cpu, sys, handle)?;
    let result = match count {
        0 => a,
        _ => O::apply::<SIZE>(&mut cpu.vcpu.rflags, a, count as u32),
    };
    D::store::<S, SIZE>(cpu, sys, handle, result)
}

/// SHLD and SHRD: bits come from the `src` register.
fn double<S: System, D: Destination, const LEFT: bool, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let by_cl = op.insn.op2_kind() == OpKind::Register;
    let count = if by_cl { cpu.reg::<1>(CL) } else { op.imm };
    let count = (count & count_mask::<SIZE>()) as u32;
    let filler = cpu.reg::<SIZE>(op.src);
    let handle = D::open::<S, SIZE>(cpu, sys, op)?;
    let a = D::load::<S, SIZE>(cpu, sys, handle)?;
    let result = match count {
        0 => a,
        _ if LEFT => shift_double_left::<SIZE>(&mut cpu.vcpu.rflags, a, filler, count),
        _ => shift_double_right::<SIZE>(&mut cpu.vcpu.rflags, a, filler, count),
    };
    D::store::<S, SIZE>(cpu, sys, handle, result)
}

/// With a 16-bit operand a count above 16 is undefined; like real CPUs we shift the 48-bit
/// `a:filler:a`.
fn shift_double_left<const SIZE: usize>(f: &mut u64, a: u64, filler: u64, count: u32) -> u64 {
    let bits = SIZE as u32 * 8;
    let joined = u128::from(a) << bits | u128::from(filler);
    let (joined, width) =
        if SIZE == 2 { (joined << 16 | u128::from(a), 48) } else { (joined, 2 * bits) };
    let result = (joined << count >> (width - bits)) as u64 & mask::<SIZE>();
    let carry = joined >> (width - count) & 1 != 0;
    finish_double::<SIZE>(f, a, result, carry)
}

fn shift_double_right<const SIZE: usize>(f: &mut u64, a: u64, filler: u64, count: u32) -> u64 {
    let bits = SIZE as u32 * 8;
    let joined = u128::from(filler) << bits | u128::from(a);
    let joined = if SIZE == 2 { joined | u128::from(a) << 32 } else { joined };
    let result = (joined >> count) as u64 & mask::<SIZE>();
    let carry = joined >> (count - 1) & 1 != 0;
    finish_double::<SIZE>(f, a, result, carry)
}

fn finish_double<const SIZE: usize>(f: &mut u64, a: u64, result: u64, carry: bool) -> u64 {
    let overflow = bit(a ^ result, SIZE as u32 * 8 - 1);
    set_status(f, zsp::<SIZE>(result) | flag(carry, flags::CF) | flag(overflow, flags::OF));
    result
}

pub(super) fn select<S: System>(insn: &Instruction) -> Option<Handler<S>> {
    let size = operand_size(insn, 0);
    let memory = is_memory(insn, 0);
    Some(match insn.mnemonic() {
        Mnemonic::Shl | Mnemonic::Sal => choose::<S, Shl>(insn),
        Mnemonic::Shr => choose::<S, Shr>(insn),
        Mnemonic::Sar => choose::<S, Sar>(insn),
        Mnemonic::Rol => choose::<S, Rol>(insn),
        Mnemonic::Ror => choose::<S, Ror>(insn),
        Mnemonic::Rcl => choose::<S, Rcl>(insn),
        Mnemonic::Rcr => choose::<S, Rcr>(insn),
        Mnemonic::Shld if memory => choose_double::<S, Mem, true>(size),
        Mnemonic::Shld => choose_double::<S, Dst, true>(size),
        Mnemonic::Shrd if memory => choose_double::<S, Mem, false>(size),
        Mnemonic::Shrd => choose_double::<S, Dst, false>(size),
        _ => return None,
    })
}

fn choose_double<S: System, D: Destination, const LEFT: bool>(size: usize) -> Handler<S> {
    match size {
        2 => double::<S, D, LEFT, 2>,
        4 => double::<S, D, LEFT, 4>,
        _ => double::<S, D, LEFT, 8>,
    }
}

fn choose<S: System, O: Shift>(insn: &Instruction) -> Handler<S> {
    let size = operand_size(insn, 0);
    match (is_memory(insn, 0), insn.op1_register() == Register::CL) {
        (true, true) => by_size!(size, shift, S, O, Mem, Src),
        (true, false) => by_size!(size, shift, S, O, Mem, Imm),
        (false, true) => by_size!(size, shift, S, O, Dst, Src),
        (false, false) => by_size!(size, shift, S, O, Dst, Imm),
    }
}
