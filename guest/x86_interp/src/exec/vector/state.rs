//! FXSAVE, the XSAVE family, MXCSR and XCR0 (SDM vol. 1, 10.5 and chapter 13).
//!
//! XINUSE is computed from the contents: a component is in its initial configuration exactly when
//! its registers have their initial values.

use super::{
    environment::control_word,
    permit::{self, update_summary},
};
use crate::{
    cpu::Cpu,
    op::{Handler, Op},
    system::System,
    tlb::View,
};
use iced_x86::{Instruction, Mnemonic};
use x86::{
    Fault,
    control::cr4,
    fpu::{FpuState, MXCSR_MASK, xstate},
    paging, reg, vector,
};

/// Bytes of the FXSAVE area.
const LEGACY: usize = 512;
/// Where ST(0) is.
const ST: usize = 32;
/// Where XMM0 is.
const XMM: usize = 160;
/// Bytes of the XSAVE header, which follows the legacy area.
const HEADER: usize = 64;
/// Where the high half of YMM0 is.
const AVX: usize = LEGACY + HEADER;

/// An image of the legacy area. `wide`: with REX.W the pointers have 64 bits, without they have 32
/// and a (deprecated, zero) selector.
fn legacy_image(fpu: &FpuState, wide: bool) -> [u8; LEGACY] {
    let mut image = [0; LEGACY];
    image[0..2].copy_from_slice(&fpu.fcw.to_le_bytes());
    image[2..4].copy_from_slice(&fpu.fsw.to_le_bytes());
    image[4] = fpu.ftw;
    image[6..8].copy_from_slice(&fpu.fop.to_le_bytes());
    let pointer = |value: u64| if wide { value } else { value & 0xffff_ffff };
    image[8..16].copy_from_slice(&pointer(fpu.fip).to_le_bytes());
    image[16..24].copy_from_slice(&pointer(fpu.fdp).to_le_bytes());
    image[24..28].copy_from_slice(&fpu.mxcsr.to_le_bytes());
    image[28..32].copy_from_slice(&MXCSR_MASK.to_le_bytes());
    for (slot, st) in image[ST..XMM].chunks_exact_mut(16).zip(&fpu.st) {
        slot[..10].copy_from_slice(&st[..10]);
    }
    for (slot, xmm) in image[XMM..].chunks_exact_mut(16).zip(&fpu.xmm) {
        slot.copy_from_slice(xmm);
    }
    image
}

/// Takes the x87 part of a legacy area.
fn set_x87(fpu: &mut FpuState, image: &[u8; LEGACY], wide: bool) {
    let pointer = |at: usize| {
        let value = u64::from_le_bytes(core::array::from_fn(|i| image[at + i]));
        if wide { value } else { value & 0xffff_ffff }
    };
    fpu.fcw = control_word(u16::from_le_bytes([image[0], image[1]]));
    fpu.fsw = u16::from_le_bytes([image[2], image[3]]);
    fpu.ftw = image[4];
    fpu.fop = u16::from_le_bytes([image[6], image[7]]) & 0x7ff;
    fpu.fip = pointer(8);
    fpu.fdp = pointer(16);
    for (st, slot) in fpu.st.iter_mut().zip(image[ST..XMM].chunks_exact(16)) {
        st[..10].copy_from_slice(&slot[..10]);
        st[10..].fill(0);
    }
    update_summary(fpu);
}

fn initialize_x87(fpu: &mut FpuState) {
    let initial = FpuState::default();
    (fpu.fcw, fpu.fsw, fpu.ftw) = (initial.fcw, initial.fsw, initial.ftw);
    (fpu.fop, fpu.fip, fpu.fdp, fpu.st) = (0, 0, 0, initial.st);
}

/// MXCSR from a legacy area; #GP if a reserved bit is set.
fn image_mxcsr(image: &[u8; LEGACY]) -> Result<u32, Fault> {
    valid_mxcsr(u32::from_le_bytes([image[24], image[25], image[26], image[27]]))
}

