//! Addition, subtraction, logic, comparison: the two- and one-operand arithmetic instructions.

use super::{is_gpr, is_memory, operand_size, set_status};
use crate::{
    cpu::Cpu,
    memory::Target,
    op::{Destination, Dst, Handler, Imm, Mem, Op, Source, Src, by_size, mask},
    system::System,
};
use contract::GuestRam;
use iced_x86::{Instruction, Mnemonic, OpKind};
use x86::{Fault, flags};

/// A two-operand operation on values of `SIZE` bytes.
pub(super) trait Binary {
    /// The result is written back.
    const WRITES: bool = true;
    fn apply<const SIZE: usize>(rflags: &mut u64, a: u64, b: u64) -> u64;
}

/// A one-operand operation.
pub(super) trait Unary {
    fn apply<const SIZE: usize>(rflags: &mut u64, a: u64) -> u64;
}

/// ZF, SF and PF of a result.
#[inline(always)]
pub(super) fn zsp<const SIZE: usize>(result: u64) -> u64 {
    let zero = u64::from(result == 0) << 6;
    let sign = (result >> (SIZE * 8 - 1) & 1) << 7;
    zero | sign | parity(result)
}

#[inline(always)]
pub(super) fn parity(result: u64) -> u64 {
    // Bit n of the constant is the (even) parity of the nibble n.
    (0x9669 >> ((result ^ result >> 4) & 0xf) & 1) << 2
}

/// Sum with carry and its flags.
#[inline(always)]
pub(super) fn add<const SIZE: usize>(rflags: &mut u64, a: u64, b: u64, carry: u64) -> u64 {
    let sum = a.wrapping_add(b).wrapping_add(carry) & mask::<SIZE>();
    let carries = (a & b) | ((a | b) & !sum);
    let overflow = (a ^ sum) & (b ^ sum);
    set_status(rflags, zsp::<SIZE>(sum) | carry_flags::<SIZE>(carries, overflow));
    sum
}

/// Difference with borrow and its flags.
#[inline(always)]
pub(super) fn sub<const SIZE: usize>(rflags: &mut u64, a: u64, b: u64, borrow: u64) -> u64 {
    let difference = a.wrapping_sub(b).wrapping_sub(borrow) & mask::<SIZE>();
    let borrows = (!a & b) | ((!a | b) & difference);
    let overflow = (a ^ b) & (a ^ difference);
    set_status(rflags, zsp::<SIZE>(difference) | carry_flags::<SIZE>(borrows, overflow));
    difference
}

#[inline(always)]
fn carry_flags<const SIZE: usize>(carries: u64, overflow: u64) -> u64 {
    let top = SIZE * 8 - 1;
    (carries >> top & 1) | (carries >> 3 & 1) << 4 | (overflow >> top & 1) << 11
}

macro_rules! binary {
    ($name:ident, $writes:expr, |$rflags:ident, $a:ident, $b:ident| $body:expr) => {
        pub(super) struct $name;
        impl Binary for $name {
            const WRITES: bool = $writes;
            #[inline(always)]
            fn apply<const SIZE: usize>($rflags: &mut u64, $a: u64, $b: u64) -> u64 {
                $body
            }
        }
    };
}

macro_rules! logic {
    ($name:ident, $writes:expr, |$a:ident, $b:ident| $body:expr) => {
        binary!($name, $writes, |rflags, $a, $b| {
            let result = $body;
            set_status(rflags, zsp::<SIZE>(result));
            result
        });
    };
}

binary!(Add, true, |f, a, b| add::<SIZE>(f, a, b, 0));
binary!(Adc, true, |f, a, b| add::<SIZE>(f, a, b, *f & flags::CF));
binary!(Sub, true, |f, a, b| sub::<SIZE>(f, a, b, 0));
binary!(Sbb, true, |f, a, b| sub::<SIZE>(f, a, b, *f & flags::CF));
binary!(Cmp, false, |f, a, b| sub::<SIZE>(f, a, b, 0));
logic!(And, true, |a, b| a & b);
logic!(Or, true, |a, b| a | b);
logic!(Xor, true, |a, b| a ^ b);
logic!(Test, false, |a, b| a & b);

macro_rules! unary {
    ($name:ident, |$rflags:ident, $a:ident| $body:expr) => {
        struct $name;
        impl Unary for $name {
            #[inline(always)]
            fn apply<const SIZE: usize>($rflags: &mut u64, $a: u64) -> u64 {
                $body
            }
        }
    };
}

unary!(Inc, |f, a| {
    let carry = *f & flags::CF;
    let result = add::<SIZE>(f, a, 1, 0);
    *f = *f & !flags::CF | carry;
    result
});
unary!(Dec, |f, a| {
    let carry = *f & flags::CF;
    let result = sub::<SIZE>(f, a, 1, 0);
    *f = *f & !flags::CF | carry;
    result
});
unary!(Neg, |f, a| sub::<SIZE>(f, 0, a, 0));
unary!(Not, |_f, a| !a & mask::<SIZE>());

