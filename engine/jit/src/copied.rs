//! The instructions that may be copied: those whose effect on registers and on their memory operand is the
//! same in user mode as in the kernel, whatever the control registers hold, and shows nothing of the host.
//!
//! An instruction that is not on the list is interpreted. Whoever adds one says by that: it reads no control
//! register, no descriptor table and no model-specific register; it faults for the same reasons at any
//! privilege level; it touches no memory that its operand does not show. The tests walk every instruction
//! the decoder knows and fail on one that is neither on this list nor on theirs.

use iced_x86::{CpuidFeature, Mnemonic};

/// Whether the instructions of this name may be copied, if their extensions may be ([`has_extension`]).
pub fn has(mnemonic: Mnemonic) -> bool {
    MNEMONICS.get(mnemonic as usize).is_some_and(|&copied| copied)
}

/// Whether instructions of an extension may be copied.
pub fn has_extension(feature: CpuidFeature) -> bool {
    FEATURES.get(feature as usize).is_some_and(|&copied| copied)
}

/// For each value of an enumeration whether it is on a list. The table has room for more values than there are.
macro_rules! table {
    ($room:expr, $list:expr) => {{
        let (mut table, mut i) = ([false; $room], 0);
        while i < $list.len() {
            table[$list[i] as usize] = true;
            i += 1;
        }
        table
    }};
}

static MNEMONICS: [bool; 4096] = table!(4096, COPIED);

static FEATURES: [bool; 256] = table!(256, EXTENSIONS);

const EXTENSIONS: &[CpuidFeature] = {
    use CpuidFeature::*;
    &[
        INTEL8086,
        INTEL186,
        INTEL286,
        INTEL386,
        INTEL486,
        X64,
        CMOV,
        MULTIBYTENOP,
        PAUSE,
        FPU,
        FPU287,
        FPU387,
        MMX,
        SSE,
        SSE2,
        SSE3,
        SSSE3,
        SSE4_1,
        SSE4_2,
        POPCNT,
        AES,
        PCLMULQDQ,
        SHA,
        AVX,
        AVX2,
        FMA,
        F16C,
        BMI1,
        BMI2,
        ADX,
        MOVBE,
        LZCNT,
        CX8,
        CMPXCHG16B,
        CLFSH,
        CLFLUSHOPT,
        CLWB,
        PREFETCHW,
        RDRAND,
        RDSEED,
        TSC,
        CET_IBT,
        GFNI,
        VAES,
        VPCLMULQDQ,
    ]
};

