//! The fixed routines at the start of the code cache: entry, exit and indirect jumps.
//!
//! They lie at fixed distances so that blocks can jump to them before anything is linked.

use crate::{
    Layout, Level,
    asm::{Assembler, gpr, plus, register, slot, spill, sum},
};
use iced_x86::{Code, MemoryOperand, Register};
use wedge_abi::{BlockExit, COMPUTED, TABLE_SLOTS, kernel_key};

/// Bytes reserved for the routines.
pub const LEN: u64 = 4096;
/// Bytes for one of them.
const ROUTINE: u64 = 512;
/// Slots of the searched table that share one copy of the code for a hit. A short jump, which reaches 127 bytes, leads
/// from each to that copy.
const PROBES: usize = 4;
/// Bytes for what an unlinked jump points at. All those of a cache lie together at its end, from the first jump's downwards: they
/// are hardly ever executed, and would be half of what the CPU has to fetch beside what is.
pub const MISSED_LEN: u64 = 36;
const _: () = assert!(wedge_abi::DEEP_REACH.is_multiple_of(PROBES));

/// HVAs of the routines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stubs {
    /// `extern "C" fn()`: loads the guest's registers and jumps to `BlockState::jump`; returns
    /// when translated code exits. FS base and GS base keep the values of translated code after the return. The
    /// wedge uses neither, and each write of a base takes 10 ns. A caller that uses them saves them first.
    pub enter: u64,
    /// Stores the guest's registers and goes on with `leave`.
    pub exit: u64,
    /// Returns to the caller of `enter`; whoever jumps here has stored the guest's registers.
    pub leave: u64,
    /// Jumps to the block for the GVA in RAX (the guest's RAX is in spill slot 0), for the
    /// virtual AC clear and set.
    pub indirect: [u64; 2],
    /// The same, but no block is found: for those that are to run alone.
    pub alone: u64,
    /// Leaves for want of a block that a direct jump leads to; what the jump points at has stored RIP and which jump it is.
    pub missed: u64,
    /// Where a computed jump comes if what it has found is another address's: searches, or leaves. The GVA is in RAX, and the guest's RAX
    /// and RCX are in the first two spill slots.
    pub astray: u64,
}

impl Stubs {
    /// Where the routines are.
    pub fn of(layout: &Layout) -> Self {
        let at = |n: u64| layout.cache + n * ROUTINE;
        let indirect = [at(3), at(4)];
        Self {
            enter: at(0),
            exit: at(1),
            leave: at(2),
            indirect,
            alone: at(5),
            missed: at(6),
            astray: at(7),
        }
    }
}

/// Byte offsets, in the first of the tables of user code, of the key (the negated GVA) and the value (the HVA) for a GVA.
pub fn table_slot(guest: u64) -> (usize, usize) {
    let slot = (guest as usize & (TABLE_SLOTS - 1)) * 16;
    (slot, slot + 8)
}

/// The routines' code, [`LEN`] bytes.
pub fn generate(layout: &Layout) -> Vec<u8> {
    let stubs = Stubs::of(layout);
    let mut all = Vec::with_capacity(LEN as usize);
    let routines = [
        enter(layout, stubs.enter),
        exit(layout, &stubs),
        leave(layout, stubs.leave),
        indirect(layout, &stubs, false),
        indirect(layout, &stubs, true),
        alone(layout, &stubs),
        missed(layout, &stubs),
        astray(layout, &stubs),
    ];
    for mut code in routines {
        assert!(code.len() <= ROUTINE as usize, "a routine outgrew its place");
        code.resize(ROUTINE as usize, 0xcc);
        all.append(&mut code);
    }
    all.resize(LEN as usize, 0xcc);
    all
}

const SAVED: [Register; 6] =
    [Register::RBX, Register::RBP, Register::R12, Register::R13, Register::R14, Register::R15];

fn enter(layout: &Layout, at: u64) -> Vec<u8> {
    let mut a = Assembler::new(*layout, at);
    for r in SAVED {
        a.reg1(Code::Push_r64, r);
    }
    a.store(slot!(block.host_rsp), Register::RSP);
    a.load(Register::RAX, slot!(block.bias));
    a.reg1(Code::Wrgsbase_r64, Register::RAX);
    a.load(Register::RAX, slot!(block.percpu));
    a.reg1(Code::Wrfsbase_r64, Register::RAX);
    a.push_slot(slot!(block.host_flags));
    a.op(Code::Popfq);
    for index in 0..16 {
        a.load(register(index), gpr(index));
    }
    a.jmp_slot(slot!(block.jump));
    a.finish()
}

fn exit(layout: &Layout, stubs: &Stubs) -> Vec<u8> {
    let mut a = Assembler::new(*layout, stubs.exit);
    for index in 0..16 {
        a.store(gpr(index), register(index));
    }
    a.load(Register::RSP, slot!(block.host_rsp));
    a.op(Code::Pushfq);
    a.pop_slot(slot!(block.host_flags));
    a.jmp(stubs.leave);
    a.finish()
}

fn leave(layout: &Layout, at: u64) -> Vec<u8> {
    let mut a = Assembler::new(*layout, at);
    a.load(Register::RSP, slot!(block.host_rsp));
    a.op(Code::Cld);
    for r in SAVED.into_iter().rev() {
        a.reg1(Code::Pop_r64, r);
    }
    a.op(Code::Retnq);
    a.finish()
}

fn indirect(layout: &Layout, stubs: &Stubs, ac: bool) -> Vec<u8> {
    let mut a = Assembler::new(*layout, stubs.indirect[usize::from(ac)]);
    a.store(spill(1), Register::RCX);
    match (layout.level, layout.landings) {
        (Level::User, _) => look_up(&mut a, stubs),
        (Level::Kernel, Some(landings)) if !ac => a.land(landings),
        (Level::Kernel, _) => search_or_miss(&mut a, stubs, kernel_key(0, ac)),
    }
    a.finish()
}

