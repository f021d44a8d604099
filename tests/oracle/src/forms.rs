//! Which instruction forms are tested, and why others are not.
//!
//! A form is an iced-x86 [`Code`]: mnemonic, operand kinds and encoding. The CPU model decides by
//! CPUID feature (see `x86::cpuid`); of what it offers, only forms whose result is not a law of
//! the architecture but a fact of the machine or of the host kernel are left out.

use iced_x86::{Code, CpuidFeature, EncodingKind, Mnemonic, OpCodeInfo};

/// What is to be done with a form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is tested.
    Tested,
    /// The CPU model offers it, the oracle cannot test it: the reason.
    Excluded(&'static str),
    /// The CPU model does not offer it.
    NotOffered,
}

/// Features the CPU model offers if the host has them.
pub const OFFERED: [CpuidFeature; 55] = {
    use CpuidFeature as F;
    [
        F::INTEL8086,
        F::INTEL186,
        F::INTEL286,
        F::INTEL386,
        F::INTEL486,
        F::X64,
        F::ADX,
        F::AES,
        F::AVX,
        F::AVX2,
        F::BMI1,
        F::BMI2,
        F::CLFLUSHOPT,
        F::CLFSH,
        F::CLWB,
        F::CMOV,
        F::CMPXCHG16B,
        F::CPUID,
        F::CX8,
        F::F16C,
        F::FMA,
        F::FPU,
        F::FPU287,
        F::FPU387,
        F::FSGSBASE,
        F::FXSR,
        F::INVPCID,
        F::LZCNT,
        F::MMX,
        F::MOVBE,
        F::MSR,
        F::MULTIBYTENOP,
        F::PAUSE,
        F::PCLMULQDQ,
        F::POPCNT,
        F::PREFETCHW,
        F::RDPID,
        F::RDPMC,
        F::RDRAND,
        F::RDSEED,
        F::RDTSCP,
        F::SEP,
        F::SHA,
        F::SMAP,
        F::SSE,
        F::SSE2,
        F::SSE3,
        F::SSE4_1,
        F::SSE4_2,
        F::SSSE3,
        F::SYSCALL,
        F::TSC,
        F::XSAVE,
        F::XSAVEOPT,
        // Without CET these are no-operations.
        F::CET_IBT,
    ]
};

/// What of [`OFFERED`] the host does not have: nothing of it is tested here.
pub fn missing() -> Vec<CpuidFeature> {
    OFFERED.iter().copied().filter(|feature| !host_has(*feature)).collect()
}

/// The features `code` needs are all offered on this host: what user code can execute follows it.
pub fn offered(code: Code) -> bool {
    code.cpuid_features().iter().all(|feature| OFFERED.contains(feature) && host_has(*feature))
}

fn host_has(feature: CpuidFeature) -> bool {
    use CpuidFeature as F;
    match feature {
        F::ADX => is_x86_feature_detected!("adx"),
        F::AES => is_x86_feature_detected!("aes"),
        F::AVX => is_x86_feature_detected!("avx"),
        F::AVX2 => is_x86_feature_detected!("avx2"),
        F::BMI1 => is_x86_feature_detected!("bmi1"),
        F::BMI2 => is_x86_feature_detected!("bmi2"),
        F::F16C => is_x86_feature_detected!("f16c"),
        F::FMA => is_x86_feature_detected!("fma"),
        F::LZCNT => is_x86_feature_detected!("lzcnt"),
        F::MOVBE => is_x86_feature_detected!("movbe"),
        F::PCLMULQDQ => is_x86_feature_detected!("pclmulqdq"),
        F::POPCNT => is_x86_feature_detected!("popcnt"),
        F::SHA => is_x86_feature_detected!("sha"),
        F::SSE4_2 => is_x86_feature_detected!("sse4.2"),
        _ => true,
    }
}

/// What is to be done with `code` in code of `bits` 64 or 32.
pub fn verdict(code: Code, bits: u32) -> Verdict {
    let op_code = code.op_code();
    let encoded = matches!(op_code.encoding(), EncodingKind::Legacy | EncodingKind::VEX);
    let intel = if bits == 64 { op_code.intel_decoder64() } else { op_code.intel_decoder32() };
    let available = op_code.is_instruction() && op_code.is_available_in_mode(bits) && intel;
    if !available || !encoded || !offered(code) {
        return Verdict::NotOffered;
    }
    match exclusion(code, op_code) {
        Some(reason) => Verdict::Excluded(reason),
        None => Verdict::Tested,
    }
}

fn exclusion(code: Code, op_code: &OpCodeInfo) -> Option<&'static str> {
    if op_code.fwait() {
        return Some("two instructions to the CPU: WAIT and the one without it, both tested");
    }
    Some(match code.mnemonic() {
        Mnemonic::Syscall | Mnemonic::Sysenter => "enters the host kernel",
        Mnemonic::Cpuid | Mnemonic::Xgetbv => "describes the CPU it runs on",
        Mnemonic::Rdtsc | Mnemonic::Rdtscp | Mnemonic::Rdpmc | Mnemonic::Rdpid => {
            "reads a clock or counter"
        }
        Mnemonic::Rdrand | Mnemonic::Rdseed => "random by definition",
        Mnemonic::Sgdt | Mnemonic::Sidt | Mnemonic::Sldt | Mnemonic::Str | Mnemonic::Smsw => {
            "emulated by the Linux kernel where UMIP forbids it"
        }
        Mnemonic::Xsaveopt | Mnemonic::Xsaveopt64 => {
            "may leave memory as it was, depending on what the CPU remembers"
        }
        Mnemonic::Int1 | Mnemonic::Int3 | Mnemonic::Into => {
            "a trap; what follows is the host kernel's choice"
        }
        _ if code == Code::Bswap_r16 => "has an undefined result",
        _ => return None,
    })
}

/// All forms to be tested in code of `bits` 64 or 32, in iced's order.
pub fn tested(bits: u32) -> Vec<Code> {
    Code::values().filter(|&code| verdict(code, bits) == Verdict::Tested).collect()
}

/// The form works on vector or x87 registers.
pub fn is_vector(code: Code) -> bool {
    use CpuidFeature as F;
    code.op_code().encoding() == EncodingKind::VEX
        || code.cpuid_features().iter().any(|feature| {
            matches!(
                feature,
                F::FPU | F::FPU287 | F::FPU387 | F::MMX | F::SSE | F::SSE2 | F::SSE3 | F::SSSE3
            ) || matches!(feature, F::SSE4_1 | F::AES | F::SHA | F::PCLMULQDQ)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts() {
        assert_eq!(verdict(Code::Add_rm64_r64, 64), Verdict::Tested);
        assert_eq!(verdict(Code::VEX_Vfmadd132pd_ymm_ymm_ymmm256, 64), Verdict::Tested);
        assert_eq!(verdict(Code::Mov_cr_r64, 64), Verdict::Tested);
        assert_eq!(verdict(Code::Aaa, 64), Verdict::NotOffered);
        assert_eq!(verdict(Code::EVEX_Vaddpd_xmm_k1z_xmm_xmmm128b64, 64), Verdict::NotOffered);
        assert!(matches!(verdict(Code::Syscall, 64), Verdict::Excluded(_)));
        assert_eq!(verdict(Code::Aaa, 32), Verdict::Tested);
        assert_eq!(verdict(Code::Movsxd_r64_rm32, 32), Verdict::NotOffered);
        assert!(tested(64).len() > 1500);
    }
}
