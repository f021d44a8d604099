//! A random stretch of code, a kernel's or a program's, with the state it starts in.

use iced_x86::{
    Code, Decoder, DecoderOptions, Encoder, Instruction, MemoryOperand, Mnemonic, OpKind, Register,
};
use jit::Level;
use oracle::random::Random;
use x86::{flags, reg, seg};

/// Bytes of data. The page before and after are not mapped.
pub const DATA_LEN: u64 = 4 * 4096;

/// Whose code it is, and where its memory lies (GVAs).
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// The kernel's or a program's.
    pub level: Level,
    /// It is 32-bit code.
    pub narrow: bool,
    /// The code page.
    pub code: u64,
    /// The data pages, where absolute operands reach them.
    pub data: u64,
}

impl Place {
    /// A kernel's text and data lie in the top 2 GiB, a program's text wherever.
    pub const fn of(level: Level) -> Self {
        match level {
            Level::Kernel => Self {
                level,
                narrow: false,
                code: 0xffff_ffff_8100_0000,
                data: 0xffff_ffff_8200_0000,
            },
            Level::User => Self { level, narrow: false, code: 0x5555_0000_0000, data: 0x2000_0000 },
        }
    }

    /// The same of a 32-bit guest's, whose kernel has the last GiB.
    pub const fn narrow(level: Level) -> Self {
        match level {
            Level::Kernel => Self { level, narrow: true, code: 0xc100_0000, data: 0xc200_0000 },
            Level::User => Self { level, narrow: true, code: 0x0804_8000, data: 0x2000_0000 },
        }
    }

    /// Bits of the code.
    pub const fn bits(&self) -> u32 {
        if self.narrow { 32 } else { 64 }
    }

    /// The segment that has [`Place::base`].
    pub fn own_segment(&self) -> Register {
        match (self.level, self.narrow) {
            (Level::Kernel, true) | (Level::User, false) => Register::FS,
            _ => Register::GS,
        }
    }

    /// Base of the segment that code finds its CPU's or its thread's own memory by, inside the data.
    pub const fn base(&self) -> u64 {
        self.data + 0x2000
    }

    /// The stack pointer: ESP or RSP.
    fn stack(&self) -> Register {
        if self.narrow { Register::ESP } else { Register::RSP }
    }

    /// As much of a number as an address has bits.
    const fn address(&self, number: u64) -> u64 {
        if self.narrow { number & 0xffff_ffff } else { number }
    }

    fn is_kernel(&self) -> bool {
        self.level == Level::Kernel
    }
}

/// Bytes of the largest XSAVE area the code may write.
const VECTORS_LEN: u64 = 1024;
/// GVA of user pages, reachable inside STAC..CLAC.
pub const USER: u64 = 0x0000_0000_0100_0000;
/// Bytes of user memory.
pub const USER_LEN: u64 = 4096;

/// Bytes of MOV EAX, imm32.
const MOV_LEN: u64 = 5;

/// A case.
#[derive(Clone, Debug)]
pub struct Case {
    /// Where it lies.
    pub place: Place,
    /// Instructions, ending in HLT.
    pub code: Vec<u8>,
    /// General registers.
    pub gpr: [u64; 16],
    /// RFLAGS.
    pub rflags: u64,
    /// XMM0..XMM15.
    pub xmm: [[u8; 16]; 16],
    /// Kernel data, then user data.
    pub memory: Vec<u8>,
    /// Selectors of ES, CS, SS, DS, FS and GS.
    pub selectors: [u16; 6],
    /// The base of FS in kernel code, of GS in a program's; the other is [`Place::base`].
    pub other_base: u64,
    /// The GS base that SWAPGS exchanges.
    pub kernel_gs_base: u64,
    /// TSC_AUX.
    pub tsc_aux: u64,
    /// An interrupt waits for IF.
    pub pending: bool,
}

impl Case {
    /// The case of a seed.
    pub fn random(seed: u64, level: Level) -> Self {
        Self::random_at(seed, Place::of(level))
    }

