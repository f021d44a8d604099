//! Floating point and SIMD: everything on x87, MMX, XMM and YMM registers, and the VEX-encoded
//! instructions on general registers.
//!
//! The arithmetic is not done here but by the [`VectorUnit`]; what this module adds is the CPU
//! around it:
//! - `permit`: which control bits must be set, and which exception it is if they are not.
//! - `unit`: address, alignment, load, hand-over to the vector unit, store.
//! - `moves`, `lanes`: the hottest instructions, plain moves and integer lane operations, in safe
//!   Rust instead.
//! - `general`: BMI and ADX, which touch no vector register at all.
//! - `elements`: masked moves and gathers, whose elements fault one by one.
//! - `state`, `environment`: instructions that save, restore or initialize whole states.
//!
//! [`VectorUnit`]: crate::VectorUnit

mod access;
mod elements;
mod environment;
mod general;
mod lanes;
mod moves;
mod permit;
mod state;
mod unit;

use super::ud;
use crate::{
    op::{Handler, Op},
    system::System,
};
use iced_x86::{CpuidFeature, EncodingKind, Instruction, Mnemonic};

/// A placeholder for the instructions of this module: [`prepare`] chooses their handler.
pub(super) fn select<S: System>(insn: &Instruction) -> Option<Handler<S>> {
    claims(insn).then_some(ud)
}

/// Chooses the handler and packs what it needs to know into the operand fields.
pub(super) fn prepare<S: System>(sys: &mut S, op: &mut Op<S>) {
    if !claims(&op.insn) {
        return;
    }
    op.run = moves::prepare(op)
        .or_else(|| lanes::prepare(op))
        .or_else(|| general::prepare(op))
        .or_else(|| state::select(&op.insn))
        .or_else(|| environment::select(&op.insn))
        .or_else(|| elements::select(&op.insn))
        .or_else(|| unit::prepare(sys, op))
        .unwrap_or(ud);
}

/// Whether the instruction is one of this module's.
fn claims(insn: &Instruction) -> bool {
    match insn.encoding() {
        EncodingKind::VEX => true,
        // An instruction of the 8086, says the decoder, since it waits for any coprocessor.
        EncodingKind::Legacy if insn.mnemonic() == Mnemonic::Wait => true,
        EncodingKind::Legacy => {
            !is_integer(insn.mnemonic()) && insn.cpuid_features().iter().copied().any(is_vector)
        }
        _ => false,
    }
}

fn is_vector(feature: CpuidFeature) -> bool {
    use CpuidFeature as F;
    matches!(
        feature,
        F::FPU
            | F::FPU287
            | F::FPU387
            | F::MMX
            | F::SSE
            | F::SSE2
            | F::SSE3
            | F::SSSE3
            | F::SSE4_1
            | F::SSE4_2
            | F::AES
            | F::PCLMULQDQ
            | F::SHA
            | F::GFNI
            | F::FXSR
            | F::XSAVE
            | F::XSAVEOPT
            | F::ADX
    )
}

/// Came with the vector extensions but touches no vector register: the integer core has them.
fn is_integer(mnemonic: Mnemonic) -> bool {
    use Mnemonic as M;
    matches!(
        mnemonic,
        M::Movnti
            | M::Pause
            | M::Lfence
            | M::Sfence
            | M::Mfence
            | M::Prefetchnta
            | M::Prefetcht0
            | M::Prefetcht1
            | M::Prefetcht2
            | M::Crc32
            | M::Popcnt
    )
}
