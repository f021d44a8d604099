//! Checks that a translated program accesses no memory but the program's own. Protection keys shut other memory to programs that run
//! directly, and are open where translations run.
//!
//! Accesses that are looked up ([`super::lookup`]) lead to the program's own pages only. Any other access is checked first: no region of
//! the kernel's or the wedge's is there, and what is read is mapped as the program has it. A check changes nothing, so what follows
//! is emitted as it would be without. An instruction that does not pass is interpreted.

use super::{
    Emitter,
    lookup::{is_addressed, is_bit_string},
    memory::bytes_read,
    string::{MOST, PAGE, Pointers, is_repeated, pointers},
    vectors::loads_vectors,
};
use crate::{
    asm::{plus, slot, spill, sum},
    recover::Fixes,
    rules::Rule,
};
use iced_x86::{Code, Instruction, MemoryOperand, Mnemonic, OpKind, Register};
use wedge_abi::BlockExit;

/// Put aside while a check is made, in the spill slots of their order.
const USED: [Register; 4] = [Register::RCX, Register::RDX, Register::RBX, Register::R8];
/// Zero if all is well.
const ODD: Register = USED[0];
const ADDRESS: Register = USED[1];
const TABLE: Register = USED[2];
const OTHER: Register = USED[3];

/// A check of an access. The code for an access that is refused is still to be emitted.
pub(crate) struct Refusal {
    /// Displacement of the jump to the refusal.
    displacement: usize,
    /// Offset of the instruction from the block's guest address.
    guest: u32,
    /// What it is, and its GVA.
    code: Code,
    ip: u64,
}

/// What is accessed.
#[derive(Clone, Copy)]
struct Touch {
    /// Where, relative to no segment; `None` where the instruction's memory operand says.
    at: Option<MemoryOperand>,
    /// So many bytes are read there.
    reads: usize,
}

impl Touch {
    fn write(at: MemoryOperand) -> Self {
        Self { at: Some(at), reads: 0 }
    }
}

