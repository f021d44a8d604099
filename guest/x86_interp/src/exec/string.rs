//! String instructions, with REP.
//!
//! A repeated instruction runs in bursts: after a burst RIP points at the instruction again, so
//! interrupts are taken between iterations as on hardware. A fault leaves the registers as after
//! the last completed iteration.

use crate::{
    cpu::Cpu,
    op::{Handler, Op, RegRef, address_mask, address_size, by_size, mask, segment_index},
    system::System,
    tlb::Right,
};
use contract::GuestRam;
use iced_x86::{Instruction, Mnemonic, OpKind};
use x86::{Fault, flags, reg, seg};

/// Iterations in a burst.
const BURST: u64 = 4096;
/// Iterations in a burst that has written code, perhaps over the instruction itself. A CPU finishes the instruction
/// as it was, unless an interrupt comes; only then are its new bytes fetched.
const BURST_OVER_CODE: u64 = 16 * BURST;
const RAX: RegRef = RegRef { index: reg::RAX as u8, shift: 0 };

/// One kind of string instruction: what an iteration does, given the op.
trait Step {
    const SOURCE: bool;
    const DESTINATION: bool;
    /// Stops on ZF (REPE, REPNE).
    const COMPARES: bool = false;
    /// Accesses the port in DX.
    const PORT: bool = false;
    fn step<S: System, const SIZE: usize>(
        cpu: &mut Cpu<S>,
        sys: &mut S,
        walk: &Walk,
    ) -> Result<(), Fault>;
    /// Does many iterations at once where that is indistinguishable; returns how many.
    fn bulk<S: System, const SIZE: usize>(_: &mut Cpu<S>, _: &mut S, _: &Walk, _: u64) -> u64 {
        0
    }
}

/// How the instruction addresses memory.
struct Walk {
    mask: u64,
    segment: usize,
}

impl Walk {
    fn of<S: System>(cpu: &Cpu<S>, op: &Op<S>) -> Self {
        Self {
            mask: address_mask(address_size(&op.insn, cpu.vcpu.code_bits())),
            segment: segment_index(op.insn.memory_segment()),
        }
    }

    fn source<S: System>(&self, cpu: &Cpu<S>, size: u64) -> Result<u64, Fault> {
        cpu.segmented(self.segment, cpu.vcpu.gpr[reg::RSI] & self.mask, size, false)
    }

    fn destination<S: System>(&self, cpu: &Cpu<S>, size: u64, write: bool) -> Result<u64, Fault> {
        cpu.segmented(seg::ES, cpu.vcpu.gpr[reg::RDI] & self.mask, size, write)
    }

    /// Adds to RSI, RDI or RCX within the address size.
    fn advance<S: System>(&self, cpu: &mut Cpu<S>, register: usize, by: u64) {
        let slot = &mut cpu.vcpu.gpr[register];
        let moved = slot.wrapping_add(by) & self.mask;
        *slot = if self.mask == 0xffff { *slot & !0xffff | moved } else { moved };
    }
}

struct Movs;
struct Stos;
struct Lods;
struct Scas;
struct Cmps;
struct Ins;
struct Outs;

/// Iterations of `SIZE` bytes from `linear` upwards that stay within its page.
fn in_page<const SIZE: usize>(linear: u64) -> u64 {
    (4096 - (linear & 0xfff)) / SIZE as u64
}

impl Step for Movs {
    const SOURCE: bool = true;
    const DESTINATION: bool = true;
    fn step<S: System, const SIZE: usize>(
        cpu: &mut Cpu<S>,
        sys: &mut S,
        walk: &Walk,
    ) -> Result<(), Fault> {
        let source = walk.source(cpu, SIZE as u64)?;
        let value = cpu.load::<SIZE>(sys, source)?;
        let destination = walk.destination(cpu, SIZE as u64, true)?;
        cpu.store::<SIZE>(sys, destination, value)
    }
    fn bulk<S: System, const SIZE: usize>(
        cpu: &mut Cpu<S>,
        sys: &mut S,
        walk: &Walk,
        count: u64,
    ) -> u64 {
        let (Ok(source), Ok(destination)) = (walk.source(cpu, 1), walk.destination(cpu, 1, true))
        else {
            return 0;
        };
        let count = count.min(in_page::<SIZE>(source)).min(in_page::<SIZE>(destination));
        let bytes = count * SIZE as u64;
        let from = cpu.tlb.lookup(cpu.view, Right::Read, source, 1);
        let to = cpu.tlb.lookup(cpu.view, Right::Write, destination, 1);
        let (Some(from), Some(to)) = (from, to) else { return 0 };
        // An overlapping forward copy repeats its pattern: only disjoint ones are one copy.
        if from < to + bytes && to < from + bytes {
            return 0;
        }
        let mut buffer = [0; 4096];
        let buffer = &mut buffer[..bytes as usize];
        sys.ram().read(from, buffer);
        sys.ram().write(to, buffer);
        count
    }
}