#[rustfmt::skip]
const COPIED: &[Mnemonic] = { use Mnemonic::*; &[
    // Integers, bits, bytes and flags.
    Adc, Adcx, Add, Adox, And, Andn, Bextr, Blsi, Blsmsk, Blsr, Bsf, Bsr, Bswap, Bt, Btc, Btr,
    Bts, Bzhi, Cbw, Cdq, Cdqe, Clc, Cld, Cmc, Cmova, Cmovae, Cmovb, Cmovbe, Cmove, Cmovg,
    Cmovge, Cmovl, Cmovle, Cmovne, Cmovno, Cmovnp, Cmovns, Cmovo, Cmovp, Cmovs, Cmp, Cmpxchg,
    Cmpxchg16b, Cmpxchg8b, Cqo, Cwd, Cwde, Dec, Div, Idiv, Imul, Inc, Lahf, Lea, Lzcnt, Mov,
    Movbe, Movsx, Movsxd, Movzx, Mul, Mulx, Neg, Nop, Not, Or, Pdep, Pext, Popcnt, Rcl, Rcr,
    Rol, Ror, Rorx, Sahf, Sal, Sar, Sarx, Sbb, Seta, Setae, Setb, Setbe, Sete, Setg, Setge,
    Setl, Setle, Setne, Setno, Setnp, Setns, Seto, Setp, Sets, Shl, Shld, Shlx, Shr, Shrd, Shrx,
    Stc, Std, Sub, Test, Tzcnt, Wait, Xadd, Xchg, Xor,
    // Time, random numbers, hints, caches: the host's are the guest's.
    Clflush, Clflushopt, Clwb, Endbr32, Endbr64, Pause, Prefetch, Prefetchw, Rdrand, Rdseed,
    Rdtsc,
    // x87.
    F2xm1, Fabs, Fadd, Faddp, Fbld, Fbstp, Fchs, Fclex, Fcmovb, Fcmovbe, Fcmove, Fcmovnb,
    Fcmovnbe, Fcmovne, Fcmovnu, Fcmovu, Fcom, Fcomi, Fcomip, Fcomp, Fcompp, Fcos, Fdecstp,
    Fdisi, Fdiv, Fdivp, Fdivr, Fdivrp, Feni, Ffree, Ffreep, Fiadd, Ficom, Ficomp, Fidiv, Fidivr,
    Fild, Fimul, Fincstp, Finit, Fist, Fistp, Fisttp, Fisub, Fisubr, Fld, Fld1, Fldcw, Fldenv,
    Fldl2e, Fldl2t, Fldlg2, Fldln2, Fldpi, Fldz, Fmul, Fmulp, Fnclex, Fndisi, Fneni, Fninit,
    Fnop, Fnsave, Fnsetpm, Fnstcw, Fnstenv, Fnstsw, Fpatan, Fprem, Fprem1, Fptan, Frndint,
    Frstor, Fsave, Fscale, Fsetpm, Fsin, Fsincos, Fsqrt, Fst, Fstcw, Fstenv, Fstp, Fstpnce,
    Fstsw, Fsub, Fsubp, Fsubr, Fsubrp, Ftst, Fucom, Fucomi, Fucomip, Fucomp, Fucompp, Fxam,
    Fxch, Fxtract, Fyl2x, Fyl2xp1,
    // MMX and SSE.
    Addpd, Addps, Addsd, Addss, Addsubpd, Addsubps, Aesdec, Aesdeclast, Aesenc, Aesenclast,
    Aesimc, Aeskeygenassist, Andnpd, Andnps, Andpd, Andps, Blendpd, Blendps, Blendvpd, Blendvps,
    Cmppd, Cmpps, Cmpsd, Cmpss, Comisd, Comiss, Crc32, Cvtdq2pd, Cvtdq2ps, Cvtpd2dq, Cvtpd2pi,
    Cvtpd2ps, Cvtpi2pd, Cvtpi2ps, Cvtps2dq, Cvtps2pd, Cvtps2pi, Cvtsd2si, Cvtsd2ss, Cvtsi2sd,
    Cvtsi2ss, Cvtss2sd, Cvtss2si, Cvttpd2dq, Cvttpd2pi, Cvttps2dq, Cvttps2pi, Cvttsd2si,
    Cvttss2si, Divpd, Divps, Divsd, Divss, Dppd, Dpps, Extractps, Gf2p8affineinvqb,
    Gf2p8affineqb, Gf2p8mulb, Haddpd, Haddps, Hsubpd, Hsubps, Insertps, Lddqu, Ldmxcsr, Lfence,
    Maxpd, Maxps, Maxsd, Maxss, Mfence, Minpd, Minps, Minsd, Minss, Movapd, Movaps, Movd,
    Movddup, Movdq2q, Movdqa, Movdqu, Movhlps, Movhpd, Movhps, Movlhps, Movlpd, Movlps,
    Movmskpd, Movmskps, Movntdq, Movntdqa, Movnti, Movntpd, Movntps, Movntq, Movq, Movq2dq,
    Movsd, Movshdup, Movsldup, Movss, Movupd, Movups, Mpsadbw, Mulpd, Mulps, Mulsd, Mulss, Orpd,
    Orps, Pabsb, Pabsd, Pabsw, Packssdw, Packsswb, Packusdw, Packuswb, Paddb, Paddd, Paddq,
    Paddsb, Paddsw, Paddusb, Paddusw, Paddw, Palignr, Pand, Pandn, Pavgb, Pavgw, Pblendvb,
    Pblendw, Pclmulqdq, Pcmpeqb, Pcmpeqd, Pcmpeqq, Pcmpeqw, Pcmpestri, Pcmpestri64, Pcmpestrm,
    Pcmpestrm64, Pcmpgtb, Pcmpgtd, Pcmpgtq, Pcmpgtw, Pcmpistri, Pcmpistrm, Pextrb, Pextrd,
    Pextrq, Pextrw, Phaddd, Phaddsw, Phaddw, Phminposuw, Phsubd, Phsubsw, Phsubw, Pinsrb,
    Pinsrd, Pinsrq, Pinsrw, Pmaddubsw, Pmaddwd, Pmaxsb, Pmaxsd, Pmaxsw, Pmaxub, Pmaxud, Pmaxuw,
    Pminsb, Pminsd, Pminsw, Pminub, Pminud, Pminuw, Pmovmskb, Pmovsxbd, Pmovsxbq, Pmovsxbw,
    Pmovsxdq, Pmovsxwd, Pmovsxwq, Pmovzxbd, Pmovzxbq, Pmovzxbw, Pmovzxdq, Pmovzxwd, Pmovzxwq,
    Pmuldq, Pmulhrsw, Pmulhuw, Pmulhw, Pmulld, Pmullw, Pmuludq, Por, Prefetchnta, Prefetcht0,
    Prefetcht1, Prefetcht2, Psadbw, Pshufb, Pshufd, Pshufhw, Pshuflw, Pshufw, Psignb, Psignd,
    Psignw, Pslld, Pslldq, Psllq, Psllw, Psrad, Psraw, Psrld, Psrldq, Psrlq, Psrlw, Psubb,
    Psubd, Psubq, Psubsb, Psubsw, Psubusb, Psubusw, Psubw, Ptest, Punpckhbw, Punpckhdq,
    Punpckhqdq, Punpckhwd, Punpcklbw, Punpckldq, Punpcklqdq, Punpcklwd, Pxor, Rcpps, Rcpss,
    Roundpd, Roundps, Roundsd, Roundss, Rsqrtps, Rsqrtss, Sfence, Sha1msg1, Sha1msg2, Sha1nexte,
    Sha1rnds4, Sha256msg1, Sha256msg2, Sha256rnds2, Shufpd, Shufps, Sqrtpd, Sqrtps, Sqrtsd,
    Sqrtss, Stmxcsr, Subpd, Subps, Subsd, Subss, Ucomisd, Ucomiss, Unpckhpd, Unpckhps, Unpcklpd,
    Unpcklps, Xorpd, Xorps,
    // AVX.
    Vaddpd, Vaddps, Vaddsd, Vaddss, Vaddsubpd, Vaddsubps, Vaesdec, Vaesdeclast, Vaesenc,
    Vaesenclast, Vaesimc, Vaeskeygenassist, Vandnpd, Vandnps, Vandpd, Vandps, Vblendpd,
    Vblendps, Vblendvpd, Vblendvps, Vbroadcastf128, Vbroadcasti128, Vbroadcastsd, Vbroadcastss,
    Vcmppd, Vcmpps, Vcmpsd, Vcmpss, Vcomisd, Vcomiss, Vcvtdq2pd, Vcvtdq2ps, Vcvtpd2dq,
    Vcvtpd2ps, Vcvtph2ps, Vcvtps2dq, Vcvtps2pd, Vcvtps2ph, Vcvtsd2si, Vcvtsd2ss, Vcvtsi2sd,
    Vcvtsi2ss, Vcvtss2sd, Vcvtss2si, Vcvttpd2dq, Vcvttps2dq, Vcvttsd2si, Vcvttss2si, Vdivpd,
    Vdivps, Vdivsd, Vdivss, Vdppd, Vdpps, Vextractf128, Vextracti128, Vextractps, Vfmadd132pd,
    Vfmadd132ps, Vfmadd132sd, Vfmadd132ss, Vfmadd213pd, Vfmadd213ps, Vfmadd213sd, Vfmadd213ss,
    Vfmadd231pd, Vfmadd231ps, Vfmadd231sd, Vfmadd231ss, Vfmaddsub132pd, Vfmaddsub132ps,
    Vfmaddsub213pd, Vfmaddsub213ps, Vfmaddsub231pd, Vfmaddsub231ps, Vfmsub132pd, Vfmsub132ps,
    Vfmsub132sd, Vfmsub132ss, Vfmsub213pd, Vfmsub213ps, Vfmsub213sd, Vfmsub213ss, Vfmsub231pd,
    Vfmsub231ps, Vfmsub231sd, Vfmsub231ss, Vfmsubadd132pd, Vfmsubadd132ps, Vfmsubadd213pd,
    Vfmsubadd213ps, Vfmsubadd231pd, Vfmsubadd231ps, Vfnmadd132pd, Vfnmadd132ps, Vfnmadd132sd,
    Vfnmadd132ss, Vfnmadd213pd, Vfnmadd213ps, Vfnmadd213sd, Vfnmadd213ss, Vfnmadd231pd,
    Vfnmadd231ps, Vfnmadd231sd, Vfnmadd231ss, Vfnmsub132pd, Vfnmsub132ps, Vfnmsub132sd,
    Vfnmsub132ss, Vfnmsub213pd, Vfnmsub213ps, Vfnmsub213sd, Vfnmsub213ss, Vfnmsub231pd,
    Vfnmsub231ps, Vfnmsub231sd, Vfnmsub231ss, Vgatherdpd, Vgatherdps, Vgatherqpd, Vgatherqps,
    Vgf2p8affineinvqb, Vgf2p8affineqb, Vgf2p8mulb, Vhaddpd, Vhaddps, Vhsubpd, Vhsubps,
    Vinsertf128, Vinserti128, Vinsertps, Vlddqu, Vldmxcsr, Vmaskmovpd, Vmaskmovps, Vmaxpd,
    Vmaxps, Vmaxsd, Vmaxss, Vminpd, Vminps, Vminsd, Vminss, Vmovapd, Vmovaps, Vmovd, Vmovddup,
    Vmovdqa, Vmovdqu, Vmovhlps, Vmovhpd, Vmovhps, Vmovlhps, Vmovlpd, Vmovlps, Vmovmskpd,
    Vmovmskps, Vmovntdq, Vmovntdqa, Vmovntpd, Vmovntps, Vmovq, Vmovsd, Vmovshdup, Vmovsldup,
    Vmovss, Vmovupd, Vmovups, Vmpsadbw, Vmulpd, Vmulps, Vmulsd, Vmulss, Vorpd, Vorps, Vpabsb,
    Vpabsd, Vpabsw, Vpackssdw, Vpacksswb, Vpackusdw, Vpackuswb, Vpaddb, Vpaddd, Vpaddq, Vpaddsb,
    Vpaddsw, Vpaddusb, Vpaddusw, Vpaddw, Vpalignr, Vpand, Vpandn, Vpavgb, Vpavgw, Vpblendd,
    Vpblendvb, Vpblendw, Vpbroadcastb, Vpbroadcastd, Vpbroadcastq, Vpbroadcastw, Vpclmulqdq,
    Vpcmpeqb, Vpcmpeqd, Vpcmpeqq, Vpcmpeqw, Vpcmpestri, Vpcmpestri64, Vpcmpestrm, Vpcmpestrm64,
    Vpcmpgtb, Vpcmpgtd, Vpcmpgtq, Vpcmpgtw, Vpcmpistri, Vpcmpistrm, Vperm2f128, Vperm2i128,
    Vpermd, Vpermilpd, Vpermilps, Vpermpd, Vpermps, Vpermq, Vpextrb, Vpextrd, Vpextrq, Vpextrw,
    Vpgatherdd, Vpgatherdq, Vpgatherqd, Vpgatherqq, Vphaddd, Vphaddsw, Vphaddw, Vphminposuw,
    Vphsubd, Vphsubsw, Vphsubw, Vpinsrb, Vpinsrd, Vpinsrq, Vpinsrw, Vpmaddubsw, Vpmaddwd,
    Vpmaskmovd, Vpmaskmovq, Vpmaxsb, Vpmaxsd, Vpmaxsw, Vpmaxub, Vpmaxud, Vpmaxuw, Vpminsb,
    Vpminsd, Vpminsw, Vpminub, Vpminud, Vpminuw, Vpmovmskb, Vpmovsxbd, Vpmovsxbq, Vpmovsxbw,
    Vpmovsxdq, Vpmovsxwd, Vpmovsxwq, Vpmovzxbd, Vpmovzxbq, Vpmovzxbw, Vpmovzxdq, Vpmovzxwd,
    Vpmovzxwq, Vpmuldq, Vpmulhrsw, Vpmulhuw, Vpmulhw, Vpmulld, Vpmullw, Vpmuludq, Vpor, Vpsadbw,
    Vpshufb, Vpshufd, Vpshufhw, Vpshuflw, Vpsignb, Vpsignd, Vpsignw, Vpslld, Vpslldq, Vpsllq,
    Vpsllvd, Vpsllvq, Vpsllw, Vpsrad, Vpsravd, Vpsraw, Vpsrld, Vpsrldq, Vpsrlq, Vpsrlvd,
    Vpsrlvq, Vpsrlw, Vpsubb, Vpsubd, Vpsubq, Vpsubsb, Vpsubsw, Vpsubusb, Vpsubusw, Vpsubw,
    Vptest, Vpunpckhbw, Vpunpckhdq, Vpunpckhqdq, Vpunpckhwd, Vpunpcklbw, Vpunpckldq,
    Vpunpcklqdq, Vpunpcklwd, Vpxor, Vrcpps, Vrcpss, Vroundpd, Vroundps, Vroundsd, Vroundss,
    Vrsqrtps, Vrsqrtss, Vshufpd, Vshufps, Vsqrtpd, Vsqrtps, Vsqrtsd, Vsqrtss, Vstmxcsr, Vsubpd,
    Vsubps, Vsubsd, Vsubss, Vtestpd, Vtestps, Vucomisd, Vucomiss, Vunpckhpd, Vunpckhps,
    Vunpcklpd, Vunpcklps, Vxorpd, Vxorps, Vzeroall, Vzeroupper,
] };

