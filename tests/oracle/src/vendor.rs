//! Where the host CPU's maker departs from Intel.
//!
//! The guest CPU is Intel's, whatever the host is. On a host of AMD's a case that comes upon a
//! difference is not judged, or not in what differs. Most of them are in the manuals of both (SDM
//! and APM); those that are not were found by this program on Zen 4 and say so.

use std::ops::Range;

use iced_x86::{
    Code, CodeSize, Decoder, DecoderOptions, Instruction, Mnemonic as M, OpKind, Register,
};
use x86::{Fault, Vcpu, flags, reg, seg, vector};

use crate::state::{Case, Outcome, State, Stop};
use crate::undefined::{Undefined, operand_address, repeats};

/// Who made the host CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vendor {
    /// Intel, or somebody unknown.
    Intel,
    /// AMD.
    Amd,
}

impl Vendor {
    /// The host's.
    pub fn of_host() -> Self {
        let leaf = std::arch::x86_64::__cpuid(0);
        let name = [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes).concat();
        if name == b"AuthenticAMD" { Self::Amd } else { Self::Intel }
    }

    /// The addresses of those instructions of `case` that this maker's CPUs take for others.
    pub fn foreign(self, case: &Case) -> Vec<u64> {
        let insns = if self == Self::Amd { case.instructions() } else { Vec::new() };
        let foreign = insns.iter().filter(|insn| is_foreign(insn, case));
        foreign.map(Instruction::ip).collect()
    }

    /// To be called after `insn` has completed.
    pub fn after(self, insn: &Instruction, vcpu: &Vcpu, undefined: &mut Undefined) {
        if self == Self::Intel {
            return;
        }
        if keeps_null_base(insn, vcpu) {
            undefined.open("AMD: a null selector keeps its segment's base");
        }
        if is_x87_store(insn) && vcpu.fpu.fsw & 0x80 != 0 {
            undefined.open("AMD: an x87 store that does not happen faults");
        }
        if let Some(address) = operand_address(insn, vcpu) {
            let address = if vcpu.is_64bit() { address } else { address & 0xffff_ffff };
            let stored = own_bytes(insn).into_iter().filter(|own| !own.is_empty());
            stored.for_each(|own| undefined.ignore_memory(address + own.start..address + own.end));
        }
        if is_segment_push(insn) {
            let top = vcpu.gpr[reg::RSP];
            undefined.ignore_memory(top + 2..top + 4);
        }
    }

    /// To be called before `insn` runs. `last` has run before it.
    pub fn before(
        self,
        insn: &Instruction,
        last: &[Instruction],
        vcpu: &Vcpu,
        undefined: &mut Undefined,
    ) {
        if self == Self::Intel {
            return;
        }
        let len = insn.memory_size().size() as u64;
        let operand = operand_address(insn, vcpu).map(|start| start..start.saturating_add(len));
        // A gather reads here and there.
        let reads = operand.is_some_and(|operand| undefined.ignores_memory(&operand))
            || is_gather(insn) && undefined.ignores_some_memory();
        if reads {
            undefined.open("AMD: reads or writes what is the maker's own");
        }
        let pops = insn.stack_pointer_increment() > 0 || insn.mnemonic() == M::Leave;
        if pops && last.iter().any(is_segment_push) {
            undefined.open("AMD: segment registers take all of the stack's slot");
        }
    }

    /// To be called when `insn` has raised `fault` in the interpreter.
    pub fn faulted(self, insn: &Instruction, fault: Fault, undefined: &mut Undefined) {
        if self == Self::Intel {
            return;
        }
        if is_sha(insn) && fault.vector == vector::GP {
            undefined.open("AMD: SHA instructions need no alignment");
        }
        if is_gather(insn) {
            undefined.open("AMD: a gather that faults leaves another mask");
        }
        if matches!(insn.mnemonic(), M::Cmpsb | M::Cmpsw | M::Cmpsd | M::Cmpsq) {
            undefined.open("AMD: CMPS reads its operands in another order");
        }
        if repeats(insn) {
            // Written once, at the end.
            undefined.ignore_flags(flags::STATUS);
        }
    }

    /// Forms that mean something else to this maker's CPUs: far pointers with 64-bit offsets,
    /// PREFETCHW of a register, and SYSRET outside 64-bit mode.
    pub fn lacks(self, form: Code) -> bool {
        use Code as C;
        let far = matches!(form, C::Call_m1664 | C::Jmp_m1664);
        let loads = matches!(form, C::Lss_r64_m1664 | C::Lfs_r64_m1664 | C::Lgs_r64_m1664);
        let prefetch = matches!(
            form,
            C::Reservednop_rm16_r16_0F0D
                | C::Reservednop_rm32_r32_0F0D
                | C::Reservednop_rm64_r64_0F0D
        );
        self == Self::Amd && (far || loads || prefetch || form == C::Sysretd)
    }

