//! Bytes to [`Op`]s.

use crate::{
    at_once::{is_undefined_at_once, is_whole},
    exec,
    op::{Address, Op, RegRef},
    system::System,
};
use iced_x86::{Code, Decoder, DecoderError, DecoderOptions, FlowControl, Instruction, OpKind};

/// Bytes looked at for one block.
pub(crate) const WINDOW: usize = 512;
const MAX_OPS: usize = 64;
const MAX_LENGTH: usize = 15;

/// Decodes a block. Empty if not even the first instruction lies wholly within `bytes`.
pub(crate) fn block<S: System>(sys: &mut S, bytes: &[u8], bits: u32) -> Vec<Op<S>> {
    let mut decoder = Decoder::with_ip(bits, bytes, 0, DecoderOptions::NONE);
    let mut ops = Vec::new();
    while decoder.can_decode() && ops.len() < MAX_OPS {
        let start = decoder.position();
        let insn = decoder.decode();
        if bytes.len() - start < MAX_LENGTH && !is_decided(&decoder, &bytes[start..], bits) {
            break;
        }
        let (op, ends) = make(sys, insn, &bytes[start..], bits);
        ops.push(op);
        if ends {
            break;
        }
    }
    ops
}

/// Decodes one instruction; an incomplete or invalid one becomes #UD or #GP.
pub(crate) fn one<S: System>(sys: &mut S, bytes: &[u8], bits: u32) -> Op<S> {
    let insn = Decoder::with_ip(bits, bytes, 0, DecoderOptions::NONE).decode();
    make(sys, insn, bytes, bits).0
}

/// The bytes hold a whole instruction (valid or not).
pub(crate) fn complete(bytes: &[u8], bits: u32) -> bool {
    if is_undefined_at_once(bytes, bits) {
        return true;
    }
    let mut decoder = Decoder::with_ip(bits, bytes, 0, DecoderOptions::NONE);
    let _ = decoder.decode();
    is_decided(&decoder, bytes, bits)
}

/// What the decoder has made of the bytes does not depend on others behind them.
fn is_decided(decoder: &Decoder<'_>, bytes: &[u8], bits: u32) -> bool {
    match decoder.last_error() {
        DecoderError::NoMoreBytes => false,
        DecoderError::InvalidInstruction => is_whole(bytes, bits),
        _ => true,
    }
}

fn make<S: System>(sys: &mut S, insn: Instruction, bytes: &[u8], bits: u32) -> (Op<S>, bool) {
    let too_long =
        insn.code() == Code::INVALID && bytes.len() >= MAX_LENGTH && endless(bytes, bits);
    let (run, ends) = if too_long { (exec::gp as _, true) } else { exec::select(&insn) };
    let len = insn.len().min(bytes.len());
    let mut encoding = [0; MAX_LENGTH];
    encoding[..len].copy_from_slice(&bytes[..len]);
    let mut op = Op {
        run,
        imm: immediate(&insn),
        address: Address::of(&insn, bits),
        len: len as u8,
        dst: RegRef::of(insn.op0_register()),
        src: source_register(&insn),
        long: bits == 64,
        insn,
        bytes: encoding,
        unit: 0,
    };
    exec::prepare(sys, &mut op);
    let flow = insn.flow_control();
    let ends = ends || !matches!(flow, FlowControl::Next | FlowControl::ConditionalBranch);
    (op, ends)
}

/// Fifteen bytes are not enough: that is #GP, not #UD (SDM 6.15), and only prefixes make an
/// instruction so long. The decoder says so only if it runs out of bytes before its own limit, so
/// it gets the instruction without its first prefix.
fn endless(bytes: &[u8], bits: u32) -> bool {
    let mut decoder = Decoder::with_ip(bits, &bytes[1..MAX_LENGTH], 0, DecoderOptions::NONE);
    let _ = decoder.decode();
    is_prefix(bytes[0], bits) && decoder.last_error() == DecoderError::NoMoreBytes
}

pub(crate) fn is_prefix(byte: u8, bits: u32) -> bool {
    matches!(byte, 0x26 | 0x2e | 0x36 | 0x3e | 0x64..=0x67 | 0xf0 | 0xf2 | 0xf3)
        || (bits == 64 && (0x40..=0x4f).contains(&byte))
}

/// The second register operand; for a memory-first form that is operand 1 too.
fn source_register(insn: &Instruction) -> RegRef {
    RegRef::of(insn.op1_register())
}

/// The last immediate, sign-extended to the operand size; for near branches the distance from
/// the next instruction.
fn immediate(insn: &Instruction) -> u64 {
    for i in (0..insn.op_count()).rev() {
        match insn.op_kind(i) {
            OpKind::NearBranch16 | OpKind::NearBranch32 | OpKind::NearBranch64 => {
                return insn.near_branch_target().wrapping_sub(insn.next_ip());
            }
            OpKind::Immediate8
            | OpKind::Immediate16
            | OpKind::Immediate32
            | OpKind::Immediate64
            | OpKind::Immediate8to16
            | OpKind::Immediate8to32
            | OpKind::Immediate8to64
            | OpKind::Immediate32to64 => return insn.immediate(i),
            _ => {}
        }
    }
    0
}
