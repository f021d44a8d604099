//! Operand values that matter: boundaries of every width, and every class of IEEE number.

use crate::random::Random;

const INTEGERS: [u64; 28] = [
    0,
    1,
    2,
    7,
    8,
    0x0f,
    0x1f,
    0x20,
    0x3f,
    0x40,
    0x7f,
    0x80,
    0xff,
    0x100,
    0x7fff,
    0x8000,
    0xffff,
    0x1_0000,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    0x1_0000_0000,
    0x7fff_ffff_ffff_ffff,
    0x8000_0000_0000_0000,
    0x5555_5555_5555_5555,
    0xaaaa_aaaa_aaaa_aaaa,
    0x0123_4567_89ab_cdef,
    0xffff_ffff_0000_0000,
];

/// Zero, ones, extremes, denormals, infinities, quiet and signalling NaNs.
const SINGLES: [u32; 20] = [
    0x0000_0000,
    0x3f80_0000,
    0x4000_0000,
    0x3f00_0000,
    0x3fc0_0000,
    0x4b80_0001,
    0x4eff_ffff,
    0x4f00_0000,
    0x5f00_0000,
    0x7f7f_ffff,
    0x0080_0000,
    0x007f_ffff,
    0x0000_0001,
    0x0000_1234,
    0x7f80_0000,
    0x7fc0_0000,
    0x7f80_0001,
    0x7fff_ffff,
    0x3eaa_aaab,
    0x3380_0000,
];
const DOUBLES: [u64; 18] = [
    0x0000_0000_0000_0000,
    0x3ff0_0000_0000_0000,
    0x4000_0000_0000_0000,
    0x3fe0_0000_0000_0000,
    0x3ff8_0000_0000_0000,
    0x41df_ffff_ffc0_0000,
    0x41e0_0000_0000_0000,
    0x43e0_0000_0000_0000,
    0x4340_0000_0000_0001,
    0x7fef_ffff_ffff_ffff,
    0x0010_0000_0000_0000,
    0x000f_ffff_ffff_ffff,
    0x0000_0000_0000_0001,
    0x7ff0_0000_0000_0000,
    0x7ff8_0000_0000_0000,
    0x7ff0_0000_0000_0001,
    0x3fd5_5555_5555_5555,
    0x36a0_0000_0000_0000,
];
/// Half precision, for F16C.
const HALVES: [u16; 10] =
    [0, 0x3c00, 0x4000, 0x7bff, 0x0400, 0x03ff, 0x0001, 0x7c00, 0x7e00, 0x7c01];
/// Sign and exponent of extended numbers: zero, denormal range, one, integers, maximum, special.
const EXPONENTS: [u16; 10] = [0, 1, 0x3ffe, 0x3fff, 0x4000, 0x401e, 0x403e, 0x407f, 0x7ffe, 0x7fff];
const MANTISSAS: [u64; 9] = [
    0,
    1,
    0x8000_0000_0000_0000,
    0x8000_0000_0000_0001,
    0xc000_0000_0000_0000,
    0xffff_ffff_ffff_ffff,
    0x4000_0000_0000_0000,
    0xa000_0000_0000_0000,
    0xaaaa_aaaa_aaaa_aaaa,
];

/// A general register's value.
pub fn integer(random: &mut Random) -> u64 {
    let value = match random.below(8) {
        0..=2 => random.pick(&INTEGERS),
        3 => random.pick(&INTEGERS).wrapping_add(random.below(5)).wrapping_sub(2),
        4 => random.below(256),
        5 => random.bits() >> random.below(64),
        _ => random.bits(),
    };
    if random.chance(20) { value.wrapping_neg() } else { value }
}

/// Sixteen bytes of vector lanes of some type.
pub fn lanes(random: &mut Random) -> [u8; 16] {
    let mut bytes = [0; 16];
    match random.below(8) {
        0 | 1 => fill(&mut bytes, 4, || u64::from(single(random))),
        2 | 3 => fill(&mut bytes, 8, || double(random)),
        4 => fill(&mut bytes, 2, || random.pick(&HALVES).into()),
        5 => fill(&mut bytes, 8, || integer(random)),
        6 => fill(&mut bytes, 1, || random.pick(&[0, 1, 0x7f, 0x80, 0xff, 0x3c])),
        _ => fill(&mut bytes, 8, || random.bits()),
    }
    bytes
}

fn fill(bytes: &mut [u8; 16], size: usize, mut lane: impl FnMut() -> u64) {
    for chunk in bytes.chunks_exact_mut(size) {
        chunk.copy_from_slice(&lane().to_le_bytes()[..size]);
    }
}

fn single(random: &mut Random) -> u32 {
    let value = match random.below(4) {
        0 => random.bits() as u32,
        1 => (random.below(2000) as f32 / 7.0).to_bits(),
        _ => random.pick(&SINGLES),
    };
    value ^ (u32::from(random.chance(30)) << 31)
}

fn double(random: &mut Random) -> u64 {
    let value = match random.below(4) {
        0 => random.bits(),
        1 => (random.below(2000) as f64 / 7.0).to_bits(),
        _ => random.pick(&DOUBLES),
    };
    value ^ (u64::from(random.chance(30)) << 63)
}

/// An x87 register: normal numbers, denormals, unnormals, infinities, NaNs.
pub fn extended(random: &mut Random) -> [u8; 16] {
    let exponent = match random.below(4) {
        0 => random.bits() as u16 & 0x7fff,
        1 => 0x3ff0 + random.below(0x50) as u16,
        _ => random.pick(&EXPONENTS),
    };
    let mantissa = match random.below(4) {
        0 => random.bits() | 1 << 63,
        1 => random.bits(),
        _ => random.pick(&MANTISSAS),
    };
    let sign = u16::from(random.chance(30)) << 15;
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&mantissa.to_le_bytes());
    bytes[8..10].copy_from_slice(&(exponent | sign).to_le_bytes());
    bytes
}

/// An MXCSR: the usual one, or others of rounding, flush and mask bits.
pub fn mxcsr(random: &mut Random) -> u32 {
    let masks = match random.below(8) {
        0 => random.bits() as u32 & 0x1f80,
        _ => 0x1f80,
    };
    let rest = match random.below(4) {
        0 | 1 => 0,
        2 => random.bits() as u32 & 0x6000,
        _ => random.bits() as u32 & 0xe07f,
    };
    masks | rest
}

/// An x87 control word.
pub fn fcw(random: &mut Random) -> u16 {
    match random.below(8) {
        0 => random.bits() as u16 & 0x0f3f | 0x40,
        1..=3 => random.bits() as u16 & 0x0f00 | 0x7f,
        _ => 0x37f,
    }
}