    /// The case of a seed, at a place.
    pub fn random_at(seed: u64, place: Place) -> Self {
        let mut r = Random::new(seed);
        let mut gpr = [0; 16];
        let registers = if place.narrow { 8 } else { 16 };
        for value in &mut gpr[..registers] {
            *value = interesting(&mut r, &place);
        }
        gpr[reg::RSP] = place.data + 0x1000 + r.below(0x200) * 8;
        let ac = r.below(4) == 0 && place.is_kernel();
        let mut rflags = flags::FIXED | r.bits() & (flags::STATUS | flags::ID);
        rflags |= if r.below(6) == 0 { flags::DF } else { 0 };
        rflags |= if r.below(2) == 0 || !place.is_kernel() { flags::IF } else { 0 };
        rflags |= if ac { flags::AC } else { 0 };
        let mut memory = vec![0; (DATA_LEN + USER_LEN) as usize];
        for word in memory.chunks_exact_mut(8) {
            word.copy_from_slice(&interesting(&mut r, &place).to_le_bytes());
        }
        let mut xmm = [[0; 16]; 16];
        for byte in xmm.iter_mut().flatten() {
            *byte = r.bits() as u8;
        }
        Self {
            place,
            code: code(&mut r, &place, ac),
            gpr,
            rflags,
            xmm,
            memory,
            selectors: selectors(&mut r, &place),
            other_base: pointer(&mut r, &place),
            kernel_gs_base: pointer(&mut r, &place),
            tsc_aux: r.bits() & 0xffff_ffff,
            pending: r.below(3) == 0,
        }
    }

    /// The bases of FS and GS.
    pub fn bases(&self) -> (u64, u64) {
        match self.place.own_segment() {
            Register::GS => (self.other_base, self.place.base()),
            _ => (self.place.base(), self.other_base),
        }
    }

    /// Nothing at `rip` is the CPU's own: the time that RDTSCP has put into registers, and the mask
    /// XSAVE has put into memory, have been overwritten.
    pub fn is_settled(&self, rip: u64) -> bool {
        let mut code = self.decoder();
        !code.iter().any(|insn| match insn.mnemonic() {
            Mnemonic::Rdtscp => [0, MOV_LEN].contains(&rip.wrapping_sub(insn.next_ip())),
            Mnemonic::Xsave64 => rip == insn.next_ip(),
            _ => false,
        })
    }

    /// At `rip` an instruction compares again and again: what the flags are in between is the CPU's affair. Intel's
    /// have them of the last comparison, AMD's those from before the first until it is done.
    pub fn compares_repeatedly(&self, rip: u64) -> bool {
        use Mnemonic::{Cmpsb, Cmpsd, Cmpsq, Cmpsw, Scasb, Scasd, Scasq, Scasw};
        let mut code = self.decoder();
        code.iter().filter(|insn| insn.ip() == rip).any(|insn| {
            let m = insn.mnemonic();
            matches!(m, Cmpsb | Cmpsw | Cmpsd | Cmpsq | Scasb | Scasw | Scasd | Scasq)
        })
    }

    /// Reads the code.
    pub fn decoder(&self) -> Decoder<'_> {
        let place = &self.place;
        Decoder::with_ip(place.bits(), &self.code, place.code, DecoderOptions::NONE)
    }

    /// The code, disassembled.
    pub fn listing(&self) -> String {
        let mut text = String::new();
        for insn in &mut self.decoder() {
            text += &format!("  {:x}: {insn}\n", insn.ip());
        }
        text
    }
}

/// A value at a border, a pointer into one of the windows, or noise.
fn interesting(r: &mut Random, p: &Place) -> u64 {
    let value = match r.below(8) {
        0 => r.pick(&[0, 1, 2, 7, 8, 63, 64, u64::MAX, 1 << 63, (1 << 63) - 1, 0x8000_0000, 0xff]),
        1..=3 => p.data + r.below(DATA_LEN),
        4 => USER + r.below(USER_LEN),
        5 => r.below(64),
        _ => r.bits(),
    };
    p.address(value)
}

