//! The sequences, one file per kind of instruction.

mod branch;
mod check;
mod control;
mod flags;
mod gate;
mod landing;
mod lookup;
mod memory;
mod narrow;
mod segment;
mod stack;
mod string;
mod tap;
mod vectors;

use crate::{
    Layout,
    asm::{Assembler, register, slot, spill},
    block::{Block, JumpLookup, Link},
    recover::{Fixes, Mark},
    rules::{Rule, rule},
    stubs::{MISSED_LEN, Stubs},
    translate::{Flow, Request},
};
use iced_x86::{Instruction, InstructionInfoFactory, Register};
use wedge_abi::BlockExit;

/// What an instruction means to interrupts around the next one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Shadow {
    /// Nothing.
    #[default]
    None,
    /// It is STI: none is taken before the next one. Behind it they are looked for.
    Checked,
    /// It is STI, and they have been looked for before it.
    Unchecked,
}

/// Builds one block.
pub(crate) struct Emitter<'a> {
    pub asm: Assembler,
    layout: &'a Layout,
    request: &'a Request<'a>,
    stubs: Stubs,
    marks: Vec<Mark>,
    links: Vec<Link>,
    lookups: Vec<JumpLookup>,
    /// Look-ups in the software TLB, whose misses are emitted at the end.
    misses: Vec<lookup::Missed>,
    /// Checks of accesses. The code for those that are refused is emitted at the end.
    refused: Vec<check::Refusal>,
    /// Displacements of the jumps of the gate, whose exit is emitted at the end.
    gates: Vec<usize>,
    /// Offset of the code behind the gate or the landing.
    body: u32,
    /// Where a call at the end will return to.
    returns: Option<u64>,
    /// Offset of the current guest instruction.
    guest: u32,
    /// The virtual RFLAGS.AC here.
    ac: bool,
    /// What the instruction just emitted means to the next one.
    shadow: Shadow,
    /// No interrupt is taken before the current instruction.
    is_shadowed: bool,
    /// The tap at the first instruction, whose exit is emitted at the end.
    tapped: Option<tap::Tapped>,
}

impl<'a> Emitter<'a> {
    pub fn new(layout: &'a Layout, request: &'a Request<'a>) -> Self {
        Self {
            asm: Assembler::new(*layout, request.host),
            layout,
            request,
            stubs: Stubs::of(layout),
            marks: Vec::new(),
            links: Vec::new(),
            lookups: Vec::new(),
            misses: Vec::new(),
            refused: Vec::new(),
            gates: Vec::new(),
            body: 0,
            returns: None,
            guest: 0,
            ac: request.ac,
            shadow: Shadow::None,
            is_shadowed: false,
            tapped: None,
        }
    }

    /// Emits one guest instruction.
    pub fn instruction(
        &mut self,
        insn: &Instruction,
        bytes: &[u8],
        follower: Option<Rule>,
    ) -> Flow {
        self.guest = insn.ip().wrapping_sub(self.request.guest) as u32;
        let shadow = std::mem::take(&mut self.shadow);
        self.is_shadowed = shadow != Shadow::None;
        // Between a tap and its instruction nothing else comes: it would be recorded again.
        let boundary = !self.is_shadowed && (self.guest != 0 || self.tapped.is_none());
        self.mark(boundary, Fixes::default());
        let flow = match self.request.narrow {
            true => self.apply_narrow(insn, bytes, follower),
            false => self.apply(rule(insn, self.layout.level), insn, bytes, follower),
        };
        if shadow == Shadow::Checked && flow == Flow::On {
            self.check_pending(insn.next_ip());
        }
        flow
    }

