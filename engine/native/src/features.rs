//! Which instructions the unit accepts.
//!
//! An instruction is accepted when every CPUID feature it belongs to is one we know to have only
//! effects the stub carries over (registers, flags, one memory operand), the host has it, and it
//! is not one of the exceptions below, which have more memory or state than that.

use iced_x86::{CpuidFeature, EncodingKind, Instruction, Mnemonic, OpKind};

/// Whether the unit executes `insn`.
pub(crate) fn accepts(insn: &Instruction) -> bool {
    matches!(insn.encoding(), EncodingKind::Legacy | EncodingKind::VEX)
        && insn.cpuid_features().iter().all(|&feature| available(feature))
        && !insn.cpuid_features().iter().all(|&feature| is_integer(feature))
        && !is_excluded(insn.mnemonic())
        && !insn.is_vsib()
        && insn.op_kinds().all(is_plain_operand)
        && insn.memory_size().size() <= 64
}

/// Whether the instruction is x87 or MMX: it works on the x87 register file.
pub(crate) fn uses_x87(insn: &Instruction) -> bool {
    use CpuidFeature as F;
    let features = insn.cpuid_features();
    features.iter().any(|f| matches!(f, F::FPU | F::FPU287 | F::FPU387 | F::MMX))
        || (0..insn.op_count())
            .any(|i| insn.op_kind(i) == OpKind::Register && insn.op_register(i).is_mm())
}

/// Whether the instruction reads or writes MXCSR: floating-point arithmetic, comparison and
/// conversion. By name: moves, shuffles, logic and all integer vector instructions (which start
/// with P) are out. RCPPS and RSQRTPS are in, for they obey the flush modes on some CPUs.
pub(crate) fn uses_mxcsr(insn: &Instruction) -> bool {
    const STEMS: [&str; 19] = [
        "add", "sub", "mul", "div", "sqrt", "min", "max", "cmp", "com", "ucom", "cvt", "hadd",
        "hsub", "dp", "round", "fm", "fnm", "rcp", "rsqrt",
    ];
    let name = format!("{:?}", insn.mnemonic()).to_ascii_lowercase();
    let is_vector_name = insn.encoding() == EncodingKind::VEX;
    let stem = if is_vector_name { name.strip_prefix('v').unwrap_or("") } else { &name };
    STEMS.iter().any(|s| stem.starts_with(s))
}

/// Whether an x87 or MMX instruction faults on a pending x87 exception.
pub(crate) fn waits(mnemonic: Mnemonic) -> bool {
    !matches!(
        mnemonic,
        Mnemonic::Fnclex
            | Mnemonic::Fninit
            | Mnemonic::Fnstcw
            | Mnemonic::Fnstsw
            | Mnemonic::Fneni
            | Mnemonic::Fndisi
            | Mnemonic::Fnsetpm
    )
}

/// Not accepted though their feature is: whole-state and element-wise memory instructions, and
/// those without any effect on operands, which the interpreter does itself.
fn is_excluded(mnemonic: Mnemonic) -> bool {
    use Mnemonic as M;
    matches!(
        mnemonic,
        M::Fnsave
            | M::Fsave
            | M::Frstor
            | M::Fnstenv
            | M::Fstenv
            | M::Fldenv
            | M::Wait
            | M::Frstpm
            | M::Ldmxcsr
            | M::Stmxcsr
            | M::Vldmxcsr
            | M::Vstmxcsr
            | M::Vzeroall
            | M::Vzeroupper
            | M::Vmaskmovps
            | M::Vmaskmovpd
            | M::Vpmaskmovd
            | M::Vpmaskmovq
            | M::Lfence
            | M::Sfence
            | M::Mfence
            | M::Prefetchnta
            | M::Prefetcht0
            | M::Prefetcht1
            | M::Prefetcht2
    )
}

fn is_plain_operand(kind: OpKind) -> bool {
    matches!(
        kind,
        OpKind::Register
            | OpKind::Memory
            | OpKind::Immediate8
            | OpKind::Immediate8_2nd
            | OpKind::Immediate8to16
            | OpKind::Immediate8to32
            | OpKind::Immediate8to64
    )
}

/// Features that alone make an instruction of the interpreter's own.
fn is_integer(feature: CpuidFeature) -> bool {
    matches!(feature, CpuidFeature::X64 | CpuidFeature::CMOV)
}

fn available(feature: CpuidFeature) -> bool {
    use CpuidFeature as F;
    match feature {
        // Every x86-64 CPU.
        F::X64 | F::FPU | F::FPU287 | F::FPU387 | F::CMOV | F::MMX | F::SSE | F::SSE2 => true,
        F::SSE3 => is_x86_feature_detected!("sse3"),
        F::SSSE3 => is_x86_feature_detected!("ssse3"),
        F::SSE4_1 => is_x86_feature_detected!("sse4.1"),
        F::SSE4_2 => is_x86_feature_detected!("sse4.2"),
        F::AES => is_x86_feature_detected!("aes"),
        F::PCLMULQDQ => is_x86_feature_detected!("pclmulqdq"),
        F::SHA => is_x86_feature_detected!("sha"),
        F::AVX => is_x86_feature_detected!("avx"),
        F::AVX2 => is_x86_feature_detected!("avx2"),
        F::FMA => is_x86_feature_detected!("fma"),
        F::F16C => is_x86_feature_detected!("f16c"),
        F::GFNI => is_x86_feature_detected!("gfni"),
        F::VAES => is_x86_feature_detected!("vaes"),
        F::VPCLMULQDQ => is_x86_feature_detected!("vpclmulqdq"),
        F::BMI1 => is_x86_feature_detected!("bmi1"),
        F::BMI2 => is_x86_feature_detected!("bmi2"),
        F::ADX => is_x86_feature_detected!("adx"),
        F::MOVBE => is_x86_feature_detected!("movbe"),
        F::LZCNT => is_x86_feature_detected!("lzcnt"),
        F::POPCNT => is_x86_feature_detected!("popcnt"),
        _ => false,
    }
}
