//! The general case: memory operand, vector unit, memory result.
//!
//! Precise faults: a memory source is loaded before anything else, a memory result is stored before
//! any register is committed. The exceptions are stores that also change floating-point state: for
//! them it is saved and put back. So an exception of the computation comes before one of the
//! store, as on hardware.

use super::permit::{self, EXCEPTIONS, VectorClass};
use crate::{
    cpu::Cpu,
    op::{Handler, Op},
    system::{System, UnitCode},
    tlb::{Right, View},
};
use contract::GuestRam;
use iced_x86::{
    EncodingKind, Instruction, InstructionInfoFactory, InstructionInfoOptions, Mnemonic, OpAccess,
    OpKind,
};
use x86::{Fault, control::cr4, vector};

/// What is known of an instruction after decoding, packed into `Op::imm`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Facts {
    class: VectorClass,
    /// Bytes of the memory operand, zero if there is none.
    size: u8,
    reads_memory: bool,
    writes_memory: bool,
    /// The memory operand must be aligned to its size.
    aligned: bool,
    /// General registers take part.
    general: bool,
    /// Writes memory and changes the x87 stack. (VCVTPS2PH changes exception flags: those stay
    /// changed if its store faults.)
    stores_and_changes: bool,
}

impl Facts {
    fn of(insn: &Instruction) -> Self {
        let (reads_memory, writes_memory) = memory_access(insn);
        let uses_memory = reads_memory || writes_memory;
        let size = insn.memory_size().size() as u8;
        let class = VectorClass::of(insn);
        let changes = matches!(class, VectorClass::X87 | VectorClass::Mmx);
        Self {
            class,
            size: if uses_memory { size } else { 0 },
            reads_memory,
            writes_memory,
            aligned: uses_memory && must_be_aligned(insn),
            general: uses_general(insn),
            stores_and_changes: writes_memory && changes,
        }
    }

    const fn pack(self) -> u64 {
        self.size as u64
            | (self.class as u64) << 8
            | (self.reads_memory as u64) << 16
            | (self.writes_memory as u64) << 17
            | (self.aligned as u64) << 18
            | (self.general as u64) << 19
            | (self.stores_and_changes as u64) << 20
    }

    const fn unpack(bits: u64) -> Self {
        Self {
            class: VectorClass::from_bits((bits >> 8) as u8),
            size: bits as u8,
            reads_memory: bits >> 16 & 1 != 0,
            writes_memory: bits >> 17 & 1 != 0,
            aligned: bits >> 18 & 1 != 0,
            general: bits >> 19 & 1 != 0,
            stores_and_changes: bits >> 20 & 1 != 0,
        }
    }
}

/// Prepares an instruction for the vector unit; `None` if the unit refuses it.
pub(super) fn prepare<S: System>(sys: &mut S, op: &mut Op<S>) -> Option<Handler<S>> {
    let bytes = op.bytes.get(..op.len as usize)?;
    op.unit = sys.vector_unit().prepare(&op.insn, bytes).ok()?.0;
    op.imm = Facts::of(&op.insn).pack();
    Some(run)
}

fn run<S: System>(cpu: &mut Cpu<S>, sys: &mut S, op: &Op<S>) -> Result<(), Fault> {
    let facts = Facts::unpack(op.imm);
    permit::check(cpu, facts.class)?;
    let linear = match open(cpu, sys, op, facts) {
        Ok(linear) => linear,
        Err(fault) => return refused(cpu, sys, op, facts, fault),
    };
    if facts.stores_and_changes {
        let before = cpu.vcpu.fpu;
        compute(cpu, sys, op, facts)?;
        return store(cpu, sys, op, facts, linear).inspect_err(|_| cpu.vcpu.fpu = before);
    }
    compute(cpu, sys, op, facts)?;
    if facts.writes_memory {
        return store(cpu, sys, op, facts, linear);
    }
    cpu.vcpu.rflags = cpu.operands.rflags;
    if facts.general {
        cpu.vcpu.gpr = cpu.operands.gpr;
    }
    Ok(())
}

/// The segment does not let the operand through. An x87 store that an exception suppresses does not
/// even ask it.
#[cold]
fn refused<S: System>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
    facts: Facts,
    fault: Fault,
) -> Result<(), Fault> {
    if facts.class != VectorClass::X87 || facts.reads_memory {
        return Err(fault);
    }
    let before = cpu.vcpu.fpu;
    compute(cpu, sys, op, facts)?;
    if is_store_suppressed(cpu, facts.class) {
        return Ok(());
    }
    cpu.vcpu.fpu = before;
    Err(fault)
}

/// Hands over to the vector unit.
#[inline(always)]
fn compute<S: System>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
    facts: Facts,
) -> Result<(), Fault> {
    cpu.operands.rflags = cpu.vcpu.rflags;
    if facts.general {
        cpu.operands.gpr = cpu.vcpu.gpr;
    }
    cpu.operands.rip = cpu.vcpu.rip.wrapping_sub(op.len.into());
    let (fpu, operands) = (&mut cpu.vcpu.fpu, &mut cpu.operands);
    let result = sys.vector_unit().run(UnitCode(op.unit), &op.insn, fpu, operands);
    result.map_err(|fault| simd_exception(cpu, fault))
}