#[cfg(test)]
mod tests {
    use super::*;
    use iced_x86::Code;
    use std::collections::BTreeSet;

    /// Instructions of [`EXTENSIONS`] that are not copied: privileged, sensitive, with memory that no operand
    /// shows, or with a rule of their own.
    #[rustfmt::skip]
    const CALLED_OUT: &[Mnemonic] = { use Mnemonic::*; &[
        Call, Cli, Clts, Cmpsb, Cmpsq, Cmpsw, Emms, Enter, Hlt, In, Insb, Insd, Insw, Int,
        Int1, Int3, Invd, Invlpg, Iret, Iretd, Iretq, Ja, Jae, Jb, Jbe, Je, Jecxz, Jg, Jge,
        Jl, Jle, Jmp, Jne, Jno, Jnp, Jns, Jo, Jp, Jrcxz, Js, Lar, Leave, Lfs, Lgdt, Lgs,
        Lidt, Lldt, Lmsw, Lodsb, Lodsd, Lodsq, Lodsw, Loop, Loope, Loopne, Lsl, Lss, Ltr,
        Maskmovdqu, Maskmovq, Movsb, Movsq, Movsw, Out, Outsb, Outsd, Outsw, Pop, Popf,
        Popfq, Push, Pushf, Pushfq, Reservednop, Ret, Retf, Scasb, Scasd, Scasq, Scasw,
        Sgdt, Sidt, Sldt, Smsw, Sti, Stosb, Stosd, Stosq, Stosw, Str, Swapgs, Ud0, Ud1, Ud2,
        Verr, Verw, Vmaskmovdqu, Wbinvd, Xlatb,
    ] };

