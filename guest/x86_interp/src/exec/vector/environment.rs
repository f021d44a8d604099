//! The x87 environment: FNSTENV, FLDENV, FNSAVE, FRSTOR, FNINIT's relatives and WAIT (SDM vol. 1,
//! 8.1.10).
//!
//! Protected-mode formats only: where they differ in real mode, the pointers are packed
//! differently, and real mode is not executed. FCS and FDS are deprecated (CPUID leaf 7 EBX bit 13)
//! and read as zero.

use super::permit::{self, EXCEPTIONS};
use crate::{
    cpu::Cpu,
    op::{Handler, Op},
    system::System,
};
use iced_x86::{Code, Instruction};
use x86::{Fault, fpu::FpuState};

/// Bits of the control word that exist; the rest read as in [`FCW_FIXED`].
const FCW_MASK: u16 = 0x1f3f;
/// Bit of the control word that is always one.
const FCW_FIXED: u16 = 0x40;
/// Bytes of the eight registers in an FNSAVE image.
const REGISTERS: usize = 80;

/// Loads a control word as FLDCW does: bits that do not exist do not stick.
pub(super) const fn control_word(value: u16) -> u16 {
    value & FCW_MASK | FCW_FIXED
}

fn top(fpu: &FpuState) -> usize {
    usize::from(fpu.fsw >> 11 & 7)
}

/// The full tag word: two bits per physical register, 0 valid, 1 zero, 2 special, 3 empty.
fn full_tags(fpu: &FpuState) -> u16 {
    (0..8).fold(0, |word, register| {
        let st = &fpu.st[(register + 8 - top(fpu)) & 7];
        let tag = if fpu.ftw >> register & 1 == 0 { 3 } else { tag(st) };
        word | tag << (2 * register)
    })
}

fn tag(st: &[u8; 16]) -> u16 {
    let word = u128::from_le_bytes(*st);
    let (fraction, exponent) = (word as u64, (word >> 64) as u16 & 0x7fff);
    match (exponent, fraction) {
        (0, 0) => 1,
        (0 | 0x7fff, _) => 2,
        _ if fraction >> 63 == 0 => 2,
        _ => 0,
    }
}

/// The abridged tag word: one bit per register that is not empty.
fn abridged_tags(full: u16) -> u8 {
    (0..8).fold(0, |word, register| {
        let filled = full >> (2 * register) & 3 != 3;
        word | u8::from(filled) << register
    })
}

/// Bytes of the environment for an operand size: 32-bit, or 16-bit.
const fn environment_size(wide: bool) -> usize {
    if wide { 28 } else { 14 }
}

/// The environment in memory format.
fn environment(fpu: &FpuState, wide: bool) -> [u8; 28] {
    let mut image = [0; 28];
    let tags = full_tags(fpu);
    if wide {
        let opcode = u32::from(fpu.fop & 0x7ff) << 16;
        let high = |word: u16| 0xffff_0000 | u32::from(word);
        let (fip, fdp) = (fpu.fip as u32, fpu.fdp as u32);
        let fields = [high(fpu.fcw), high(fpu.fsw), high(tags), fip, opcode, fdp, 0xffff_0000];
        for (slot, field) in image.chunks_exact_mut(4).zip(fields) {
            slot.copy_from_slice(&field.to_le_bytes());
        }
    } else {
        let fields = [fpu.fcw, fpu.fsw, tags, fpu.fip as u16, 0, fpu.fdp as u16, 0];
        for (slot, field) in image.chunks_exact_mut(2).zip(fields) {
            slot.copy_from_slice(&field.to_le_bytes());
        }
    }
    image
}

/// Takes an environment from memory format. Registers keep their physical places.
fn set_environment(fpu: &mut FpuState, image: &[u8; 28], wide: bool) {
    let stride = if wide { 4 } else { 2 };
    let word = |field: usize| {
        let at = field * stride;
        u16::from_le_bytes([image[at], image[at + 1]])
    };
    let pointer = |field: usize| match wide {
        true => {
            u64::from(word(field))
                | u64::from(image[4 * field + 2]) << 16
                | u64::from(image[4 * field + 3]) << 24
        }
        false => u64::from(word(field)),
    };
    let old_top = top(fpu);
    fpu.fcw = control_word(word(0));
    fpu.fsw = word(1);
    fpu.ftw = abridged_tags(word(2));
    fpu.fip = pointer(3);
    fpu.fdp = pointer(5);
    // The 16-bit format has no opcode.
    fpu.fop = if wide { u16::from_le_bytes([image[18], image[19]]) & 0x7ff } else { 0 };
    permit::update_summary(fpu);
    let moved = (top(fpu) + 8 - old_top) & 7;
    fpu.st.rotate_left(moved);
}

