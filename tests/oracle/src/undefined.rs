//! What the architecture leaves open: flags and results the SDM calls undefined, and what it calls
//! implementation-dependent about faults.
//!
//! While the interpreter steps through a case, [`Undefined`] follows which flags are undefined
//! by then. An instruction that reads one makes everything after it open, and the whole case is
//! not judged; flags that are undefined at the end are left out of the comparison.

use std::ops::Range;

use iced_x86::{Code, Instruction, Mnemonic, OpKind, Register};
use x86::{Fault, Vcpu, flags, reg, seg, vector};
use x86_interp::rflags;

use crate::layout::WINDOWS;

const MXCSR_FLAGS: u32 = 0x3f;

/// How exactly a page fault is compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FaultDetail {
    /// Address and error code.
    #[default]
    Exact,
    /// The page of the address, and the error code.
    Page,
    /// Only that there is one, or another exception of memory.
    Vector,
}

/// What not to compare.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ignored {
    /// Flags, as in RFLAGS.
    pub flags: u64,
    /// Memory (GVAs).
    pub memory: Vec<Range<u64>>,
    /// General registers whose upper halves are open, a bit each.
    pub upper_halves: u16,
    /// MXCSR bits.
    pub mxcsr: u32,
    /// x87 top of stack, tags and registers.
    pub x87_stack: bool,
    /// The pointers to the last x87 instruction.
    pub x87_pointers: bool,
    /// How a page fault at the end is compared.
    pub fault: FaultDetail,
    /// Why nothing is to be compared.
    pub all: Option<&'static str>,
}

/// Follows undefined state through the instructions of a case.
#[derive(Clone, Debug, Default)]
pub struct Undefined {
    ignored: Ignored,
    /// Flags the instruction about to run makes undefined.
    next: u64,
}

impl Undefined {
    /// To be called before `insn` runs, on the state it runs on.
    pub fn before(&mut self, insn: &Instruction, vcpu: &Vcpu) {
        if rflags(insn.rflags_read()) & self.ignored.flags != 0 {
            self.open("reads an undefined flag");
        }
        if undefined_result(insn, vcpu) {
            self.open("undefined result");
        }
        let address = operand_address(insn, vcpu);
        if is_byte_masked(insn) && !address.is_some_and(|address| writable(address, 16)) {
            self.open("MASKMOV next to a page it may or may not touch");
        }
        if repeats(insn) && has_narrow_addresses(insn) && vcpu.gpr[reg::RCX] as u32 == 0 {
            self.open("REP without iteration may clear upper halves of pointers");
        }
        if fault_detail(insn) == FaultDetail::Vector && wraps(insn, vcpu) {
            self.open("a large operand across the end of a segment");
        }
        if is_far_call(insn) && vcpu.gpr[reg::RSP].wrapping_sub(16) >> 32 != 0 {
            self.open("far call on a stack compatibility mode cannot reach");
        }
        self.next = undefined_flags(insn, vcpu);
    }

    /// From here on nothing is to be compared.
    pub fn open(&mut self, reason: &'static str) {
        self.ignored.all = self.ignored.all.or(Some(reason));
    }

    /// To be called after `insn` has completed.
    pub fn after(&mut self, insn: &Instruction) {
        if always_writes_flags(insn) {
            let written = insn.rflags_written() | insn.rflags_cleared() | insn.rflags_set();
            self.ignored.flags &= !rflags(written);
        }
        self.ignored.flags |= self.next;
    }

    /// To be called when `insn` has raised `fault`, on the state it left.
    pub fn faulted(&mut self, insn: &Instruction, vcpu: &Vcpu, fault: Fault) {
        use Mnemonic as M;
        if matches!(insn.mnemonic(), M::Popa | M::Popad | M::Pusha | M::Pushad) {
            self.open("POPA and PUSHA may be half done when they fault");
        }
        let ignored = &mut self.ignored;
        if insn.mnemonic() == M::Vcvtps2ph && fault.vector != vector::XM {
            // Whether the conversion comes before the segment is looked at.
            ignored.mxcsr |= MXCSR_FLAGS;
        }
        if repeats(insn) && has_narrow_addresses(insn) {
            // Some CPUs clear the upper halves before the first iteration.
            ignored.upper_halves |= 1 << reg::RCX | 1 << reg::RSI | 1 << reg::RDI;
        }
        // The instruction's step from x87 to MMX state may have been made, or part of it.
        ignored.x87_stack |= (0..insn.op_count()).any(|i| insn.op_register(i).is_mm());
        ignored.fault = fault_detail(insn);
        let address = operand_address(insn, vcpu);
        let at_end = address.is_some_and(at_canonical_end) || wraps(insn, vcpu);
        if ignored.fault == FaultDetail::Page && at_end {
            // Whether a masked element is an address at all.
            ignored.fault = FaultDetail::Vector;
        }
        if ignored.fault == FaultDetail::Vector
            && let Some(address) = address
        {
            // What comes before the page that faulted may have been stored.
            ignored.memory.push(address..address.saturating_add(1024));
        }
    }

    /// The case ended in compatibility mode: what becomes of the upper halves of registers when an
    /// exception enters 64-bit mode again is undefined (SDM vol. 1, 3.4.1.1).
    pub fn left_64bit_mode(&mut self) {
        self.ignored.upper_halves = u16::MAX;
    }

