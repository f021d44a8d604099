//! Random instructions and random states to run them in.

use iced_x86::{
    Code, Decoder, DecoderOptions, Encoder, EncodingKind, Instruction, Mnemonic,
    OpCodeOperandKind as K, OpKind, Register,
};
use x86::fpu::FpuState;

use crate::oracle::{INSTRUCTION_ADDRESS, MEMORY, MEMORY_ADDRESS, State};

/// An instruction and the state it starts in.
pub struct Case {
    pub insn: Instruction,
    pub bytes: Vec<u8>,
    pub before: State,
}

impl Case {
    /// The effective address of the memory operand; without one, that of the memory.
    pub fn memory_address(&self) -> u64 {
        let value = |register: Register, _, _| match register {
            r if r.is_gpr() => self.before.gpr.get(r.number()).copied(),
            _ => Some(0),
        };
        let operand = self.insn.op_kinds().position(|kind| kind == OpKind::Memory);
        operand
            .and_then(|operand| self.insn.virtual_address(operand as u32, 0, value))
            .unwrap_or(MEMORY_ADDRESS)
    }
}

/// A xorshift generator: the same cases on every run.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
    pub fn below(&mut self, n: u64) -> u64 {
        (self.next() >> 32) % n
    }
    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }
    fn chance(&mut self, one_in: u64) -> bool {
        self.below(one_in) == 0
    }
}

/// A random case for `code`; `None` if it has operands this generator does not make.
pub fn case(code: Code, random: &mut Random) -> Option<Case> {
    let op_code = code.op_code();
    if !op_code.is_instruction()
        || !op_code.mode64()
        || !matches!(op_code.encoding(), EncodingKind::Legacy | EncodingKind::VEX)
    {
        return None;
    }
    let mut gpr = [0; 16];
    gpr.fill_with(|| general_value(random));
    for _ in 0..20 {
        let Some(insn) = instruction(code, &mut gpr, random) else { continue };
        let mut encoder = Encoder::new(64);
        if encoder.encode(&insn, INSTRUCTION_ADDRESS).is_err() {
            continue;
        }
        let bytes = encoder.take_buffer();
        let ip = INSTRUCTION_ADDRESS;
        let insn = Decoder::with_ip(64, &bytes, ip, DecoderOptions::NONE).decode();
        if insn.code() != code {
            continue;
        }
        let mut memory = [0; MEMORY];
        for part in memory.chunks_mut(64) {
            fill(part, random);
        }
        let rflags = random.next() & x86::flags::STATUS | x86::flags::FIXED;
        let mut before = State { fpu: fpu(random), gpr, memory, rflags };
        adapt(&insn, &mut before, random);
        return Some(Case { insn, bytes, before });
    }
    None
}

fn instruction(code: Code, gpr: &mut [u64; 16], random: &mut Random) -> Option<Instruction> {
    let mut insn = Instruction::default();
    insn.set_code(code);
    for (i, &kind) in code.op_code().op_kinds().iter().enumerate() {
        let i = i as u32;
        let number = random.below(16) as u32;
        match kind {
            K::mem => memory_operand(&mut insn, i, gpr, random),
            K::r8_or_mem
            | K::r16_or_mem
            | K::r32_or_mem
            | K::r64_or_mem
            | K::mm_or_mem
            | K::xmm_or_mem
            | K::ymm_or_mem
                if random.chance(2) =>
            {
                memory_operand(&mut insn, i, gpr, random);
            }
            K::mem_vsib32x | K::mem_vsib64x | K::mem_vsib32y | K::mem_vsib64y => {
                gather_operand(&mut insn, kind, gpr, random);
                insn.set_op_kind(i, OpKind::Memory);
            }
            K::seg_rDI => {
                insn.set_op_kind(i, OpKind::MemorySegRDI);
                gpr[7] = insn_target(random);
            }
            K::imm8 => {
                insn.set_op_kind(i, OpKind::Immediate8);
                insn.set_immediate8(random.next() as u8);
            }
            _ => {
                let register = register(kind, number)?;
                insn.set_op_kind(i, OpKind::Register);
                insn.set_op_register(i, register);
            }
        }
    }
    Some(insn)
}

fn register(kind: K, number: u32) -> Option<Register> {
    Some(match kind {
        K::r8_or_mem | K::r8_reg => Register::AL + number,
        K::r16_or_mem | K::r16_reg | K::r16_rm => Register::AX + number,
        K::r32_or_mem | K::r32_reg | K::r32_rm | K::r32_vvvv => Register::EAX + number,
        K::r64_or_mem | K::r64_reg | K::r64_rm | K::r64_vvvv => Register::RAX + number,
        K::mm_or_mem | K::mm_reg | K::mm_rm => Register::MM0 + number % 8,
        K::xmm_or_mem | K::xmm_reg | K::xmm_rm | K::xmm_vvvv | K::xmm_is4 => {
            Register::XMM0 + number
        }
        K::ymm_or_mem | K::ymm_reg | K::ymm_rm | K::ymm_vvvv | K::ymm_is4 => {
            Register::YMM0 + number
        }
        K::ax => Register::AX,
        K::st0 => Register::ST0,
        K::sti_opcode => Register::ST0 + number % 8,
        _ => return None,
    })
}