    /// Why the CPU was free to end otherwise than the interpreter. To be asked if it did.
    pub fn is_stricter(
        self,
        case: &Case,
        native: &Outcome,
        other: &Outcome,
    ) -> Option<&'static str> {
        if self == Self::Intel {
            return None;
        }
        let at = |rip| case.instruction_at(rip);
        if let Some(further) = at(other.state.rip).as_ref().and_then(exists_there) {
            return Some(further);
        }
        let Stop::Fault(fault) = native.stop else { return None };
        let insn = &at(native.state.rip)?;
        match fault.vector {
            vector::AC if checks_alignment(insn) => Some(ALIGNMENT),
            vector::GP | vector::SS | vector::PF | vector::AC => {
                limits(insn, native, other).or_else(|| looks_at_memory(insn, other.stop))
            }
            vector::UD if insn.mnemonic() == M::Reservednop => {
                Some("AMD: PREFETCHW of a register is invalid")
            }
            _ => None,
        }
    }
}

const ALIGNMENT: &str = "AMD: checks the alignment of more accesses";

/// An instruction that is invalid on Intel's CPUs, and why it may not be on AMD's.
fn exists_there(insn: &Instruction) -> Option<&'static str> {
    match insn.mnemonic() {
        M::INVALID => Some("AMD: does not look at every VEX bit, or has further instructions"),
        M::Ud0 | M::Ud1 => Some("AMD: does not fetch all of UD0 and UD1"),
        _ => None,
    }
}

/// Segments and alignment, looked at in another order.
fn limits(insn: &Instruction, native: &Outcome, other: &Outcome) -> Option<&'static str> {
    let same_place = native.state.rip == other.state.rip;
    let page = matches!(native.stop, Stop::Fault(fault) if fault.vector == vector::PF);
    if same_place && !page && wraps(other.stop) {
        Some("AMD: checks limits before pages")
    } else if same_place && native.state.rflags & flags::AC != 0 {
        Some("AMD: checks alignment after other things")
    } else if !page && offset(insn, &native.state).is_some_and(|offset| !is_canonical(offset)) {
        Some("AMD: the offset into a segment must be canonical, too")
    } else if same_place && insn.mnemonic() == M::Call {
        Some("AMD: CALL looks at its target first")
    } else {
        None
    }
}

/// Instructions that look at memory where Intel's do not, or earlier.
fn looks_at_memory(insn: &Instruction, other: Stop) -> Option<&'static str> {
    let other = if let Stop::Fault(fault) = other { fault.vector } else { 0 };
    match insn.mnemonic() {
        M::Vcvtps2ph if other == vector::XM => Some("AMD: VCVTPS2PH looks at its operand first"),
        M::Sysret if other == vector::UD => Some("AMD: SYSRET exists outside 64-bit mode"),
        M::Bound => Some("AMD: BOUND reads both bounds first"),
        M::Movsxd if insn.op0_register().size() == 2 => Some("AMD: MOVSXD to 16 bits reads 32"),
        M::Vmaskmovps | M::Vmaskmovpd | M::Vpmaskmovd | M::Vpmaskmovq => {
            Some("AMD: masked moves wrap at 64 KiB")
        }
        M::Iret | M::Iretd | M::Iretq | M::Retf => {
            Some("AMD: a far return looks at more of RIP and the stack")
        }
        _ if is_x87_store(insn) => Some("AMD: an x87 store that does not happen faults"),
        _ if is_segment_load(insn) || is_segment_push(insn) => {
            Some("AMD: segment registers take all of the stack's slot")
        }
        _ => None,
    }
}

/// The offset of a memory operand into FS or GS.
fn offset(insn: &Instruction, state: &State) -> Option<u64> {
    let based = matches!(insn.memory_segment(), Register::FS | Register::GS);
    let in_segment = |kind| matches!(kind, OpKind::Memory | OpKind::MemorySegRSI);
    let operand = insn.op_kinds().position(in_segment).filter(|_| based)?;
    insn.virtual_address(operand as u32, 0, |register, _, _| match register {
        r if r.is_gpr64() => state.gpr.get(r.number()).copied(),
        r if r.is_gpr32() => Some(state.gpr.get(r.number())? & 0xffff_ffff),
        r if r.is_segment_register() => Some(0),
        _ => None,
    })
}

fn is_canonical(address: u64) -> bool {
    (address as i64) << 16 >> 16 == address as i64
}

