//! How much of an instruction that means nothing has to be there before it is refused.
//!
//! At the end of a page with nothing behind it, CPUs differ from the decoder. For opcodes that it does not know the
//! decoder wants a ModR/M byte. Others, which it knows to be undefined, it refuses before it has all of their bytes.
//! CPUs learn an instruction's length from its opcode. They refuse it when all of its bytes are there, or at once,
//! which depends on the opcode. At once was seen on an Intel Xeon (family
//! 6, model 167), which did the same for 10,800 sequences; the lengths on an AMD EPYC (family 25, model 17), too.

use crate::decode::is_prefix;

/// The bytes are undefined, and the CPU looks at nothing behind them: #UD, rather than a fault of the fetch.
pub(crate) fn is_undefined_at_once(bytes: &[u8], bits: u32) -> bool {
    let prefixes = bytes.iter().take_while(|byte| is_prefix(**byte, bits)).count();
    match bytes[prefixes..] {
        [opcode, ..] if bits == 64 && is_dropped(opcode) => true,
        [0x0f, opcode, ..] => matches!(opcode, 0x04 | 0x0a | 0x0c | 0x0f | 0x24..=0x27 | 0x36),
        // x87's without memory: two bytes, whether they mean something or not.
        [0xd8..=0xdf, 0xc0..=0xff, ..] => true,
        // Neither POP nor, as on AMD's CPUs, XOP.
        [0x8f, modrm, ref rest @ ..] => bits == 64 && modrm & 0x38 != 0 && has_operand(modrm, rest),
        [0xc5, _, opcode, ..] => bits == 64 && is_no_vector(opcode),
        // No map of opcodes: as long as one whose ModR/M byte is the second.
        [0x62 | 0xc4, map, ref rest @ ..] if map & 3 == 0 => {
            map >= 0xc0 || bits == 64 && has_operand(map, rest)
        }
        [0xc4, map, _, opcode, ..] => bits == 64 && map & 0x1f == 1 && is_no_vector(opcode),
        _ => false,
    }
}

/// Opcodes without operands that 64-bit mode has dropped.
fn is_dropped(opcode: u8) -> bool {
    matches!(
        opcode,
        0x06 | 0x07
            | 0x0e
            | 0x16
            | 0x17
            | 0x1e
            | 0x1f
            | 0x27
            | 0x2f
            | 0x37
            | 0x3f
            | 0x60
            | 0x61
            | 0xce
            | 0xd6
    )
}

/// Opcodes behind 0F that have no ModR/M byte, and no meaning behind a VEX prefix.
fn is_no_vector(opcode: u8) -> bool {
    matches!(
        opcode,
        0x04..=0x0c
            | 0x0e
            | 0x0f
            | 0x24..=0x27
            | 0x30..=0x3f
            | 0xa0..=0xa2
            | 0xa8..=0xaa
            | 0xc8..=0xcf
    )
}

/// All of an instruction is there that the decoder has found to be undefined.
pub(crate) fn is_whole(bytes: &[u8], bits: u32) -> bool {
    let prefixes = bytes.iter().take_while(|byte| is_prefix(**byte, bits)).count();
    let (prefixes, opcode) = bytes.split_at(prefixes);
    let narrow = prefixes.contains(&0x66) && !matches!(prefixes.last(), Some(0x48..=0x4f));
    // 16-bit addresses have other operands.
    if bits == 16 || bits == 32 && prefixes.contains(&0x67) {
        return true;
    }
    let word = if narrow { 2 } else { 4 };
    let (modrm, immediate) = match *opcode {
        [0x9a | 0xea, ref rest @ ..] => return rest.len() >= word + 2,
        // The register forms of moves to and from control registers are the only ones.
        [0x0f, 0x20..=0x23, ref rest @ ..] => return !rest.is_empty(),
        [0x0f, 0x38, _, ref rest @ ..] => (rest, 0),
        [0x0f, 0x3a, _, ref rest @ ..] | [0x0f, 0x71..=0x73 | 0xba, ref rest @ ..] => (rest, 1),
        [0x0f, _, ref rest @ ..] => (rest, 0),
        [0x82 | 0xc6, ref rest @ ..] => (rest, 1),
        [0xc7, ref rest @ ..] => (rest, word),
        [0x8c..=0x8e | 0xd8..=0xdf | 0xfe | 0xff, ref rest @ ..] => (rest, 0),
        _ => return true,
    };
    modrm.split_first().is_some_and(|(modrm, rest)| has(*modrm, rest, immediate))
}

/// What a ModR/M byte asks for is there: SIB and displacement.
fn has_operand(modrm: u8, rest: &[u8]) -> bool {
    has(modrm, rest, 0)
}

