//! Control registers: MOV CR, LMSW, SMSW, CLTS, and what their bits entail (SDM 2.5, 4.1, 9.8.5).
//!
//! The TLB holds translations of the current address space only, so every load of CR3 drops it:
//! CR3 bit 63 (keep this PCID's translations) is permission, never an order.

use super::{first16, put16};
use crate::{cpu::Cpu, exec::Choice, op::Op, system::System};
use contract::GuestRam;
use iced_x86::{Instruction, Mnemonic, Register};
use x86::{
    Fault,
    control::{cr0, cr4, efer},
    paging, seg,
    segment::attr,
};

/// CR3 bit 63: the PCID's cached translations may stay.
const CR3_KEEP: u64 = 1 << 63;
/// The PCID field of CR3.
const CR3_PCID: u64 = 0xfff;
/// CR0 bits whose change alters translations.
const CR0_PAGING: u64 = cr0::PG | cr0::WP | cr0::PE;
/// CR4 bits whose change alters translations.
const CR4_PAGING: u64 =
    cr4::PSE | cr4::PAE | cr4::PGE | cr4::PCIDE | cr4::SMEP | cr4::SMAP | cr4::LA57;
/// CR4 bits the CPU model always has.
const CR4_ALWAYS: u64 = cr4::TSD
    | cr4::DE
    | cr4::PSE
    | cr4::PAE
    | cr4::MCE
    | cr4::PGE
    | cr4::PCE
    | cr4::OSFXSR
    | cr4::OSXMMEXCPT
    | cr4::UMIP
    | cr4::PCIDE
    | cr4::OSXSAVE
    | cr4::SMEP
    | cr4::SMAP;

fn gp_if(wrong: bool) -> Result<(), Fault> {
    if wrong { Err(Fault::gp(0)) } else { Ok(()) }
}

impl<S: System> Cpu<S> {
    fn write_cr0(&mut self, sys: &mut S, value: u64) -> Result<(), Fault> {
        let has = |bits: u64| value & bits == bits;
        gp_if(value >> 32 != 0)?;
        gp_if(has(cr0::PG) && !has(cr0::PE) || has(cr0::NW) && !has(cr0::CD))?;
        let value = value & cr0::ALL | cr0::ET;
        let changed = value ^ self.vcpu.cr0;
        if changed & cr0::PG != 0 {
            self.switch_paging(sys, has(cr0::PG))?;
        }
        self.vcpu.cr0 = value;
        if changed & CR0_PAGING != 0 {
            self.flush_tlb();
        }
        self.update_view();
        Ok(())
    }

    /// Turning paging on or off enters or leaves long mode if EFER.LME is set (SDM 9.8.5).
    fn switch_paging(&mut self, sys: &mut S, on: bool) -> Result<(), Fault> {
        let v = &self.vcpu;
        let long_code = v.seg[seg::CS].attr & attr::L != 0;
        if on && v.efer & efer::LME != 0 {
            gp_if(v.cr4 & cr4::PAE == 0 || long_code)?;
            self.vcpu.efer |= efer::LMA;
        } else if on && v.cr4 & cr4::PAE != 0 {
            self.check_pdptes(sys, v.cr3)?;
        } else if !on {
            gp_if(v.is_64bit() || v.cr4 & cr4::PCIDE != 0)?;
            self.vcpu.efer &= !efer::LMA;
        }
        Ok(())
    }

    /// PAE paging: reserved bits in a present page-directory-pointer entry are #GP.
    fn check_pdptes(&self, sys: &S, cr3: u64) -> Result<(), Fault> {
        let table = cr3 & 0xffff_ffe0;
        let Some(page) = sys.ram().page(table) else { return Ok(()) };
        let offset = page.offset + (table & 0xfff);
        let wrong = (0..4).map(|n| sys.ram().load64(offset + 8 * n)).any(|entry| {
            let address = paging::ADDRESS;
            entry & paging::P != 0 && entry & !(address | 0xe19) != 0
        });
        gp_if(wrong)
    }

    fn write_cr3(&mut self, sys: &mut S, value: u64) -> Result<(), Fault> {
        let v = &self.vcpu;
        let mut value = value;
        let mut keep = false;
        if v.long_mode() {
            if v.cr4 & cr4::PCIDE != 0 {
                keep = value & CR3_KEEP != 0;
                value &= !CR3_KEEP;
            }
            gp_if(value >> paging::PHYS_BITS != 0)?;
        } else if v.cr0 & cr0::PG != 0 && v.cr4 & cr4::PAE != 0 {
            self.check_pdptes(sys, value)?;
        }
        self.vcpu.cr3 = value;
        if keep {
            self.forget_translations();
        } else {
            self.flush_space(self.pcid());
        }
        Ok(())
    }

