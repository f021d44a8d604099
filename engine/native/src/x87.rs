//! x87 and MMX: the whole legacy area is loaded by FXRSTOR and stored by FXSAVE.
//!
//! x87 exceptions are deferred: an instruction that raises an unmasked one sets ES, and the next
//! *waiting* instruction faults. So the stub runs under the guest's own control word, ES comes out
//! exactly, and the host never faults because
//! - an instruction that waits is not run while an unmasked exception is pending: that is #MF;
//! - FXSAVE and FNINIT, which follow it, do not wait.
//!
//! The pointers to the last instruction (FIP, FDP, FOP) are the stub's after execution. CPUs differ
//! in when they update them, so they are loaded with values that cannot occur: where such a value
//! is still there the guest's old one is put back, else the guest's new one.

use x86::{
    Fault,
    fpu::{FpuState, MXCSR_MASK},
    vector,
};
use x86_interp::VectorOperands;

use crate::float;

/// x87 status: error summary.
const ES: u16 = 1 << 7;
/// x87 status: busy, follows ES.
const BUSY: u16 = 1 << 15;
/// FOP is eleven bits.
const FOP_MASK: u16 = 0x7ff;
/// FIP and FDP that no stub has: in the page that is never mapped.
const NOWHERE: u64 = 0x5a5;

/// FOP of an x87 instruction: low three bits of the opcode, then ModRM. Zero for other
/// instructions. No prefix has the value of an x87 opcode (D8 to DF).
pub(crate) fn opcode(bytes: &[u8]) -> u16 {
    let at = bytes.iter().position(|byte| (0xd8..=0xdf).contains(byte));
    match at.and_then(|at| bytes.get(at..at + 2)) {
        Some(&[opcode, modrm]) => u16::from(opcode & 7) << 8 | u16::from(modrm),
        _ => 0,
    }
}

/// Runs a stub on the x87 register file by `call(fpu, operands, unused)`.
///
/// # Errors
/// #MF for an exception pending from before, #XM for one of the SSE conversions from and to MMX.
pub(crate) fn run(
    fop: u16,
    waits: bool,
    fpu: &mut FpuState,
    operands: &mut VectorOperands,
    mut call: impl FnMut(&mut FpuState, &mut VectorOperands, u32) -> u32,
) -> Result<(), Fault> {
    let pending = update_summary(fpu);
    if waits && pending {
        return Err(Fault::new(vector::MF));
    }
    let guest = fpu.mxcsr & MXCSR_MASK;
    // Only the conversions between MMX and XMM can raise #XM, and hardly ever may.
    let before = (guest & float::ALL_MASKED != float::ALL_MASKED).then_some(*fpu);
    let hidden = Hidden::take(fop, fpu);
    call(fpu, operands, 0);

    let (flags, fault) = float::reported(guest, fpu.mxcsr & float::FLAGS);
    match before {
        Some(before) if fault => {
            *fpu = before;
            enter_mmx(fpu);
        }
        _ => hidden.put_back(fop, fpu, operands),
    }
    fpu.mxcsr = guest | flags;
    if fault { Err(Fault::new(vector::XM)) } else { Ok(()) }
}

/// Fields that hold something else while a stub runs.
struct Hidden {
    fip: u64,
    fdp: u64,
    fop: u16,
    mxcsr_mask: u32,
    /// What stands in FOP in the meantime.
    marker: u16,
}

impl Hidden {
    /// `fop` is what the instruction may leave there: the marker differs in the opcode bits.
    fn take(fop: u16, fpu: &mut FpuState) -> Self {
        let (fip, fdp, mxcsr_mask) = (fpu.fip, fpu.fdp, fpu.mxcsr_mask);
        let marker = (fop ^ 0x700) & FOP_MASK;
        let hidden = Self { fip, fdp, fop: fpu.fop, mxcsr_mask, marker };
        (fpu.fip, fpu.fdp, fpu.fop) = (NOWHERE, NOWHERE, marker);
        fpu.mxcsr = (fpu.mxcsr & MXCSR_MASK | float::ALL_MASKED) & !float::FLAGS;
        hidden
    }

    /// Puts the guest's values where the stub's have been left. Zeros are FNINIT's.
    fn put_back(self, fop: u16, fpu: &mut FpuState, operands: &VectorOperands) {
        if fpu.fop == self.marker {
            fpu.fop = self.fop;
        } else if fpu.fip != 0 {
            fpu.fop = fop;
        }
        let choose = |left, old, new| match left {
            NOWHERE => old,
            0 => 0,
            _ => new,
        };
        fpu.fip = choose(fpu.fip, self.fip, operands.rip);
        fpu.fdp = choose(fpu.fdp, self.fdp, operands.address);
        fpu.mxcsr_mask = self.mxcsr_mask;
    }
}

/// What the CPU has already done when a conversion from or to MMX faults: the top of the stack is
/// zero and all registers are valid. As measured; the manual is silent.
fn enter_mmx(fpu: &mut FpuState) {
    let top = usize::from(fpu.fsw >> 11 & 7);
    fpu.st.rotate_right(top);
    fpu.fsw &= !(7 << 11);
    fpu.ftw = 0xff;
}

/// Makes ES and B agree with the flags and masks, as loading the state into a CPU does; returns
/// ES.
fn update_summary(fpu: &mut FpuState) -> bool {
    let pending = fpu.fsw & !fpu.fcw & 0x3f != 0;
    fpu.fsw &= !(ES | BUSY);
    if pending {
        fpu.fsw |= ES | BUSY;
    }
    pending
}