fn astray(layout: &Layout, stubs: &Stubs) -> Vec<u8> {
    let mut a = Assembler::new(*layout, stubs.astray);
    match layout.level {
        Level::Kernel => search_or_miss(&mut a, stubs, 0),
        Level::User => {
            a.load(Register::RCX, spill(1));
            miss(&mut a, stubs);
        }
    }
    a.finish()
}

/// Jumps to the block whose key is the GVA in RAX and `mark`, or leaves for want of one. RCX has been put aside.
fn search_or_miss(a: &mut Assembler, stubs: &Stubs, mark: u64) {
    a.store(spill(2), Register::RDX);
    add_to_target(a, mark);
    search(a);
    add_to_target(a, mark.wrapping_neg());
    a.load(Register::RDX, spill(2));
    a.load(Register::RCX, spill(1));
    miss(a, stubs);
}

/// Adds a constant to RAX without flags. RCX is lost.
fn add_to_target(a: &mut Assembler, mark: u64) {
    if mark != 0 {
        a.mov_imm(Register::RCX, mark);
        a.lea(Register::RAX, sum(Register::RAX, Register::RCX));
    }
}

/// Jumps to the block of user code for the GVA in RAX, if it is in the first table. Two addresses can be in each other's way there. The wedge
/// searches then, as it knows which page of RAM is meant. No flag is touched: a key is compared by
/// adding the address to its stored negation, which makes zero if they are equal.
fn look_up(a: &mut Assembler, stubs: &Stubs) {
    let (target, at, word) = (Register::RAX, Register::RDX, Register::RCX);
    let table = a.layout().table;
    a.store(spill(2), at);
    a.mov(at, target);
    a.zero_extend_word(at);
    a.lea(at, sum(at, at));
    a.lea_hva(word, table);
    a.lea(at, MemoryOperand::with_base_index_scale(word, at, 8));
    a.load_mem(word, plus(at, 0));
    a.lea(word, sum(word, target));
    let hit = a.jrcxz();
    let missed = a.jmp_short();
    a.bind_short(hit);
    a.load_mem(word, plus(at, 8));
    jump_to_found(a);
    a.bind_short(missed);
    a.load(at, spill(2));
    a.load(word, spill(1));
    miss(a, stubs);
}

fn alone(layout: &Layout, stubs: &Stubs) -> Vec<u8> {
    let mut a = Assembler::new(*layout, stubs.alone);
    miss(&mut a, stubs);
    a.finish()
}

/// Leaves for want of a block for the GVA in RAX.
fn miss(a: &mut Assembler, stubs: &Stubs) {
    a.store(slot!(regs.rip), Register::RAX);
    a.load(Register::RAX, spill(0));
    let info = if a.layout().level == Level::User { COMPUTED } else { 0 };
    a.store_imm(slot!(exit.info), info as i32);
    a.store_imm(slot!(exit.kind), BlockExit::Miss as i32);
    a.jmp(stubs.exit);
}

fn missed(layout: &Layout, stubs: &Stubs) -> Vec<u8> {
    let mut a = Assembler::new(*layout, stubs.missed);
    a.store_imm(slot!(exit.kind), BlockExit::Miss as i32);
    a.jmp(stubs.exit);
    a.finish()
}

/// Jumps to the HVA in RCX with the registers of the guest. A block for a place restores the last two itself, when it has seen that it
/// is meant.
fn jump_to_found(a: &mut Assembler) {
    a.store(slot!(block.jump), Register::RCX);
    a.load(Register::RDX, spill(2));
    if a.layout().origins.is_none() {
        a.load(Register::RCX, spill(1));
        a.load(Register::RAX, spill(0));
    }
    a.jmp_slot(slot!(block.jump));
}

/// Jumps to the block whose key is in RAX if it is in the table that is searched; goes on if not. RCX
/// and RDX are lost.
fn search(a: &mut Assembler) {
    let (target, at, word) = (Register::RAX, Register::RDX, Register::RCX);
    let deep = a.layout().table + wedge_abi::DEEP as u64;
    a.mov_imm(at, wedge_abi::DEEP_FACTOR);
    a.op3(Code::VEX_Mulx_r64_r64_rm64, word, at, target);
    a.mov_imm(word, wedge_abi::DEEP_SHIFT.into());
    a.op3(Code::VEX_Shrx_r64_rm64_r64, at, at, word);
    a.lea(at, sum(at, at));
    a.lea_hva(word, deep);
    a.lea(at, MemoryOperand::with_base_index_scale(word, at, 8));
    for _ in 0..wedge_abi::DEEP_REACH / PROBES {
        let hits = [(); PROBES].map(|()| probe(a));
        let missed = a.jmp_short();
        hits.into_iter().for_each(|hit| a.bind_short(hit));
        a.load_mem(word, plus(at, 8));
        jump_to_found(a);
        a.bind_short(missed);
    }
}

/// Compares the key of the slot at HVA RDX with RAX. If they are equal, takes the short jump whose place is
/// returned. If not, adds the length of a slot to RDX. RCX is lost.
fn probe(a: &mut Assembler) -> usize {
    let (target, at, word) = (Register::RAX, Register::RDX, Register::RCX);
    a.load_mem(word, plus(at, 0));
    a.reg1(Code::Not_rm64, word);
    a.lea(word, MemoryOperand::with_base_index_scale_displ_size(word, target, 1, 1, 1));
    let hit = a.jrcxz();
    a.lea(at, plus(at, 16));
    hit
}