impl Emitter<'_> {
    /// Emits the checks of what the instruction accesses without a look-up; false if it is to be interpreted.
    pub(super) fn check(&mut self, rule: Rule, insn: &Instruction) -> bool {
        match rule {
            Rule::Memory | Rule::PerCpu if is_addressed(insn) && !is_bit_string(insn) => {
                self.check_touch(insn, Touch { at: None, reads: bytes_read(insn).unwrap_or(0) });
            }
            Rule::String => return self.check_string(insn),
            // What opens protection keys must not be in translated code.
            Rule::MoveVectors if !loads_vectors(insn) => {
                self.check_touch(insn, Touch { at: None, reads: 0 });
            }
            Rule::CallIndirect | Rule::PushFlags => self.check_pushed(insn),
            Rule::Push if insn.op0_kind() == OpKind::Memory => self.check_pushed(insn),
            // They access no memory, or look all of it up.
            Rule::Push | Rule::Pop | Rule::Leave | Rule::Call | Rule::JumpIndirect => {}
            Rule::Copy | Rule::LoadAddress | Rule::Jump | Rule::Conditional | Rule::Return => {}
            Rule::ReadSelector | Rule::ReadTime | Rule::SystemCall => {}
            _ => return false,
        }
        // Checks of strings look upwards.
        insn.mnemonic() != Mnemonic::Std
    }

    fn check_pushed(&mut self, insn: &Instruction) {
        self.check_touch(insn, Touch::write(plus(Register::RSP, -8)));
    }

    fn check_string(&mut self, insn: &Instruction) -> bool {
        let Some(Pointers { source, destination }) = pointers(insn) else { return false };
        if self.compares_hidden(insn) {
            return false;
        }
        if source {
            let reads = insn.memory_size().size();
            self.check_touch(insn, Touch { reads, ..Touch::write(plus(Register::RSI, 0)) });
        }
        if source && is_repeated(insn) {
            self.check_pages(insn);
        }
        if destination {
            self.check_touch(insn, Touch::write(plus(Register::RDI, 0)));
        }
        true
    }

    fn check_touch(&mut self, insn: &Instruction, touch: Touch) {
        self.begin_check();
        match touch.at {
            Some(at) => self.asm.lea(ADDRESS, at),
            None => self.user_address(insn, [ADDRESS, ODD]),
        }
        self.asm.mov_imm(TABLE, self.layout.regions);
        let mask = self.asm.slot_operand(slot!(block.user_region_mask));
        self.asm.op3(Code::VEX_Pext_r64_r64_rm64, ODD, ADDRESS, mask);
        self.asm.load_mem(ODD, entry(ODD, 0));
        if touch.reads > 0 {
            self.add_hidden();
        }
        if touch.reads > 1 {
            self.asm.lea(ADDRESS, plus(ADDRESS, touch.reads as i64 - 1));
            self.add_hidden();
        }
        self.refuse_odd(insn);
        self.end_check();
    }

    /// Adds what the table of copies says about the address to what is odd.
    fn add_hidden(&mut self) {
        self.hidden_entry(OTHER);
        self.asm.lea(ODD, sum(ODD, OTHER));
    }

    /// `into` := what the table of copies, which lies behind that of regions, says about the address.
    fn hidden_entry(&mut self, into: Register) {
        let mask = self.asm.slot_operand(slot!(block.copy_index));
        self.asm.op3(Code::VEX_Pext_r64_r64_rm64, into, ADDRESS, mask);
        let behind = self.layout.copies.unwrap_or_default().wrapping_sub(self.layout.regions);
        self.asm.load_mem(into, entry(into, behind as i64));
    }

    /// Checks all pages that a repeated instruction reads, upwards from RSI.
    fn check_pages(&mut self, insn: &Instruction) {
        let left = OTHER;
        self.begin_check();
        let [none, some] = [self.asm.jrcxz(), self.asm.jmp_short()];
        self.asm.bind_short(none);
        let nothing = self.asm.jmp(self.stubs.exit);
        self.asm.bind_short(some);
        // So many that looking would take too long are not looked at.
        self.asm.mov_imm(ADDRESS, MOST.trailing_zeros().into());
        self.asm.op3(Code::VEX_Shrx_r64_rm64_r64, ODD, ODD, ADDRESS);
        self.refuse_odd(insn);
        self.asm.load(ODD, spill(0));
        // left := pages beyond the first.
        self.end_of_reads(insn, left, ADDRESS);
        self.asm.mov_imm(ADDRESS, PAGE.trailing_zeros().into());
        self.asm.op3(Code::VEX_Shrx_r64_rm64_r64, left, left, ADDRESS);
        self.asm.mov(ADDRESS, Register::RSI);
        self.asm.mov_imm(TABLE, self.layout.regions);
        let again = self.asm.here();
        self.hidden_entry(ODD);
        self.refuse_odd(insn);
        self.asm.mov(ODD, left);
        let all = self.asm.jrcxz();
        self.asm.lea(left, plus(left, -1));
        self.asm.lea(ADDRESS, plus(ADDRESS, PAGE as i64));
        self.asm.jmp(again);
        self.asm.bind_short(all);
        self.asm.bind(nothing);
        self.end_check();
    }

    fn begin_check(&mut self) {
        self.undoes();
        USED.iter().enumerate().for_each(|(index, used)| self.asm.store(spill(index), *used));
        self.mark(false, all_used());
        self.undoes();
    }

    /// Leaves for the interpreter unless [`ODD`] is zero.
    fn refuse_odd(&mut self, insn: &Instruction) {
        let fine = self.asm.jrcxz();
        let displacement = self.asm.jmp(self.stubs.exit);
        self.asm.bind_short(fine);
        let (guest, code, ip) = (self.guest, insn.code(), insn.ip());
        self.refused.push(Refusal { displacement, guest, code, ip });
    }

    fn end_check(&mut self) {
        self.restore_used();
        self.mark(false, Fixes::default());
        self.undoes();
    }

    fn restore_used(&mut self) {
        USED.iter().enumerate().for_each(|(index, used)| self.asm.load(*used, spill(index)));
    }

    /// Emits the code for accesses that are refused. What is emitted next belongs to the last instruction again.
    pub(super) fn emit_refusals(&mut self) {
        let (last, any) = (self.guest, !self.refused.is_empty());
        for Refusal { displacement, guest, code, ip } in std::mem::take(&mut self.refused) {
            self.guest = guest;
            self.asm.bind(displacement);
            self.mark(false, all_used());
            self.undoes();
            self.restore_used();
            self.exit(BlockExit::CallOut, code as u32, ip);
        }
        if any {
            self.guest = last;
            self.mark(false, Fixes::default());
        }
    }
}

/// The entry of a table of words, `behind` the start of that of regions (bytes).
fn entry(index: Register, behind: i64) -> MemoryOperand {
    MemoryOperand::with_base_index_scale_displ_size(TABLE, index, 8, behind, 8)
}

fn all_used() -> Fixes {
    let spilled = USED.map(|register| Some(register.number() as u8));
    Fixes { spilled, ..Fixes::default() }
}
