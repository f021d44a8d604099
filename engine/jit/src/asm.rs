//! A thin assembler over iced's encoder: host instructions at known host addresses.

use crate::Layout;
use iced_x86::{Code, Encoder, IcedError, Instruction, MemoryOperand, Register};
use wedge_abi::LANDING_SHIFT;

const INT3: u8 = 0xcc;

/// A word of the [`wedge_abi::VcpuPage`], by its byte offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot(pub usize);

/// Names the slot of a vCPU page's field.
macro_rules! slot {
    ($($field:tt)+) => { $crate::asm::Slot(core::mem::offset_of!(wedge_abi::VcpuPage, $($field)+)) };
}
pub(crate) use slot;

/// The `index`-th spill slot.
pub fn spill(index: usize) -> Slot {
    Slot(slot!(block.spill).0 + index * 8)
}

/// The slot where an exit stores general register `index`.
pub fn gpr(index: usize) -> Slot {
    Slot(slot!(regs.gpr).0 + index * 8)
}

/// The 64-bit general register with an encoding number.
pub fn register(index: usize) -> Register {
    Register::RAX + index as u32
}

/// Collects code that will lie at a host address.
pub struct Assembler {
    encoder: Encoder,
    layout: Layout,
    /// HVA of the first byte.
    base: u64,
    bytes: Vec<u8>,
}

impl Assembler {
    /// Code that will lie at HVA `base`.
    pub fn new(layout: Layout, base: u64) -> Self {
        Self { encoder: Encoder::new(64), layout, base, bytes: Vec::with_capacity(256) }
    }

    /// Where things are.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// HVA of the next byte.
    pub fn here(&self) -> u64 {
        self.base + self.bytes.len() as u64
    }

    /// Bytes emitted so far.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Nothing emitted yet.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The code.
    pub fn finish(self) -> Vec<u8> {
        self.bytes
    }

