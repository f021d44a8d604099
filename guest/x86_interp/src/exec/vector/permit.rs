//! Who may execute vector instructions (SDM vol. 3A, 2.5 and 14.1; vol. 2A, 2.4).

use crate::{cpu::Cpu, system::System};
use iced_x86::{EncodingKind, Instruction, Mnemonic, OpKind};
use x86::{
    Fault,
    control::{cr0, cr4},
    flags,
    fpu::{FpuState, xstate},
    vector,
};

/// x87 status: error summary.
pub(super) const ES: u16 = 1 << 7;
/// x87 status: busy, follows ES.
pub(super) const BUSY: u16 = 1 << 15;
/// x87 exception flags in the status word, masks in the control word.
pub(super) const EXCEPTIONS: u16 = 0x3f;

/// Classes of instructions with the same conditions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum VectorClass {
    /// x87, waits for a pending exception.
    X87 = 0,
    /// x87 that does not wait.
    X87Control = 1,
    /// Only MMX registers.
    Mmx = 2,
    /// MMX and XMM registers.
    MmxSse = 3,
    /// XMM registers, legacy encoding.
    Sse = 4,
    /// Vector registers, VEX encoding.
    Avx = 5,
    /// General registers, VEX encoding.
    VexGeneral = 6,
}

impl VectorClass {
    /// The class of an instruction of this module.
    pub(super) fn of(insn: &Instruction) -> Self {
        let has = |test: fn(iced_x86::Register) -> bool| {
            (0..insn.op_count())
                .any(|i| insn.op_kind(i) == OpKind::Register && test(insn.op_register(i)))
        };
        if insn.encoding() == EncodingKind::VEX {
            let general = has(|r| r.is_gpr()) && !has(|r| r.is_vector_register());
            let from_vector_memory = matches!(insn.mnemonic(), Mnemonic::Vldmxcsr);
            let general = general && !from_vector_memory && !takes_vector_memory(insn.mnemonic());
            return if general { Self::VexGeneral } else { Self::Avx };
        }
        let is_fpu = insn.cpuid_features().iter().any(|feature| {
            use iced_x86::CpuidFeature as F;
            matches!(feature, F::FPU | F::FPU287 | F::FPU387)
        });
        match (has(|r| r.is_mm()), has(|r| r.is_vector_register())) {
            _ if is_fpu && waits(insn.mnemonic()) => Self::X87,
            _ if is_fpu => Self::X87Control,
            (true, true) => Self::MmxSse,
            (true, false) if converts(insn.mnemonic()) => Self::MmxSse,
            (true, false) => Self::Mmx,
            _ if insn.mnemonic() == Mnemonic::Emms => Self::Mmx,
            _ => Self::Sse,
        }
    }

    /// The inverse of `as u8`.
    pub(super) const fn from_bits(bits: u8) -> Self {
        match bits {
            0 => Self::X87,
            1 => Self::X87Control,
            2 => Self::Mmx,
            3 => Self::MmxSse,
            4 => Self::Sse,
            6 => Self::VexGeneral,
            _ => Self::Avx,
        }
    }
}

/// VEX conversions to a general register whose other operand is a scalar in memory.
fn takes_vector_memory(mnemonic: Mnemonic) -> bool {
    matches!(
        mnemonic,
        Mnemonic::Vcvtss2si | Mnemonic::Vcvttss2si | Mnemonic::Vcvtsd2si | Mnemonic::Vcvttsd2si
    )
}

/// SSE conversions to MMX registers.
fn converts(mnemonic: Mnemonic) -> bool {
    matches!(
        mnemonic,
        Mnemonic::Cvtps2pi | Mnemonic::Cvttps2pi | Mnemonic::Cvtpd2pi | Mnemonic::Cvttpd2pi
    )
}

/// Whether an x87 instruction checks for a pending exception before it starts.
fn waits(mnemonic: Mnemonic) -> bool {
    !matches!(
        mnemonic,
        Mnemonic::Fnclex
            | Mnemonic::Fninit
            | Mnemonic::Fnstcw
            | Mnemonic::Fnstsw
            | Mnemonic::Fnstenv
            | Mnemonic::Fnsave
            | Mnemonic::Fneni
            | Mnemonic::Fndisi
            | Mnemonic::Fnsetpm
    )
}

