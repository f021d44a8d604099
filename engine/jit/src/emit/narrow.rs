//! Translates the code of 32-bit guests to 64-bit code that does the same.
//!
//! Each of the guest's eight registers is the lower half of a host register. The upper half is always zero, since a write to the lower
//! half clears the upper one. The host's other eight registers are scratch. Memory operands keep their 32-bit addresses, so a sum of
//! more than 32 bits wraps, as on the guest's CPU.
//!
//! While the guest kernel's code runs, the host's GS base is 4 GiB less than the bias of 64-bit kernels
//! ([`wedge_abi::Base::narrow_bias`]). So an address in the last GiB leads to the HVA where the last GiB of a 64-bit kernel would be.
//! While a program's code runs, the GS base is zero.

use super::{
    Emitter,
    lookup::{access_of_operand, at_sum},
    memory::{flat_operand, on_narrow_stack},
    segment::{half, selector_slot},
    string::{Pointers, pointers},
};
use crate::{
    asm::{register, slot, spill, sum},
    recover::{Bias, Fixes},
    rules::{Level, Rule, narrow, own_segment},
    translate::Flow,
};
use iced_x86::{Code, Instruction, MemoryOperand, OpKind, Register};
use wedge_abi::{BlockExit, NARROW_STRING_BIASES, SegmentLoad};
use x86::narrow::KERNEL_START;

/// Scratch.
const ADDRESS: Register = Register::R8;
const BIAS: Register = Register::R9;
const MASK: Register = Register::R10;
/// What makes an address one that the host refuses, or zero.
const BEYOND: Register = Register::R11;
/// Bytes of a word that is pushed.
const WORD: i64 = 4;

