//! Integer lane operations that string functions and hashes are made of: logic, comparison,
//! addition, minimum, unpacking. On 128 bits at a time, which is what they do in AVX2 too.

use super::{access::Vector, moves::register, permit};
use crate::{
    cpu::Cpu,
    op::{Handler, Op},
    system::System,
};
use iced_x86::{EncodingKind, Instruction, Mnemonic, OpKind};
use x86::Fault;

/// An operation on 128 bits.
trait Lanes {
    fn apply(a: Vector, b: Vector) -> Vector;
}

macro_rules! lanes {
    ($($name:ident: |$a:ident, $b:ident| $body:expr;)*) => {$(
        struct $name;
        impl Lanes for $name {
            #[inline(always)]
            fn apply($a: Vector, $b: Vector) -> Vector {
                $body
            }
        }
    )*};
}

lanes! {
    And: |a, b| bytes(a, b, |x, y| x & y);
    AndNot: |a, b| bytes(a, b, |x, y| !x & y);
    Or: |a, b| bytes(a, b, |x, y| x | y);
    Xor: |a, b| bytes(a, b, |x, y| x ^ y);
    AddBytes: |a, b| bytes(a, b, u8::wrapping_add);
    AddDwords: |a, b| dwords(a, b, u32::wrapping_add);
    AddQwords: |a, b| qwords(a, b, u64::wrapping_add);
    SubtractBytes: |a, b| bytes(a, b, u8::wrapping_sub);
    SubtractDwords: |a, b| dwords(a, b, u32::wrapping_sub);
    SubtractQwords: |a, b| qwords(a, b, u64::wrapping_sub);
    EqualBytes: |a, b| bytes(a, b, |x, y| if x == y { 0xff } else { 0 });
    EqualDwords: |a, b| dwords(a, b, |x, y| if x == y { u32::MAX } else { 0 });
    GreaterBytes: |a, b| bytes(a, b, |x, y| if x as i8 > y as i8 { 0xff } else { 0 });
    MinimumBytes: |a, b| bytes(a, b, u8::min);
    MaximumBytes: |a, b| bytes(a, b, u8::max);
    UnpackLowQwords: |a, b| join(a[..8].iter().chain(&b[..8]));
    UnpackHighQwords: |a, b| join(a[8..].iter().chain(&b[8..]));
}

#[inline(always)]
fn join<'a>(from: impl Iterator<Item = &'a u8>) -> Vector {
    let mut result = [0; 16];
    for (to, byte) in result.iter_mut().zip(from) {
        *to = *byte;
    }
    result
}

// Plain loops over arrays: the compiler makes one SIMD instruction of each.

#[inline(always)]
fn bytes(a: Vector, b: Vector, f: impl Fn(u8, u8) -> u8) -> Vector {
    let mut result = a;
    for (x, y) in result.iter_mut().zip(b) {
        *x = f(*x, y);
    }
    result
}

#[inline(always)]
fn dwords(a: Vector, b: Vector, f: impl Fn(u32, u32) -> u32) -> Vector {
    let mut result = a;
    for (x, y) in result.as_chunks_mut::<4>().0.iter_mut().zip(b.as_chunks::<4>().0) {
        *x = f(u32::from_le_bytes(*x), u32::from_le_bytes(*y)).to_le_bytes();
    }
    result
}

#[inline(always)]
fn qwords(a: Vector, b: Vector, f: impl Fn(u64, u64) -> u64) -> Vector {
    let mut result = a;
    for (x, y) in result.as_chunks_mut::<8>().0.iter_mut().zip(b.as_chunks::<8>().0) {
        *x = f(u64::from_le_bytes(*x), u64::from_le_bytes(*y)).to_le_bytes();
    }
    result
}

/// `dst = dst OP (register or memory)`, legacy encoding.
fn legacy<S: System, L: Lanes, const MEMORY: bool>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    permit::sse(cpu)?;
    let b = match MEMORY {
        true => cpu.load_vector::<16, true>(sys, op)?[0],
        false => cpu.low(op.src.index),
    };
    let a = cpu.low(op.dst.index);
    cpu.set_low(op.dst.index, L::apply(a, b));
    Ok(())
}

/// `dst = src OP (register or memory)`, VEX encoding; the third register's number is in `imm`.
fn vex<S: System, L: Lanes, const N: usize, const MEMORY: bool>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    permit::avx(cpu)?;
    let b = match MEMORY {
        true => cpu.load_vector::<N, false>(sys, op)?,
        false => [cpu.low(op.imm as u8), cpu.high(op.imm as u8)],
    };
    let a = [cpu.low(op.src.index), cpu.high(op.src.index)];
    cpu.set_low(op.dst.index, L::apply(a[0], b[0]));
    cpu.set_high(op.dst.index, if N == 32 { L::apply(a[1], b[1]) } else { [0; 16] });
    Ok(())
}

/// PMOVMSKB: the top bit of each byte.
fn byte_mask<S: System, const N: usize, const VEX: bool>(
    cpu: &mut Cpu<S>,
    _: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    if VEX {
        permit::avx(cpu)?
    } else {
        permit::sse(cpu)?
    }
    let low = top_bits(cpu.low(op.src.index));
    let high = if N == 32 { top_bits(cpu.high(op.src.index)) } else { 0 };
    cpu.set_reg::<4>(op.dst, low | high << 16);
    Ok(())
}