/// Any selectors; those of CS and SS with the privilege level.
fn selectors(r: &mut Random, p: &Place) -> [u16; 6] {
    let mut selectors = [0; 6];
    for selector in &mut selectors {
        *selector = r.bits() as u16;
    }
    let privilege = if p.is_kernel() { 0 } else { 3 };
    for segment in [seg::CS, seg::SS] {
        selectors[segment] = selectors[segment] & !3 | privilege;
    }
    selectors
}

/// A canonical address, the kernel's or the user's.
fn pointer(r: &mut Random, p: &Place) -> u64 {
    p.address(r.pick(&[p.data, p.data + 0x1000, p.base(), USER, 0, 1 << 45]))
}

fn code(r: &mut Random, p: &Place, ac: bool) -> Vec<u8> {
    let mut ac = ac;
    let mut code = Vec::new();
    for _ in 0..1 + r.below(7) {
        let at = p.code + code.len() as u64;
        code.extend(instruction(r, p, at, &mut ac));
    }
    code.push(0xf4);
    code
}

/// One encodable instruction, from a template or from random bytes.
fn instruction(r: &mut Random, p: &Place, at: u64, ac: &mut bool) -> Vec<u8> {
    loop {
        let bytes = match r.below(5) {
            0 => template(r, p, at, ac),
            _ => noise(r, p, at),
        };
        if let Some(bytes) = bytes {
            return bytes;
        }
    }
}

/// Random bytes that decode to something, with its memory operand steered.
fn noise(r: &mut Random, p: &Place, at: u64) -> Option<Vec<u8>> {
    let mut bytes = [0u8; 15];
    for byte in &mut bytes {
        *byte = r.bits() as u8;
    }
    steer_opcode(r, p, &mut bytes);
    let mut insn = Decoder::with_ip(p.bits(), &bytes, at, DecoderOptions::NONE).decode();
    if insn.code() == Code::INVALID || unwanted(&insn) {
        return None;
    }
    if (0..insn.op_count()).any(|i| insn.op_kind(i) == OpKind::Memory) {
        steer_memory(r, p, &mut insn);
        return encode(p, &insn, at);
    }
    Some(bytes[..insn.len()].to_vec())
}

/// Prefixes and escapes with the frequency of real code rather than of noise.
fn steer_opcode(r: &mut Random, p: &Place, bytes: &mut [u8; 15]) {
    let mut at = 0;
    let mut put = |byte: u8| {
        bytes[at] = byte;
        at += 1;
    };
    if r.below(10) == 0 {
        let own = if p.own_segment() == Register::FS && p.narrow { 0x64 } else { 0x65 };
        put(r.pick(&[0x66, 0xf2, 0xf3, 0xf0, own, 0x3e]));
    }
    if r.below(2) == 0 && !p.narrow {
        put(0x48 | r.below(8) as u8);
    }
    if r.below(3) == 0 {
        put(0x0f);
    }
}

/// Control transfers and what ends a program too soon come from templates; the rest is what
/// the interpreter must be spared here because it is tested elsewhere.
fn unwanted(insn: &Instruction) -> bool {
    use iced_x86::FlowControl::*;
    use iced_x86::Mnemonic::*;
    !matches!(insn.flow_control(), Next)
        || insn.is_privileged()
        || insn.memory_base() == Register::EIP
        || insn.memory_index_scale() == 0
        || matches!(
            insn.mnemonic(),
            Rdtsc | Rdtscp | Rdrand | Rdseed | Rdpid | Cpuid | Xgetbv | Popfq
        )
        || matches!(
            insn.mnemonic(),
            Xsave
                | Xsave64
                | Xsaveopt
                | Xsaveopt64
                | Ldmxcsr
                | Vldmxcsr
                | Fldcw
                | Fldenv
                | Frstor
                | Fnsave
                | Fnstenv
        )
        || insn.mnemonic() == Mov && insn.op0_register().is_segment_register()
        || insn.cpuid_features().iter().any(|f| format!("{f:?}").contains("AVX"))
}

