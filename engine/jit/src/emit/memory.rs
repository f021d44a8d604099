//! Memory operands: through the bias, per CPU, or wherever the address says.

use super::{
    Emitter,
    lookup::{at_sum, is_addressed},
};
use crate::{
    asm::{plus, slot, spill, sum},
    recover::Fixes,
    translate::Flow,
};
use iced_x86::{
    Code, Instruction, InstructionInfoFactory, MemoryOperand, OpAccess, OpKind, Register,
    UsedMemory,
};

impl Emitter<'_> {
    /// One memory operand in a flat segment.
    pub(super) fn memory(&mut self, insn: &Instruction, bytes: &[u8]) -> Flow {
        if self.looked_up(insn) {
            return Flow::On;
        }
        if self.ac && !on_stack(insn) {
            return self.memory_either(insn);
        }
        self.overridden(insn, bytes, Register::GS)
    }

    /// One memory operand relative to the segment base that the host's FS base follows.
    pub(super) fn per_cpu(&mut self, insn: &Instruction, bytes: &[u8]) -> Flow {
        self.overridden(insn, bytes, Register::FS)
    }

    /// The instruction with another segment.
    fn overridden(&mut self, insn: &Instruction, bytes: &[u8], segment: Register) -> Flow {
        if insn.is_ip_rel_memory_operand() {
            return self.relative(insn, segment);
        }
        match with_prefix(bytes, segment) {
            Some(changed) => {
                self.asm.raw(&changed);
                Flow::On
            }
            None => self.call_out(insn),
        }
    }

    /// A RIP-relative operand: absolute if its address fits into 32 bits, or else by way of a register.
    fn relative(&mut self, insn: &Instruction, segment: Register) -> Flow {
        let mut changed = *insn;
        changed.set_segment_prefix(segment);
        if absolute(&mut changed) && self.asm.try_put(&changed) {
            return Flow::On;
        }
        let [address, _] = self.scratch(insn);
        if address == Register::None {
            return self.call_out(insn);
        }
        let mut fixes = Fixes::default();
        self.put_aside(&mut fixes, 0, address);
        self.load_guest_address(address, insn.ip_rel_memory_address());
        changed.set_memory_base(address);
        changed.set_memory_displ_size(0);
        changed.set_memory_displacement64(0);
        let done = self.asm.try_put(&changed);
        self.asm.load(address, spill(0));
        if done { Flow::On } else { self.call_out(insn) }
    }

    /// Inside STAC..CLAC the address may be the user's (as it is) or the kernel's (biased): its
    /// sign decides, without flags.
    fn memory_either(&mut self, insn: &Instruction) -> Flow {
        let [address, bias] = self.scratch(insn);
        let wide = |r: Register| r == Register::None || r == Register::RIP || r.is_gpr64();
        let usual = wide(insn.memory_base()) && wide(insn.memory_index());
        if bias == Register::None || !usual {
            return self.call_out(insn);
        }
        let mut fixes = Fixes::default();
        self.put_aside(&mut fixes, 0, address);
        self.put_aside(&mut fixes, 1, bias);
        self.effective_address(insn, address);
        if let Some(bytes) = bytes_read(insn) {
            self.unless_hidden(address, bias, bytes);
        }
        self.bias_for(address, bias);
        let changed = at_sum(insn, [address, bias]);
        if !self.asm.try_put(&changed) {
            self.asm.load(address, spill(0));
            self.asm.load(bias, spill(1));
            return self.call_out(insn);
        }
        self.asm.load(address, spill(0));
        self.asm.load(bias, spill(1));
        Flow::On
    }

    /// The address of a flat memory operand into a register.
    pub(super) fn effective_address(&mut self, insn: &Instruction, into: Register) {
        if insn.is_ip_rel_memory_operand() {
            self.load_guest_address(into, insn.ip_rel_memory_address());
            return;
        }
        if insn.memory_base() == Register::None && insn.memory_index() == Register::None {
            self.asm.mov_imm(into, insn.memory_displacement64());
            return;
        }
        let memory = flat_operand(insn, Register::None);
        self.asm.lea(into, memory);
    }

    /// `bias` := what has to be added to `address`, which may be the kernel's or the user's. An
    /// address of the user's where kernel memory lies becomes non-canonical.
    pub(super) fn bias_for(&mut self, address: Register, bias: Register) {
        let mask = self.asm.slot_operand(slot!(block.region_mask));
        self.asm.op3(Code::VEX_Pext_r64_r64_rm64, bias, address, mask);
        let table = self.layout.regions.wrapping_sub(self.layout.bias) as i64;
        let entry = MemoryOperand::new(Register::None, bias, 8, table, 8, false, Register::GS);
        self.asm.load_mem(bias, entry);
    }

    /// `address` becomes non-canonical if it is the user's and the page of the last of so many bytes is mapped as a changed
    /// copy. `scratch` is lost.
    fn unless_hidden(&mut self, address: Register, scratch: Register, bytes: usize) {
        let Some(table) = self.layout.copies else { return };
        self.asm.lea(scratch, plus(address, bytes as i64 - 1));
        self.hidden(table, scratch, scratch);
        self.asm.lea(address, sum(address, scratch));
    }

    /// `into` := what the table of copies says about an address.
    pub(super) fn hidden(&mut self, table: u64, address: Register, into: Register) {
        let mask = self.asm.slot_operand(slot!(block.copy_index));
        self.asm.op3(Code::VEX_Pext_r64_r64_rm64, into, address, mask);
        let near = table.wrapping_sub(self.layout.bias) as i64;
        let entry = MemoryOperand::new(Register::None, into, 8, near, 8, false, Register::GS);
        self.asm.load_mem(into, entry);
    }

    /// LEA of a RIP-relative address.
    pub(super) fn load_address(&mut self, insn: &Instruction) -> Flow {
        let to = insn.op0_register();
        if to.is_gpr64() {
            self.load_guest_address(to, insn.ip_rel_memory_address());
            return Flow::On;
        }
        self.call_out(insn)
    }

    /// Loads the operand of an indirect branch or a PUSH into RAX, which is put aside; what to fix from then on. On failure
    /// nothing is changed.
    pub(super) fn load_into_rax(&mut self, insn: &Instruction) -> Option<Fixes> {
        if let Some(table) = self.looks_all_up().filter(|_| insn.op0_kind() == OpKind::Memory) {
            let pair = self.scratch_but(insn, &[Register::RAX, Register::RCX]);
            let [_, entry] = pair;
            let can = is_addressed(insn) && entry != Register::None;
            return can.then(|| self.look_word_up(table, pair, |e| e.user_address(insn, pair)));
        }
        let mut fixes = Fixes::default();
        self.put_aside(&mut fixes, 0, Register::RAX);
        if self.load_operand(insn, Register::RAX) {
            return Some(fixes);
        }
        self.asm.load(Register::RAX, spill(0));
        None
    }

    /// Loads the operand of an indirect branch or a PUSH into `into`, which may be one of its own
    /// address registers.
    fn load_operand(&mut self, insn: &Instruction, into: Register) -> bool {
        if insn.op0_kind() == OpKind::Register {
            self.asm.mov(into, insn.op0_register());
            return true;
        }
        if self.ac && !on_stack(insn) && insn.memory_segment() != Register::GS {
            return false;
        }
        let mut changed = *insn;
        if insn.is_ip_rel_memory_operand() && !absolute(&mut changed) {
            self.load_guest_address(into, insn.ip_rel_memory_address());
            changed.set_memory_base(into);
            changed.set_memory_displ_size(0);
            changed.set_memory_displacement64(0);
        }
        let in_fs = insn.memory_segment() == self.layout.level.base_in_fs();
        let segment = if in_fs { Register::FS } else { Register::GS };
        self.asm.load_mem(into, flat_operand(&changed, segment));
        true
    }
}

