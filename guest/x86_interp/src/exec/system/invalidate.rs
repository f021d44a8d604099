//! Dropping translations and cache lines: INVLPG, INVPCID, WBINVD, CLFLUSH (SDM 4.10.4).

use crate::{cpu::Cpu, exec::Choice, observe::Flush, op::Op, system::System, tlb::Right};
use iced_x86::{Instruction, Mnemonic};
use x86::{Fault, control::cr4, paging};

fn invlpg<S: System>(cpu: &mut Cpu<S>, _: &mut S, op: &Op<S>) -> Result<(), Fault> {
    cpu.require_cpl0()?;
    let offset = cpu.effective(op);
    let based = op.address.segmented;
    let base = if based { cpu.vcpu.seg[op.address.seg as usize].base } else { 0 };
    cpu.flush_page(cpu.wrap_linear(base.wrapping_add(offset)));
    Ok(())
}

/// Only the current PCID has translations cached, so those of another are gone already.
fn invpcid<S: System>(cpu: &mut Cpu<S>, sys: &mut S, op: &Op<S>) -> Result<(), Fault> {
    cpu.require_cpl0()?;
    let kind = if op.long { cpu.reg::<8>(op.dst) } else { cpu.reg::<4>(op.dst) };
    let linear = cpu.linear(op, 16, false)?;
    let low = cpu.load::<8>(sys, linear).map_err(|fault| cpu.blame_stack(op, fault))?;
    let high = cpu.wrap_linear(linear.wrapping_add(8));
    let address = cpu.load::<8>(sys, high).map_err(|fault| cpu.blame_stack(op, fault))?;
    let pcid = low & 0xfff;
    let named = kind <= 1;
    let disabled = cpu.vcpu.cr4 & cr4::PCIDE == 0;
    let wild = kind == 0 && !paging::canonical(address);
    if kind > 3 || low >> 12 != 0 || named && disabled && pcid != 0 || wild {
        return Err(Fault::gp(0));
    }
    let current = disabled || cpu.vcpu.cr3 & 0xfff == pcid;
    match kind {
        0 if current => cpu.flush_page(address),
        0 => cpu.observer.flush(Flush::Page { pcid: pcid as u16, linear: address }),
        1 if current => cpu.flush_space(pcid as u16),
        1 => cpu.observer.flush(Flush::Space { pcid: pcid as u16 }),
        _ => cpu.flush_tlb(),
    }
    Ok(())
}

/// Memory is always coherent here: writing back or dropping caches changes nothing.
fn wbinvd<S: System>(cpu: &mut Cpu<S>, _: &mut S, _: &Op<S>) -> Result<(), Fault> {
    cpu.require_cpl0()
}

/// CLFLUSH, CLFLUSHOPT, CLWB: fault like a load of a byte, and do nothing else.
fn flush_line<S: System>(cpu: &mut Cpu<S>, sys: &mut S, op: &Op<S>) -> Result<(), Fault> {
    let linear = cpu.linear(op, 1, false)?;
    let touched = cpu.translate(sys, cpu.view, linear, Right::Read);
    touched.map(drop).map_err(|fault| cpu.blame_stack(op, fault))
}

pub(super) fn select<S: System>(insn: &Instruction) -> Option<Choice<S>> {
    Some(match insn.mnemonic() {
        Mnemonic::Invlpg => (invlpg, true),
        Mnemonic::Invpcid => (invpcid, true),
        Mnemonic::Wbinvd | Mnemonic::Wbnoinvd | Mnemonic::Invd => (wbinvd, false),
        Mnemonic::Clflush | Mnemonic::Clflushopt | Mnemonic::Clwb => (flush_line, false),
        _ => return None,
    })
}