#[inline(always)]
fn top_bits(value: Vector) -> u64 {
    let value = u128::from_le_bytes(value);
    // The product gathers bit 7 of eight bytes in the top byte.
    let gather =
        |half: u64| ((half >> 7) & 0x0101_0101_0101_0101).wrapping_mul(0x0102_0408_1020_4080) >> 56;
    gather(value as u64) | gather((value >> 64) as u64) << 8
}

/// PSHUFD.
fn shuffle_dwords<S: System>(cpu: &mut Cpu<S>, _: &mut S, op: &Op<S>) -> Result<(), Fault> {
    permit::sse(cpu)?;
    let from = cpu.low(op.src.index);
    let mut value = from;
    for (i, lane) in value.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        let which = (op.imm >> (2 * i) & 3) as usize;
        lane.copy_from_slice(&from[4 * which..4 * which + 4]);
    }
    cpu.set_low(op.dst.index, value);
    Ok(())
}

/// PSLLDQ and PSRLDQ.
fn shift_bytes<S: System, const LEFT: bool>(
    cpu: &mut Cpu<S>,
    _: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    permit::sse(cpu)?;
    let count = 8 * (op.imm & 0xff) as u32;
    let value = u128::from_le_bytes(cpu.low(op.dst.index));
    let shifted = if LEFT { value.checked_shl(count) } else { value.checked_shr(count) };
    cpu.set_low(op.dst.index, shifted.unwrap_or(0).to_le_bytes());
    Ok(())
}

/// Chooses a handler and sets its register numbers; `None` if it is no such operation.
pub(super) fn prepare<S: System>(op: &mut Op<S>) -> Option<Handler<S>> {
    let insn = op.insn;
    if (0..insn.op_count()).any(|i| insn.op_register(i).is_mm()) {
        return None;
    }
    let handler = choose(&insn)?;
    op.dst = register(&insn, 0);
    op.src = register(&insn, 1);
    if insn.op_count() == 3 && insn.op2_kind() == OpKind::Register {
        op.imm = register(&insn, 2).index.into();
    }
    Some(handler)
}

fn choose<S: System>(insn: &Instruction) -> Option<Handler<S>> {
    use Mnemonic as M;
    Some(match insn.mnemonic() {
        M::Pand | M::Andps | M::Andpd | M::Vpand | M::Vandps | M::Vandpd => form::<S, And>(insn),
        M::Pandn | M::Andnps | M::Andnpd | M::Vpandn | M::Vandnps | M::Vandnpd => {
            form::<S, AndNot>(insn)
        }
        M::Por | M::Orps | M::Orpd | M::Vpor | M::Vorps | M::Vorpd => form::<S, Or>(insn),
        M::Pxor | M::Xorps | M::Xorpd | M::Vpxor | M::Vxorps | M::Vxorpd => form::<S, Xor>(insn),
        M::Paddb | M::Vpaddb => form::<S, AddBytes>(insn),
        M::Paddd | M::Vpaddd => form::<S, AddDwords>(insn),
        M::Paddq | M::Vpaddq => form::<S, AddQwords>(insn),
        M::Psubb | M::Vpsubb => form::<S, SubtractBytes>(insn),
        M::Psubd | M::Vpsubd => form::<S, SubtractDwords>(insn),
        M::Psubq | M::Vpsubq => form::<S, SubtractQwords>(insn),
        M::Pcmpeqb | M::Vpcmpeqb => form::<S, EqualBytes>(insn),
        M::Pcmpeqd | M::Vpcmpeqd => form::<S, EqualDwords>(insn),
        M::Pcmpgtb | M::Vpcmpgtb => form::<S, GreaterBytes>(insn),
        M::Pminub | M::Vpminub => form::<S, MinimumBytes>(insn),
        M::Pmaxub | M::Vpmaxub => form::<S, MaximumBytes>(insn),
        M::Punpcklqdq | M::Vpunpcklqdq => form::<S, UnpackLowQwords>(insn),
        M::Punpckhqdq | M::Vpunpckhqdq => form::<S, UnpackHighQwords>(insn),
        M::Pmovmskb => byte_mask::<S, 16, false>,
        M::Vpmovmskb if insn.op1_register().is_ymm() => byte_mask::<S, 32, true>,
        M::Vpmovmskb => byte_mask::<S, 16, true>,
        M::Pshufd if insn.op1_kind() == OpKind::Register => shuffle_dwords,
        M::Pslldq => shift_bytes::<S, true>,
        M::Psrldq => shift_bytes::<S, false>,
        _ => return None,
    })
}

fn form<S: System, L: Lanes>(insn: &Instruction) -> Handler<S> {
    let last = insn.op_count() - 1;
    let memory = insn.op_kind(last) == OpKind::Memory;
    let wide = insn.op0_register().is_ymm();
    match (insn.encoding() == EncodingKind::VEX, wide, memory) {
        (false, _, false) => legacy::<S, L, false>,
        (false, _, true) => legacy::<S, L, true>,
        (true, false, false) => vex::<S, L, 16, false>,
        (true, false, true) => vex::<S, L, 16, true>,
        (true, true, false) => vex::<S, L, 32, false>,
        (true, true, true) => vex::<S, L, 32, true>,
    }
}