/// The state after FNINIT; the registers are empty but keep their contents.
fn initialize(fpu: &mut FpuState) {
    let old_top = top(fpu);
    (fpu.fcw, fpu.fsw, fpu.ftw) = (0x37f, 0, 0);
    (fpu.fop, fpu.fip, fpu.fdp) = (0, 0, 0);
    fpu.st.rotate_right(old_top);
}

/// FNSTENV: all exceptions are masked afterwards.
fn store_environment<S: System, const WIDE: bool>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    permit::x87(cpu)?;
    let size = environment_size(WIDE);
    let linear = cpu.linear(op, size as u64, true)?;
    let image = environment(&cpu.vcpu.fpu, WIDE);
    let result = cpu.write_bytes(sys, linear, &image[..size]);
    result.map_err(|fault| cpu.blame_stack(op, fault))?;
    cpu.vcpu.fpu.fcw |= EXCEPTIONS;
    permit::update_summary(&mut cpu.vcpu.fpu);
    Ok(())
}

/// FLDENV.
fn load_environment<S: System, const WIDE: bool>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    permit::check(cpu, permit::VectorClass::X87)?;
    let size = environment_size(WIDE);
    let linear = cpu.linear(op, size as u64, false)?;
    let mut image = [0; 28];
    let result = cpu.read_bytes(sys, linear, &mut image[..size]);
    result.map_err(|fault| cpu.blame_stack(op, fault))?;
    set_environment(&mut cpu.vcpu.fpu, &image, WIDE);
    Ok(())
}

/// FNSAVE: the environment, the registers in stack order, then FNINIT.
fn save<S: System, const WIDE: bool>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    permit::x87(cpu)?;
    let head = environment_size(WIDE);
    let mut image = [0; 28 + REGISTERS];
    image[..28].copy_from_slice(&environment(&cpu.vcpu.fpu, WIDE));
    for (slot, st) in image[head..].chunks_exact_mut(10).zip(&cpu.vcpu.fpu.st) {
        slot.copy_from_slice(&st[..10]);
    }
    let size = head + REGISTERS;
    let linear = cpu.linear(op, size as u64, true)?;
    let result = cpu.write_bytes(sys, linear, &image[..size]);
    result.map_err(|fault| cpu.blame_stack(op, fault))?;
    initialize(&mut cpu.vcpu.fpu);
    Ok(())
}

/// FRSTOR.
fn restore<S: System, const WIDE: bool>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    permit::check(cpu, permit::VectorClass::X87)?;
    let head = environment_size(WIDE);
    let size = head + REGISTERS;
    let linear = cpu.linear(op, size as u64, false)?;
    let mut image = [0; 28 + REGISTERS];
    let result = cpu.read_bytes(sys, linear, &mut image[..size]);
    result.map_err(|fault| cpu.blame_stack(op, fault))?;
    let mut first = [0; 28];
    first[..head].copy_from_slice(&image[..head]);
    let fpu = &mut cpu.vcpu.fpu;
    set_environment(fpu, &first, WIDE);
    for (st, slot) in fpu.st.iter_mut().zip(image[head..].chunks_exact(10)) {
        st[..10].copy_from_slice(slot);
        st[10..].fill(0);
    }
    Ok(())
}

fn wait<S: System>(cpu: &mut Cpu<S>, _: &mut S, _: &Op<S>) -> Result<(), Fault> {
    permit::wait(cpu)
}

/// Chooses the handler.
pub(super) fn select<S: System>(insn: &Instruction) -> Option<Handler<S>> {
    Some(match insn.code() {
        Code::Fnstenv_m28byte => store_environment::<S, true>,
        Code::Fnstenv_m14byte => store_environment::<S, false>,
        Code::Fldenv_m28byte => load_environment::<S, true>,
        Code::Fldenv_m14byte => load_environment::<S, false>,
        Code::Fnsave_m108byte => save::<S, true>,
        Code::Fnsave_m94byte => save::<S, false>,
        Code::Frstor_m108byte => restore::<S, true>,
        Code::Frstor_m94byte => restore::<S, false>,
        Code::Wait => wait,
        _ => return None,
    })
}