/// Whether AMD's CPUs decode the instruction otherwise.
fn is_foreign(insn: &Instruction, case: &Case) -> bool {
    let at = (insn.ip() - case.state.rip) as usize;
    let bytes = case.code.get(at..at + insn.len()).unwrap_or_default();
    let mut decoder = Decoder::with_ip(case.state.bits(), bytes, insn.ip(), DecoderOptions::AMD);
    let theirs = decoder.decode();
    // The last byte is the distance.
    let opcode = bytes.split_last().map_or(bytes, |(_, opcode)| opcode);
    let prefixed = |prefixes: &[u8]| opcode.iter().any(|byte| prefixes.contains(byte));
    match insn.mnemonic() {
        // F3 REX.B 90 is XCHG.
        M::Pause => insn.len() > 2,
        // The same but for names.
        M::Ud0 | M::Ud1 | M::Reservednop => false,
        // Found by trial: F2 makes either of them LOOPNE, F3 makes it LOOPE.
        M::Loope | M::Loopne if prefixed(&[0xf2, 0xf3]) => true,
        // An operand size of 16 bits cuts off RIP.
        M::Loop | M::Loope | M::Loopne if insn.code_size() == CodeSize::Code64 => prefixed(&[0x66]),
        _ => theirs.code() != insn.code() || theirs.len() != insn.len(),
    }
}

/// A selector became null, which on Intel's CPUs clears the base (APM vol. 2, 4.5.3).
fn keeps_null_base(insn: &Instruction, vcpu: &Vcpu) -> bool {
    let loaded = is_segment_load(insn) || matches!(insn.mnemonic(), M::Lfs | M::Lgs);
    loaded && [seg::FS, seg::GS].iter().any(|&index| vcpu.seg[index].selector & !3 == 0)
}

fn is_segment_load(insn: &Instruction) -> bool {
    matches!(insn.mnemonic(), M::Pop | M::Mov) && insn.op0_register().is_segment_register()
}

fn is_x87_store(insn: &Instruction) -> bool {
    let stores =
        matches!(insn.mnemonic(), M::Fst | M::Fstp | M::Fist | M::Fistp | M::Fisttp | M::Fbstp);
    stores && insn.op0_kind() == OpKind::Memory
}

fn is_sha(insn: &Instruction) -> bool {
    use M::{Sha1msg1, Sha1msg2, Sha1nexte, Sha1rnds4, Sha256msg1, Sha256msg2, Sha256rnds2};
    matches!(
        insn.mnemonic(),
        Sha1msg1 | Sha1msg2 | Sha1nexte | Sha1rnds4 | Sha256msg1 | Sha256msg2 | Sha256rnds2
    )
}

/// A gather has an index in a vector register.
fn is_gather(insn: &Instruction) -> bool {
    insn.memory_index().is_xmm() || insn.memory_index().is_ymm()
}

/// PUSH of a segment register outside 64-bit mode, where Intel's CPUs write two bytes of four.
fn is_segment_push(insn: &Instruction) -> bool {
    use Code::{Pushd_CS, Pushd_DS, Pushd_ES, Pushd_FS, Pushd_GS, Pushd_SS};
    matches!(insn.code(), Pushd_CS | Pushd_DS | Pushd_ES | Pushd_FS | Pushd_GS | Pushd_SS)
}

/// A page fault at the end of 4 GiB, which an operand reaches across.
fn wraps(stop: Stop) -> bool {
    matches!(stop, Stop::Fault(fault) if fault.vector == vector::PF && fault.address >> 8 == 0xff_ffff)
}

/// Whose alignment AMD's CPUs check and Intel's do not, or not as a whole.
fn checks_alignment(insn: &Instruction) -> bool {
    is_wide(insn) || is_segment_load(insn) || is_segment_push(insn)
}

/// An instruction of vectors or of x87.
fn is_wide(insn: &Instruction) -> bool {
    let vector = |register: Register| register.is_xmm() || register.is_ymm() || register.is_mm();
    (0..insn.op_count()).any(|i| vector(insn.op_register(i))) || insn.memory_size().size() >= 10
}

/// Where the instruction stores what is the maker's own, as offsets into its operand: the pointers to
/// the last x87 instruction, which AMD's CPUs keep, through FXRSTOR and FXSAVE, only while an
/// exception is pending (APM vol. 2, 11.4.4), and the mask of MXCSR, which has a bit more there.
fn own_bytes(insn: &Instruction) -> [Range<u64>; 2] {
    match (insn.mnemonic(), insn.memory_size().size()) {
        (M::Fnstenv | M::Fstenv, 14) | (M::Fnsave | M::Fsave, 94) => [6..14, 0..0],
        (M::Fnstenv | M::Fstenv, 28) | (M::Fnsave | M::Fsave, 108) => [12..28, 0..0],
        (M::Fxsave | M::Fxsave64 | M::Xsave | M::Xsave64 | M::Xsaveopt | M::Xsaveopt64, _) => {
            [6..24, 28..32]
        }
        _ => [0..0, 0..0],
    }
}