    fn apply(
        &mut self,
        rule: Rule,
        insn: &Instruction,
        bytes: &[u8],
        follower: Option<Rule>,
    ) -> Flow {
        if self.is_out_of_reach(insn) {
            return self.call_out(insn);
        }
        if self.layout.checks {
            if matches!(rule, Rule::Memory | Rule::PerCpu) && self.looked_up(insn) {
                return Flow::On;
            }
            if !self.check(rule, insn) {
                return self.call_out(insn);
            }
        }
        match rule {
            Rule::Copy => self.copy(bytes),
            Rule::Memory => self.memory(insn, bytes),
            Rule::PerCpu => self.per_cpu(insn, bytes),
            Rule::LoadAddress => self.load_address(insn),
            Rule::Push => self.push(insn),
            Rule::Pop => self.pop(insn),
            Rule::Leave => self.leave(),
            Rule::PushFlags => self.push_flags(),
            Rule::PopFlags => self.pop_flags(insn),
            Rule::SetInterrupts(false) => self.clear_interrupts(),
            Rule::SetInterrupts(true) => self.set_interrupts(insn, follower),
            Rule::SetAlignment(on) => self.set_alignment(insn, on),
            Rule::String => self.string(insn, bytes),
            Rule::Call => self.call(insn),
            Rule::CallIndirect => self.call_indirect(insn, bytes),
            Rule::Jump => self.jump(insn),
            Rule::JumpIndirect => self.jump_indirect(insn, bytes),
            Rule::Conditional => self.conditional(insn),
            Rule::Return => self.ret(insn),
            Rule::SwapGs => self.swap_gs(follower),
            Rule::ReadSelector => self.read_selector(insn),
            Rule::StoreSelector => self.store_selector(insn),
            Rule::LoadSelector => self.load_selector(insn),
            Rule::ReadControl => self.read_control(insn),
            Rule::LoadSpace => self.load_space(insn),
            Rule::InvalidatePage => self.invalidate_page(insn),
            Rule::ReadTime => self.read_time(),
            Rule::SystemCall => self.system_call(insn),
            Rule::SaveVectors => self.save_vectors(insn),
            Rule::LoadVectors => self.load_vectors(insn),
            Rule::MoveVectors => self.move_vectors(insn, bytes),
            Rule::ReadBase => self.read_base(insn),
            Rule::WriteBase => self.write_base(insn),
            Rule::Sysret => self.leave_for(BlockExit::Sysret, insn.ip()),
            Rule::SysretNarrow => self.leave_for(BlockExit::SysretNarrow, insn.ip()),
            Rule::Iret => self.leave_for(BlockExit::Iret, insn.ip()),
            Rule::Pause => self.pause(insn, bytes),
            // 32-bit code's.
            Rule::LoadSegment | Rule::EnterSystem | Rule::SoftwareInterrupt | Rule::ExitSystem => {
                self.call_out(insn)
            }
            Rule::CallOut => self.call_out(insn),
        }
    }

    fn copy(&mut self, bytes: &[u8]) -> Flow {
        self.asm.raw(bytes);
        Flow::On
    }

    /// From here on, host bytes belong to the current guest instruction with these fixes.
    fn mark(&mut self, boundary: bool, fixes: Fixes) {
        let host = self.asm.len() as u32;
        self.marks.push(Mark { host, guest: self.guest, boundary, fixes, undoes: false });
    }

    /// Puts a guest register aside. `fixes` gathers it.
    fn put_aside(&mut self, fixes: &mut Fixes, index: usize, register: Register) {
        self.asm.store(spill(index), register);
        fixes.spilled[index] = Some(register.number() as u8);
        self.mark(false, *fixes);
    }

    /// Leaves translated code with RIP at `guest`.
    fn exit(&mut self, kind: BlockExit, info: u32, guest: u64) {
        self.asm.store_constant(slot!(regs.rip), guest);
        self.asm.store_constant(slot!(exit.info), info.into());
        self.asm.store_imm(slot!(exit.kind), kind as i32);
        self.asm.jmp(self.stubs.exit);
    }

    /// Has the instruction interpreted; the exit's detail is its code.
    fn call_out(&mut self, insn: &Instruction) -> Flow {
        self.exit(BlockExit::CallOut, insn.code() as u32, insn.ip());
        Flow::Ends
    }