    /// Nor is this memory (GVAs).
    pub fn ignore_memory(&mut self, range: Range<u64>) {
        self.ignored.memory.push(range);
    }

    /// Whether any of this memory (GVAs) is not compared.
    pub fn ignores_memory(&self, range: &Range<u64>) -> bool {
        let overlap = |own: &Range<u64>| own.start < range.end && range.start < own.end;
        self.ignored.memory.iter().any(overlap)
    }

    /// Whether any memory at all is not compared.
    pub fn ignores_some_memory(&self) -> bool {
        !self.ignored.memory.is_empty()
    }

    /// Nor are these flags.
    pub fn ignore_flags(&mut self, flags: u64) {
        self.ignored.flags |= flags;
    }

    /// Nor are the pointers to the last x87 instruction.
    pub fn ignore_x87_pointers(&mut self) {
        self.ignored.x87_pointers = true;
    }

    /// What not to compare at the end.
    pub fn ignored(self) -> Ignored {
        self.ignored
    }
}

/// Instructions that access memory in parts do so in an order of the CPU's choice.
fn fault_detail(insn: &Instruction) -> FaultDetail {
    use Mnemonic as M;
    match insn.mnemonic() {
        M::Fnsave | M::Frstor | M::Fnstenv | M::Fldenv => FaultDetail::Vector,
        M::Fxsave | M::Fxsave64 | M::Fxrstor | M::Fxrstor64 => FaultDetail::Vector,
        M::Xsave | M::Xsave64 | M::Xrstor | M::Xrstor64 => FaultDetail::Vector,
        M::Vmaskmovps | M::Vmaskmovpd | M::Vpmaskmovd | M::Vpmaskmovq => FaultDetail::Page,
        M::Iret | M::Iretd | M::Iretq | M::Retf => FaultDetail::Vector,
        M::Fld | M::Fstp | M::Fbld | M::Fbstp if insn.memory_size().size() == 10 => {
            FaultDetail::Vector
        }
        _ => FaultDetail::Exact,
    }
}

fn is_byte_masked(insn: &Instruction) -> bool {
    use Mnemonic as M;
    matches!(insn.mnemonic(), M::Maskmovq | M::Maskmovdqu | M::Vmaskmovdqu)
}

/// A vector here reaches beyond the last canonical address of the lower half.
fn at_canonical_end(address: u64) -> bool {
    address < 1 << 47 && address + 32 > 1 << 47
}

fn is_far_call(insn: &Instruction) -> bool {
    matches!(insn.code(), Code::Call_m1616 | Code::Call_m1632 | Code::Call_m1664)
}

/// All of the bytes can be written.
fn writable(address: u64, len: u64) -> bool {
    let end = address.saturating_add(len);
    WINDOWS.iter().any(|w| w.writable && w.base <= address && end <= w.end())
}

/// The memory operand of 32-bit code begins just below 4 GiB of its segment.
fn wraps(insn: &Instruction, vcpu: &Vcpu) -> bool {
    let base = match insn.memory_segment() {
        Register::FS => vcpu.seg[seg::FS].base,
        Register::GS => vcpu.seg[seg::GS].base,
        _ => 0,
    };
    let offset = operand_address(insn, vcpu).map(|linear| linear.wrapping_sub(base) as u32);
    !vcpu.is_64bit() && offset.is_some_and(|offset| offset > u32::MAX - 1024)
}

/// Linear address of the memory operand.
pub(crate) fn operand_address(insn: &Instruction, vcpu: &Vcpu) -> Option<u64> {
    let memory = [OpKind::Memory, OpKind::MemorySegRDI, OpKind::MemorySegEDI];
    let operand = (0..insn.op_count()).find(|&i| memory.contains(&insn.op_kind(i)))?;
    insn.virtual_address(operand, 0, |register, _, _| match register {
        Register::FS => Some(vcpu.seg[seg::FS].base),
        Register::GS => Some(vcpu.seg[seg::GS].base),
        r if r.is_segment_register() => Some(0),
        r if r.is_gpr32() => Some(vcpu.gpr[r.full_register().number()] & 0xffff_ffff),
        r if r.is_gpr() => Some(vcpu.gpr[r.full_register().number()]),
        _ => None,
    })
}

/// Unless its count is zero.
fn always_writes_flags(insn: &Instruction) -> bool {
    !is_shift(insn.mnemonic()) && !repeats(insn)
}

pub(crate) fn repeats(insn: &Instruction) -> bool {
    insn.is_string_instruction() && (insn.has_rep_prefix() || insn.has_repne_prefix())
}

/// A string instruction with 32-bit addresses.
fn has_narrow_addresses(insn: &Instruction) -> bool {
    insn.op_kinds().any(|kind| matches!(kind, OpKind::MemorySegESI | OpKind::MemoryESEDI))
}

fn is_shift(mnemonic: Mnemonic) -> bool {
    use Mnemonic as M;
    matches!(mnemonic, M::Shl | M::Sal | M::Shr | M::Sar | M::Rol | M::Ror | M::Rcl | M::Rcr)
        || is_double_shift(mnemonic)
}

fn is_double_shift(mnemonic: Mnemonic) -> bool {
    matches!(mnemonic, Mnemonic::Shld | Mnemonic::Shrd)
}

/// The count of a shift or rotate, masked as the CPU does (SDM vol. 2, SHL), and its operand size
/// in bits.
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
        return rflags(insn.rflags_undefined());
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