/// An address for a memory operand: usually the start of the memory; sometimes not aligned, or so
/// near its end that the access may cross into the page that is not mapped.
fn insn_target(random: &mut Random) -> u64 {
    match random.below(16) {
        0 => MEMORY_ADDRESS + random.below(64),
        1 => MEMORY_ADDRESS + MEMORY as u64 - random.below(80),
        _ => MEMORY_ADDRESS,
    }
}

/// One of the addressing forms, with register values that make it point to the buffer.
fn memory_operand(insn: &mut Instruction, operand: u32, gpr: &mut [u64; 16], random: &mut Random) {
    let target = insn_target(random);
    insn.set_op_kind(operand, OpKind::Memory);
    insn.set_memory_displ_size(8);
    let displacement = u64::from(random.next() as u32 >> random.below(31)).wrapping_sub(200);
    let displacement = displacement as i32 as i64 as u64;
    let base = random.below(16) as usize;
    match random.below(4) {
        0 => {
            insn.set_memory_base(Register::RIP);
            insn.set_memory_displacement64(target);
        }
        1 => {
            insn.set_memory_base(Register::RAX + base as u32);
            insn.set_memory_displacement64(displacement);
            gpr[base] = target.wrapping_sub(displacement);
        }
        _ => {
            let index = [0, 1, 2, 3, 5, 8, 12, 15][random.below(8) as usize];
            let base = if base == index { (base + 1) % 16 } else { base };
            let scale = 1 << random.below(4);
            insn.set_memory_base(Register::RAX + base as u32);
            insn.set_memory_index(Register::RAX + index as u32);
            insn.set_memory_index_scale(scale);
            insn.set_memory_displacement64(displacement);
            let scaled = gpr[index].wrapping_mul(u64::from(scale));
            gpr[base] = target.wrapping_sub(displacement).wrapping_sub(scaled);
        }
    }
}

/// A gather's memory operand; the index register's contents come with the state.
fn gather_operand(insn: &mut Instruction, kind: K, gpr: &mut [u64; 16], random: &mut Random) {
    let wide = matches!(kind, K::mem_vsib32y | K::mem_vsib64y);
    let first = if wide { Register::YMM0 } else { Register::XMM0 };
    let base = random.below(16) as usize;
    insn.set_memory_base(Register::RAX + base as u32);
    insn.set_memory_index(first + random.below(16) as u32);
    insn.set_memory_index_scale(1 << random.below(4));
    insn.set_memory_displ_size(1);
    insn.set_memory_displacement64(0x40);
    gpr[base] = MEMORY_ADDRESS + 0x100;
}

/// Contents that the instruction does not refuse, most of the time.
fn adapt(insn: &Instruction, state: &mut State, random: &mut Random) {
    use Mnemonic as M;
    match insn.mnemonic() {
        M::Xsave
        | M::Xsave64
        | M::Xsaveopt
        | M::Xsaveopt64
        | M::Xrstor
        | M::Xrstor64
        | M::Xsetbv => {
            // The host has more components than the guest.
            state.gpr[0] &= 7;
            state.gpr[2] &= 0xffff_ffff_0000_0000;
        }
        _ => {}
    }
    if insn.is_vsib() {
        let index = insn.memory_index().number();
        let small = |random: &mut Random| (random.below(0x40) as i8 as u8, random.below(40) == 0);
        let size = if insn.vsib() == Some(true) { 8 } else { 4 };
        let fpu = &mut state.fpu;
        for half in [&mut fpu.xmm[index], &mut fpu.ymm_high[index]] {
            half.fill(0);
            for lane in half.chunks_mut(size) {
                let (value, far) = small(random);
                lane[0] = value;
                lane[2] = if far { 1 } else { 0 };
            }
        }
    }
    if random.chance(8) {
        return;
    }
    match insn.mnemonic() {
        M::Fxrstor | M::Fxrstor64 | M::Ldmxcsr | M::Vldmxcsr | M::Xrstor | M::Xrstor64 => {
            for offset in [0, 24] {
                state.memory[offset + 2..offset + 4].fill(0);
            }
            state.memory[512..576].fill(0);
            state.memory[512] = random.below(8) as u8;
        }
        _ => {}
    }
}

