//! What control registers and 32-bit mode make of vector instructions, which the oracle, a process
//! in 64-bit user mode, cannot show. Expected results are from SDM vol. 3A, table 14-1 and vol. 2A,
//! section 2.4.

use x86::{
    Vcpu,
    control::{cr0, cr4},
    seg,
    segment::attr,
    vector,
};

use crate::{
    interpreter::InterpreterSide,
    oracle::{MEMORY, MEMORY_ADDRESS, Outcome, State},
};

const ADDPS: &[u8] = &[0x0f, 0x58, 0xc1];
const MOVAPS: &[u8] = &[0x0f, 0x28, 0xc1];
const PXOR: &[u8] = &[0x66, 0x0f, 0xef, 0xc1];
const LDMXCSR: &[u8] = &[0x0f, 0xae, 0x10];
const PADDB_MMX: &[u8] = &[0x0f, 0xfc, 0xc1];
const PSHUFW_MMX: &[u8] = &[0x0f, 0x70, 0xc1, 0x1b];
const CVTPS2PI: &[u8] = &[0x0f, 0x2d, 0xc1];
const EMMS: &[u8] = &[0x0f, 0x77];
const FLD1: &[u8] = &[0xd9, 0xe8];
const FNCLEX: &[u8] = &[0xdb, 0xe2];
const FNSTENV: &[u8] = &[0xd9, 0x30];
const WAIT: &[u8] = &[0x9b];
const FXSAVE: &[u8] = &[0x0f, 0xae, 0x00];
const XSAVE: &[u8] = &[0x0f, 0xae, 0x20];
const XGETBV: &[u8] = &[0x0f, 0x01, 0xd0];
const VADDPS: &[u8] = &[0xc5, 0xf0, 0x58, 0xc2];
const VMOVAPS: &[u8] = &[0xc5, 0xf8, 0x28, 0xc1];
const VPXOR: &[u8] = &[0xc5, 0xf5, 0xef, 0xc2];
const VZEROUPPER: &[u8] = &[0xc5, 0xf8, 0x77];
const VZEROALL: &[u8] = &[0xc5, 0xfc, 0x77];
const ANDN: &[u8] = &[0xc4, 0xe2, 0x70, 0xf2, 0xc2];
const CRC32: &[u8] = &[0xf2, 0x0f, 0x38, 0xf1, 0xc1];

const SSE: &[&[u8]] = &[ADDPS, MOVAPS, PXOR, LDMXCSR, CVTPS2PI];
const MMX: &[&[u8]] = &[PADDB_MMX, PSHUFW_MMX, EMMS];
const X87: &[&[u8]] = &[FLD1, FNCLEX, FNSTENV, FXSAVE];
const AVX: &[&[u8]] = &[VADDPS, VMOVAPS, VPXOR, VZEROUPPER, VZEROALL];
const OTHER: &[&[u8]] = &[ANDN, CRC32];

fn state() -> State {
    let mut gpr = [0; 16];
    gpr[0] = MEMORY_ADDRESS;
    State { fpu: Default::default(), gpr, memory: [0; MEMORY], rflags: x86::flags::FIXED }
}

fn run(change: impl Fn(&mut Vcpu), bytes: &[u8], state: &State) -> Outcome {
    let mut interpreter = InterpreterSide::new();
    interpreter.change(change);
    interpreter.run(bytes, state)
}

/// All instructions of the groups end in the exception (zero: in none).
#[track_caller]
fn expect(change: impl Fn(&mut Vcpu), groups: &[(&[&[u8]], u8)]) {
    for (group, fault) in groups {
        for bytes in *group {
            assert_eq!(run(&change, bytes, &state()).fault, *fault, "{bytes:02x?}");
        }
    }
}

#[test]
fn everything_runs_when_enabled() {
    expect(
        |_| {},
        &[(SSE, 0), (MMX, 0), (X87, 0), (AVX, 0), (OTHER, 0), (&[WAIT, XSAVE, XGETBV], 0)],
    );
}

#[test]
fn task_switched_is_device_not_available() {
    const NM: u8 = vector::NM;
    let change = |v: &mut Vcpu| v.cr0 |= cr0::TS;
    expect(change, &[(SSE, NM), (MMX, NM), (X87, NM), (AVX, NM), (&[WAIT, XSAVE], NM)]);
    expect(change, &[(OTHER, 0), (&[XGETBV], 0)]);
    let without_mp = |v: &mut Vcpu| v.cr0 = v.cr0 & !cr0::MP | cr0::TS;
    expect(without_mp, &[(&[WAIT], 0), (&[FLD1], NM)]);
}

#[test]
fn emulation_takes_x87_mmx_and_sse_away() {
    let change = |v: &mut Vcpu| v.cr0 |= cr0::EM;
    expect(change, &[(X87, vector::NM), (MMX, vector::UD), (SSE, vector::UD)]);
    expect(change, &[(AVX, 0), (OTHER, 0), (&[WAIT], 0)]);
    let both = |v: &mut Vcpu| v.cr0 |= cr0::EM | cr0::TS;
    expect(both, &[(MMX, vector::UD), (SSE, vector::UD)]);
}

#[test]
fn sse_needs_osfxsr() {
    let change = |v: &mut Vcpu| v.cr4 &= !cr4::OSFXSR;
    expect(change, &[(SSE, vector::UD), (MMX, 0), (X87, 0), (AVX, 0), (OTHER, 0)]);
}

#[test]
fn avx_needs_osxsave_and_its_state() {
    let change = |v: &mut Vcpu| v.cr4 &= !cr4::OSXSAVE;
    expect(change, &[(AVX, vector::UD), (&[XSAVE, XGETBV], vector::UD), (SSE, 0), (OTHER, 0)]);
    let change = |v: &mut Vcpu| v.xcr0 = 3;
    expect(change, &[(AVX, vector::UD), (&[XSAVE, XGETBV], 0), (SSE, 0), (OTHER, 0)]);
}

