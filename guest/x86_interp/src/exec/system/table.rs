//! The registers that locate descriptor tables and the task: GDTR, IDTR, LDTR, TR.

use super::{first16, put16};
use crate::{
    cpu::Cpu,
    descriptor::{is_null, selector_fault},
    exec::Choice,
    op::Op,
    system::System,
};
use iced_x86::{Code, Instruction, Mnemonic};
use x86::{Fault, Segment, TableRegister, control::cr4, paging, segment::kind, vector};

impl<S: System> Cpu<S> {
    /// UMIP keeps user programs from reading where the system's tables are.
    pub(super) fn check_umip(&self) -> Result<(), Fault> {
        let hidden = self.vcpu.cr4 & cr4::UMIP != 0 && self.vcpu.cpl() > 0;
        if hidden { Err(Fault::gp(0)) } else { Ok(()) }
    }
}

/// LGDT and LIDT: a limit, and a base of 24, 32 or 64 bits.
fn load_table<S: System>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<TableRegister, Fault> {
    cpu.require_cpl0()?;
    let size = if op.long { 8 } else { 4 };
    let linear = cpu.linear(op, size + 2, false)?;
    let blame = |cpu: &Cpu<S>, fault| cpu.blame_stack(op, fault);
    let limit = cpu.load::<2>(sys, linear).map_err(|f| blame(cpu, f))? as u16;
    let at = cpu.wrap_linear(linear.wrapping_add(2));
    let base = match size {
        8 => cpu.load::<8>(sys, at),
        _ => cpu.load::<4>(sys, at),
    };
    let base = base.map_err(|f| blame(cpu, f))?;
    let narrow = matches!(op.insn.code(), Code::Lgdt_m1632_16 | Code::Lidt_m1632_16);
    let base = if narrow { base & 0xff_ffff } else { base };
    if op.long && !paging::canonical(base) {
        return Err(Fault::gp(0));
    }
    Ok(TableRegister { base, limit, ..TableRegister::default() })
}

fn lgdt<S: System>(cpu: &mut Cpu<S>, sys: &mut S, op: &Op<S>) -> Result<(), Fault> {
    cpu.vcpu.gdtr = load_table(cpu, sys, op)?;
    Ok(())
}

fn lidt<S: System>(cpu: &mut Cpu<S>, sys: &mut S, op: &Op<S>) -> Result<(), Fault> {
    cpu.vcpu.idtr = load_table(cpu, sys, op)?;
    Ok(())
}

/// SGDT and SIDT store all the base bits whatever the operand size.
fn store_table<S: System>(cpu: &mut Cpu<S>, sys: &mut S, op: &Op<S>) -> Result<(), Fault> {
    cpu.check_umip()?;
    let table = if op.insn.mnemonic() == Mnemonic::Sgdt { cpu.vcpu.gdtr } else { cpu.vcpu.idtr };
    let mut bytes = [0; 10];
    bytes[..2].copy_from_slice(&table.limit.to_le_bytes());
    bytes[2..].copy_from_slice(&table.base.to_le_bytes());
    let len = if op.long { 10 } else { 6 };
    let linear = cpu.linear(op, len as u64, true)?;
    let view = cpu.view;
    cpu.write_view(sys, view, linear, &bytes[..len]).map_err(|fault| cpu.blame_stack(op, fault))
}

fn lldt<S: System>(cpu: &mut Cpu<S>, sys: &mut S, op: &Op<S>) -> Result<(), Fault> {
    cpu.require_protected()?;
    cpu.require_cpl0()?;
    let selector = first16(cpu, sys, op)?;
    if is_null(selector) {
        cpu.vcpu.ldtr = Segment::null(selector, 0);
        return Ok(());
    }
    cpu.vcpu.ldtr = system_segment(cpu, sys, selector, &[kind::LDT])?.1;
    Ok(())
}

fn ltr<S: System>(cpu: &mut Cpu<S>, sys: &mut S, op: &Op<S>) -> Result<(), Fault> {
    cpu.require_protected()?;
    cpu.require_cpl0()?;
    let selector = first16(cpu, sys, op)?;
    if is_null(selector) {
        return Err(Fault::gp(0));
    }
    let kinds: &[u8] = if cpu.vcpu.long_mode() { &[kind::TSS] } else { &[kind::TSS, kind::TSS16] };
    let (address, segment) = system_segment(cpu, sys, selector, kinds)?;
    let busy = segment.attr | 2;
    cpu.store_system::<1>(sys, address.wrapping_add(5), busy.into())?;
    cpu.vcpu.tr = Segment { attr: busy, ..segment };
    Ok(())
}

/// A system segment of the GDT of one of the given kinds, with its descriptor's address.
fn system_segment<S: System>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    selector: u16,
    kinds: &[u8],
) -> Result<(u64, Segment), Fault> {
    let wrong = selector_fault(vector::GP, selector);
    if selector & 4 != 0 {
        return Err(wrong);
    }
    let found = cpu.descriptor(sys, selector, vector::GP)?;
    if !found.segment.is_system() || !kinds.contains(&found.segment.kind()) {
        return Err(wrong);
    }
    if !found.segment.present() {
        return Err(selector_fault(vector::NP, selector));
    }
    Ok((found.address, cpu.complete_system_segment(sys, &found)?))
}

fn sldt<S: System>(cpu: &mut Cpu<S>, sys: &mut S, op: &Op<S>) -> Result<(), Fault> {
    cpu.require_protected()?;
    cpu.check_umip()?;
    put16(cpu, sys, op, cpu.vcpu.ldtr.selector.into())
}

fn str<S: System>(cpu: &mut Cpu<S>, sys: &mut S, op: &Op<S>) -> Result<(), Fault> {
    cpu.require_protected()?;
    cpu.check_umip()?;
    put16(cpu, sys, op, cpu.vcpu.tr.selector.into())
}

pub(super) fn select<S: System>(insn: &Instruction) -> Option<Choice<S>> {
    Some(match insn.mnemonic() {
        Mnemonic::Lgdt => (lgdt, false),
        Mnemonic::Lidt => (lidt, false),
        Mnemonic::Sgdt | Mnemonic::Sidt => (store_table, false),
        Mnemonic::Lldt => (lldt, false),
        Mnemonic::Ltr => (ltr, false),
        Mnemonic::Sldt => (sldt, false),
        Mnemonic::Str => (str, false),
        _ => return None,
    })
}
