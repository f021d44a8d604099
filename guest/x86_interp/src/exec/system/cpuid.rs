//! CPUID: the machine's model, with the bits that follow the CPU's own state.

use crate::{cpu::Cpu, exec::Choice, op::Op, system::System};
use iced_x86::{Instruction, Mnemonic};
use std::sync::atomic::{Ordering, fence};
use x86::{Fault, control::cr4, fpu::XSAVE_SIZE, fpu::xstate, reg};

/// Leaf 1 ECX: XSAVE is enabled.
const OSXSAVE: u32 = 1 << 27;
/// Bytes of the XSAVE area without the AVX component.
const LEGACY_SIZE: u32 = 576;

fn cpuid<S: System>(cpu: &mut Cpu<S>, sys: &mut S, _: &Op<S>) -> Result<(), Fault> {
    // It serializes (SDM 8.3), as other vCPUs can tell.
    fence(Ordering::SeqCst);
    let leaf = cpu.vcpu.gpr[reg::RAX] as u32;
    let subleaf = cpu.vcpu.gpr[reg::RCX] as u32;
    let mut result = sys.cpuid(leaf, subleaf);
    match (leaf, subleaf) {
        (1, _) => {
            let enabled = cpu.vcpu.cr4 & cr4::OSXSAVE != 0;
            result.ecx = result.ecx & !OSXSAVE | if enabled { OSXSAVE } else { 0 };
        }
        (0xd, 0) => {
            let avx = cpu.vcpu.xcr0 & xstate::AVX != 0;
            result.ebx = if avx { XSAVE_SIZE as u32 } else { LEGACY_SIZE };
        }
        _ => {}
    }
    let g = &mut cpu.vcpu.gpr;
    g[reg::RAX] = result.eax.into();
    g[reg::RBX] = result.ebx.into();
    g[reg::RCX] = result.ecx.into();
    g[reg::RDX] = result.edx.into();
    Ok(())
}

pub(super) fn select<S: System>(insn: &Instruction) -> Option<Choice<S>> {
    (insn.mnemonic() == Mnemonic::Cpuid).then_some((cpuid, false))
}