#[test]
fn xsetbv_takes_what_the_model_has() {
    const XSETBV: &[u8] = &[0x0f, 0x01, 0xd1];
    fn supervisor(v: &mut Vcpu) {
        for segment in &mut v.seg {
            segment.attr &= !(3 << attr::DPL_SHIFT);
        }
    }
    let with = |eax: u64, ecx: u64| {
        let mut state = state();
        (state.gpr[0], state.gpr[1]) = (eax, ecx);
        state
    };
    for good in [1, 3, 7] {
        assert_eq!(run(supervisor, XSETBV, &with(good, 0)).fault, 0, "{good}");
    }
    for bad in [0, 2, 5, 6, 8, 15, 1 << 31] {
        assert_eq!(run(supervisor, XSETBV, &with(bad, 0)).fault, vector::GP, "{bad}");
    }
    assert_eq!(run(supervisor, XSETBV, &with(7, 1)).fault, vector::GP, "XCR1");
    assert_eq!(run(|_| {}, XSETBV, &with(7, 0)).fault, vector::GP, "user mode");
}

#[test]
fn unexpected_simd_exception_is_undefined_opcode() {
    let mut divide_by_zero = state();
    divide_by_zero.fpu.mxcsr = 0x1f80 & !(1 << 9);
    divide_by_zero.fpu.xmm[0] = [0x3f; 16];
    let divps = &[0x0f, 0x5e, 0xc1];
    let outcome = run(|_| {}, divps, &divide_by_zero);
    assert_eq!(outcome.fault, vector::XM);
    assert_eq!(outcome.fpu.mxcsr & 0x3f, 4);
    assert_eq!(outcome.fpu.xmm, divide_by_zero.fpu.xmm);
    let outcome = run(|v| v.cr4 &= !cr4::OSXMMEXCPT, divps, &divide_by_zero);
    assert_eq!(outcome.fault, vector::UD);
}

#[test]
fn what_the_model_does_not_have_is_undefined() {
    let foreign: &[&[u8]] = &[
        &[0x62, 0xf1, 0x74, 0x48, 0x58, 0xc2], // vaddps zmm0,zmm1,zmm2
        &[0x62, 0xf1, 0x74, 0x08, 0x58, 0xc2], // the same on XMM, EVEX
        &[0xc5, 0xf8, 0x90, 0xc1],             // kmovw k0,k1
        &[0x8f, 0xe9, 0x78, 0x80, 0xc1],       // vfrczps xmm0,xmm1 (XOP)
        &[0x0f, 0x0f, 0xc1, 0x9e],             // pfadd mm0,mm1 (3DNow)
        &[0xf2, 0x0f, 0x79, 0xc1],             // insertq xmm0,xmm1 (SSE4A)
        &[0xc4, 0xe2, 0x78, 0x49, 0xc0],       // tilerelease (AMX)
        &[0x0f, 0xc7, 0x20],                   // xsavec
        &[0x0f, 0xc7, 0x28],                   // xsaves
        &[0xc4, 0xe2, 0x71, 0x50, 0xc2],       // vpdpbusd, VEX
        &[0xf0, 0x0f, 0x58, 0xc1],             // lock addps
        &[0xc4, 0xe2, 0x75, 0x90, 0x04, 0x08], // vpgatherdd ymm0,[rax+ymm1],ymm1
    ];
    expect(|_| {}, &[(foreign, vector::UD)]);
}

fn compatibility_mode(v: &mut Vcpu) {
    let code = &mut v.seg[seg::CS].attr;
    *code = *code & !attr::L | attr::DB;
}

#[test]
fn thirty_two_bit_code_has_eight_registers() {
    let mut state = state();
    state.memory.fill(0xcc);
    state.fpu.xmm.as_flattened_mut().fill(0x11);
    state.fpu.ymm_high.as_flattened_mut().fill(0x22);
    let outcome = run(compatibility_mode, FXSAVE, &state);
    assert_eq!(outcome.fault, 0);
    assert_eq!(outcome.memory[287], 0x11, "XMM7");
    assert!(outcome.memory[288..].iter().all(|byte| *byte == 0xcc), "beyond XMM7");
    let outcome = run(compatibility_mode, VZEROALL, &state);
    assert_eq!(outcome.fpu.xmm[7], [0; 16]);
    assert_eq!(outcome.fpu.ymm_high[7], [0; 16]);
    assert_eq!(outcome.fpu.xmm[8], [0x11; 16]);
    assert_eq!(outcome.fpu.ymm_high[8], [0x22; 16]);
}

#[test]
fn the_unit_runs_thirty_two_bit_code() {
    let mut state = state();
    state.gpr[1] = 0xffff_ffff;
    state.gpr[2] = 0xf0f0;
    let outcome = run(compatibility_mode, ANDN, &state);
    assert_eq!((outcome.fault, outcome.gpr[0]), (0, 0));
    state.memory[..16].copy_from_slice(&[1; 16]);
    state.fpu.xmm[0] = [1; 16];
    let paddb = &[0x66, 0x0f, 0xfc, 0x00]; // paddb xmm0,[eax]
    assert_eq!(run(compatibility_mode, paddb, &state).fpu.xmm[0], [2; 16]);
    let paddw = &[0x66, 0x0f, 0xfd, 0x00]; // paddw xmm0,[eax], which the unit does
    assert_eq!(run(compatibility_mode, paddw, &state).fpu.xmm[0], [2; 16]);
}