/// Stores a memory result. Instructions that have one write neither general registers nor flags.
fn store<S: System>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
    facts: Facts,
    linear: u64,
) -> Result<(), Fault> {
    if is_store_suppressed(cpu, facts.class) {
        return Ok(());
    }
    let bytes = cpu.operands.memory;
    let part = bytes.get(..facts.size as usize).ok_or(Fault::ud())?;
    if let Some(offset) = cpu.tlb.lookup(cpu.view, Right::Write, linear, facts.size.into()) {
        sys.ram().write(offset, part);
        return Ok(());
    }
    let result = cpu.write_view(sys, operand_view(cpu, op), linear, part);
    result.map_err(|fault| cpu.blame_stack(op, fault))
}

/// Checks the memory operand and loads it; returns its linear address, zero if there is none.
fn open<S: System>(cpu: &mut Cpu<S>, sys: &mut S, op: &Op<S>, facts: Facts) -> Result<u64, Fault> {
    if facts.size == 0 {
        return Ok(0);
    }
    let size = u64::from(facts.size);
    cpu.operands.address = cpu.effective(op);
    let linear = if facts.aligned {
        cpu.vector_address::<true>(op, size, facts.writes_memory)?
    } else {
        cpu.vector_address::<false>(op, size, facts.writes_memory)?
    };
    if facts.reads_memory {
        load(cpu, sys, op, facts, linear)?;
    }
    Ok(linear)
}

#[inline(always)]
fn load<S: System>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    op: &Op<S>,
    facts: Facts,
    linear: u64,
) -> Result<(), Fault> {
    let found = cpu.tlb.lookup(cpu.view, Right::Read, linear, facts.size.into());
    let view = operand_view(cpu, op);
    let mut bytes = [0; 64];
    let part = bytes.get_mut(..facts.size as usize).ok_or(Fault::ud())?;
    match found {
        Some(offset) => sys.ram().read(offset, part),
        None => {
            let result = cpu.read_view(sys, view, linear, part);
            result.map_err(|fault| cpu.blame_stack(op, fault))?;
        }
    }
    cpu.operands.memory = bytes;
    Ok(())
}

/// The rights of the memory operand. F16C conversions are never checked for alignment.
#[inline(always)]
fn operand_view<S: System>(cpu: &Cpu<S>, op: &Op<S>) -> View {
    let checked = cpu.view == View::UserAligned;
    let exempt = || matches!(op.insn.mnemonic(), Mnemonic::Vcvtph2ps | Mnemonic::Vcvtps2ph);
    if checked && exempt() { View::User } else { cpu.view }
}

/// An x87 store that raised an unmasked exception other than precision stores nothing (SDM vol. 1,
/// 8.5). It waited, so no other exception can be pending.
fn is_store_suppressed<S: System>(cpu: &Cpu<S>, class: VectorClass) -> bool {
    const PRECISION: u16 = 1 << 5;
    let fpu = &cpu.vcpu.fpu;
    class == VectorClass::X87 && fpu.fsw & !fpu.fcw & EXCEPTIONS & !PRECISION != 0
}

/// #XM is #UD where the system does not expect it.
#[cold]
fn simd_exception<S: System>(cpu: &Cpu<S>, fault: Fault) -> Fault {
    let expected = cpu.vcpu.cr4 & cr4::OSXMMEXCPT != 0;
    if fault.vector == vector::XM && !expected { Fault::ud() } else { fault }
}

/// Whether the memory operand is read, and whether it is written.
fn memory_access(insn: &Instruction) -> (bool, bool) {
    let mut factory = InstructionInfoFactory::new();
    let info = factory.info_options(insn, InstructionInfoOptions::NO_REGISTER_USAGE);
    let access = info.used_memory().first().map_or(OpAccess::None, |memory| memory.access());
    match access {
        OpAccess::None | OpAccess::NoMemAccess => (false, false),
        OpAccess::Read | OpAccess::CondRead => (true, false),
        OpAccess::Write | OpAccess::CondWrite => (false, true),
        OpAccess::ReadWrite | OpAccess::ReadCondWrite => (true, true),
    }
}

/// General registers other than those of the memory operand take part.
fn uses_general(insn: &Instruction) -> bool {
    let named = (0..insn.op_count())
        .any(|i| insn.op_kind(i) == OpKind::Register && insn.op_register(i).is_gpr());
    let implied = matches!(
        insn.mnemonic(),
        Mnemonic::Pcmpestri
            | Mnemonic::Pcmpestrm
            | Mnemonic::Pcmpistri
            | Mnemonic::Pcmpestri64
            | Mnemonic::Pcmpestrm64
            | Mnemonic::Vpcmpestri
            | Mnemonic::Vpcmpestrm
            | Mnemonic::Vpcmpistri
            | Mnemonic::Vpcmpestri64
            | Mnemonic::Vpcmpestrm64
    );
    named || implied
}

/// Legacy SSE wants 16-byte operands aligned, with exceptions; VEX does not, with exceptions (SDM
/// vol. 2A, table 2-16).
fn must_be_aligned(insn: &Instruction) -> bool {
    use Mnemonic as M;
    if insn.encoding() == EncodingKind::VEX {
        return matches!(
            insn.mnemonic(),
            M::Vmovaps
                | M::Vmovapd
                | M::Vmovdqa
                | M::Vmovntps
                | M::Vmovntpd
                | M::Vmovntdq
                | M::Vmovntdqa
        );
    }
    let exempt = matches!(
        insn.mnemonic(),
        M::Movups
            | M::Movupd
            | M::Movdqu
            | M::Lddqu
            | M::Pcmpestri
            | M::Pcmpestrm
            | M::Pcmpistri
            | M::Pcmpistrm
            | M::Pcmpestri64
            | M::Pcmpestrm64
    );
    insn.memory_size().size() == 16 && !exempt
}
