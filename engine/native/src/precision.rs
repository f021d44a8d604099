//! What an unmasked overflow or underflow tells of precision, and which halves are tiny.
//!
//! If overflow or underflow is raised and unmasked, the precision flag tells whether the result fits its format but for the exponent
//! (SDM vol. 1, 4.9.1.4 and 4.9.1.5). A run with masked exceptions bounds the exponent first and does not show that. So the exact result
//! of each element is looked at here. It is not computed as a float: nothing is committed when such an exception is raised.

use iced_x86::{Instruction, Mnemonic, OpKind, Register};
use x86::fpu::FpuState;
use x86_interp::VectorOperands;

/// Denormals are zeros.
const DAZ: u32 = 1 << 6;
/// Where MXCSR has the direction of rounding.
const ROUNDING: u32 = 13;
/// Significant bits of a half, and the exponent of the smallest one that is not tiny.
const HALF_BITS: u32 = 11;
const HALF_LEAST: i32 = -14;

/// A finite number: an odd mantissa, or zero, times a power of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Number {
    negative: bool,
    mantissa: u128,
    exponent: i32,
}

/// A format of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Single,
    Double,
}

impl Format {
    const fn bytes(self) -> usize {
        if matches!(self, Self::Single) { 4 } else { 8 }
    }

    /// Bits of its mantissa, the first of which is not stored.
    const fn bits(self) -> u32 {
        if matches!(self, Self::Single) { 24 } else { 53 }
    }

    /// The number that the bytes of an element stand for; `None` for an infinity or a NaN. Denormals count as zero with `zeros`.
    fn read(self, element: &[u8], zeros: bool) -> Option<Number> {
        let mut bytes = [0; 8];
        bytes[..self.bytes()].copy_from_slice(element);
        let (all, stored) = (u64::from_le_bytes(bytes), self.bits() - 1);
        let width = 8 * self.bytes() as u32 - 1;
        let (negative, fraction) = (all >> width & 1 != 0, all & ((1 << stored) - 1));
        let largest = (1_u64 << (width - stored)) - 1;
        let exponent = all >> stored & largest;
        if exponent == largest {
            return None;
        }
        let mantissa = match exponent {
            0 if zeros => 0,
            0 => fraction,
            _ => fraction | 1 << stored,
        };
        let least = 1 - (largest / 2) as i32 - stored as i32;
        Some(Number::new(negative, mantissa.into(), least + exponent.max(1) as i32 - 1))
    }
}

/// Bits from the first to the last that is set.
const fn span(mantissa: u128) -> u32 {
    if mantissa == 0 { 0 } else { 128 - mantissa.leading_zeros() - mantissa.trailing_zeros() }
}

impl Number {
    fn new(negative: bool, mantissa: u128, exponent: i32) -> Self {
        let zeros = if mantissa == 0 { 0 } else { mantissa.trailing_zeros() };
        Self { negative, mantissa: mantissa >> zeros, exponent: exponent + zeros as i32 }
    }

    fn fits(self, bits: u32) -> bool {
        span(self.mantissa) <= bits
    }

    fn times(self, other: Self) -> Self {
        let negative = self.negative != other.negative;
        Self::new(negative, self.mantissa * other.mantissa, self.exponent + other.exponent)
    }

    /// Whether the quotient fits. (By zero there is another exception.)
    fn divided_fits(self, other: Self, bits: u32) -> bool {
        other.mantissa == 0
            || self.mantissa.is_multiple_of(other.mantissa)
                && span(self.mantissa / other.mantissa) <= bits
    }

    /// Whether the sum fits.
    fn plus_fits(self, other: Self, bits: u32) -> bool {
        if self.mantissa == 0 || other.mantissa == 0 {
            return self.fits(bits) && other.fits(bits);
        }
        let (high, low) =
            if self.exponent < other.exponent { (other, self) } else { (self, other) };
        let shift = high.exponent.abs_diff(low.exponent);
        // The lower one has at most 106 bits and is odd: with a higher one of so many the sum is odd and longer than any format.
        if span(high.mantissa) + shift > 126 {
            return false;
        }
        let (high_part, low_part) = (high.mantissa << shift, low.mantissa);
        let sum = match high.negative == low.negative {
            true => high_part + low_part,
            false => high_part.abs_diff(low_part),
        };
        span(sum) <= bits
    }

    fn negated(self, negated: bool) -> Self {
        Self { negative: self.negative != negated, ..self }
    }