impl Step for Stos {
    const SOURCE: bool = false;
    const DESTINATION: bool = true;
    fn step<S: System, const SIZE: usize>(
        cpu: &mut Cpu<S>,
        sys: &mut S,
        walk: &Walk,
    ) -> Result<(), Fault> {
        let destination = walk.destination(cpu, SIZE as u64, true)?;
        cpu.store::<SIZE>(sys, destination, cpu.vcpu.gpr[reg::RAX])
    }
    fn bulk<S: System, const SIZE: usize>(
        cpu: &mut Cpu<S>,
        sys: &mut S,
        walk: &Walk,
        count: u64,
    ) -> u64 {
        let Ok(destination) = walk.destination(cpu, 1, true) else { return 0 };
        let count = count.min(in_page::<SIZE>(destination));
        let Some(to) = cpu.tlb.lookup(cpu.view, Right::Write, destination, 1) else { return 0 };
        let pattern = cpu.vcpu.gpr[reg::RAX].to_le_bytes();
        let mut buffer = [0; 4096];
        let buffer = &mut buffer[..count as usize * SIZE];
        for piece in buffer.chunks_exact_mut(SIZE) {
            piece.copy_from_slice(&pattern[..SIZE]);
        }
        sys.ram().write(to, buffer);
        count
    }
}

impl Step for Lods {
    const SOURCE: bool = true;
    const DESTINATION: bool = false;
    fn step<S: System, const SIZE: usize>(
        cpu: &mut Cpu<S>,
        sys: &mut S,
        walk: &Walk,
    ) -> Result<(), Fault> {
        let source = walk.source(cpu, SIZE as u64)?;
        let value = cpu.load::<SIZE>(sys, source)?;
        cpu.set_reg::<SIZE>(RAX, value);
        Ok(())
    }
}

impl Step for Scas {
    const SOURCE: bool = false;
    const DESTINATION: bool = true;
    const COMPARES: bool = true;
    fn step<S: System, const SIZE: usize>(
        cpu: &mut Cpu<S>,
        sys: &mut S,
        walk: &Walk,
    ) -> Result<(), Fault> {
        let destination = walk.destination(cpu, SIZE as u64, false)?;
        let value = cpu.load::<SIZE>(sys, destination)?;
        let a = cpu.vcpu.gpr[reg::RAX] & mask::<SIZE>();
        super::alu::sub::<SIZE>(&mut cpu.vcpu.rflags, a, value, 0);
        Ok(())
    }
}

impl Step for Cmps {
    const SOURCE: bool = true;
    const DESTINATION: bool = true;
    const COMPARES: bool = true;
    fn step<S: System, const SIZE: usize>(
        cpu: &mut Cpu<S>,
        sys: &mut S,
        walk: &Walk,
    ) -> Result<(), Fault> {
        // The destination first: it shows when both fault.
        let destination = walk.destination(cpu, SIZE as u64, false)?;
        let b = cpu.load::<SIZE>(sys, destination)?;
        let source = walk.source(cpu, SIZE as u64)?;
        let a = cpu.load::<SIZE>(sys, source)?;
        super::alu::sub::<SIZE>(&mut cpu.vcpu.rflags, a, b, 0);
        Ok(())
    }
}

impl Step for Ins {
    const SOURCE: bool = false;
    const DESTINATION: bool = true;
    const PORT: bool = true;
    fn step<S: System, const SIZE: usize>(
        cpu: &mut Cpu<S>,
        sys: &mut S,
        walk: &Walk,
    ) -> Result<(), Fault> {
        let port = cpu.vcpu.gpr[reg::RDX] as u16;
        let destination = walk.destination(cpu, SIZE as u64, true)?;
        let target = cpu.target(sys, destination, SIZE as u64)?;
        let value = sys.port_read(port, SIZE as u8);
        cpu.target_store::<SIZE>(sys, target, value.into())
    }
}

impl Step for Outs {
    const SOURCE: bool = true;
    const DESTINATION: bool = false;
    const PORT: bool = true;
    fn step<S: System, const SIZE: usize>(
        cpu: &mut Cpu<S>,
        sys: &mut S,
        walk: &Walk,
    ) -> Result<(), Fault> {
        let port = cpu.vcpu.gpr[reg::RDX] as u16;
        let source = walk.source(cpu, SIZE as u64)?;
        let value = cpu.load::<SIZE>(sys, source)?;
        sys.port_write(port, SIZE as u8, value as u32);
        Ok(())
    }
}

