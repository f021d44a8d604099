//! From the guest's instruction to the one a stub executes.
//!
//! Two things change, and neither changes what is computed. The memory operand becomes `[base]`
//! without segment, index or displacement, where `base` points to the operands the interpreter
//! passes. And general registers that a callee must preserve (or that is the host's stack pointer)
//! are renamed to free ones, which is allowed because only explicit operands ever name them: the
//! implicit operands of vector instructions are RAX, RCX, RDX and XMM0.

use iced_x86::{
    Encoder, EncodingKind, Instruction, InstructionInfoFactory, OpAccess, OpKind, Register,
    RflagsBits,
};
use x86::flags;
use x86_interp::rflags;

use crate::features;

/// How a routine has to be run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Needs nothing but its registers.
    Plain,
    /// Uses MXCSR.
    Float,
    /// Works on the x87 register file (x87 and MMX), and perhaps XMM registers and MXCSR.
    X87 {
        /// Faults on a pending x87 exception.
        waits: bool,
    },
}

/// A general register of the instruction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct General {
    /// Guest register, encoding order.
    pub guest: usize,
    /// The 64-bit host register that stands for it.
    pub host: Register,
    /// To be stored back.
    pub written: bool,
}

/// A vector register of the instruction: guest and host number are the same.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Vector {
    /// 0 to 15.
    pub number: usize,
    /// To be loaded: the result may depend on its old value.
    pub read: bool,
    /// To be stored back.
    pub written: bool,
}

/// All a stub is made from.
#[derive(Debug)]
pub(crate) struct Plan {
    /// The instruction the stub executes.
    pub insn: Instruction,
    /// Host register that points to the `FpuState`.
    pub fpu: Register,
    /// Host register that points to the `VectorOperands`.
    pub operands: Register,
    /// A host register free for use.
    pub scratch: Register,
    /// General registers used.
    pub general: Vec<General>,
    /// Vector registers used; empty for [`Kind::X87`], which moves all of them.
    pub vectors: Vec<Vector>,
    /// VEX encoding: registers are YMM, results zero what lies above them.
    pub vex: bool,
    /// An operand is a YMM register.
    pub wide: bool,
    /// The result depends on status flags.
    pub reads_flags: bool,
    /// Status flags it may change, as in RFLAGS.
    pub flags_written: u64,
    /// How to run it.
    pub kind: Kind,
}

/// Registers a callee may change, in the order in which they stand in for others. RDI and RSI come
/// last: the stub is called with its two pointers in them.
const FREE: [Register; 9] = [
    Register::RAX,
    Register::RCX,
    Register::RDX,
    Register::R8,
    Register::R9,
    Register::R10,
    Register::R11,
    Register::RSI,
    Register::RDI,
];

impl Plan {
    /// A plan for `insn`, or `None` if the unit does not execute it.
    pub(crate) fn new(insn: &Instruction) -> Option<Self> {
        if !features::accepts(insn) {
            return None;
        }
        let mut insn = host_form(insn);
        let used = used_registers(&insn);
        let general = place_general(&mut insn, &used)?;
        let vectors = vectors(&insn, &used)?;
        let mut free = FREE.iter().rev().filter(|r| general.iter().all(|g| g.host != **r));
        // Reversed, RDI comes first and RSI second: no move is needed in the usual case.
        let (mut fpu, mut operands, scratch) = (*free.next()?, *free.next()?, *free.next()?);
        if fpu == Register::RSI || operands == Register::RDI {
            core::mem::swap(&mut fpu, &mut operands);
        }
        if has_memory(&insn) {
            insn.set_memory_base(operands);
            insn.set_memory_displ_size(0);
        }
        let kind = kind(&insn);
        Some(Self {
            fpu,
            operands,
            scratch,
            general,
            vectors: if matches!(kind, Kind::X87 { .. }) { Vec::new() } else { vectors },
            vex: insn.encoding() == EncodingKind::VEX,
            wide: (0..insn.op_count()).any(|i| insn.op_register(i).is_ymm()),
            reads_flags: insn.rflags_read() & STATUS_BITS != 0,
            flags_written: rflags(insn.rflags_modified()) & flags::STATUS,
            kind,
            insn,
        })
    }

    /// The bytes of the instruction the stub executes, which stand for the whole plan: it follows
    /// from them alone, except for the guest registers behind `general`, so those are appended.
    pub(crate) fn encode(&self) -> Option<Vec<u8>> {
        let mut encoder = Encoder::new(64);
        encoder.encode(&self.insn, 0).ok()?;
        let mut key = encoder.take_buffer();
        key.extend(self.general.iter().map(|g| g.guest as u8));
        Some(key)
    }
}