    /// Extensions none of whose instructions is copied.
    #[rustfmt::skip]
    const OTHER_EXTENSIONS: &[CpuidFeature] = { use CpuidFeature::*; &[
        AESKLE, AMX_BF16, AMX_COMPLEX, AMX_FP16, AMX_INT8, AMX_TILE, AVX512BW, AVX512CD,
        AVX512DQ, AVX512ER, AVX512F, AVX512PF, AVX512VL, AVX512_4FMAPS, AVX512_4VNNIW,
        AVX512_BF16, AVX512_BITALG, AVX512_FP16, AVX512_IFMA, AVX512_VBMI, AVX512_VBMI2,
        AVX512_VNNI, AVX512_VP2INTERSECT, AVX512_VPOPCNTDQ, AVX_IFMA, AVX_NE_CONVERT,
        AVX_VNNI, AVX_VNNI_INT16, AVX_VNNI_INT8, CET_SS, CLDEMOTE, CLZERO, CMPCCXADD, CPUID,
        D3NOW, D3NOWEXT, ENQCMD, FMA4, FRED, FSGSBASE, FXSR, HLE_or_RTM, HRESET, INVEPT,
        INVLPGB, INVPCID, INVVPID, KL, KNC, LKGS, LWP, MCOMMIT, MONITOR, MONITORX,
        MOVDIR64B, MOVDIRI, MPX, MSR, MSRLIST, OSS, PADLOCK_ACE, PADLOCK_GMI, PADLOCK_PHE,
        PADLOCK_PMM, PADLOCK_RNG, PADLOCK_UNDOC, PCOMMIT, PCONFIG, PKU, PREFETCHITI,
        PREFETCHWT1, PTWRITE, RAO_INT, RDPID, RDPMC, RDPRU, RDTSCP, RMPQUERY, RTM, SEP,
        SERIALIZE, SEV_ES, SEV_SNP, SGX1, SHA512, SKINIT_or_SVM, SM3, SM4, SMAP, SMM, SMX,
        SSE4A, SVM, SYSCALL, TBM, TDX, TSE, TSXLDTRK, UDBG, UINTR, VMX, WAITPKG, WBNOINVD,
        WIDE_KL, WRMSRNS, XOP, XSAVE, XSAVEC, XSAVEOPT, XSAVES,
    ] };

