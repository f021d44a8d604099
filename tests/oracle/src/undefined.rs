//! What the architecture leaves open: flags and results the SDM calls undefined.
//!
//! While the interpreter steps through a case, [`Undefined`] follows which flags are undefined
//! by then. An instruction that reads one makes everything after it open, and the whole case is
//! not judged; flags that are undefined at the end are left out of the comparison.

use std::ops::Range;

use iced_x86::{FlowControl, Instruction, Mnemonic, OpKind, Register, RflagsBits};
use x86::{Vcpu, flags, reg};

/// What not to compare.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ignored {
    /// Flags, as in RFLAGS.
    pub flags: u64,
    /// Memory (GVAs).
    pub memory: Vec<Range<u64>>,
    /// Why nothing is to be compared.
    pub all: Option<&'static str>,
}

/// Follows undefined state through the instructions of a case.
#[derive(Clone, Debug, Default)]
pub struct Undefined {
    flags: u64,
    /// What the instruction about to run makes undefined.
    next: u64,
    memory: Vec<Range<u64>>,
    /// What an indirect call may have stored if it faults.
    call: Option<Range<u64>>,
    all: Option<&'static str>,
}

impl Undefined {
    /// To be called before `insn` runs, on the state it runs on.
    pub fn before(&mut self, insn: &Instruction, vcpu: &Vcpu) {
        if from_iced(insn.rflags_read()) & self.flags != 0 {
            self.all = self.all.or(Some("reads an undefined flag"));
        }
        if undefined_result(insn, vcpu) {
            self.all = self.all.or(Some("undefined result"));
        }
        self.next = undefined_flags(insn, vcpu);
        if insn.flow_control() == FlowControl::IndirectCall {
            // Whether the return address has been stored when the target turns out not to be
            // canonical is not said; Intel CPUs have, below an RSP that has not moved.
            let rsp = vcpu.gpr[reg::RSP];
            self.call = Some(rsp.wrapping_sub(8)..rsp);
        }
    }

    /// To be called after `insn` has completed.
    pub fn after(&mut self, insn: &Instruction) {
        self.call = None;
        if always_writes_flags(insn) {
            let written = insn.rflags_written() | insn.rflags_cleared() | insn.rflags_set();
            self.flags &= !from_iced(written);
        }
        self.flags |= self.next;
    }

    /// What not to compare at the end.
    pub fn ignored(self) -> Ignored {
        let memory = self.memory.into_iter().chain(self.call).collect();
        Ignored { flags: self.flags, memory, all: self.all }
    }
}

/// iced's flag bits as RFLAGS bits.
fn from_iced(bits: u32) -> u64 {
    const MAP: [(u32, u64); 7] = [
        (RflagsBits::OF, flags::OF),
        (RflagsBits::SF, flags::SF),
        (RflagsBits::ZF, flags::ZF),
        (RflagsBits::AF, flags::AF),
        (RflagsBits::CF, flags::CF),
        (RflagsBits::PF, flags::PF),
        (RflagsBits::DF, flags::DF),
    ];
    MAP.iter().filter(|(iced, _)| bits & iced != 0).map(|(_, flag)| flag).sum()
}

/// Unless its count is zero.
fn always_writes_flags(insn: &Instruction) -> bool {
    let counted = is_shift(insn.mnemonic()) || insn.has_rep_prefix() || insn.has_repne_prefix();
    !counted
}

fn is_shift(mnemonic: Mnemonic) -> bool {
    use Mnemonic as M;
    matches!(mnemonic, M::Shl | M::Sal | M::Shr | M::Sar | M::Rol | M::Ror | M::Rcl | M::Rcr)
        || is_double_shift(mnemonic)
}

fn is_double_shift(mnemonic: Mnemonic) -> bool {
    matches!(mnemonic, Mnemonic::Shld | Mnemonic::Shrd)
}

/// The count of a shift or rotate, masked as the CPU does (SDM vol. 2, SHL), and its operand size in bits.
fn shift_count(insn: &Instruction, vcpu: &Vcpu) -> (u32, u32) {
    let last = insn.op_count() - 1;
    let raw = match insn.op_kind(last) {
        OpKind::Register if insn.op_register(last) == Register::CL => vcpu.gpr[reg::RCX] as u32,
        _ => insn.immediate(last) as u32,
    };
    let bits = match insn.op0_kind() {
        OpKind::Register => insn.op0_register().size() * 8,
        _ => insn.memory_size().size() * 8,
    };
    (raw & if bits == 64 { 0x3f } else { 0x1f }, bits as u32)
}

/// Flags undefined after `insn`, from the "Flags Affected" sections of SDM vol. 2.
fn undefined_flags(insn: &Instruction, vcpu: &Vcpu) -> u64 {
    use Mnemonic as M;
    let mnemonic = insn.mnemonic();
    if !is_shift(mnemonic) {
        return from_iced(insn.rflags_undefined());
    }
    let (count, bits) = shift_count(insn, vcpu);
    if count == 0 {
        return 0;
    }
    let overflow = if count == 1 { 0 } else { flags::OF };
    match mnemonic {
        M::Rol | M::Ror | M::Rcl | M::Rcr => overflow,
        M::Shl | M::Sal | M::Shr if count >= bits => flags::AF | flags::CF | overflow,
        _ => flags::AF | overflow,
    }
}

/// The result itself is undefined.
fn undefined_result(insn: &Instruction, vcpu: &Vcpu) -> bool {
    match insn.mnemonic() {
        mnemonic if is_double_shift(mnemonic) => {
            let (count, bits) = shift_count(insn, vcpu);
            count > bits
        }
        Mnemonic::Bswap => insn.op0_register().size() == 2,
        _ => false,
    }
}