fn binary<S: System, O: Binary, D: Destination, R: Source, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    if !O::WRITES {
        let a = D::get::<S, SIZE>(cpu, sys, op)?;
        let b = R::get::<S, SIZE>(cpu, sys, op)?;
        O::apply::<SIZE>(&mut cpu.vcpu.rflags, a, b);
        return Ok(());
    }
    let b = R::get::<S, SIZE>(cpu, sys, op)?;
    let handle = D::open::<S, SIZE>(cpu, sys, op)?;
    let a = D::load::<S, SIZE>(cpu, sys, handle)?;
    let result = O::apply::<SIZE>(&mut cpu.vcpu.rflags, a, b);
    D::store::<S, SIZE>(cpu, sys, handle, result)
}

fn unary<S: System, O: Unary, D: Destination, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let handle = D::open::<S, SIZE>(cpu, sys, op)?;
    let a = D::load::<S, SIZE>(cpu, sys, handle)?;
    let result = O::apply::<SIZE>(&mut cpu.vcpu.rflags, a);
    D::store::<S, SIZE>(cpu, sys, handle, result)
}

fn locked_binary<S: System, O: Binary, R: Source, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let b = R::get::<S, SIZE>(cpu, sys, op)?;
    locked::<S, SIZE>(cpu, sys, op, |f, a| O::apply::<SIZE>(f, a, b))
}

fn locked_unary<S: System, O: Unary, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    locked::<S, SIZE>(cpu, sys, op, |f, a| O::apply::<SIZE>(f, a))
}

/// An atomic read-modify-write of the memory operand. Flags change once, with the value that won.
#[inline(always)]
pub(super) fn locked<S: System, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
    apply: impl Fn(&mut u64, u64) -> u64,
) -> Result<(), Fault> {
    let target = Mem::open::<S, SIZE>(cpu, sys, op)?;
    let mut old = cpu.target_load::<SIZE>(sys, target)?;
    loop {
        let mut rflags = cpu.vcpu.rflags;
        let new = apply(&mut rflags, old);
        match target {
            Target::Ram(offset) | Target::Code(offset) => {
                let found = sys.ram().cas(offset, SIZE, old, new);
                if found != old {
                    old = found;
                    continue;
                }
            }
            Target::Slow(linear) => match cpu.cas_split(sys, linear, SIZE, old, new)? {
                Some(found) if found != old => {
                    old = found;
                    continue;
                }
                Some(_) => {}
                None => cpu.target_store::<SIZE>(sys, target, new)?,
            },
        }
        if let Target::Code(offset) = target {
            cpu.code_written(sys, offset, SIZE as u64);
        }
        cpu.vcpu.rflags = rflags;
        return Ok(());
    }
}

pub(super) fn select<S: System>(insn: &Instruction) -> Option<Handler<S>> {
    Some(match insn.mnemonic() {
        Mnemonic::Add => choose::<S, Add>(insn)?,
        Mnemonic::Adc => choose::<S, Adc>(insn)?,
        Mnemonic::Sub => choose::<S, Sub>(insn)?,
        Mnemonic::Sbb => choose::<S, Sbb>(insn)?,
        Mnemonic::And => choose::<S, And>(insn)?,
        Mnemonic::Or => choose::<S, Or>(insn)?,
        Mnemonic::Xor => choose::<S, Xor>(insn)?,
        Mnemonic::Cmp => choose::<S, Cmp>(insn)?,
        Mnemonic::Test => choose::<S, Test>(insn)?,
        Mnemonic::Inc => choose_unary::<S, Inc>(insn),
        Mnemonic::Dec => choose_unary::<S, Dec>(insn),
        Mnemonic::Neg => choose_unary::<S, Neg>(insn),
        Mnemonic::Not => choose_unary::<S, Not>(insn),
        _ => return None,
    })
}

fn choose<S: System, O: Binary>(insn: &Instruction) -> Option<Handler<S>> {
    let size = operand_size(insn, 0);
    let register = insn.op1_kind() == OpKind::Register;
    if insn.has_lock_prefix() {
        return Some(if register {
            by_size!(size, locked_binary, S, O, Src)
        } else {
            by_size!(size, locked_binary, S, O, Imm)
        });
    }
    Some(match (is_memory(insn, 0), register, is_memory(insn, 1)) {
        (true, true, _) => by_size!(size, binary, S, O, Mem, Src),
        (true, false, _) => by_size!(size, binary, S, O, Mem, Imm),
        (false, true, _) => by_size!(size, binary, S, O, Dst, Src),
        (false, false, true) => by_size!(size, binary, S, O, Dst, Mem),
        (false, false, false) => by_size!(size, binary, S, O, Dst, Imm),
    })
}

fn choose_unary<S: System, O: Unary>(insn: &Instruction) -> Handler<S> {
    let size = operand_size(insn, 0);
    if insn.has_lock_prefix() {
        by_size!(size, locked_unary, S, O)
    } else if is_gpr(insn, 0) {
        by_size!(size, unary, S, O, Dst)
    } else {
        by_size!(size, unary, S, O, Mem)
    }
}