    /// Emits bytes as they are.
    pub fn raw(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Emits an instruction.
    ///
    /// # Panics
    /// If it cannot be encoded: sequences are built from forms that can.
    pub fn put(&mut self, insn: &Instruction) {
        if let Err(error) = self.encode(insn) {
            panic!("unencodable host instruction {insn}: {error}");
        }
    }

    /// Emits an instruction taken from the guest and changed; false (and nothing emitted) if the
    /// change made it unencodable.
    #[must_use]
    pub fn try_put(&mut self, insn: &Instruction) -> bool {
        let len = self.len();
        let done = self.encode(insn).is_ok();
        if !done {
            self.bytes.truncate(len);
        }
        done
    }

    /// The instruction can be encoded.
    pub fn can_put(&mut self, insn: &Instruction) -> bool {
        let len = self.len();
        let can = self.try_put(insn);
        self.bytes.truncate(len);
        can
    }

    /// The encoder has the bytes for that time: it writes behind them.
    fn encode(&mut self, insn: &Instruction) -> Result<usize, IcedError> {
        let at = self.here();
        self.encoder.set_buffer(std::mem::take(&mut self.bytes));
        let done = self.encoder.encode(insn, at);
        self.bytes = self.encoder.take_buffer();
        done
    }

    fn field(&self, slot: Slot) -> MemoryOperand {
        let address = self.layout.vcpu_page + slot.0 as u64;
        MemoryOperand::with_base_displ(Register::RIP, address as i64)
    }

    fn with1(&mut self, code: Code, a: impl Into<Operand>) {
        let insn = match a.into() {
            Operand::Register(r) => Instruction::with1(code, r),
            Operand::Memory(m) => Instruction::with1(code, m),
        };
        self.put(&insn.expect("a one-operand form"));
    }

    /// `mov slot, register`
    pub fn store(&mut self, slot: Slot, register: Register) {
        let insn = Instruction::with2(Code::Mov_rm64_r64, self.field(slot), register);
        self.put(&insn.expect("mov m64, r64"));
    }

    /// `mov register, slot`
    pub fn load(&mut self, register: Register, slot: Slot) {
        let insn = Instruction::with2(Code::Mov_r64_rm64, register, self.field(slot));
        self.put(&insn.expect("mov r64, m64"));
    }

    /// `mov register, qword` at an HVA near the code.
    pub fn load_hva(&mut self, register: Register, hva: u64) {
        let word = MemoryOperand::with_base_displ(Register::RIP, hva as i64);
        self.load_mem(register, word);
    }

    /// `mov register, word slot`; the rest of the register stays.
    pub fn load_half(&mut self, register: Register, slot: Slot) {
        let insn = Instruction::with2(Code::Mov_r16_rm16, register, self.field(slot));
        self.put(&insn.expect("mov r16, m16"));
    }

    /// `mov qword slot, value` for a value that sign-extends from 32 bits.
    pub fn store_imm(&mut self, slot: Slot, value: i32) {
        let insn = Instruction::with2(Code::Mov_rm64_imm32, self.field(slot), value);
        self.put(&insn.expect("mov m64, imm32"));
    }

    /// Stores a constant of any size to a slot, without a register.
    pub fn store_constant(&mut self, slot: Slot, value: u64) {
        if let Ok(small) = i32::try_from(value as i64) {
            self.store_imm(slot, small);
            return;
        }
        for (at, half) in [(slot.0, value as u32), (slot.0 + 4, (value >> 32) as u32)] {
            let insn = Instruction::with2(Code::Mov_rm32_imm32, self.field(Slot(at)), half);
            self.put(&insn.expect("mov m32, imm32"));
        }
    }

    /// `mov register, value`, in the shortest form.
    pub fn mov_imm(&mut self, register: Register, value: u64) {
        let insn = if i32::try_from(value as i64).is_ok() {
            Instruction::with2(Code::Mov_rm64_imm32, register, value as i32)
        } else {
            Instruction::with2(Code::Mov_r64_imm64, register, value)
        };
        self.put(&insn.expect("mov r64, imm"));
    }

    /// `mov to, from`
    pub fn mov(&mut self, to: Register, from: Register) {
        let insn = Instruction::with2(Code::Mov_r64_rm64, to, from);
        self.put(&insn.expect("mov r64, r64"));
    }

    /// `mov register, memory`
    pub fn load_mem(&mut self, register: Register, memory: MemoryOperand) {
        let insn = Instruction::with2(Code::Mov_r64_rm64, register, memory);
        self.put(&insn.expect("mov r64, m64"));
    }

    /// `mov memory, register`
    pub fn store_mem(&mut self, memory: MemoryOperand, register: Register) {
        let insn = Instruction::with2(Code::Mov_rm64_r64, memory, register);
        self.put(&insn.expect("mov m64, r64"));
    }

    /// `mov qword memory, value` for a value that sign-extends from 32 bits.
    pub fn store_mem_imm(&mut self, memory: MemoryOperand, value: i32) {
        let insn = Instruction::with2(Code::Mov_rm64_imm32, memory, value);
        self.put(&insn.expect("mov m64, imm32"));
    }

    /// `lea register, memory`: addition without flags.
    pub fn lea(&mut self, register: Register, memory: MemoryOperand) {
        let insn = Instruction::with2(Code::Lea_r64_m, register, memory);
        self.put(&insn.expect("lea r64, m"));
    }

    /// `lea register, [rip + ...]` of an HVA.
    pub fn lea_hva(&mut self, register: Register, hva: u64) {
        self.lea(register, MemoryOperand::with_base_displ(Register::RIP, hva as i64));
    }

    /// `rorx to, from, bits`: rotation without flags.
    pub fn rorx(&mut self, to: Register, from: Register, bits: u32) {
        let insn = Instruction::with3(Code::VEX_Rorx_r64_rm64_imm8, to, from, bits);
        self.put(&insn.expect("rorx r64, r64, imm8"));
    }

    /// The register keeps its low 16 bits: `movzx r32, r16`.
    pub fn zero_extend_word(&mut self, register: Register) {
        let number = register.number() as u32;
        let (wide, word) = (Register::EAX + number, Register::AX + number);
        let insn = Instruction::with2(Code::Movzx_r32_rm16, wide, word);
        self.put(&insn.expect("movzx r32, r16"));
    }

    /// Jumps to the landing that may be that of the GVA in RAX. RCX is lost.
    pub fn land(&mut self, landings: u64) {
        let near = landings.wrapping_sub(self.layout.bias) as i64;
        let (slot, gs) = (Register::RCX, Register::GS);
        self.rorx(slot, Register::RAX, LANDING_SHIFT);
        self.zero_extend_word(slot);
        let memory = MemoryOperand::new(Register::None, slot, 8, near, 8, false, gs);
        self.with1(Code::Jmp_rm64, memory);
    }

    /// `jmp` to an HVA with a 32-bit displacement; gives the offset of the displacement.
    pub fn jmp(&mut self, hva: u64) -> usize {
        self.raw(&[0xe9]);
        self.displacement(hva)
    }

    /// `jcc` to an HVA with a 32-bit displacement; gives the offset of the displacement.
    pub fn jcc(&mut self, condition: u8, hva: u64) -> usize {
        self.raw(&[0x0f, 0x80 | condition]);
        self.displacement(hva)
    }

    /// Does nothing until the displacement of a jump with so many bytes before it will lie in one aligned word. Such a
    /// one can be changed while other CPUs execute it: they see all of the old one or all of the new.
    pub fn keep_in_one_word(&mut self, opcode: u64) {
        const NOPS: [&[u8]; 4] = [&[], &[0x90], &[0x66, 0x90], &[0x0f, 0x1f, 0x00]];
        let into = (self.here() + opcode) % 8;
        self.raw(NOPS[if into > 4 { 8 - into as usize } else { 0 }]);
    }

    fn displacement(&mut self, hva: u64) -> usize {
        let at = self.bytes.len();
        let distance = hva.wrapping_sub(self.here() + 4) as i32;
        self.raw(&distance.to_le_bytes());
        at
    }

    /// Points a displacement emitted by [`Assembler::jmp`] or [`Assembler::jcc`] here.
    pub fn bind(&mut self, displacement: usize) {
        let distance = (self.bytes.len() - displacement - 4) as i32;
        self.bytes[displacement..displacement + 4].copy_from_slice(&distance.to_le_bytes());
    }

    /// Points a jump at an HVA. The jump is given by its displacement, as [`Assembler::jmp`] or [`Assembler::jcc`] returned it.
    pub fn bind_to(&mut self, displacement: usize, hva: u64) {
        let next = self.base + displacement as u64 + 4;
        let distance = hva.wrapping_sub(next) as i32;
        self.bytes[displacement..displacement + 4].copy_from_slice(&distance.to_le_bytes());
    }

    /// Fills up to a multiple of so many bytes, with what is not executed.
    pub fn fill(&mut self, multiple: usize) {
        self.bytes.resize(self.bytes.len().next_multiple_of(multiple), INT3);
    }

    /// `jrcxz` over what follows until [`Assembler::bind_short`]; no flags.
    pub fn jrcxz(&mut self) -> usize {
        self.raw(&[0xe3, 0]);
        self.bytes.len() - 1
    }

    /// `jmp short`, bound by [`Assembler::bind_short`].
    pub fn jmp_short(&mut self) -> usize {
        self.raw(&[0xeb, 0]);
        self.bytes.len() - 1
    }

    /// Points a short displacement here.
    ///
    /// # Panics
    /// If it is too far.
    pub fn bind_short(&mut self, displacement: usize) {
        let distance = self.bytes.len() - displacement - 1;
        self.bytes[displacement] = i8::try_from(distance).expect("a short jump") as u8;
    }

    /// `jmp qword slot`
    pub fn jmp_slot(&mut self, slot: Slot) {
        let memory = self.field(slot);
        self.with1(Code::Jmp_rm64, memory);
    }

    /// `push slot` on the stack RSP points to.
    pub fn push_slot(&mut self, slot: Slot) {
        let memory = self.field(slot);
        self.with1(Code::Push_rm64, memory);
    }

    /// `pop slot`
    pub fn pop_slot(&mut self, slot: Slot) {
        let memory = self.field(slot);
        self.with1(Code::Pop_rm64, memory);
    }

    /// An instruction with one register operand.
    pub fn reg1(&mut self, code: Code, register: Register) {
        self.with1(code, register);
    }

    /// An instruction with two register operands and a third of either kind.
    pub(crate) fn op3(&mut self, code: Code, to: Register, a: Register, b: impl Into<Operand>) {
        let insn = match b.into() {
            Operand::Register(r) => Instruction::with3(code, to, a, r),
            Operand::Memory(m) => Instruction::with3(code, to, a, m),
        };
        self.put(&insn.expect("a three-operand form"));
    }

    /// The vCPU page slot as an operand.
    pub fn slot_operand(&self, slot: Slot) -> MemoryOperand {
        self.field(slot)
    }

    /// An instruction without operands.
    pub fn op(&mut self, code: Code) {
        self.put(&Instruction::with(code));
    }

    /// HVA of the vCPU page slot.
    pub fn slot_hva(&self, slot: Slot) -> u64 {
        self.layout.vcpu_page + slot.0 as u64
    }
}

pub(crate) enum Operand {
    Register(Register),
    Memory(MemoryOperand),
}

impl From<Register> for Operand {
    fn from(register: Register) -> Self {
        Self::Register(register)
    }
}

impl From<MemoryOperand> for Operand {
    fn from(memory: MemoryOperand) -> Self {
        Self::Memory(memory)
    }
}

/// `gs:[base + displacement]`
pub fn biased(base: Register, displacement: i64) -> MemoryOperand {
    let size = (displacement != 0).into();
    MemoryOperand::new(base, Register::None, 1, displacement, size, false, Register::GS)
}

/// `[base + index]`
pub fn sum(base: Register, index: Register) -> MemoryOperand {
    MemoryOperand::with_base_index(base, index)
}

/// `[base + displacement]`
pub fn plus(base: Register, displacement: i64) -> MemoryOperand {
    MemoryOperand::with_base_displ(base, displacement)
}