fn valid_mxcsr(value: u32) -> Result<u32, Fault> {
    if value & !MXCSR_MASK == 0 { Ok(value) } else { Err(Fault::gp(0)) }
}

/// Vector registers the mode has.
fn register_count<S: System>(op: &Op<S>) -> usize {
    if op.long { 16 } else { 8 }
}

/// Copies `count` 16-byte registers out of an area.
fn set_registers(to: &mut [[u8; 16]; 16], count: usize, from: &[u8]) {
    for (register, slot) in to.iter_mut().take(count).zip(from.chunks_exact(16)) {
        register.copy_from_slice(slot);
    }
}

fn aligned_address<S: System>(
    cpu: &Cpu<S>,
    op: &Op<S>,
    size: usize,
    alignment: u64,
    write: bool,
) -> Result<u64, Fault> {
    let linear = cpu.linear(op, size as u64, write)?;
    match linear & (alignment - 1) {
        0 => Ok(linear),
        // That it is no address is found first, unlike with vectors.
        _ if cpu.vcpu.long_mode() && !paging::canonical(linear) => {
            Err(cpu.blame_stack(op, Fault::gp(0)))
        }
        // Alignment checks know only the words the area is made of.
        offset if offset & 3 != 0 && cpu.view == View::UserAligned => {
            Err(Fault::with_code(vector::AC, 0))
        }
        _ => Err(Fault::gp(0)),
    }
}

/// FXSAVE and FXSAVE64.
fn fxsave<S: System, const WIDE: bool>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    permit::x87(cpu)?;
    let linear = aligned_address(cpu, op, LEGACY, 16, true)?;
    cpu.probe_write(sys, linear, LEGACY as u64).map_err(|fault| cpu.blame_stack(op, fault))?;
    let image = legacy_image(&cpu.vcpu.fpu, WIDE);
    cpu.write_bytes(sys, linear, &image[..XMM + 16 * register_count(op)])
}

/// FXRSTOR and FXRSTOR64.
fn fxrstor<S: System, const WIDE: bool>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    permit::x87(cpu)?;
    let linear = aligned_address(cpu, op, LEGACY, 16, false)?;
    let mut image = [0; LEGACY];
    cpu.read_bytes(sys, linear, &mut image).map_err(|fault| cpu.blame_stack(op, fault))?;
    let mxcsr = image_mxcsr(&image)?;
    let fpu = &mut cpu.vcpu.fpu;
    set_x87(fpu, &image, WIDE);
    fpu.mxcsr = mxcsr;
    set_registers(&mut fpu.xmm, register_count(op), &image[XMM..]);
    Ok(())
}

/// Components in other than their initial configuration.
fn in_use(fpu: &FpuState) -> u64 {
    let initial = FpuState::default();
    let x87 = (fpu.fcw, fpu.fsw, fpu.ftw, fpu.fop, fpu.fip, fpu.fdp)
        != (initial.fcw, 0, 0, 0, 0, 0)
        || fpu.st != initial.st;
    let bit = |used: bool, bit: u64| if used { bit } else { 0 };
    bit(x87, xstate::X87)
        | bit(fpu.xmm != initial.xmm, xstate::SSE)
        | bit(fpu.ymm_high != initial.ymm_high, xstate::AVX)
}

/// The components an instruction asks for: EDX:EAX and XCR0.
fn requested<S: System>(cpu: &Cpu<S>) -> u64 {
    let gpr = &cpu.vcpu.gpr;
    let mask = gpr[reg::RAX] & 0xffff_ffff | gpr[reg::RDX] << 32;
    mask & cpu.vcpu.xcr0
}

/// Bytes of an area with the components in `mask`.
const fn area_size(mask: u64) -> usize {
    if mask & xstate::AVX != 0 { AVX + 256 } else { AVX }
}

