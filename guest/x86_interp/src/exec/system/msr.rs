//! RDMSR, WRMSR, and the counters: RDTSC, RDTSCP, RDPID, RDPMC.
//!
//! Registers that are part of the CPU live in `Vcpu`; the rest belong to the machine, which says
//! #GP for those that do not exist.

use crate::{
    cpu::Cpu,
    exec::Choice,
    op::{Op, RegRef},
    system::System,
};
use iced_x86::{Instruction, Mnemonic};
use x86::{
    Fault,
    control::{cr0, cr4, efer},
    cpuid::ARCH_CAPABILITIES,
    msr, paging, reg, seg,
};

/// IA32_FEATURE_CONTROL: locked, VMX off.
const FEATURE_CONTROL_LOCKED: u64 = 1;
/// IA32_MISC_ENABLE: branch trace and precise event sampling are unavailable (read-only).
const MISC_ENABLE_FIXED: u64 = 1 << 11 | 1 << 12;
/// IA32_BIOS_SIGN_ID: the microcode revision is in the upper half.
const MICROCODE_REVISION: u64 = 1 << 32;
/// IA32_SPEC_CTRL: IBRS, STIBP and BHI_DIS_S.
const SPEC_CTRL_BITS: u64 = 1 << 10 | 0b11;
const RAX: RegRef = RegRef { index: reg::RAX as u8, shift: 0 };
const RDX: RegRef = RegRef { index: reg::RDX as u8, shift: 0 };

impl<S: System> Cpu<S> {
    /// The time-stamp counter as the guest sees it.
    pub(crate) fn tsc(&mut self, sys: &mut S) -> u64 {
        sys.tsc().wrapping_add(self.vcpu.tsc_adjust)
    }

    fn read_msr(&mut self, sys: &mut S, index: u32) -> Result<u64, Fault> {
        let v = &self.vcpu;
        Ok(match index {
            msr::EFER => v.efer,
            msr::STAR => v.star,
            msr::LSTAR => v.lstar,
            msr::CSTAR => v.cstar,
            msr::SFMASK => v.sfmask,
            msr::FS_BASE => v.seg[seg::FS].base,
            msr::GS_BASE => v.seg[seg::GS].base,
            msr::KERNEL_GS_BASE => v.kernel_gs_base,
            msr::TSC_AUX => v.tsc_aux,
            msr::SYSENTER_CS => v.sysenter_cs,
            msr::SYSENTER_ESP => v.sysenter_esp,
            msr::SYSENTER_EIP => v.sysenter_eip,
            msr::PAT => v.pat,
            msr::MISC_ENABLE => v.misc_enable | MISC_ENABLE_FIXED,
            msr::SPEC_CTRL => v.spec_ctrl,
            msr::ARCH_CAPABILITIES => ARCH_CAPABILITIES,
            msr::TSC => self.tsc(sys),
            msr::TSC_ADJUST => v.tsc_adjust,
            msr::BIOS_SIGN_ID => MICROCODE_REVISION,
            msr::FEATURE_CONTROL => FEATURE_CONTROL_LOCKED,
            msr::PLATFORM_ID | msr::DEBUGCTL => 0,
            msr::TSC_DEADLINE => self.read_deadline(sys)?,
            _ => match self.read_mtrr(index) {
                Some(value) => value,
                None => sys.msr_read(index)?,
            },
        })
    }

    fn write_msr(&mut self, sys: &mut S, index: u32, value: u64) -> Result<(), Fault> {
        match index {
            msr::EFER => return self.write_efer(value),
            msr::STAR => self.vcpu.star = value,
            msr::LSTAR => self.vcpu.lstar = canonical(value)?,
            msr::CSTAR => self.vcpu.cstar = canonical(value)?,
            msr::SFMASK => self.vcpu.sfmask = limited(value, 0xffff_ffff)?,
            msr::FS_BASE => self.vcpu.seg[seg::FS].base = canonical(value)?,
            msr::GS_BASE => self.vcpu.seg[seg::GS].base = canonical(value)?,
            msr::KERNEL_GS_BASE => self.vcpu.kernel_gs_base = canonical(value)?,
            msr::TSC_AUX => self.vcpu.tsc_aux = limited(value, 0xffff_ffff)?,
            msr::SYSENTER_CS => self.vcpu.sysenter_cs = value & 0xffff_ffff,
            msr::SYSENTER_ESP => self.vcpu.sysenter_esp = canonical(value)?,
            msr::SYSENTER_EIP => self.vcpu.sysenter_eip = canonical(value)?,
            msr::PAT => self.vcpu.pat = memory_types(value)?,
            msr::MISC_ENABLE => self.vcpu.misc_enable = value & !MISC_ENABLE_FIXED,
            msr::SPEC_CTRL => self.vcpu.spec_ctrl = limited(value, SPEC_CTRL_BITS)?,
            // Predictors hold nothing of ours: there is nothing to flush.
            msr::PRED_CMD => drop(limited(value, 1)?),
            msr::TSC => {
                let moved = value.wrapping_sub(self.tsc(sys));
                self.vcpu.tsc_adjust = self.vcpu.tsc_adjust.wrapping_add(moved);
            }
            msr::TSC_ADJUST => self.vcpu.tsc_adjust = value,
            msr::BIOS_SIGN_ID => {}
            msr::DEBUGCTL => drop(limited(value, 0)?),
            msr::ARCH_CAPABILITIES | msr::PLATFORM_ID | msr::FEATURE_CONTROL => {
                return Err(Fault::gp(0));
            }
            msr::TSC_DEADLINE => return self.write_deadline(sys, value),
            _ => match self.write_mtrr(index, value) {
                Some(done) => return done,
                None => return sys.msr_write(index, value),
            },
        }
        Ok(())
    }