/// How many bytes of its memory operand an instruction reads.
pub(super) fn bytes_read(insn: &Instruction) -> Option<usize> {
    use OpAccess::{CondRead, Read, ReadCondWrite, ReadWrite};
    let mut factory = InstructionInfoFactory::new();
    let reads =
        |used: &UsedMemory| matches!(used.access(), Read | CondRead | ReadWrite | ReadCondWrite);
    let read = factory.info(insn).used_memory().iter().any(reads);
    read.then(|| insn.memory_size().size().max(1))
}

/// Addressed by RSP: the kernel's stack, also inside STAC..CLAC.
pub(super) fn on_stack(insn: &Instruction) -> bool {
    insn.memory_base() == Register::RSP
}

/// The same in 32-bit code.
pub(super) fn on_narrow_stack(insn: &Instruction) -> bool {
    insn.memory_base() == Register::ESP
}

/// The memory operand with another segment.
pub(super) fn flat_operand(insn: &Instruction, segment: Register) -> MemoryOperand {
    MemoryOperand::new(
        insn.memory_base(),
        insn.memory_index(),
        insn.memory_index_scale(),
        insn.memory_displacement64() as i64,
        insn.memory_displ_size(),
        false,
        segment,
    )
}

/// Makes a RIP-relative operand absolute; false if its address does not sign-extend from 32 bits.
pub(super) fn absolute(insn: &mut Instruction) -> bool {
    let address = insn.ip_rel_memory_address();
    insn.set_memory_base(Register::None);
    insn.set_memory_displ_size(8);
    insn.set_memory_displacement64(address);
    i32::try_from(address as i64).is_ok()
}

/// The bytes with the segment override replaced; `None` if they would get too long.
fn with_prefix(bytes: &[u8], segment: Register) -> Option<Vec<u8>> {
    let prefix = if segment == Register::GS { 0x65 } else { 0x64 };
    let legacy = bytes.iter().take_while(|b| is_legacy_prefix(**b)).count();
    let kept = bytes[..legacy].iter().filter(|b| !is_segment_override(**b));
    let changed: Vec<u8> =
        std::iter::once(&prefix).chain(kept).chain(&bytes[legacy..]).copied().collect();
    (changed.len() <= 15).then_some(changed)
}

fn is_segment_override(byte: u8) -> bool {
    matches!(byte, 0x26 | 0x2e | 0x36 | 0x3e | 0x64 | 0x65)
}

fn is_legacy_prefix(byte: u8) -> bool {
    is_segment_override(byte) || matches!(byte, 0x66 | 0x67 | 0xf0 | 0xf2 | 0xf3)
}

/// The string instruction's bytes with a GS override, for the caller in `string`.
pub(super) fn with_gs(bytes: &[u8]) -> Option<Vec<u8>> {
    with_prefix(bytes, Register::GS)
}