    /// Whether it is smaller than what a half can have as a normal number, once rounded to a half's precision.
    fn is_tiny_half(self, rounding: u32) -> bool {
        let (span, top) = (span(self.mantissa), self.exponent + span(self.mantissa) as i32 - 1);
        if self.mantissa == 0 || top != HALF_LEAST - 1 || span <= HALF_BITS {
            return self.mantissa != 0 && top < HALF_LEAST;
        }
        let (kept, lost) = (self.mantissa >> (span - HALF_BITS), span - HALF_BITS);
        let goes_up = match rounding {
            0 => self.mantissa >> (lost - 1) & 1 != 0,
            1 => self.negative,
            2 => !self.negative,
            _ => false,
        };
        kept + 1 != 1 << HALF_BITS || !goes_up
    }
}

/// What is computed of two or three numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    /// A sum, or a difference, in even elements and in odd ones.
    Sum([bool; 2]),
    /// The same of neighbours.
    Neighbours(bool),
    Product,
    Quotient,
    /// A product and a third number, which is subtracted or not; the places of the operands.
    Fused([bool; 2], [u32; 3]),
    /// The same number in a smaller format.
    Narrower(u32),
}

/// What an instruction computes, by its name; `None` if it never overflows.
fn operation(name: &str) -> Option<(Operation, Format, bool)> {
    let name = name.strip_prefix('v').unwrap_or(name);
    let narrower = |bits, format, scalar| Some((Operation::Narrower(bits), format, scalar));
    match name {
        "cvtsd2ss" => return narrower(24, Format::Double, true),
        "cvtpd2ps" => return narrower(24, Format::Double, false),
        "cvtps2ph" => return narrower(HALF_BITS, Format::Single, false),
        _ => {}
    }
    let (stem, suffix) = name.split_at_checked(name.len().checked_sub(2)?)?;
    let (format, scalar) = match suffix {
        "ps" => (Format::Single, false),
        "ss" => (Format::Single, true),
        "pd" => (Format::Double, false),
        "sd" => (Format::Double, true),
        _ => return None,
    };
    let operation = match stem {
        "add" => Operation::Sum([false; 2]),
        "sub" => Operation::Sum([true; 2]),
        "addsub" => Operation::Sum([true, false]),
        "hadd" => Operation::Neighbours(false),
        "hsub" => Operation::Neighbours(true),
        "mul" => Operation::Product,
        "div" => Operation::Quotient,
        _ => fused(stem)?,
    };
    Some((operation, format, scalar))
}

fn fused(stem: &str) -> Option<Operation> {
    let (stem, order) = stem.split_at_checked(stem.len().checked_sub(3)?)?;
    let places = match order {
        "132" => [0, 2, 1],
        "213" => [1, 0, 2],
        "231" => [1, 2, 0],
        _ => return None,
    };
    // A negative product and a sum are the difference with the other sign.
    let subtracts = match stem {
        "fmadd" | "fnmsub" => [false; 2],
        "fmsub" | "fnmadd" => [true; 2],
        "fmaddsub" => [true, false],
        "fmsubadd" => [false, true],
        _ => return None,
    };
    Some(Operation::Fused(subtracts, places))
}

/// Elements of an instruction's operands.
struct Elements<'a> {
    insn: &'a Instruction,
    fpu: &'a FpuState,
    operands: &'a VectorOperands,
    format: Format,
    scalar: bool,
}

impl Elements<'_> {
    fn count(&self) -> usize {
        let is_wide = |operand| self.insn.op_register(operand).is_ymm();
        let wide = (0..self.insn.op_count()).any(is_wide) || self.insn.memory_size().size() == 32;
        let bytes = if wide { 32 } else { 16 };
        if self.scalar { 1 } else { bytes / self.format.bytes() }
    }

    fn get(&self, operand: u32, index: usize) -> Option<Number> {
        let size = self.format.bytes();
        let at = index * size;
        let register = self.insn.op_register(operand);
        let source = match register {
            Register::None => &self.operands.memory[at..],
            _ if at < 16 => &self.fpu.xmm[register.number()][at..],
            _ => &self.fpu.ymm_high[register.number()][at - 16..],
        };
        self.format.read(&source[..size], self.fpu.mxcsr & DAZ != 0)
    }

    /// The places of the operands that are computed with, but for fused operations.
    fn sources(&self) -> [u32; 2] {
        let all = self.insn.op_count();
        let is_immediate = |operand: &u32| self.insn.op_kind(*operand) == OpKind::Immediate8;
        let count = all - u32::from(is_immediate(&(all - 1)));
        [count.saturating_sub(2), count - 1]
    }

    /// Whether what comes of an element fits. What is not finite does.
    fn fits(&self, operation: Operation, index: usize) -> Option<bool> {
        let bits = self.format.bits();
        let [first, second] = self.sources();
        Some(match operation {
            Operation::Sum(subtracts) => {
                let (a, b) = (self.get(first, index)?, self.get(second, index)?);
                a.plus_fits(b.negated(subtracts[index % 2]), bits)
            }
            Operation::Neighbours(subtract) => [first, second].into_iter().all(|operand| {
                let pair = (self.get(operand, index & !1), self.get(operand, index | 1));
                let (Some(a), Some(b)) = pair else { return true };
                a.plus_fits(b.negated(subtract), bits)
            }),
            Operation::Product => {
                self.get(first, index)?.times(self.get(second, index)?).fits(bits)
            }
            Operation::Quotient => {
                self.get(first, index)?.divided_fits(self.get(second, index)?, bits)
            }
            Operation::Fused(subtracts, places) => {
                let [a, b, c] = places.map(|operand| self.get(operand, index));
                a?.times(b?).plus_fits(c?.negated(subtracts[index % 2]), bits)
            }
            Operation::Narrower(bits) => self.get(second, index)?.fits(bits),
        })
    }
}