impl Emitter<'_> {
    /// Emits what the rule for an instruction of 32-bit code says.
    pub(super) fn apply_narrow(
        &mut self,
        insn: &Instruction,
        bytes: &[u8],
        follower: Option<Rule>,
    ) -> Flow {
        match narrow(insn, self.layout.level) {
            Rule::Copy => self.put_narrow(insn, insn),
            Rule::Memory if self.ac && !on_narrow_stack(insn) => self.narrow_either(insn),
            Rule::Memory if self.narrow_looked_up(insn) => Flow::On,
            Rule::Memory => self.narrow_flat(insn),
            Rule::PerCpu => self.narrow_of_own(insn),
            Rule::Push => self.push_narrow(insn),
            Rule::Pop => self.pop_narrow(insn),
            Rule::Leave => self.leave_narrow(),
            Rule::PushFlags => self.push_narrow_flags(),
            Rule::PopFlags => self.pop_narrow_flags(insn),
            Rule::SetInterrupts(false) => self.clear_interrupts(),
            Rule::SetInterrupts(true) => self.set_interrupts(insn, follower),
            Rule::SetAlignment(on) => self.set_alignment(insn, on),
            Rule::String if self.layout.level == Level::User => self.put_narrow(insn, insn),
            Rule::String => self.narrow_string(insn),
            Rule::Call => {
                self.push_narrow_return(insn);
                self.jump(insn)
            }
            Rule::CallIndirect => self.narrow_computed(insn, true),
            Rule::JumpIndirect => self.narrow_computed(insn, false),
            Rule::Jump => self.jump(insn),
            Rule::Conditional => self.conditional(insn),
            Rule::Return => self.narrow_return(insn),
            Rule::ReadSelector => self.read_selector(insn),
            Rule::ReadControl => self.read_control(insn),
            Rule::Iret => self.leave_for(BlockExit::IretNarrow, insn.ip()),
            Rule::InvalidatePage => self.invalidate_narrow_page(insn),
            Rule::LoadSegment => self.load_narrow_segment(insn),
            Rule::EnterSystem => self.exit_before(insn, BlockExit::EnterSystem),
            Rule::ExitSystem => self.exit_before(insn, BlockExit::ExitSystem),
            Rule::SoftwareInterrupt => self.interrupt(insn),
            Rule::Pause => self.pause(insn, bytes),
            Rule::ReadTime => self.read_time(),
            _ => self.call_out(insn),
        }
    }

    /// Emits an instruction as 64-bit code; in place of one that 64-bit code does not have `insn` is interpreted.
    fn put_narrow(&mut self, insn: &Instruction, changed: &Instruction) -> Flow {
        let mut changed = *changed;
        changed.set_code(wide_code(changed.code()));
        if self.asm.try_put(&changed) { Flow::On } else { self.call_out(insn) }
    }

    /// A memory operand in a flat segment.
    fn narrow_flat(&mut self, insn: &Instruction) -> Flow {
        let mut changed = *insn;
        changed.set_segment_prefix(Register::GS);
        self.put_narrow(insn, &changed)
    }

    /// Emits an instruction of kernel code with its memory operand looked up, if that is asked for and can be; if not, nothing.
    fn narrow_looked_up(&mut self, insn: &Instruction) -> bool {
        let is_sought = self.request.sought >> (self.guest % 64) & 1 == 1;
        // Code that is stopped in a look-up begins the instruction again, as if an interrupt could be taken before.
        let may = is_sought && !self.is_shadowed;
        let Some(table) = self.layout.lookups.filter(|_| may) else { return false };
        let Some(access) = access_of_operand(insn).filter(|_| !insn.is_vsib()) else {
            return false;
        };
        let pair = [ADDRESS, BIAS];
        let mut changed = at_sum(insn, pair);
        changed.set_code(wide_code(changed.code()));
        let Some(address) = address_of_operand(insn) else { return false };
        let can = self.asm.can_put(&address) && self.asm.can_put(&changed);
        if can {
            self.look_up_operand(table, access, pair, |e| e.asm.put(&address));
            self.asm.put(&changed);
        }
        can
    }

    /// An instruction inside STAC..CLAC with an operand in memory, which may be a program's or the kernel's. A program's address is the
    /// HVA, and the bias is added to the kernel's.
    fn narrow_either(&mut self, insn: &Instruction) -> Flow {
        if insn.is_vsib() || !self.narrow_address(insn) {
            return self.call_out(insn);
        }
        self.narrow_bias(ADDRESS, BIAS);
        self.put_narrow(insn, &at_sum(insn, [ADDRESS, BIAS]))
    }

    /// An instruction with an operand in the segment of the CPU's or the thread's own. Threads have memory below the segment's base: base
    /// plus offset is more than 32 bits then, and wraps. The host's CPU would not wrap what it adds to a base.
    fn narrow_of_own(&mut self, insn: &Instruction) -> Flow {
        if insn.is_vsib() || !self.narrow_own_address(insn) {
            return self.call_out(insn);
        }
        let mut changed = at_sum(insn, [ADDRESS, Register::None]);
        changed.set_segment_prefix(Register::GS);
        self.put_narrow(insn, &changed)
    }

    /// Loads the address of such an operand into [`ADDRESS`]; false if it cannot be encoded, or is certain to fault. Where there is no segment, or
    /// the operand goes beyond its end, the address becomes one that the host refuses.
    fn narrow_own_address(&mut self, insn: &Instruction) -> bool {
        let last = insn.memory_size().size().max(1) as i64 - 1;
        let is_fixed = [insn.memory_base(), insn.memory_index()] == [Register::None; 2];
        let ends = is_fixed && insn.memory_displacement64() as u32 as i64 + last > u32::MAX.into();
        if ends || !self.narrow_address(insn) {
            return false;
        }
        let beyond = (!is_fixed && last > 0).then_some(BEYOND);
        if let Some(beyond) = beyond {
            self.asm.lea(beyond, MemoryOperand::with_base_displ(ADDRESS, last));
            self.asm.mov_imm(MASK, 32);
            self.asm.op3(Code::VEX_Shrx_r64_rm64_r64, beyond, beyond, MASK);
            self.asm.rorx(beyond, beyond, 64 - wedge_abi::POISON.trailing_zeros());
        }
        self.add_narrow_base();
        if let Some(beyond) = beyond {
            self.asm.lea(ADDRESS, sum(ADDRESS, beyond));
        }
        true
    }

    /// Adds the base of that segment to [`ADDRESS`].
    fn add_narrow_base(&mut self) {
        self.asm.load(BIAS, slot!(block.percpu));
        self.asm.lea(ADDRESS, sum(ADDRESS, BIAS));
        // The base is below 4 GiB, or it is `wedge_abi::NOWHERE`: what is above 33 bits stays.
        self.asm.mov_imm(MASK, !(1 << 32));
        self.asm.op3(Code::VEX_Pext_r64_r64_rm64, BIAS, ADDRESS, MASK);
        self.asm.op3(Code::VEX_Pdep_r64_r64_rm64, ADDRESS, BIAS, MASK);
    }

    /// The 32-bit address of the instruction's memory operand into [`ADDRESS`]; false if it cannot be encoded.
    fn narrow_address(&mut self, insn: &Instruction) -> bool {
        address_of_operand(insn).is_some_and(|lea| self.asm.try_put(&lea))
    }

    /// `bias` := what has to be added to `address`, which may be the kernel's or the user's. No flags; [`MASK`] is lost.
    fn narrow_bias(&mut self, address: Register, bias: Register) {
        // One if the address is the kernel's, since that much carries it out of 32 bits.
        let up = (1 << 32) - KERNEL_START as i64;
        self.asm.lea(bias, MemoryOperand::with_base_displ(address, up));
        self.asm.mov_imm(MASK, 32);
        self.asm.op3(Code::VEX_Shrx_r64_rm64_r64, bias, bias, MASK);
        // All ones, or none.
        self.asm.lea(bias, MemoryOperand::with_base_displ(bias, -1));
        self.asm.reg1(Code::Not_rm64, bias);
        self.asm.mov_imm(MASK, self.layout.narrow_bias());
        self.asm.op3(Code::VEX_Pdep_r64_r64_rm64, bias, bias, MASK);
    }

    fn invalidate_narrow_page(&mut self, insn: &Instruction) -> Flow {
        if !self.narrow_address(insn) {
            return self.call_out(insn);
        }
        self.asm.store(slot!(exit.operand), ADDRESS);
        self.exit_before(insn, BlockExit::InvalidatePage)
    }

    fn interrupt(&mut self, insn: &Instruction) -> Flow {
        self.asm.store_constant(slot!(exit.operand), insn.immediate8().into());
        self.exit_before(insn, BlockExit::SoftwareInterrupt)
    }

    /// Has the wedge load a data segment register: it looks the selector's descriptor up.
    fn load_narrow_segment(&mut self, insn: &Instruction) -> Flow {
        let pops = insn.op_count() == 1;
        let load = if !pops && insn.op1_kind() == OpKind::Register {
            let half = half(insn.op1_register());
            Instruction::with2(Code::Movzx_r32_rm16, Register::R8D, half)
        } else {
            let from = if pops { narrow_stack(0) } else { flat_operand(insn, Register::GS) };
            Instruction::with2(Code::Movzx_r32_rm16, Register::R8D, from)
        };
        let is_elsewhere = !pops && insn.op1_kind() == OpKind::Memory && !on_narrow_stack(insn);
        let may = !(self.ac && is_elsewhere);
        if !may || !load.is_ok_and(|load| self.asm.try_put(&load)) {
            return self.call_out(insn);
        }
        let load = SegmentLoad { register: insn.op0_register().number() as u64, pops };
        self.asm.lea(ADDRESS, MemoryOperand::with_base_displ(ADDRESS, load.encode() as i64));
        self.asm.store(slot!(exit.operand), ADDRESS);
        self.exit_before(insn, BlockExit::LoadSegment)
    }

    fn push_narrow(&mut self, insn: &Instruction) -> Flow {
        let top = narrow_stack(-WORD);
        match insn.code() {
            Code::Push_r32 => self.store_narrow(top, insn.op0_register()),
            _ if insn.op0_register().is_segment_register() => {
                self.asm.load(ADDRESS, selector_slot(insn.op0_register()));
                // Of a doubleword only the lower half is written (SDM vol. 2, PUSH).
                let store = Instruction::with2(Code::Mov_rm16_r16, top, Register::R8W);
                self.asm.put(&store.expect("mov m16, r16"));
            }
            Code::Push_rm32 => {
                if !self.load_narrow(insn, Register::R8D) {
                    return self.call_out(insn);
                }
                self.store_narrow(top, Register::R8D);
            }
            _ => self.store_narrow_imm(top, insn.immediate(0) as u32),
        }
        self.move_narrow_stack(-WORD);
        Flow::On
    }

    fn pop_narrow(&mut self, insn: &Instruction) -> Flow {
        if insn.op0_kind() == OpKind::Memory {
            return self.pop_narrow_to_memory(insn);
        }
        let into = insn.op0_register();
        self.load_narrow_from(into, narrow_stack(0));
        if into != Register::ESP {
            self.move_narrow_stack(WORD);
        }
        Flow::On
    }

    /// An address by ESP is one by what ESP is behind the instruction.
    fn pop_narrow_to_memory(&mut self, insn: &Instruction) -> Flow {
        let by_stack = on_narrow_stack(insn);
        if self.ac && !by_stack {
            return self.call_out(insn);
        }
        let mut to = *insn;
        if by_stack {
            to.set_memory_displ_size(4);
            let displacement = insn.memory_displacement64().wrapping_add(WORD as u64);
            to.set_memory_displacement64(displacement & 0xffff_ffff);
        }
        let to = flat_operand(&to, Register::GS);
        match Instruction::with2(Code::Mov_rm32_r32, to, Register::R8D) {
            Ok(store) if self.asm.can_put(&store) => {
                self.load_narrow_from(Register::R8D, narrow_stack(0));
                self.asm.put(&store);
                self.move_narrow_stack(WORD);
                Flow::On
            }
            _ => self.call_out(insn),
        }
    }

    fn leave_narrow(&mut self) -> Flow {
        self.load_narrow_from(Register::R8D, narrow_at(Register::EBP, 0));
        self.lea_narrow(Register::ESP, MemoryOperand::with_base_displ(Register::EBP, WORD));
        self.asm.mov(Register::RBP, Register::R8);
        Flow::On
    }

    fn push_narrow_return(&mut self, insn: &Instruction) {
        let next = insn.next_ip() & 0xffff_ffff;
        self.returns = Some(next);
        self.store_narrow_imm(narrow_stack(-WORD), next as u32);
        self.move_narrow_stack(-WORD);
    }

    /// An indirect jump, or a call. The target is loaded before anything changes.
    fn narrow_computed(&mut self, insn: &Instruction, calls: bool) -> Flow {
        if !self.load_narrow(insn, Register::R8D) {
            return self.call_out(insn);
        }
        if calls {
            self.push_narrow_return(insn);
        }
        self.look_up_narrow();
        Flow::Ends
    }

    fn narrow_return(&mut self, insn: &Instruction) -> Flow {
        let arguments = if insn.op_count() == 1 { i64::from(insn.immediate16()) } else { 0 };
        self.load_narrow_from(Register::R8D, narrow_stack(0));
        self.move_narrow_stack(WORD + arguments);
        self.look_up_narrow();
        Flow::Ends
    }

    /// Jumps to the block for the GVA in [`ADDRESS`], by a search: blocks of 32-bit code have no landings.
    fn look_up_narrow(&mut self) {
        self.asm.store(spill(0), Register::RAX);
        self.asm.mov(Register::RAX, ADDRESS);
        self.asm.store(spill(1), Register::RCX);
        self.jump_by(match self.layout.level {
            Level::Kernel if !self.ac => self.stubs.astray,
            _ => self.stubs.indirect[usize::from(self.ac)],
        });
    }

    /// Loads the operand of an indirect branch or a PUSH; false if it may be the user's or cannot be encoded.
    fn load_narrow(&mut self, insn: &Instruction, into: Register) -> bool {
        if insn.op0_kind() == OpKind::Register {
            self.asm.mov(into.full_register(), insn.op0_register().full_register());
            return true;
        }
        if insn.memory_segment() == own_segment(self.layout.level) {
            let can = self.narrow_own_address(insn);
            if can {
                self.load_narrow_from(into, narrow_at(ADDRESS, 0));
            }
            return can;
        }
        if self.ac && !on_narrow_stack(insn) {
            return false;
        }
        let memory = flat_operand(insn, Register::GS);
        let load = Instruction::with2(Code::Mov_r32_rm32, into, memory);
        load.is_ok_and(|load| self.asm.try_put(&load))
    }

    fn load_narrow_from(&mut self, into: Register, memory: MemoryOperand) {
        let load = Instruction::with2(Code::Mov_r32_rm32, into, memory);
        self.asm.put(&load.expect("mov r32, m32"));
    }

    fn store_narrow(&mut self, memory: MemoryOperand, register: Register) {
        let store = Instruction::with2(Code::Mov_rm32_r32, memory, register);
        self.asm.put(&store.expect("mov m32, r32"));
    }

    fn store_narrow_imm(&mut self, memory: MemoryOperand, value: u32) {
        let store = Instruction::with2(Code::Mov_rm32_imm32, memory, value);
        self.asm.put(&store.expect("mov m32, imm32"));
    }

    fn lea_narrow(&mut self, into: Register, memory: MemoryOperand) {
        let lea = Instruction::with2(Code::Lea_r32_m, into, memory);
        self.asm.put(&lea.expect("lea r32, m"));
    }

    /// ESP += `bytes`, without flags.
    fn move_narrow_stack(&mut self, bytes: i64) {
        self.lea_narrow(Register::ESP, MemoryOperand::with_base_displ(Register::ESP, bytes));
    }

    fn push_narrow_flags(&mut self) -> Flow {
        self.load_flags(&mut Fixes::default(), ADDRESS, BIAS);
        self.store_narrow(narrow_stack(-WORD), Register::R8D);
        self.move_narrow_stack(-WORD);
        Flow::On
    }

    fn pop_narrow_flags(&mut self, insn: &Instruction) -> Flow {
        self.pop_flags_by(
            insn,
            |e| e.load_narrow_from(Register::EAX, narrow_stack(0)),
            |e| e.move_narrow_stack(WORD),
        )
    }

    /// The pointers have what is added taken off again behind the instruction, and what it has carried out of 32 bits.
    fn narrow_string(&mut self, insn: &Instruction) -> Flow {
        let Some((wide, pointers)) = wide_string(insn) else { return self.call_out(insn) };
        if !self.asm.can_put(&wide) {
            return self.call_out(insn);
        }
        let [of_esi, of_edi] = NARROW_STRING_BIASES.map(|number| register(number.into()));
        let used = [
            (pointers.source, Register::RSI, of_esi),
            (pointers.destination, Register::RDI, of_edi),
        ];
        let used = || used.into_iter().filter(|(used, ..)| *used);
        for (_, pointer, bias) in used() {
            match self.ac {
                true => self.narrow_bias(pointer, bias),
                false => self.asm.mov_imm(bias, self.layout.narrow_bias()),
            }
        }
        let mut fixes = Fixes::default();
        for (_, pointer, bias) in used() {
            self.asm.lea(pointer, sum(pointer, bias));
            *fix(&mut fixes, pointer) = Some(Bias::Register(bias.number() as u8));
            self.mark(false, fixes);
        }
        self.asm.put(&wide);
        for (_, pointer, bias) in used() {
            self.take_off_narrow(pointer, bias);
            *fix(&mut fixes, pointer) = None;
            self.mark(false, fixes);
        }
        Flow::On
    }

    /// `pointer -= bias`, to 32 bits and without flags. The bias register is lost.
    fn take_off_narrow(&mut self, pointer: Register, bias: Register) {
        self.asm.reg1(Code::Not_rm64, bias);
        let one_more = MemoryOperand::with_base_index_scale_displ_size(pointer, bias, 1, 1, 1);
        self.lea_narrow(Register::EAX + pointer.number() as u32, one_more);
    }
}