/// XSAVE and XSAVEOPT. `OPTIMIZED`: components in their initial configuration are not written.
fn xsave<S: System, const WIDE: bool, const OPTIMIZED: bool>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    permit::xsave(cpu)?;
    let mask = requested(cpu);
    let linear = aligned_address(cpu, op, area_size(mask), 64, true)?;
    cpu.probe_write(sys, linear, area_size(mask) as u64)
        .map_err(|fault| cpu.blame_stack(op, fault))?;
    let in_use = in_use(&cpu.vcpu.fpu);
    let write = if OPTIMIZED { mask & in_use } else { mask };
    write_components(cpu, sys, op, linear, (mask, write), WIDE)?;
    let header = linear + LEGACY as u64;
    let old = cpu.load::<8>(sys, header)?;
    cpu.store::<8>(sys, header, old & !mask | in_use & mask)
}

fn write_components<S: System>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
    linear: u64,
    (mask, write): (u64, u64),
    wide: bool,
) -> Result<(), Fault> {
    let image = legacy_image(&cpu.vcpu.fpu, wide);
    let registers = 16 * register_count(op);
    if write & xstate::X87 != 0 {
        cpu.write_bytes(sys, linear, &image[..24])?;
        cpu.write_bytes(sys, linear + ST as u64, &image[ST..XMM])?;
    }
    if mask & (xstate::SSE | xstate::AVX) != 0 {
        cpu.write_bytes(sys, linear + 24, &image[24..ST])?;
    }
    if write & xstate::SSE != 0 {
        cpu.write_bytes(sys, linear + XMM as u64, &image[XMM..XMM + registers])?;
    }
    if write & xstate::AVX != 0 {
        let high = cpu.vcpu.fpu.ymm_high;
        cpu.write_bytes(sys, linear + AVX as u64, &high.as_flattened()[..registers])?;
    }
    Ok(())
}

/// XRSTOR, standard form: the compacted one is not advertised.
fn xrstor<S: System, const WIDE: bool>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    permit::xsave(cpu)?;
    let mask = requested(cpu);
    let linear = aligned_address(cpu, op, area_size(mask), 64, false)?;
    let mut area = [0; AVX + 256];
    let result = cpu.read_bytes(sys, linear, &mut area[..area_size(mask)]);
    result.map_err(|fault| cpu.blame_stack(op, fault))?;
    let present = valid_header(&area, cpu.vcpu.xcr0)?;
    let mut image = [0; LEGACY];
    image.copy_from_slice(&area[..LEGACY]);
    let mxcsr = if mask & (xstate::SSE | xstate::AVX) != 0 {
        image_mxcsr(&image)?
    } else {
        cpu.vcpu.fpu.mxcsr
    };
    cpu.vcpu.fpu.mxcsr = mxcsr;
    let count = register_count(op);
    let fpu = &mut cpu.vcpu.fpu;
    if mask & xstate::X87 != 0 {
        if present & xstate::X87 != 0 { set_x87(fpu, &image, WIDE) } else { initialize_x87(fpu) }
    }
    let zeros = [0; 256];
    let source = |bit, at: usize| if present & bit != 0 { &area[at..at + 256] } else { &zeros };
    if mask & xstate::SSE != 0 {
        set_registers(&mut fpu.xmm, count, source(xstate::SSE, XMM));
    }
    if mask & xstate::AVX != 0 {
        set_registers(&mut fpu.ymm_high, count, source(xstate::AVX, AVX));
    }
    Ok(())
}

/// XSTATE_BV of an area; #GP for what only compacted areas have, or XCR0 does not (SDM vol. 1,
/// 13.8.1).
fn valid_header(area: &[u8], xcr0: u64) -> Result<u64, Fault> {
    let word =
        |i: usize| u64::from_le_bytes(core::array::from_fn(|byte| area[LEGACY + 8 * i + byte]));
    let present = word(0);
    let reserved = present & !xcr0 | word(1) | word(2);
    if reserved == 0 { Ok(present) } else { Err(Fault::gp(0)) }
}

