//! MXCSR and SIMD floating-point exceptions (SDM vol. 1, 11.5).
//!
//! The host must not take an exception, so the stub runs with all of them masked and the flags
//! clear; the flags it raises tell what the guest has to see. If none of them is unmasked in the
//! guest's MXCSR, the masked result is the guest's result and the flags are added. If one is,
//! nothing is committed and #XM is raised with the flags the CPU would have set:
//!
//! - An unmasked invalid, denormal or divide-by-zero exception is raised before the computation:
//!   no overflow, underflow or precision flag is set (11.5.3).
//! - Masked and unmasked underflow differ: masked, a tiny but exact result sets no flag. So if
//!   underflow is unmasked, the stub runs with flush-to-zero, which flags every tiny result; a
//!   result flushed is never committed, because then the exception is raised. VCVTPS2PH never
//!   flushes: its operands are looked at.
//! - When overflow or underflow is unmasked and raised, the CPU decides on the precision flag before
//!   it bounds the exponent, which a masked run does not show: [`precision`] looks at the operands.

use iced_x86::Instruction;
use x86::{Fault, fpu::FpuState, fpu::MXCSR_MASK, vector};
use x86_interp::VectorOperands;

use crate::precision;

/// Exception flags (bits 0 to 5).
pub(crate) const FLAGS: u32 = 0x3f;
/// All exceptions masked (bits 7 to 12).
pub(crate) const ALL_MASKED: u32 = FLAGS << 7;
/// Invalid, denormal, divide by zero: raised before the computation.
const BEFORE: u32 = 0b111;
/// Overflow and underflow: raised when the exponent is bounded.
const BOUNDED: u32 = 0b11 << 3;
/// Underflow.
const UNDERFLOW: u32 = 1 << 4;
/// Precision (inexact).
const PRECISION: u32 = 1 << 5;
/// Flush to zero.
const FLUSH_TO_ZERO: u32 = 1 << 15;

/// Runs a stub that uses MXCSR by `call(fpu, operands, mxcsr) -> mxcsr`.
///
/// # Errors
/// #XM: the flags are in `fpu.mxcsr`, nothing else has changed.
pub(crate) fn run(
    insn: &Instruction,
    fpu: &mut FpuState,
    operands: &mut VectorOperands,
    mut call: impl FnMut(&mut FpuState, &mut VectorOperands, u32) -> u32,
) -> Result<(), Fault> {
    let guest = fpu.mxcsr & MXCSR_MASK;
    if guest & ALL_MASKED == ALL_MASKED {
        fpu.mxcsr = guest | call(fpu, operands, guest & !FLAGS) & FLAGS;
        return Ok(());
    }
    run_unmasked(insn, guest, fpu, operands, call)
}

#[cold]
fn run_unmasked(
    insn: &Instruction,
    guest: u32,
    fpu: &mut FpuState,
    operands: &mut VectorOperands,
    mut call: impl FnMut(&mut FpuState, &mut VectorOperands, u32) -> u32,
) -> Result<(), Fault> {
    let before = (*fpu, operands.clone());
    let masked = (guest | ALL_MASKED) & !FLAGS;
    let flush = if is_unmasked(guest, UNDERFLOW) { FLUSH_TO_ZERO } else { 0 };
    let mut raised = call(fpu, operands, masked | flush) & FLAGS;
    if flush != 0 && precision::has_tiny_half(insn, &before.0, &before.1) {
        raised |= UNDERFLOW;
    }
    if is_unmasked(guest, raised & BOUNDED) {
        // What a masked one leaves is never exact.
        let is_lost =
            raised & BOUNDED & guest >> 7 != 0 || precision::is_lost(insn, &before.0, &before.1);
        raised = raised & !PRECISION | if is_lost { PRECISION } else { 0 };
    }
    let (flags, fault) = reported(guest, raised);
    if fault {
        (*fpu, *operands) = before;
    }
    fpu.mxcsr = guest | flags;
    if fault { Err(Fault::new(vector::XM)) } else { Ok(()) }
}

/// Whether one of the exceptions in `raised` is unmasked.
pub(crate) const fn is_unmasked(mxcsr: u32, raised: u32) -> bool {
    raised & !(mxcsr >> 7) & FLAGS != 0
}

/// The flags that are set when `raised` were found under `guest`'s masks, and whether to fault.
pub(crate) const fn reported(guest: u32, raised: u32) -> (u32, bool) {
    if is_unmasked(guest, raised & BEFORE) {
        (raised & BEFORE, true)
    } else {
        (raised, is_unmasked(guest, raised))
    }
}