/// What loads the 32-bit address of an instruction's memory operand into [`ADDRESS`].
fn address_of_operand(insn: &Instruction) -> Option<Instruction> {
    let memory = flat_operand(insn, Register::None);
    Instruction::with2(Code::Lea_r32_m, Register::R8D, memory).ok()
}

fn fix(fixes: &mut Fixes, pointer: Register) -> &mut Option<Bias> {
    if pointer == Register::RSI { &mut fixes.rsi } else { &mut fixes.rdi }
}

/// `gs:[base + displacement]`, by as many bits as the base has.
fn narrow_at(base: Register, displacement: i64) -> MemoryOperand {
    let size = u32::from(displacement != 0);
    MemoryOperand::new(base, Register::None, 1, displacement, size, false, Register::GS)
}

/// The kernel's stack.
fn narrow_stack(displacement: i64) -> MemoryOperand {
    narrow_at(Register::ESP, displacement)
}

/// The form of an instruction that 64-bit code has, for any memory operand.
fn wide_code(code: Code) -> Code {
    match code {
        Code::Inc_r16 => Code::Inc_rm16,
        Code::Inc_r32 => Code::Inc_rm32,
        Code::Dec_r16 => Code::Dec_rm16,
        Code::Dec_r32 => Code::Dec_rm32,
        Code::Mov_AL_moffs8 => Code::Mov_r8_rm8,
        Code::Mov_AX_moffs16 => Code::Mov_r16_rm16,
        Code::Mov_EAX_moffs32 => Code::Mov_r32_rm32,
        Code::Mov_moffs8_AL => Code::Mov_rm8_r8,
        Code::Mov_moffs16_AX => Code::Mov_rm16_r16,
        Code::Mov_moffs32_EAX => Code::Mov_rm32_r32,
        code => code,
    }
}

/// The string instruction by 64-bit pointers, and which of them it uses.
fn wide_string(insn: &Instruction) -> Option<(Instruction, Pointers)> {
    let mut wide = *insn;
    wide.set_segment_prefix(Register::None);
    for operand in 0..insn.op_count() {
        match insn.op_kind(operand) {
            OpKind::MemorySegESI => wide.set_op_kind(operand, OpKind::MemorySegRSI),
            OpKind::MemoryESEDI => wide.set_op_kind(operand, OpKind::MemoryESRDI),
            _ => {}
        }
    }
    let pointers = pointers(&wide)?;
    Some((wide, pointers))
}