    /// Has the wedge do the instruction at `guest`.
    fn leave_for(&mut self, kind: BlockExit, guest: u64) -> Flow {
        self.exit(kind, 0, guest);
        Flow::Ends
    }

    /// The displacement behind an opcode of so many bytes is one that is changed while others may execute it.
    fn keep_in_one_word(&mut self, opcode: u64) {
        if self.layout.several {
            self.asm.keep_in_one_word(opcode);
        }
    }

    /// Falls through to the instruction at `guest`.
    pub fn go_on(&mut self, guest: u64) {
        self.keep_in_one_word(1);
        let displacement = self.asm.jmp(self.stubs.exit);
        self.link(displacement, guest, true);
    }

    /// Notes a direct jump to `target`, taken `always` or at times; its stub is emitted at the end.
    fn link(&mut self, displacement: usize, target: u64, always: bool) {
        let ac = self.ac;
        let displacement = displacement as u32;
        self.links.push(Link { displacement, target, ac, always });
    }

    /// Jumps to the block for the GVA in RAX: by its landing, or by the routine that looks it up. Each landing is jumped to from the place
    /// itself: the CPU foresees where a jump leads, and best if it leads there each time.
    fn look_up(&mut self) {
        let ac = self.ac;
        if let Some(landings) = self.layout.landings.filter(|_| !ac && !self.request.on_trial) {
            self.asm.store(spill(1), Register::RCX);
            return self.asm.land(landings);
        }
        self.jump_by(self.stubs.indirect[usize::from(ac)]);
    }

    /// Jumps to a routine that looks up the block for the GVA in RAX.
    fn jump_by(&mut self, routine: u64) {
        let displacement = self.asm.jmp(routine) as u32;
        self.lookups.push(JumpLookup { displacement, routine });
    }

    /// Two registers the instruction does not use, other than RSP.
    fn scratch(&self, insn: &Instruction) -> [Register; 2] {
        self.scratch_but(insn, &[])
    }

    /// The same, and none of those that are spared either.
    fn scratch_but(&self, insn: &Instruction, spared: &[Register]) -> [Register; 2] {
        let mut factory = InstructionInfoFactory::new();
        let info = factory.info(insn);
        let used =
            |r: Register| info.used_registers().iter().any(|u| u.register().full_register() == r);
        let mut free = (0..16)
            .map(register)
            .filter(|r| *r != Register::RSP && !spared.contains(r) && !used(*r));
        let mut take = || free.next().unwrap_or(Register::None);
        [take(), take()]
    }

    /// Points each link at a stub of its own, which leaves for the monitor to find the block. Returns the stubs.
    fn unlinked(&mut self) -> Vec<u8> {
        let len = self.links.len() as u64 * MISSED_LEN;
        let mut stubs = Assembler::new(*self.layout, self.request.stubs.wrapping_sub(len));
        for link in self.links.iter().rev() {
            let displacement = link.displacement as usize;
            self.asm.bind_to(displacement, stubs.here());
            let site = self.request.cache_offset + link.displacement;
            stubs.store_constant(slot!(regs.rip), link.target);
            stubs.store_constant(slot!(exit.info), site.into());
            stubs.jmp(self.stubs.missed);
            stubs.fill(MISSED_LEN as usize);
        }
        stubs.finish()
    }

    /// The block, ending before guest address `end`. So many of the bytes were `read`.
    pub fn finish(mut self, end: u64, read: usize) -> Block {
        self.emit_misses();
        self.emit_refusals();
        self.emit_gates();
        self.emit_tap();
        let stubs = self.unlinked();
        Block {
            guest: self.request.guest,
            guest_len: end.wrapping_sub(self.request.guest) as u32,
            read: read as u32,
            ac: self.request.ac,
            host: self.request.host,
            code: self.asm.finish(),
            stubs,
            marks: self.marks,
            links: self.links,
            lookups: self.lookups,
            body: self.body,
            returns: self.returns.map(|guest| (guest, self.ac)),
        }
    }
}
