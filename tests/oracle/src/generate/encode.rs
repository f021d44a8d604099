//! Bytes of an instruction of a given form.
//!
//! The encoder is deliberately loose: prefixes, opcode and random bytes are put together from the
//! form's description, and the decoder says whether the result is the form wanted. So redundant
//! prefixes, ignored REX bits and every ModRM and SIB shape come up without being thought of.

use iced_x86::{
    Code, ConstantOffsets, Decoder, DecoderError, DecoderOptions, EncodingKind, Instruction,
    MandatoryPrefix, OpCodeInfo, OpCodeOperandKind, OpCodeTableKind,
};

use crate::forms::{self, Verdict};
use crate::random::Random;
use crate::values;

/// Longest instruction, in bytes.
const MAX_LEN: usize = 15;
/// Candidates tried for one form before giving up.
const TRIES: usize = 200;

/// Where an instruction is to lie.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Its address.
    pub ip: u64,
    /// 64 or 32: the code it is part of.
    pub bits: u32,
}

/// An instruction being made.
#[derive(Clone, Debug)]
pub struct Draft {
    place: Place,
    /// Its encoding.
    pub bytes: Vec<u8>,
    /// The same, decoded.
    pub insn: Instruction,
    /// Where in `bytes` displacement and immediate are.
    pub offsets: ConstantOffsets,
}

impl Draft {
    /// Decodes an instruction at `ip` from the start of `bytes`.
    pub fn decode(bytes: &[u8], place: Place) -> Option<Self> {
        let Place { ip, bits } = place;
        let mut decoder = Decoder::with_ip(bits, bytes, ip, DecoderOptions::NONE);
        let insn = decoder.decode();
        if insn.is_invalid() {
            return None;
        }
        let offsets = decoder.get_constant_offsets(&insn);
        Some(Self { place, bytes: bytes[..insn.len()].to_vec(), insn, offsets })
    }

    /// A random instruction of form `code`, to lie at `place`. `None` if the form did not come up.
    pub fn random(random: &mut Random, code: Code, place: Place) -> Option<Self> {
        for _ in 0..TRIES {
            let mut bytes = candidate(random, code.op_code(), place.bits);
            bytes.truncate(MAX_LEN);
            if let Some(mut draft) = Self::decode(&bytes, place).filter(|d| d.insn.code() == code) {
                draft.interesting_immediate(random);
                return Some(draft);
            }
        }
        None
    }

    /// Something near an instruction of form `code`, valid or not. `None` if it is something that
    /// is not to be tested.
    pub fn mutant(random: &mut Random, code: Code, place: Place) -> Option<Self> {
        let mut bytes = candidate(random, code.op_code(), place.bits);
        match random.below(8) {
            0 => bytes.insert(0, random.pick(&[0xf0, 0x66, 0xf2, 0xf3, 0x48, 0x67])),
            1 => drop(bytes.remove(0)),
            2 => bytes.iter_mut().take(4).for_each(|byte| *byte = random.byte()),
            _ => bytes[random.below(5) as usize] ^= 1 << random.below(8),
        }
        bytes.truncate(MAX_LEN);
        let Place { ip, bits } = place;
        let mut decoder = Decoder::with_ip(bits, &bytes, ip, DecoderOptions::NONE);
        let insn = decoder.decode();
        if !insn.is_invalid() {
            let tested = forms::verdict(insn.code(), bits) == Verdict::Tested;
            return tested.then(|| Self::decode(&bytes, place)).flatten();
        }
        let whole = decoder.last_error() == DecoderError::InvalidInstruction;
        // The host may know more EVEX instructions than the CPU model or the decoder.
        let known = !bytes.iter().take(5).any(|byte| *byte == 0x62);
        let offsets = ConstantOffsets::default();
        let bytes = bytes[..insn.len().max(1)].to_vec();
        (whole && known).then_some(Self { place, bytes, insn, offsets })
    }

    fn interesting_immediate(&mut self, random: &mut Random) {
        if self.offsets.has_immediate() && random.chance(60) {
            let (at, size) = (self.offsets.immediate_offset(), self.offsets.immediate_size());
            self.set_bytes(at, size, values::integer(random));
        }
    }

    /// Overwrites the displacement. False if there is none that holds `value`.
    pub fn set_displacement(&mut self, value: i64) -> bool {
        let size = self.offsets.displacement_size();
        let fits = match size {
            4 => i32::try_from(value).is_ok(),
            8 => true,
            _ => false,
        };
        if fits {
            self.set_bytes(self.offsets.displacement_offset(), size, value as u64);
        }
        fits
    }

    fn set_bytes(&mut self, at: usize, size: usize, value: u64) {
        self.bytes[at..at + size].copy_from_slice(&value.to_le_bytes()[..size]);
        if let Some(again) = Self::decode(&self.bytes, self.place) {
            *self = again;
        }
    }
}