/// Checks that an instruction of the class may run now.
///
/// # Errors
/// #UD, #NM, #MF in this order. #MF is raised whatever CR0.NE says: there is no FERR# pin.
#[inline]
pub(super) fn check<S: System>(cpu: &Cpu<S>, class: VectorClass) -> Result<(), Fault> {
    match class {
        VectorClass::Sse => sse(cpu),
        VectorClass::Avx => avx(cpu),
        VectorClass::VexGeneral => vex(cpu),
        VectorClass::X87 => x87(cpu).and_then(|()| pending(&cpu.vcpu.fpu)),
        VectorClass::X87Control => x87(cpu),
        VectorClass::Mmx => mmx(cpu).and_then(|()| pending(&cpu.vcpu.fpu)),
        VectorClass::MmxSse => sse(cpu).and_then(|()| pending(&cpu.vcpu.fpu)),
    }
}

/// Legacy SSE.
#[inline(always)]
pub(super) fn sse<S: System>(cpu: &Cpu<S>) -> Result<(), Fault> {
    let v = &cpu.vcpu;
    if v.cr0 & (cr0::EM | cr0::TS) == 0 && v.cr4 & cr4::OSFXSR != 0 {
        return Ok(());
    }
    let undefined = v.cr0 & cr0::EM != 0 || v.cr4 & cr4::OSFXSR == 0;
    Err(if undefined { Fault::ud() } else { Fault::new(vector::NM) })
}

/// VEX on vector registers.
#[inline(always)]
pub(super) fn avx<S: System>(cpu: &Cpu<S>) -> Result<(), Fault> {
    const STATE: u64 = xstate::SSE | xstate::AVX;
    let v = &cpu.vcpu;
    let enabled = v.cr4 & cr4::OSXSAVE != 0 && v.xcr0 & STATE == STATE;
    if enabled && v.cr0 & (cr0::TS | cr0::PE) == cr0::PE && v.rflags & flags::VM == 0 {
        return Ok(());
    }
    vex(cpu)?;
    Err(if enabled { Fault::new(vector::NM) } else { Fault::ud() })
}

/// VEX on general registers: not in real or virtual-8086 mode.
fn vex<S: System>(cpu: &Cpu<S>) -> Result<(), Fault> {
    let v = &cpu.vcpu;
    let known = v.cr0 & cr0::PE != 0 && v.rflags & flags::VM == 0;
    if known { Ok(()) } else { Err(Fault::ud()) }
}

/// x87, FXSAVE and FXRSTOR.
pub(super) fn x87<S: System>(cpu: &Cpu<S>) -> Result<(), Fault> {
    let blocked = cpu.vcpu.cr0 & (cr0::EM | cr0::TS) != 0;
    if blocked { Err(Fault::new(vector::NM)) } else { Ok(()) }
}

/// WAIT.
pub(super) fn wait<S: System>(cpu: &Cpu<S>) -> Result<(), Fault> {
    let blocked = cpu.vcpu.cr0 & (cr0::MP | cr0::TS) == cr0::MP | cr0::TS;
    if blocked { Err(Fault::new(vector::NM)) } else { pending(&cpu.vcpu.fpu) }
}

/// The XSAVE family.
pub(super) fn xsave<S: System>(cpu: &Cpu<S>) -> Result<(), Fault> {
    if cpu.vcpu.cr4 & cr4::OSXSAVE == 0 {
        return Err(Fault::ud());
    }
    let blocked = cpu.vcpu.cr0 & cr0::TS != 0;
    if blocked { Err(Fault::new(vector::NM)) } else { Ok(()) }
}

fn mmx<S: System>(cpu: &Cpu<S>) -> Result<(), Fault> {
    match cpu.vcpu.cr0 {
        cr0 if cr0 & cr0::EM != 0 => Err(Fault::ud()),
        cr0 if cr0 & cr0::TS != 0 => Err(Fault::new(vector::NM)),
        _ => Ok(()),
    }
}

/// #MF if an unmasked x87 exception is pending.
pub(super) fn pending(fpu: &FpuState) -> Result<(), Fault> {
    let pending = fpu.fsw & !fpu.fcw & EXCEPTIONS != 0;
    if pending { Err(Fault::new(vector::MF)) } else { Ok(()) }
}

/// Brings ES and B in line with the exception flags and masks, as the CPU does when either was
/// loaded.
pub(super) fn update_summary(fpu: &mut FpuState) {
    fpu.fsw &= !(ES | BUSY);
    if fpu.fsw & !fpu.fcw & EXCEPTIONS != 0 {
        fpu.fsw |= ES | BUSY;
    }
}