/// LDMXCSR and VLDMXCSR.
fn load_mxcsr<S: System, const VEX: bool>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    if VEX {
        permit::avx(cpu)?
    } else {
        permit::sse(cpu)?
    }
    let [[a, b, c, d, ..], _] = cpu.load_vector::<4, false>(sys, op)?;
    cpu.vcpu.fpu.mxcsr = valid_mxcsr(u32::from_le_bytes([a, b, c, d]))?;
    Ok(())
}

/// STMXCSR and VSTMXCSR.
fn store_mxcsr<S: System, const VEX: bool>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    if VEX {
        permit::avx(cpu)?
    } else {
        permit::sse(cpu)?
    }
    let value = u128::from(cpu.vcpu.fpu.mxcsr);
    cpu.store_vector::<4, false>(sys, op, [value.to_le_bytes(), [0; 16]])
}

/// XGETBV: register 0 only, for XGETBV with ECX = 1 is not advertised.
fn xgetbv<S: System>(cpu: &mut Cpu<S>, _: &mut S, _: &Op<S>) -> Result<(), Fault> {
    if cpu.vcpu.cr4 & cr4::OSXSAVE == 0 {
        return Err(Fault::ud());
    }
    if cpu.vcpu.gpr[reg::RCX] as u32 != 0 {
        return Err(Fault::gp(0));
    }
    let value = cpu.vcpu.xcr0;
    cpu.vcpu.gpr[reg::RAX] = value & 0xffff_ffff;
    cpu.vcpu.gpr[reg::RDX] = value >> 32;
    Ok(())
}

/// XSETBV.
fn xsetbv<S: System>(cpu: &mut Cpu<S>, sys: &mut S, _: &Op<S>) -> Result<(), Fault> {
    if cpu.vcpu.cr4 & cr4::OSXSAVE == 0 {
        return Err(Fault::ud());
    }
    let gpr = &cpu.vcpu.gpr;
    let value = gpr[reg::RAX] & 0xffff_ffff | gpr[reg::RDX] << 32;
    let supported = u64::from(sys.cpuid(0xd, 0).eax) & xstate::SUPPORTED;
    let avx_without_sse = value & (xstate::SSE | xstate::AVX) == xstate::AVX;
    let valid = gpr[reg::RCX] as u32 == 0
        && cpu.vcpu.cpl() == 0
        && value & xstate::X87 != 0
        && value & !supported == 0
        && !avx_without_sse;
    if !valid {
        return Err(Fault::gp(0));
    }
    cpu.vcpu.xcr0 = value;
    Ok(())
}

/// Chooses the handler.
pub(super) fn select<S: System>(insn: &Instruction) -> Option<Handler<S>> {
    use Mnemonic as M;
    Some(match insn.mnemonic() {
        M::Fxsave => fxsave::<S, false>,
        M::Fxsave64 => fxsave::<S, true>,
        M::Fxrstor => fxrstor::<S, false>,
        M::Fxrstor64 => fxrstor::<S, true>,
        M::Xsave => xsave::<S, false, false>,
        M::Xsave64 => xsave::<S, true, false>,
        M::Xsaveopt => xsave::<S, false, true>,
        M::Xsaveopt64 => xsave::<S, true, true>,
        M::Xrstor => xrstor::<S, false>,
        M::Xrstor64 => xrstor::<S, true>,
        M::Ldmxcsr => load_mxcsr::<S, false>,
        M::Vldmxcsr => load_mxcsr::<S, true>,
        M::Stmxcsr => store_mxcsr::<S, false>,
        M::Vstmxcsr => store_mxcsr::<S, true>,
        M::Xgetbv => xgetbv,
        M::Xsetbv => xsetbv,
        _ => return None,
    })
}