    fn write_cr4(&mut self, sys: &mut S, value: u64) -> Result<(), Fault> {
        let v = &self.vcpu;
        let fsgsbase = sys.cpuid(7, 0).ebx & 1 != 0;
        let allowed = CR4_ALWAYS | if fsgsbase { cr4::FSGSBASE } else { 0 };
        gp_if(value & !(allowed | v.cr4 & cr4::FSGSBASE) != 0)?;
        let changed = value ^ v.cr4;
        let (set, cleared) = (changed & value, changed & !value);
        gp_if(v.long_mode() && cleared & cr4::PAE != 0)?;
        gp_if(set & cr4::PCIDE != 0 && (!v.long_mode() || v.cr3 & CR3_PCID != 0))?;
        let legacy = v.cr0 & cr0::PG != 0 && !v.long_mode();
        if legacy && value & cr4::PAE != 0 && changed & CR4_PAGING != 0 {
            self.check_pdptes(sys, v.cr3)?;
        }
        self.vcpu.cr4 = value;
        if changed & CR4_PAGING != 0 {
            self.flush_tlb();
        }
        self.update_view();
        Ok(())
    }

    fn write_cr8(&mut self, sys: &mut S, value: u64) -> Result<(), Fault> {
        gp_if(value > 15)?;
        sys.set_cr8(value as u8);
        Ok(())
    }
}

fn read<S: System>(cpu: &mut Cpu<S>, sys: &mut S, op: &Op<S>) -> Result<(), Fault> {
    cpu.require_cpl0()?;
    let value = match op.insn.op1_register() {
        Register::CR0 => cpu.vcpu.cr0,
        Register::CR2 => cpu.vcpu.cr2,
        Register::CR3 => cpu.vcpu.cr3,
        Register::CR4 => cpu.vcpu.cr4,
        _ => sys.cr8().into(),
    };
    if op.long {
        cpu.set_reg::<8>(op.dst, value);
    } else {
        cpu.set_reg::<4>(op.dst, value);
    }
    Ok(())
}

fn write<S: System>(cpu: &mut Cpu<S>, sys: &mut S, op: &Op<S>) -> Result<(), Fault> {
    cpu.require_cpl0()?;
    let value = if op.long { cpu.reg::<8>(op.src) } else { cpu.reg::<4>(op.src) };
    match op.insn.op0_register() {
        Register::CR0 => cpu.write_cr0(sys, value),
        Register::CR2 => {
            cpu.vcpu.cr2 = value;
            Ok(())
        }
        Register::CR3 => cpu.write_cr3(sys, value),
        Register::CR4 => cpu.write_cr4(sys, value),
        _ => cpu.write_cr8(sys, value),
    }
}

/// LMSW can set PE but not clear it; it reaches MP, EM and TS besides.
fn lmsw<S: System>(cpu: &mut Cpu<S>, sys: &mut S, op: &Op<S>) -> Result<(), Fault> {
    cpu.require_cpl0()?;
    let word = u64::from(first16(cpu, sys, op)?);
    let reach = cr0::MP | cr0::EM | cr0::TS;
    let value = cpu.vcpu.cr0 & !reach | word & (reach | cr0::PE);
    cpu.write_cr0(sys, value)
}

/// SMSW gives a register operand as much of CR0 as fits.
fn smsw<S: System>(cpu: &mut Cpu<S>, sys: &mut S, op: &Op<S>) -> Result<(), Fault> {
    cpu.check_umip()?;
    put16(cpu, sys, op, cpu.vcpu.cr0)
}

fn clts<S: System>(cpu: &mut Cpu<S>, _: &mut S, _: &Op<S>) -> Result<(), Fault> {
    cpu.require_cpl0()?;
    cpu.vcpu.cr0 &= !cr0::TS;
    Ok(())
}

/// CR1, CR5 to CR7 and CR9 up do not exist.
fn exists(register: Register) -> bool {
    use Register::*;
    matches!(register, CR0 | CR2 | CR3 | CR4 | CR8)
}

pub(super) fn select<S: System>(insn: &Instruction) -> Option<Choice<S>> {
    let (first, second) = (insn.op0_register(), insn.op1_register());
    Some(match insn.mnemonic() {
        Mnemonic::Mov if exists(first) => (write, true),
        Mnemonic::Mov if exists(second) => (read, false),
        Mnemonic::Lmsw => (lmsw, true),
        Mnemonic::Smsw => (smsw, false),
        Mnemonic::Clts => (clts, false),
        _ => return None,
    })
}