/// Most memory operands must be valid, or no case gets past its first.
fn steer_memory(r: &mut Random, p: &Place, insn: &mut Instruction) {
    if insn.is_vsib() || (r.below(12) == 0) {
        return;
    }
    let offset = r.below(DATA_LEN - 64) & !if r.below(2) == 0 { 15 } else { 0 };
    let target = if insn.segment_prefix() == p.own_segment() {
        offset.wrapping_sub(p.base() - p.data)
    } else {
        if insn.segment_prefix() != Register::None {
            insn.set_segment_prefix(Register::None);
        }
        p.data + offset
    };
    match r.below(3) {
        // A stack slot.
        0 => {
            insn.set_memory_base(p.stack());
            insn.set_memory_index(Register::None);
            insn.set_memory_displ_size(p.bits() / 8);
            insn.set_memory_displacement64(r.below(0x200));
        }
        // Wherever its registers happen to point.
        1 if insn.memory_base() != Register::RIP => {}
        _ => {
            insn.set_memory_base(Register::None);
            insn.set_memory_index(Register::None);
            insn.set_memory_displ_size(p.bits() / 8);
            insn.set_memory_displacement64(p.address(target));
        }
    }
}

/// What random bytes hardly give.
fn template(r: &mut Random, p: &Place, at: u64, ac: &mut bool) -> Option<Vec<u8>> {
    match r.below(8) {
        0 => Some(flags_and_stack(r)),
        // What only a kernel may do ends a program's case.
        1 | 4 | 5 if !p.is_kernel() && !p.narrow => constructed(r, p, at),
        1 if !p.is_kernel() => narrow(r, p, at),
        1 => {
            *ac = !*ac;
            Some(vec![0x0f, 0x01, if *ac { 0xcb } else { 0xca }])
        }
        2 => Some(string(r, p)),
        3 => Some(transfer(r, p, at)),
        4 if !p.narrow => Some(segments(r)),
        5 if !p.narrow => saved_vectors(r, p, at),
        _ if p.narrow => narrow(r, p, at),
        _ => constructed(r, p, at),
    }
}

fn flags_and_stack(r: &mut Random) -> Vec<u8> {
    match r.below(7) {
        0 => vec![0x9c], // pushfq
        1 => vec![0x9d], // popfq
        2 => vec![0x50 | r.below(8) as u8],
        3 => vec![0x58 | r.below(8) as u8],
        4 => vec![0xc9], // leave
        5 => vec![0xfa], // cli
        _ => vec![0xfb], // sti
    }
}

/// Transfers to the next instruction.
fn transfer(r: &mut Random, p: &Place, at: u64) -> Vec<u8> {
    match r.below(5) {
        0 => vec![0x70 | r.below(16) as u8, 0], // jcc
        1 => vec![0xe8, 0, 0, 0, 0],            // call
        2 => vec![0xe9, 0, 0, 0, 0],            // jmp
        // push, ret; mov eax; jmp or call eax
        3 if p.narrow => with_address(&[0x68], at + 6, &[0xc3]),
        _ if p.narrow => with_address(&[0xb8], at + 7, &[0xff, r.pick(&[0xe0, 0xd0])]),
        // mov rax; jmp or call rax, or push, ret
        _ if !p.is_kernel() => {
            let way = r.pick(&[[0xff, 0xe0], [0xff, 0xd0], [0x50, 0xc3]]);
            [&[0x48, 0xb8], &(at + 12).to_le_bytes()[..], &way].concat()
        }
        3 => with_address(&[0x68], at + 6, &[0xc3]), // push, ret
        // mov rax; jmp or call rax
        _ => with_address(&[0x48, 0xc7, 0xc0], at + 9, &[0xff, r.pick(&[0xe0, 0xd0])]),
    }
}