/// Something that may well be an instruction of the form, with more bytes behind it.
fn candidate(random: &mut Random, form: &OpCodeInfo, bits: u32) -> Vec<u8> {
    let mut bytes = prefixes(random, form, bits);
    match form.encoding() {
        EncodingKind::VEX => vex(random, form, bits, &mut bytes),
        _ => legacy(random, form, bits, &mut bytes),
    }
    let mut tail: [u8; 12] = std::array::from_fn(|_| random.byte());
    if form.is_group() {
        tail[0] = tail[0] & 0xc7 | (form.group_index() as u8) << 3;
    }
    if form.is_rm_group() {
        tail[0] = tail[0] & 0xf8 | form.rm_group_index() as u8;
    }
    bytes.extend(tail);
    bytes
}

/// Legacy prefixes in any order.
fn prefixes(random: &mut Random, form: &OpCodeInfo, bits: u32) -> Vec<u8> {
    let mut list = Vec::with_capacity(MAX_LEN);
    let legacy = form.encoding() == EncodingKind::Legacy;
    if legacy {
        list.extend(mandatory(form));
        if form.operand_size() == 16 {
            list.push(0x66);
        }
        if form.can_use_lock_prefix() && random.chance(25) {
            list.push(0xf0);
        }
        if (form.can_use_rep_prefix() || form.can_use_repne_prefix()) && random.chance(60) {
            list.push(random.pick(&[0xf2, 0xf3]));
        }
    }
    if form.address_size() == bits / 2 || random.chance(8) {
        list.push(0x67);
    }
    if random.chance(10) {
        list.push(random.pick(&[0x64, 0x65]));
    }
    if legacy && random.chance(4) {
        list.push(random.pick(&[0x66, 0x67, 0xf2, 0xf3, 0x2e, 0x36, 0x3e, 0x26, 0x48, 0x41]));
    }
    for i in (1..list.len()).rev() {
        list.swap(i, random.below(i as u64 + 1) as usize);
    }
    list
}

fn mandatory(form: &OpCodeInfo) -> Option<u8> {
    match form.mandatory_prefix() {
        MandatoryPrefix::P66 => Some(0x66),
        MandatoryPrefix::PF3 => Some(0xf3),
        MandatoryPrefix::PF2 => Some(0xf2),
        _ => None,
    }
}

fn legacy(random: &mut Random, form: &OpCodeInfo, bits: u32, bytes: &mut Vec<u8>) {
    let wide = if form.operand_size() == 64 { 80 } else { 10 };
    let w = u8::from(random.chance(wide)) << 3;
    if bits == 64 && (w != 0 || random.chance(50)) {
        bytes.push(0x40 | w | (random.byte() & 7));
    }
    match form.table() {
        OpCodeTableKind::T0F => bytes.push(0x0f),
        OpCodeTableKind::T0F38 => bytes.extend([0x0f, 0x38]),
        OpCodeTableKind::T0F3A => bytes.extend([0x0f, 0x3a]),
        _ => {}
    }
    push_op_code(random, form, bytes);
}

fn push_op_code(random: &mut Random, form: &OpCodeInfo, bytes: &mut Vec<u8>) {
    use OpCodeOperandKind as K;
    let in_op_code = |kind: &K| {
        matches!(kind, K::r8_opcode | K::r16_opcode | K::r32_opcode | K::r64_opcode)
            || *kind == K::sti_opcode
    };
    let register = if form.op_kinds().iter().any(in_op_code) { random.byte() & 7 } else { 0 };
    let op_code = form.op_code();
    if form.op_code_len() == 2 {
        bytes.push((op_code >> 8) as u8);
    }
    bytes.push((op_code as u8).wrapping_add(register));
}

fn vex(random: &mut Random, form: &OpCodeInfo, bits: u32, bytes: &mut Vec<u8>) {
    let map = match form.table() {
        OpCodeTableKind::T0F => 1,
        OpCodeTableKind::T0F38 => 2,
        _ => 3,
    };
    let pp = match form.mandatory_prefix() {
        MandatoryPrefix::P66 => 1,
        MandatoryPrefix::PF3 => 2,
        MandatoryPrefix::PF2 => 3,
        _ => 0,
    };
    let w = if form.is_wig() { random.byte() & 1 } else { form.w() as u8 };
    let l = if form.is_lig() { random.byte() & 1 } else { form.l() as u8 };
    let vvvv = if random.chance(50) { 0xf } else { random.byte() & 0xf };
    let vvvv = if bits == 64 { vvvv } else { vvvv | 8 };
    let last = vvvv << 3 | l << 2 | pp;
    // In 32-bit code these two bits tell VEX from LES and LDS.
    let rxb = random.byte() & 0xe0 | if bits == 64 { 0 } else { 0xc0 };
    if map == 1 && w == 0 && random.chance(50) {
        bytes.extend([0xc5, rxb & 0x80 | last]);
    } else {
        bytes.extend([0xc4, rxb | map, w << 7 | last]);
    }
    push_op_code(random, form, bytes);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tested_form_comes_up() {
        let mut random = Random::new(1);
        for bits in [64, 32] {
            let place = Place { ip: 0x1000, bits };
            let mut comes =
                |code| (0..20).any(|_| Draft::random(&mut random, code, place).is_some());
            let missing: Vec<Code> =
                forms::tested(bits).into_iter().filter(|&code| !comes(code)).collect();
            assert!(missing.is_empty(), "{bits}-bit: {missing:?}");
        }
    }
}