/// The same, and an immediate.
fn has(modrm: u8, rest: &[u8], immediate: usize) -> bool {
    let (mode, register) = (modrm >> 6, modrm & 7);
    let sib = usize::from(mode != 3 && register == 4);
    let no_base =
        if sib == 1 { rest.first().is_some_and(|sib| sib & 7 == 5) } else { register == 5 };
    let displacement = match mode {
        0 if no_base => 4,
        1 => 1,
        2 => 4,
        _ => 0,
    };
    rest.len() >= sib + displacement + immediate
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decode::complete;

    /// What the CPU refused at the end of a page.
    const REFUSED: [&[u8]; 24] = [
        &[0x27],
        &[0x0f, 0x04],
        &[0xf3, 0x0f, 0x36],
        &[0x0f, 0x0f],
        &[0x66, 0x0f, 0x27],
        &[0xd9, 0xd7],
        &[0xd9, 0xe2],
        &[0xdb, 0xe5],
        &[0xdb, 0xfc],
        &[0xde, 0xd8],
        &[0xdf, 0xe1],
        &[0x8f, 0xf8],
        &[0x62, 0x00],
        &[0x62, 0xc4],
        &[0x62, 0xfc],
        &[0xc4, 0x00],
        &[0xc4, 0x38],
        &[0xc4, 0xe0],
        &[0xc4, 0xe4],
        &[0xc4, 0x60, 0x78],
        &[0xc4, 0xe1, 0x78, 0x05],
        &[0xc5, 0xf8, 0x0b],
        &[0xc5, 0xf9, 0xaa],
        &[0xc5, 0xf8, 0xcf],
    ];
    /// Where it went on to the next page.
    const FETCHED: [&[u8]; 23] = [
        &[0x0f],
        &[0x66],
        &[0x0f, 0xff],
        &[0x0f, 0xb9],
        &[0x0f, 0x0d],
        &[0x0f, 0xa6],
        &[0x0f, 0xc7],
        &[0x82],
        &[0x8f],
        &[0x9a],
        &[0xd9],
        &[0xd9, 0x05],
        &[0xea],
        &[0xd4],
        &[0x62],
        &[0x62, 0x04],
        &[0x62, 0x40],
        &[0xc4, 0x05],
        &[0xc4, 0x61],
        &[0xc4, 0x60],
        &[0xc4, 0x64, 0x00],
        &[0xc5, 0xfc],
        &[0xc5, 0xf8, 0x0d],
    ];

    #[test]
    fn what_the_cpu_refuses_is_refused() {
        for bytes in REFUSED {
            assert!(is_undefined_at_once(bytes, 64), "{bytes:x?}");
        }
    }

    #[test]
    fn what_the_cpu_fetches_is_fetched() {
        for bytes in FETCHED {
            assert!(!is_undefined_at_once(bytes, 64), "{bytes:x?}");
        }
    }

    /// Undefined, each without its last byte: the CPU goes on to the next page for that.
    const CUT: [&[u8]; 16] = [
        &[0x82, 0xc0],
        &[0x82, 0x04, 0x24],
        &[0x9a, 0, 0, 0, 0, 0],
        &[0x66, 0xea, 0, 0, 0],
        &[0xc6, 0x4d, 0],
        &[0xc7, 0xc8, 0, 0, 0],
        &[0x48, 0xc7, 0x0d, 0, 0, 0, 0, 0, 0, 0],
        &[0xd9, 0x0c],
        &[0xdb, 0xa4, 0x24, 0, 0, 0],
        &[0xdd, 0x2d, 0, 0, 0],
        &[0xfe, 0x14],
        &[0xf0, 0xff, 0x78],
        &[0x0f, 0x71, 0xc0],
        &[0x0f, 0xba, 0x04, 0x24],
        &[0x0f, 0x38, 0x0f],
        &[0x0f, 0x3a, 0x00, 0xc0],
    ];

    #[test]
    fn what_is_undefined_is_fetched_to_its_end() {
        for bytes in CUT {
            assert!(!complete(bytes, 64), "{bytes:x?}");
            assert!(complete(&[bytes, &[0]].concat(), 64), "{bytes:x?} and the last byte");
        }
        for whole in [&[0xd9, 0x08][..], &[0x8c, 0xf8], &[0xfe, 0xd0], &[0x0f, 0x20, 0x0c]] {
            assert!(complete(whole, 64), "{whole:x?}");
        }
    }

    /// BOUND, LES and LDS.
    #[test]
    fn prefixes_of_64_bits_are_instructions_in_32() {
        for bytes in [&[0x62, 0x00][..], &[0xc4, 0x00], &[0xc4, 0x38], &[0xc5, 0x38, 0x0b], &[0x27]]
        {
            assert!(!is_undefined_at_once(bytes, 32), "{bytes:x?}");
        }
    }
}
