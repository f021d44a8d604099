//! Memory operands of user code, and some of a 32-bit kernel's ([`super::narrow`]), found by a software TLB. A page's entry holds the
//! distance from the page's GVA to the same page in the wedge's view of guest RAM. The instruction is executed with an operand in that
//! view.
//!
//! Only instructions that access their memory operand and nothing else are looked up. All others access the host's mappings. So do
//! accesses to the stack: it is in few pages, which stay mapped. Where mappings have to be checked first ([`super::check`]) the stack
//! is looked up, too. An access across two pages always misses. A miss exits at the start
//! of the instruction, with nothing changed.

use super::Emitter;
use crate::{
    asm::{plus, slot, spill, sum},
    recover::{Fixes, Mark},
    rules::Level,
};
use iced_x86::{
    Code, CpuidFeature, Instruction, InstructionInfoFactory, MemoryOperand, Mnemonic, OpAccess,
    OpKind, Register,
};
use wedge_abi::{BlockExit, LOOKUP_WRITE, Lookup};

/// The most bytes of an operand.
const WIDEST: usize = 32;
/// Which of `BlockState::lookup_masks` has the bits of the index.
const INDEX: usize = 0;
const READS: usize = 1;
const WRITES: usize = 2;
const _: () = assert!(size_of::<Lookup>() == 16);

/// An access to be looked up.
#[derive(Clone, Copy)]
pub(super) struct SoughtAccess {
    pub bytes: usize,
    pub write: bool,
}

/// A look-up whose miss is still to be emitted.
pub(crate) struct Missed {
    /// Displacement of the jump to the miss.
    displacement: usize,
    /// Offset of the look-up's first byte, where it begins again once the entry is filled.
    start: usize,
    /// Register with the operand's GVA.
    address: Register,
    access: SoughtAccess,
    /// Offset of the instruction from the block's guest address.
    guest: u32,
    fixes: Fixes,
}

impl Emitter<'_> {
    /// Emits the instruction with its memory operand looked up, if it is one of those; if not, nothing.
    pub(super) fn looked_up(&mut self, insn: &Instruction) -> bool {
        let Some(table) = self.layout.lookups.filter(|_| self.layout.level == Level::User) else {
            return false;
        };
        let Some(access) = access(insn, self.layout.checks) else { return false };
        let pair = self.scratch_but(insn, &[Register::RCX]);
        let changed = at_sum(insn, pair);
        if pair[1] == Register::None || !self.asm.can_put(&changed) {
            return false;
        }
        self.look_up_operand(table, access, pair, |e| e.user_address(insn, pair));
        self.asm.put(&changed);
        self.give_back(pair);
        true
    }

    /// The table of look-ups, if everything is looked up there that can be.
    pub(super) fn looks_all_up(&self) -> Option<u64> {
        self.layout.lookups.filter(|_| self.layout.checks)
    }

    /// Emits a load of the word whose GVA `find` computes into the first of two registers. The word ends up in RAX, which is put
    /// aside; what to fix from then on.
    pub(super) fn look_word_up(
        &mut self,
        table: u64,
        pair: [Register; 2],
        find: impl FnOnce(&mut Self),
    ) -> Fixes {
        let [word, entry] = pair;
        self.look_up_operand(table, SoughtAccess { bytes: 8, write: false }, pair, find);
        self.asm.load_mem(word, sum(word, entry));
        self.mark(false, Fixes::default());
        self.asm.load(entry, spill(2));
        self.asm.store(spill(0), Register::RAX);
        self.asm.mov(Register::RAX, word);
        self.asm.load(word, spill(1));
        let mut fixes = Fixes::default();
        fixes.spilled[0] = Some(Register::RAX.number() as u8);
        self.mark(false, fixes);
        fixes
    }

    /// Has `address` and `entry` add up to an operand in the wedge's view of guest RAM, or exits. `find` computes the GVA into
    /// `address`. The two registers and RCX are put aside in the first three spill slots; RCX has its value again in the end.
    pub(super) fn look_up_operand(
        &mut self,
        table: u64,
        access: SoughtAccess,
        [address, entry]: [Register; 2],
        find: impl FnOnce(&mut Self),
    ) {
        let start = self.asm.len();
        self.undoes();
        let mut fixes = Fixes::default();
        for (index, register) in [Register::RCX, address, entry].into_iter().enumerate() {
            self.asm.store(spill(index), register);
            fixes.spilled[index] = Some(register.number() as u8);
        }
        self.mark(false, fixes);
        self.undoes();
        find(self);
        self.find_entry(table, address, entry, access);
        let hit = self.asm.jrcxz();
        let displacement = self.asm.jmp(self.stubs.exit);
        self.asm.bind_short(hit);
        self.asm.load(Register::RCX, spill(0));
        self.asm.load_mem(entry, plus(entry, 8));
        let guest = self.guest;
        self.misses.push(Missed { displacement, start, address, access, guest, fixes });
    }

    /// Restores the two registers of a look-up, behind the instruction that has used them.
    pub(super) fn give_back(&mut self, [address, entry]: [Register; 2]) {
        self.mark(false, Fixes::default());
        self.asm.load(address, spill(1));
        self.asm.load(entry, spill(2));
    }

    /// The GVA of a memory operand of user code into the first register. The second is lost.
    pub(super) fn user_address(&mut self, insn: &Instruction, [into, base]: [Register; 2]) {
        self.effective_address(insn, into);
        if insn.memory_segment() == Level::User.base_in_fs() {
            self.asm.load(base, slot!(block.percpu));
            self.asm.lea(into, sum(into, base));
        }
    }

    /// `entry` := where the entry for `address` lies; RCX := zero if that allows the access. No flags.
    fn find_entry(&mut self, table: u64, address: Register, entry: Register, access: SoughtAccess) {
        let rcx = Register::RCX;
        let mask = |at: usize| crate::asm::Slot(slot!(block.lookup_masks).0 + at * 8);
        let index = self.asm.slot_operand(mask(INDEX));
        let allowed = self.asm.slot_operand(mask(if access.write { WRITES } else { READS }));
        self.asm.op3(Code::VEX_Pext_r64_r64_rm64, entry, address, index);
        self.asm.lea(entry, sum(entry, entry));
        self.asm.lea_hva(rcx, table);
        self.asm.lea(entry, MemoryOperand::with_base_index_scale(rcx, entry, 8));
        self.asm.load_mem(rcx, plus(entry, 0));
        let last = access.bytes as i64 - 1;
        let scaled = MemoryOperand::with_base_index_scale_displ_size(rcx, address, 1, last, 1);
        self.asm.lea(rcx, scaled);
        self.asm.op3(Code::VEX_Pext_r64_r64_rm64, rcx, rcx, allowed);
    }

    /// From the last mark on, the state before the instruction can be restored from anywhere.
    pub(super) fn undoes(&mut self) {
        if let Some(mark) = self.marks.last_mut() {
            *mark = Mark { undoes: true, ..*mark };
        }
    }

    /// What is emitted next belongs to the last instruction again.
    pub(super) fn emit_misses(&mut self) {
        let (last, any) = (self.guest, !self.misses.is_empty());
        for miss in std::mem::take(&mut self.misses) {
            self.miss(&miss);
        }
        if any {
            self.guest = last;
            self.mark(false, Fixes::default());
        }
    }

    /// Leaves for a look-up that has missed.
    fn miss(&mut self, miss: &Missed) {
        self.guest = miss.guest;
        self.asm.bind(miss.displacement);
        self.mark(false, miss.fixes);
        self.undoes();
        self.asm.store(slot!(exit.operand), miss.address);
        for (index, register) in miss.fixes.spilled.iter().enumerate() {
            if let Some(number) = register {
                self.asm.load(crate::asm::register((*number).into()), spill(index));
            }
        }
        self.asm.store_constant(slot!(block.jump), self.request.host + miss.start as u64);
        let info = miss.access.bytes as u64 | if miss.access.write { LOOKUP_WRITE } else { 0 };
        self.exit(
            BlockExit::Lookup,
            info as u32,
            self.request.guest.wrapping_add(miss.guest.into()),
        );
    }
}