    /// What the decoder can find in 64-bit code.
    fn instructions() -> impl Iterator<Item = Code> {
        Code::values().filter(|code| {
            let op_code = code.op_code();
            op_code.is_instruction() && op_code.is_available_in_mode(64)
        })
    }

    fn all_extensions_may_be(code: Code) -> bool {
        code.cpuid_features().iter().all(|feature| has_extension(*feature))
    }

    #[test]
    fn every_instruction_is_on_one_list() {
        let mut wrong = BTreeSet::new();
        for code in instructions() {
            let mnemonic = code.mnemonic();
            let unknown = code.cpuid_features().iter().filter(|f| !has_extension(**f));
            for feature in unknown.filter(|f| !OTHER_EXTENSIONS.contains(f)) {
                wrong.insert(format!("{feature:?}: an extension on no list"));
            }
            let listed = [has(mnemonic), CALLED_OUT.contains(&mnemonic)];
            if all_extensions_may_be(code) && listed[0] == listed[1] {
                wrong.insert(format!("{code:?}: on {} lists", u8::from(listed[0]) * 2));
            }
        }
        assert!(wrong.is_empty(), "{wrong:#?}");
    }

    /// The lists hold nothing that does not exist, and nothing twice.
    #[test]
    fn the_lists_are_exact() {
        let mut found = BTreeSet::new();
        for code in instructions().filter(|code| all_extensions_may_be(*code)) {
            found.insert(format!("{:?}", code.mnemonic()));
        }
        for list in [COPIED, CALLED_OUT] {
            let names: Vec<_> = list.iter().map(|mnemonic| format!("{mnemonic:?}")).collect();
            let once: BTreeSet<_> = names.iter().cloned().collect();
            assert_eq!(once.len(), names.len(), "a name is there twice");
            let gone: Vec<_> = once.difference(&found).collect();
            assert!(gone.is_empty(), "not in 64-bit code: {gone:?}");
        }
        assert!(OTHER_EXTENSIONS.iter().all(|feature| !has_extension(*feature)));
    }
}
