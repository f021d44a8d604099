//! Between the architectural state and the registers a wedge runs with.

use wedge::Registers;
use x86::{
    Vcpu, flags,
    fpu::{FpuState, MXCSR_INIT, xstate},
    seg,
};

/// Flags user code can change without the kernel.
const USER_FLAGS: u64 = flags::STATUS | flags::TF | flags::DF | flags::NT | flags::AC | flags::ID;

/// What to run with.
pub fn load(vcpu: &Vcpu, registers: &mut Registers) {
    registers.gpr = vcpu.gpr;
    registers.rip = vcpu.rip;
    registers.rflags = vcpu.rflags & USER_FLAGS | flags::IF | flags::FIXED;
    registers.fs_base = vcpu.seg[seg::FS].base;
    registers.gs_base = vcpu.seg[seg::GS].base;
    let f = &vcpu.fpu;
    let v = &mut registers.vectors;
    v[0..2].copy_from_slice(&f.fcw.to_le_bytes());
    v[2..4].copy_from_slice(&f.fsw.to_le_bytes());
    v[4..6].copy_from_slice(&[f.ftw, 0]);
    v[6..8].copy_from_slice(&f.fop.to_le_bytes());
    v[8..16].copy_from_slice(&f.fip.to_le_bytes());
    v[16..24].copy_from_slice(&f.fdp.to_le_bytes());
    v[24..28].copy_from_slice(&f.mxcsr.to_le_bytes());
    v[32..160].copy_from_slice(f.st.as_flattened());
    v[160..416].copy_from_slice(f.xmm.as_flattened());
    v[576..832].copy_from_slice(f.ymm_high.as_flattened());
}

/// What it came back with. Components the CPU did not store are in their initial state.
pub fn store(registers: &Registers, vcpu: &mut Vcpu) {
    vcpu.gpr = registers.gpr;
    vcpu.rip = registers.rip;
    vcpu.rflags = vcpu.rflags & !USER_FLAGS | registers.rflags & USER_FLAGS;
    vcpu.seg[seg::FS].base = registers.fs_base;
    vcpu.seg[seg::GS].base = registers.gs_base;
    let v = &registers.vectors;
    let present = u64::from_le_bytes(part(v, 512));
    let initial = FpuState::default();
    let f = &mut vcpu.fpu;
    if present & xstate::X87 != 0 {
        f.fcw = u16::from_le_bytes(part(v, 0));
        f.fsw = u16::from_le_bytes(part(v, 2));
        f.ftw = v[4];
        f.fop = u16::from_le_bytes(part(v, 6));
        f.fip = u64::from_le_bytes(part(v, 8));
        f.fdp = u64::from_le_bytes(part(v, 16));
        fill(&mut f.st, &v[32..160]);
    } else {
        (f.fcw, f.fsw, f.ftw, f.fop) = (initial.fcw, initial.fsw, initial.ftw, initial.fop);
        (f.fip, f.fdp, f.st) = (0, 0, initial.st);
    }
    f.mxcsr = u32::from_le_bytes(part(v, 24));
    if f.mxcsr == 0 && present & (xstate::SSE | xstate::AVX) == 0 {
        f.mxcsr = MXCSR_INIT;
    }
    match present & xstate::SSE {
        0 => f.xmm = initial.xmm,
        _ => fill(&mut f.xmm, &v[160..416]),
    }
    match present & xstate::AVX {
        0 => f.ymm_high = initial.ymm_high,
        _ => fill(&mut f.ymm_high, &v[576..832]),
    }
    f.xstate_bv = xstate::SUPPORTED;
}

fn part<const N: usize>(bytes: &[u8; 832], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

fn fill<const N: usize>(registers: &mut [[u8; 16]; N], bytes: &[u8]) {
    for (register, value) in registers.iter_mut().zip(bytes.chunks_exact(16)) {
        register.copy_from_slice(value);
    }
}