/// The instruction, with its memory operand at the sum of two registers.
pub(super) fn at_sum(insn: &Instruction, [base, index]: [Register; 2]) -> Instruction {
    let mut changed = *insn;
    changed.set_memory_base(base);
    changed.set_memory_index(index);
    changed.set_memory_index_scale(1);
    changed.set_memory_displ_size(0);
    changed.set_memory_displacement64(0);
    changed.set_segment_prefix(Register::None);
    changed
}

/// The access of an instruction that has one, to a memory operand, and may be looked up. With `all`, the stack and what is relative to
/// FS may be, too.
fn access(insn: &Instruction, all: bool) -> Option<SoughtAccess> {
    let may = is_addressed(insn) && (all || !is_near(insn));
    may.then(|| access_of_operand(insn))?
}

/// The access of an instruction of which one operand is in memory, if it may be looked up.
pub(super) fn access_of_operand(insn: &Instruction) -> Option<SoughtAccess> {
    if is_special(insn) {
        return None;
    }
    let mut factory = InstructionInfoFactory::new();
    let info = factory.info(insn);
    let [used] = info.used_memory() else { return None };
    let write = match used.access() {
        OpAccess::Read | OpAccess::CondRead => false,
        OpAccess::Write | OpAccess::CondWrite | OpAccess::ReadWrite | OpAccess::ReadCondWrite => {
            true
        }
        OpAccess::None | OpAccess::NoMemAccess => return None,
    };
    let bytes = insn.memory_size().size();
    (1..=WIDEST).contains(&bytes).then_some(SoughtAccess { bytes, write })
}

/// One memory operand, addressed by 64-bit registers, by RIP or by nothing.
pub(super) fn is_addressed(insn: &Instruction) -> bool {
    let operands = (0..insn.op_count()).filter(|at| insn.op_kind(*at) == OpKind::Memory).count();
    let wide = |r: Register| r == Register::None || r.is_gpr64();
    operands == 1
        && (wide(insn.memory_base()) || insn.is_ip_rel_memory_operand())
        && wide(insn.memory_index())
}

/// The operand is addressed as the stack is, or as what is each thread's own.
fn is_near(insn: &Instruction) -> bool {
    let (base, index) = (insn.memory_base(), insn.memory_index());
    base == Register::RSP
        || (base, index) == (Register::None, Register::None)
        || insn.memory_segment() == Level::User.base_in_fs()
}

/// Bit strings reach beyond their operand, and x87 instructions note its address.
fn is_special(insn: &Instruction) -> bool {
    use CpuidFeature::{FPU, FPU287, FPU387};
    let notes = |feature: &CpuidFeature| matches!(feature, FPU | FPU287 | FPU387);
    is_bit_string(insn) || insn.cpuid_features().iter().any(notes)
}

/// The instruction accesses a bit that may be far beyond its operand.
pub(super) fn is_bit_string(insn: &Instruction) -> bool {
    let bits =
        matches!(insn.mnemonic(), Mnemonic::Bt | Mnemonic::Bts | Mnemonic::Btr | Mnemonic::Btc);
    bits && insn.op1_kind() == OpKind::Register
}