/// Code around an address of the top 2 GiB, which sign-extends from 32 bits.
fn with_address(before: &[u8], address: u64, after: &[u8]) -> Vec<u8> {
    [before, &(address as u32).to_le_bytes(), after].concat()
}

/// Bases and selectors, read and written.
fn segments(r: &mut Random) -> Vec<u8> {
    let register = r.below(8) as u8;
    match r.below(7) {
        0 => vec![0x0f, 0x01, 0xf8],                        // swapgs
        1 => vec![0xf3, 0x48, 0x0f, 0xae, 0xc0 | register], // rdfsbase
        2 => vec![0xf3, 0x48, 0x0f, 0xae, 0xc8 | register], // rdgsbase
        3 => vec![0xf3, 0x48, 0x0f, 0xae, 0xd0 | register], // wrfsbase
        4 => vec![0xf3, 0x48, 0x0f, 0xae, 0xd8 | register], // wrgsbase
        5 => cleared_selector(r, register),
        // mov r, sreg, of each size
        _ => {
            let operand = 0xc0 | (r.below(6) as u8) << 3 | register;
            r.pick(&[&[0x66][..], &[], &[0x48]]).iter().chain(&[0x8c, operand]).copied().collect()
        }
    }
}

/// MOV of zero to ES, DS, FS or GS, as Linux does; or of whatever the register holds.
fn cleared_selector(r: &mut Random, register: u8) -> Vec<u8> {
    let operand = 0xc0 | r.pick(&[0, 3, 4, 5]) << 3 | register;
    let size = r.pick(&[&[0x66][..], &[], &[0x48]]);
    let clear = if r.below(8) == 0 { vec![] } else { vec![0xb8 | register, 0, 0, 0, 0] };
    [&clear, size, &[0x8e, operand]].concat()
}

/// XSAVE of x87 or SSE state, which both sides know. RDTSCP, of which only TSC_AUX can be compared.
fn saved_vectors(r: &mut Random, p: &Place, at: u64) -> Option<Vec<u8>> {
    if r.below(2) == 0 {
        return Some(vec![0x0f, 0x01, 0xf9, 0xb8, 0, 0, 0, 0, 0xba, 0, 0, 0, 0]);
    }
    let area = p.data + r.below((DATA_LEN - VECTORS_LEN) / 64) * 64 + u64::from(r.below(20) == 0);
    let to = MemoryOperand::with_displ(area, 8);
    let save = Instruction::with1(Code::Xsave64_mem, to).ok()?;
    // mov eax, SSE
    let mut code = vec![0xb8, 2, 0, 0, 0];
    code.extend(encode(p, &save, at + code.len() as u64)?);
    // MXCSR_MASK is the CPU's: mov dword [area + 28], 0
    code.extend(with_address(&[0xc7, 0x04, 0x25], area + 28, &[0; 4]));
    Some(code)
}

/// Memory operands of kinds that matter.
fn constructed(r: &mut Random, p: &Place, at: u64) -> Option<Vec<u8>> {
    let any = Register::RAX + r.below(16) as u32;
    let relative = |r: &mut Random| {
        MemoryOperand::with_base_displ(Register::RIP, (p.code + r.below(4088)) as i64)
    };
    let based = |displacement: u64| {
        let (at, segment) = (displacement.wrapping_sub(p.base() - p.data), p.own_segment());
        MemoryOperand::new(Register::None, Register::None, 1, at as i64, 8, false, segment)
    };
    let insn = match r.below(6) {
        0 => Instruction::with2(Code::Lea_r64_m, any, relative(r)),
        1 => Instruction::with2(Code::Mov_r64_rm64, any, relative(r)),
        2 => {
            let slot = MemoryOperand::with_base_displ(Register::RSP, r.below(0x100) as i64);
            Instruction::with1(Code::Push_rm64, slot)
        }
        3 => Instruction::with1(Code::Push_rm64, based(r.below(DATA_LEN - 8))),
        4 => Instruction::with2(Code::Add_r64_rm64, any, based(r.below(DATA_LEN - 8))),
        _ => {
            let segment = r.pick(&[Register::ES, Register::CS, Register::SS, Register::DS]);
            let to = MemoryOperand::with_displ(p.data + r.below(DATA_LEN - 8), 8);
            Instruction::with2(Code::Mov_rm16_Sreg, to, segment)
        }
    };
    encode(p, &insn.ok()?, at)
}