fn string<S: System, K: Step, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
) -> Result<(), Fault> {
    let walk = Walk::of(cpu, op);
    let backward = cpu.vcpu.rflags & flags::DF != 0;
    let stride = if backward { (SIZE as u64).wrapping_neg() } else { SIZE as u64 };
    let (repe, repne) = (op.insn.has_rep_prefix(), op.insn.has_repne_prefix());
    if K::PORT {
        // Even if there is nothing to repeat.
        cpu.check_port(sys, cpu.vcpu.gpr[reg::RDX] as u16, SIZE as u64)?;
    }
    if !repe && !repne {
        K::step::<S, SIZE>(cpu, sys, &walk)?;
        move_pointers::<S, K>(cpu, &walk, stride);
        return Ok(());
    }
    let mut iterations = 0;
    let rflags = cpu.vcpu.rflags;
    // A single step is one iteration (SDM vol. 3, 18.3.1.4).
    let one_by_one = backward || rflags & flags::TF != 0;
    loop {
        let count = cpu.vcpu.gpr[reg::RCX] & walk.mask;
        if count == 0 {
            if walk.mask == 0xffff_ffff {
                cpu.vcpu.gpr[reg::RCX] = 0;
            }
            return Ok(());
        }
        let most = if cpu.wrote_code { BURST_OVER_CODE } else { BURST };
        if iterations >= most || cpu.traps != 0 {
            return repeat(cpu, op, rflags);
        }
        let bulk = if one_by_one {
            0
        } else {
            K::bulk::<S, SIZE>(cpu, sys, &walk, count.min(most - iterations))
        };
        let done = if bulk > 0 {
            bulk
        } else {
            // A fault in REP CMPS or SCAS leaves the flags as before the first iteration (SDM vol. 2, REP).
            K::step::<S, SIZE>(cpu, sys, &walk).inspect_err(|_| cpu.vcpu.rflags = rflags)?;
            1
        };
        move_pointers::<S, K>(cpu, &walk, stride.wrapping_mul(done));
        walk.advance(cpu, reg::RCX, done.wrapping_neg());
        iterations += done;
        let equal = cpu.vcpu.rflags & flags::ZF != 0;
        if K::COMPARES && equal == repne {
            return Ok(());
        }
        if cpu.vcpu.gpr[reg::RCX] & walk.mask == 0 {
            continue;
        }
        // A single step is one iteration, and a device may have been written that interrupts.
        if cpu.vcpu.rflags & flags::TF != 0 || cpu.leave_block {
            return repeat(cpu, op, rflags);
        }
    }
}

/// The instruction is not finished: come back to it. RF says so to whatever is delivered in
/// between, and keeps an instruction breakpoint from hitting again (SDM 17.3.1.1). Whatever comes in between
/// sees the other flags as before the first iteration, as on Intel's CPUs; AMD's show those of the last one.
fn repeat<S: System>(cpu: &mut Cpu<S>, op: &Op<S>, rflags: u64) -> Result<(), Fault> {
    let start = cpu.vcpu.rip.wrapping_sub(op.len.into());
    cpu.vcpu.rflags = rflags | flags::RF;
    cpu.jump(start);
    Ok(())
}

fn move_pointers<S: System, K: Step>(cpu: &mut Cpu<S>, walk: &Walk, by: u64) {
    if K::SOURCE {
        walk.advance(cpu, reg::RSI, by);
    }
    if K::DESTINATION {
        walk.advance(cpu, reg::RDI, by);
    }
}

pub(super) fn select<S: System>(insn: &Instruction) -> Option<Handler<S>> {
    // SSE2 has a MOVSD and a CMPSD too: those have no implicit memory operands.
    let implicit = (0..insn.op_count()).any(|i| {
        matches!(
            insn.op_kind(i),
            OpKind::MemorySegSI
                | OpKind::MemorySegESI
                | OpKind::MemorySegRSI
                | OpKind::MemoryESDI
                | OpKind::MemoryESEDI
                | OpKind::MemoryESRDI
        )
    });
    if !implicit {
        return None;
    }
    let size = insn.memory_size().size();
    Some(match insn.mnemonic() {
        Mnemonic::Movsb | Mnemonic::Movsw | Mnemonic::Movsd | Mnemonic::Movsq => {
            by_size!(size, string, S, Movs)
        }
        Mnemonic::Stosb | Mnemonic::Stosw | Mnemonic::Stosd | Mnemonic::Stosq => {
            by_size!(size, string, S, Stos)
        }
        Mnemonic::Lodsb | Mnemonic::Lodsw | Mnemonic::Lodsd | Mnemonic::Lodsq => {
            by_size!(size, string, S, Lods)
        }
        Mnemonic::Scasb | Mnemonic::Scasw | Mnemonic::Scasd | Mnemonic::Scasq => {
            by_size!(size, string, S, Scas)
        }
        Mnemonic::Cmpsb | Mnemonic::Cmpsw | Mnemonic::Cmpsd | Mnemonic::Cmpsq => {
            by_size!(size, string, S, Cmps)
        }
        Mnemonic::Insb | Mnemonic::Insw | Mnemonic::Insd => by_size!(size, string, S, Ins),
        Mnemonic::Outsb | Mnemonic::Outsw | Mnemonic::Outsd => by_size!(size, string, S, Outs),
        _ => return None,
    })
}