fn fpu(random: &mut Random) -> FpuState {
    let mut fpu = FpuState::default();
    let mode = random.below(3);
    fpu.mxcsr = random.next() as u32 & 0xffff;
    fpu.fcw = random.next() as u16 & 0x0f3f | 0x40;
    if mode != 0 {
        fpu.mxcsr |= 0x1f80;
        fpu.fcw |= 0x3f;
    }
    // An exception is pending in some cases.
    fpu.fsw = random.next() as u16 & 0x7f40;
    if random.chance(4) {
        fpu.fsw |= random.next() as u16 & 0x3f;
    }
    if fpu.fsw & !fpu.fcw & 0x3f != 0 {
        fpu.fsw |= 0x8080;
    }
    let tags = random.next() as u8;
    fpu.ftw = random.pick(&[0, 0xff, tags]);
    fpu.fop = random.next() as u16 & 0x7ff;
    fpu.fip = 0x1111_2222;
    fpu.fdp = 0x3333_4444;
    for i in 0..16 {
        fill(&mut fpu.xmm[i], random);
        fill(&mut fpu.ymm_high[i], random);
    }
    for i in 0..8 {
        let value = extended(random);
        fpu.st[i][..10].copy_from_slice(&value);
    }
    fpu
}

fn general_value(random: &mut Random) -> u64 {
    match random.below(4) {
        0 => random.below(70),
        1 => random.next() as u32 as u64,
        2 => random.next() as i16 as u64,
        _ => random.next(),
    }
}

/// Fills with floating-point numbers of all kinds, or just bits.
fn fill(bytes: &mut [u8], random: &mut Random) {
    if random.chance(4) {
        // The same interesting values in both operands of an operation.
        bytes.fill(random.pick(&[0, 0xff, 0x80, 0x01]));
        return;
    }
    let kind = random.below(4);
    for chunk in bytes.chunks_mut(16) {
        match kind {
            0 => {
                for lane in chunk.chunks_mut(4) {
                    lane.copy_from_slice(&single(random).to_le_bytes()[..lane.len()]);
                }
            }
            1 => {
                for lane in chunk.chunks_mut(8) {
                    lane.copy_from_slice(&double(random).to_le_bytes()[..lane.len()]);
                }
            }
            2 => chunk[..10].copy_from_slice(&extended(random)),
            _ => {
                for lane in chunk.chunks_mut(8) {
                    lane.copy_from_slice(&random.next().to_le_bytes()[..lane.len()]);
                }
            }
        }
    }
}

fn single(random: &mut Random) -> u32 {
    const VALUES: [u32; 14] = [
        0,
        0x3f80_0000,
        0x4000_0000,
        0x7f80_0000,
        0x7fc0_1234,
        0x7f80_0001,
        1,
        0x007f_ffff,
        0x0080_0000,
        0x7f7f_ffff,
        0x4f00_0000,
        0x4b00_0001,
        0x3eaa_aaab,
        0x2000_0000,
    ];
    let value = if random.chance(3) { random.next() as u32 } else { random.pick(&VALUES) };
    value ^ (random.next() as u32 & 0x8000_0000)
}

fn double(random: &mut Random) -> u64 {
    const VALUES: [u64; 16] = [
        0,
        0x3ff0_0000_0000_0000,
        0x4000_0000_0000_0000,
        0x7ff0_0000_0000_0000,
        0x7ff8_0000_0000_1234,
        0x7ff0_0000_0000_0001,
        1,
        0x000f_ffff_ffff_ffff,
        0x0010_0000_0000_0000,
        0x7fef_ffff_ffff_ffff,
        0x41e0_0000_0000_0000,
        0x4330_0000_0000_0001,
        0x3fd5_5555_5555_5555,
        0x36a0_0000_0000_0000,
        0x3810_0000_0000_0000,
        0x2000_0000_0000_0000,
    ];
    let value = if random.chance(3) { random.next() } else { random.pick(&VALUES) };
    value ^ (random.next() & 1 << 63)
}

fn extended(random: &mut Random) -> [u8; 10] {
    const EXPONENTS: [u16; 10] =
        [0, 1, 0x3fff, 0x4000, 0x403e, 0x7ffe, 0x7fff, 0x3c01, 0x43ff, 0x3f81];
    const FRACTIONS: [u64; 8] = [
        0,
        1 << 63,
        u64::MAX,
        1,
        0x8000_0000_0000_0001,
        0xc000_0000_0000_0000,
        0xaaaa_aaaa_aaaa_aaaa,
        0x7fff_ffff_ffff_ffff,
    ];
    let exponent = if random.chance(3) { random.next() as u16 } else { random.pick(&EXPONENTS) };
    let fraction = if random.chance(3) { random.next() | 1 << 63 } else { random.pick(&FRACTIONS) };
    let mut bytes = [0; 10];
    bytes[..8].copy_from_slice(&fraction.to_le_bytes());
    bytes[8..].copy_from_slice(&(exponent ^ (random.next() as u16 & 0x8000)).to_le_bytes());
    bytes
}