fn kind(insn: &Instruction) -> Kind {
    if features::uses_x87(insn) {
        Kind::X87 { waits: features::waits(insn.mnemonic()) }
    } else if features::uses_mxcsr(insn) {
        Kind::Float
    } else {
        Kind::Plain
    }
}

/// The instruction without prefixes and with an absolute memory operand, for now.
fn host_form(insn: &Instruction) -> Instruction {
    let mut host = *insn;
    // FSTSW and friends with a wait prefix never come: the decoder gives WAIT on its own.
    host.set_has_lock_prefix(false);
    host.set_has_rep_prefix(false);
    host.set_has_repne_prefix(false);
    host.set_segment_prefix(Register::None);
    if has_memory(&host) {
        host.set_memory_base(Register::None);
        host.set_memory_index(Register::None);
        host.set_memory_index_scale(1);
        host.set_memory_displacement64(0);
        host.set_memory_displ_size(8);
    }
    host
}

fn has_memory(insn: &Instruction) -> bool {
    insn.op_kinds().any(|kind| kind == OpKind::Memory)
}

fn used_registers(insn: &Instruction) -> Vec<(Register, OpAccess)> {
    let mut factory = InstructionInfoFactory::new();
    let info = factory.info(insn);
    info.used_registers().iter().map(|used| (used.register(), used.access())).collect()
}

const fn writes(access: OpAccess) -> bool {
    matches!(
        access,
        OpAccess::Write | OpAccess::CondWrite | OpAccess::ReadWrite | OpAccess::ReadCondWrite
    )
}

/// Chooses host registers for the general registers and renames the operands.
fn place_general(insn: &mut Instruction, used: &[(Register, OpAccess)]) -> Option<Vec<General>> {
    let mut general: Vec<General> = Vec::new();
    for &(register, access) in used.iter().filter(|(register, _)| register.is_gpr()) {
        let host = register.full_register();
        let written = writes(access);
        match general.iter_mut().find(|g| g.host == host) {
            Some(g) => g.written |= written,
            None => general.push(General { guest: host.number(), host, written }),
        }
    }
    for i in 0..general.len() {
        let guest = general[i].host;
        if FREE.contains(&guest) {
            continue;
        }
        let taken = |r: &Register| general.iter().any(|g| g.host == *r);
        let host = FREE.into_iter().find(|r| !taken(r))?;
        general[i].host = host;
        rename(insn, guest, host);
    }
    Some(general)
}

/// Replaces the general register `from` (a full register) by `to` in every operand.
fn rename(insn: &mut Instruction, from: Register, to: Register) {
    for i in 0..insn.op_count() {
        let register = insn.op_register(i);
        if insn.op_kind(i) == OpKind::Register && register.full_register() == from {
            insn.set_op_register(i, same_size(register, to));
        }
    }
}

/// The part of `full` that `register` is of its full register.
fn same_size(register: Register, full: Register) -> Register {
    let high_byte = matches!(register, Register::AH | Register::BH | Register::CH | Register::DH);
    let first = match register.size() {
        1 if high_byte => Register::AH,
        1 if full.number() < 4 => Register::AL,
        1 => return Register::R8L + (full.number() as u32).wrapping_sub(8),
        2 => Register::AX,
        4 => Register::EAX,
        _ => Register::RAX,
    };
    first + full.number() as u32
}

fn vectors(insn: &Instruction, used: &[(Register, OpAccess)]) -> Option<Vec<Vector>> {
    let vex = insn.encoding() == EncodingKind::VEX;
    let mut vectors: Vec<Vector> = Vec::new();
    for &(register, access) in used.iter().filter(|(register, _)| register.is_vector_register()) {
        let number = register.number();
        // Legacy instructions leave parts of their destination alone.
        let read = !vex || access != OpAccess::Write;
        let written = writes(access);
        match vectors.iter_mut().find(|v| v.number == number) {
            Some(v) => {
                v.read |= read;
                v.written |= written;
            }
            None => vectors.push(Vector { number, read, written }),
        }
    }
    vectors.iter().all(|v| v.number < 16).then_some(vectors)
}

const STATUS_BITS: u32 = RflagsBits::OF
    | RflagsBits::SF
    | RflagsBits::ZF
    | RflagsBits::AF
    | RflagsBits::CF
    | RflagsBits::PF;