    fn write_efer(&mut self, value: u64) -> Result<(), Fault> {
        let old = self.vcpu.efer;
        let value = limited(value & !efer::LMA, efer::WRITABLE)? | old & efer::LMA;
        let changed = old ^ value;
        if changed & efer::LME != 0 && self.vcpu.cr0 & cr0::PG != 0 {
            return Err(Fault::gp(0));
        }
        self.vcpu.efer = value;
        if changed & efer::NXE != 0 {
            self.flush_tlb();
        }
        Ok(())
    }

    /// The machine's timer counts in its own ticks, the deadline is in the guest's; zero is "off"
    /// in both.
    fn read_deadline(&mut self, sys: &mut S) -> Result<u64, Fault> {
        let deadline = sys.msr_read(msr::TSC_DEADLINE)?;
        let moved = deadline.wrapping_add(self.vcpu.tsc_adjust);
        Ok(if deadline == 0 { 0 } else { moved })
    }

    fn write_deadline(&mut self, sys: &mut S, value: u64) -> Result<(), Fault> {
        let moved = value.wrapping_sub(self.vcpu.tsc_adjust).max(1);
        sys.msr_write(msr::TSC_DEADLINE, if value == 0 { 0 } else { moved })
    }

    /// RDTSC and RDTSCP below CPL 0 can be forbidden.
    fn check_tsc(&self) -> Result<(), Fault> {
        let forbidden = self.vcpu.cr4 & cr4::TSD != 0 && self.vcpu.cpl() > 0;
        if forbidden { Err(Fault::gp(0)) } else { Ok(()) }
    }

    fn set_edx_eax(&mut self, value: u64) {
        self.set_reg::<4>(RAX, value);
        self.set_reg::<4>(RDX, value >> 32);
    }
}

fn canonical(value: u64) -> Result<u64, Fault> {
    if paging::canonical(value) { Ok(value) } else { Err(Fault::gp(0)) }
}

/// #GP(0) for bits outside `mask`.
fn limited(value: u64, mask: u64) -> Result<u64, Fault> {
    if value & !mask == 0 { Ok(value) } else { Err(Fault::gp(0)) }
}

/// Eight memory types, each UC, WC, WT, WP, WB or UC- (SDM table 11-10).
fn memory_types(value: u64) -> Result<u64, Fault> {
    let valid = value.to_le_bytes().iter().all(|kind| matches!(kind, 0 | 1 | 4..=7));
    if valid { Ok(value) } else { Err(Fault::gp(0)) }
}

fn rdmsr<S: System>(cpu: &mut Cpu<S>, sys: &mut S, _: &Op<S>) -> Result<(), Fault> {
    cpu.require_cpl0()?;
    let index = cpu.vcpu.gpr[reg::RCX] as u32;
    let value = cpu.read_msr(sys, index)?;
    sys.note_msr(index, false, value);
    cpu.set_edx_eax(value);
    Ok(())
}

fn wrmsr<S: System>(cpu: &mut Cpu<S>, sys: &mut S, _: &Op<S>) -> Result<(), Fault> {
    cpu.require_cpl0()?;
    let value = cpu.reg::<4>(RDX) << 32 | cpu.reg::<4>(RAX);
    let index = cpu.vcpu.gpr[reg::RCX] as u32;
    cpu.write_msr(sys, index, value)?;
    sys.note_msr(index, true, value);
    Ok(())
}

fn rdtsc<S: System>(cpu: &mut Cpu<S>, sys: &mut S, _: &Op<S>) -> Result<(), Fault> {
    cpu.check_tsc()?;
    let tsc = cpu.tsc(sys);
    cpu.set_edx_eax(tsc);
    Ok(())
}

fn rdtscp<S: System>(cpu: &mut Cpu<S>, sys: &mut S, op: &Op<S>) -> Result<(), Fault> {
    rdtsc(cpu, sys, op)?;
    cpu.vcpu.gpr[reg::RCX] = cpu.vcpu.tsc_aux & 0xffff_ffff;
    Ok(())
}

fn rdpid<S: System>(cpu: &mut Cpu<S>, _: &mut S, op: &Op<S>) -> Result<(), Fault> {
    cpu.set_reg::<8>(op.dst, cpu.vcpu.tsc_aux & 0xffff_ffff);
    Ok(())
}

/// There are no performance counters to read.
fn rdpmc<S: System>(_: &mut Cpu<S>, _: &mut S, _: &Op<S>) -> Result<(), Fault> {
    Err(Fault::gp(0))
}

pub(super) fn select<S: System>(insn: &Instruction) -> Option<Choice<S>> {
    Some(match insn.mnemonic() {
        Mnemonic::Rdmsr => (rdmsr, false),
        Mnemonic::Wrmsr => (wrmsr, true),
        Mnemonic::Rdtsc => (rdtsc, false),
        Mnemonic::Rdtscp => (rdtscp, false),
        Mnemonic::Rdpid => (rdpid, false),
        Mnemonic::Rdpmc => (rdpmc, false),
        _ => return None,
    })
}