/// What 32-bit code has in other forms than 64-bit code.
fn narrow(r: &mut Random, p: &Place, at: u64) -> Option<Vec<u8>> {
    let any = Register::EAX + r.below(8) as u32;
    let absolute = |r: &mut Random, segment: Register| {
        let base = if segment == p.own_segment() { p.base() } else { 0 };
        let to = p.address((p.data + r.below(DATA_LEN - 8)).wrapping_sub(base));
        MemoryOperand::new(Register::None, Register::None, 1, to as i64, 4, false, segment)
    };
    let segment = r.pick(&[Register::None, Register::DS, p.own_segment(), p.own_segment()]);
    let memory = absolute(r, segment);
    let slot = MemoryOperand::new(
        Register::ESP,
        Register::None,
        1,
        r.below(0x100) as i64,
        4,
        false,
        Register::None,
    );
    let insn = match r.below(15) {
        0 => Instruction::with1(Code::Inc_r32, any),
        1 => Instruction::with1(Code::Dec_r16, Register::AX + r.below(8) as u32),
        2 => Instruction::with2(Code::Mov_EAX_moffs32, Register::EAX, memory),
        3 => Instruction::with2(Code::Mov_moffs8_AL, memory, Register::AL),
        4 => Instruction::with1(Code::Push_rm32, memory),
        5 => Instruction::with1(Code::Push_rm32, slot),
        6 => Instruction::with2(Code::Add_r32_rm32, any, memory),
        7 => Instruction::with2(Code::Mov_rm8_r8, memory, Register::AL + r.below(8) as u32),
        8 => Instruction::with2(Code::Lea_r32_m, any, slot),
        9 => Instruction::with1(Code::Pushd_imm8, r.below(256) as i32 - 128),
        // mov r, sreg
        10 => return Some([0x8c, 0xc0 | (r.below(6) as u8) << 3 | r.below(8) as u8].to_vec()),
        // push sreg
        11 => {
            return Some(
                r.pick(&[&[0x06][..], &[0x0e], &[0x16], &[0x1e], &[0x0f, 0xa0], &[0x0f, 0xa8]])
                    .to_vec(),
            );
        }
        12 => Instruction::with1(Code::Pop_rm32, memory),
        13 => Instruction::with1(Code::Pop_rm32, slot),
        _ => Instruction::with2(Code::Xchg_r32_EAX, any, Register::EAX),
    };
    encode(p, &insn.ok()?, at)
}

fn encode(p: &Place, insn: &Instruction, at: u64) -> Option<Vec<u8>> {
    let mut encoder = Encoder::new(p.bits());
    encoder.encode(insn, at).ok()?;
    Some(encoder.take_buffer())
}

fn string(r: &mut Random, p: &Place) -> Vec<u8> {
    let mut bytes = Vec::new();
    // A count is only sane now and then, so REP comes with one: mov ecx, n
    if r.below(2) == 0 {
        bytes.extend([0xb9, r.below(40) as u8, 0, 0, 0]);
        bytes.push(r.pick(&[0xf3, 0xf2]));
    }
    if r.below(2) == 0 && !p.narrow {
        bytes.push(0x48);
    }
    bytes.push(r.pick(&[0xa4, 0xa5, 0xaa, 0xab, 0xac, 0xad, 0xa6, 0xa7, 0xae, 0xaf]));
    bytes
}