/// Whether an element's result does not fit its format, whatever its exponent. `fpu` and `operands` are as before the instruction.
pub(crate) fn is_lost(insn: &Instruction, fpu: &FpuState, operands: &VectorOperands) -> bool {
    let name = format!("{:?}", insn.mnemonic()).to_lowercase();
    let Some((operation, format, scalar)) = operation(&name) else { return false };
    let elements = Elements { insn, fpu, operands, format, scalar };
    (0..elements.count()).any(|index| elements.fits(operation, index) == Some(false))
}

/// Whether VCVTPS2PH makes a half that is tiny, exact or not. (It takes no notice of flush-to-zero.)
pub(crate) fn has_tiny_half(insn: &Instruction, fpu: &FpuState, operands: &VectorOperands) -> bool {
    if insn.mnemonic() != Mnemonic::Vcvtps2ph {
        return false;
    }
    let (control, format) = (u32::from(insn.immediate8()), Format::Single);
    let rounding = if control & 4 == 0 { control } else { fpu.mxcsr >> ROUNDING } & 3;
    let elements = Elements { insn, fpu, operands, format, scalar: false };
    (0..elements.count())
        .filter_map(|index| elements.get(1, index))
        .any(|number| number.is_tiny_half(rounding))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn double(value: f64) -> Number {
        Format::Double.read(&value.to_le_bytes(), false).expect("finite")
    }

    #[test]
    fn numbers_are_read_as_they_are() {
        let three = Number { negative: true, mantissa: 3, exponent: -1 };
        assert_eq!(double(-1.5), three);
        assert_eq!(Format::Single.read(&(-1.5_f32).to_le_bytes(), false), Some(three));
        let least = f64::from_bits(1);
        assert_eq!((double(least).mantissa, double(least).exponent), (1, -1074));
        assert_eq!(double(f64::MIN_POSITIVE).exponent, -1022);
        assert_eq!(Format::Double.read(&least.to_le_bytes(), true).map(|it| it.mantissa), Some(0));
        assert_eq!(Format::Single.read(&f32::INFINITY.to_le_bytes(), false), None);
    }

    #[test]
    fn exact_results_fit() {
        let (most, least) = (double(f64::MAX), double(f64::from_bits(1)));
        assert!(most.plus_fits(most, 53), "one bit more of exponent");
        assert!(!most.plus_fits(double(1.0), 53) && !most.plus_fits(least, 53));
        assert!(most.times(double(2.0)).fits(53) && !most.times(most).fits(53));
        assert!(least.times(least).fits(53), "a power of two");
        assert!(least.divided_fits(double(4.0), 53) && !least.divided_fits(double(3.0), 53));
        let third = double(1.0 / 3.0);
        assert!(!third.times(third).plus_fits(double(1.0), 53));
        assert!(third.times(double(3.0)).plus_fits(double(-1.0), 53), "what remains is small");
    }

    #[test]
    fn halves_are_tiny_before_their_exponent_is_bounded() {
        let single = |value: f32| Format::Single.read(&value.to_le_bytes(), false).expect("finite");
        let least = 2_f32.powi(HALF_LEAST);
        let below = f32::from_bits(least.to_bits() - 1);
        assert!(!single(least).is_tiny_half(0) && single(least / 2.0).is_tiny_half(0));
        assert!(!single(below).is_tiny_half(0), "rounds to one that is not");
        assert!(single(below).is_tiny_half(1) && single(-below).is_tiny_half(2));
        assert!(!single(-below).is_tiny_half(1) && single(below).is_tiny_half(3));
        assert!(!single(0.0).is_tiny_half(0));
    }
}
