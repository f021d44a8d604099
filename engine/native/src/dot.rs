//! Dot products that raise an unmasked exception.
//!
//! DPPS and DPPD multiply, and then add once or twice. Each step may raise exceptions, and what a step has raised is seen with the flags of
//! those before it and of none behind it (SDM vol. 2, DPPS). A run with masked exceptions has the flags of all steps. So the
//! steps are made one by one, as instructions of their own.

use iced_x86::{Code, Instruction, Mnemonic, Register};
use x86::fpu::FpuState;
use x86_interp::VectorOperands;

use crate::HostVectorUnit;

/// What a dot product is made of.
struct Steps {
    multiply: Instruction,
    add: Instruction,
    /// How often there is an addition.
    additions: usize,
    /// Bytes of an element.
    size: usize,
}

impl Steps {
    /// `None` if this is no dot product.
    fn of(insn: &Instruction) -> Option<Self> {
        use Mnemonic as M;
        let wide = insn.op0_register().is_ymm();
        let (size, additions, codes) = match insn.mnemonic() {
            M::Dpps | M::Vdpps if wide => {
                let codes = (Code::VEX_Vmulps_ymm_ymm_ymmm256, Code::VEX_Vhaddps_ymm_ymm_ymmm256);
                (4, 2, codes)
            }
            M::Dpps | M::Vdpps => (4, 2, (Code::Mulps_xmm_xmmm128, Code::Haddps_xmm_xmmm128)),
            M::Dppd | M::Vdppd => (8, 1, (Code::Mulpd_xmm_xmmm128, Code::Haddpd_xmm_xmmm128)),
            _ => return None,
        };
        let (a, b) = match wide {
            true => (Register::YMM0, Register::YMM1),
            false => (Register::XMM0, Register::XMM1),
        };
        let made = |code, second| match wide {
            true => Instruction::with3(code, a, a, second).ok(),
            false => Instruction::with2(code, a, second).ok(),
        };
        Some(Self { multiply: made(codes.0, b)?, add: made(codes.1, a)?, additions, size })
    }
}

/// The flags with which a dot product has raised an exception, in place of those of all its steps. `mxcsr` is what it began with; nothing
/// else has changed.
pub(crate) fn settle(
    unit: &mut HostVectorUnit,
    insn: &Instruction,
    mxcsr: u32,
    operands: &VectorOperands,
    fpu: &mut FpuState,
) {
    let Some(steps) = Steps::of(insn) else { return };
    let mut state = FpuState { mxcsr, ..*fpu };
    [0, 1].iter().for_each(|which| place(&mut state, *which, insn, fpu, operands, steps.size));
    let additions = std::iter::repeat_n(&steps.add, steps.additions);
    let mut all = std::iter::once(&steps.multiply).chain(additions);
    if all.any(|step| unit.run_alone(step, &mut state).is_err()) {
        fpu.mxcsr = state.mxcsr;
    }
}

/// Has a register of `state` hold a source's elements, those that take part, and zeros.
fn place(
    state: &mut FpuState,
    which: usize,
    insn: &Instruction,
    before: &FpuState,
    operands: &VectorOperands,
    size: usize,
) {
    // The last operand says which elements take part.
    let register = insn.op_register(insn.op_count() - 3 + which as u32);
    let (low, high) = match register {
        Register::None => operands.memory[..32].split_at(16),
        _ => (&before.xmm[register.number()][..], &before.ymm_high[register.number()][..]),
    };
    for (half, source) in [(&mut state.xmm[which], low), (&mut state.ymm_high[which], high)] {
        for (index, element) in half.chunks_mut(size).enumerate() {
            let takes_part = insn.immediate8() >> (4 + index) & 1 != 0;
            let at = index * size;
            match takes_part {
                true => element.copy_from_slice(&source[at..at + size]),
                false => element.fill(0),
            }
        }
    }
}
