//! A random stretch of kernel code with the state it starts in.

use iced_x86::{
    Code, Decoder, DecoderOptions, Encoder, Instruction, MemoryOperand, Mnemonic, OpKind, Register,
};
use oracle::random::Random;
use x86::{flags, reg, seg};

/// GVA of the code page; like a kernel's text it lies in the top 2 GiB.
pub const CODE: u64 = 0xffff_ffff_8100_0000;
/// GVA of the kernel's data pages, in the top 2 GiB so that absolute operands reach them.
pub const DATA: u64 = 0xffff_ffff_8200_0000;
/// Bytes of data. The page before and after are not mapped.
pub const DATA_LEN: u64 = 4 * 4096;
/// GVA of the guest's GS base, inside the data.
pub const PERCPU: u64 = DATA + 0x2000;
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
    /// Instructions at [`CODE`], ending in HLT.
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
    /// FS base; the GS base is [`PERCPU`].
    pub fs_base: u64,
    /// The GS base that SWAPGS exchanges.
    pub kernel_gs_base: u64,
    /// TSC_AUX.
    pub tsc_aux: u64,
    /// An interrupt waits for IF.
    pub pending: bool,
}

impl Case {
    /// The case of a seed.
    pub fn random(seed: u64) -> Self {
        let mut r = Random::new(seed);
        let mut gpr = [0; 16];
        for value in &mut gpr {
            *value = interesting(&mut r);
        }
        gpr[reg::RSP] = DATA + 0x1000 + r.below(0x200) * 8;
        let alignment = r.below(4) == 0;
        let mut rflags = flags::FIXED | r.bits() & (flags::STATUS | flags::ID);
        rflags |= if r.below(6) == 0 { flags::DF } else { 0 };
        rflags |= if r.below(2) == 0 { flags::IF } else { 0 };
        rflags |= if alignment { flags::AC } else { 0 };
        let mut memory = vec![0; (DATA_LEN + USER_LEN) as usize];
        for word in memory.chunks_exact_mut(8) {
            word.copy_from_slice(&interesting(&mut r).to_le_bytes());
        }
        let mut xmm = [[0; 16]; 16];
        for byte in xmm.iter_mut().flatten() {
            *byte = r.bits() as u8;
        }
        Self {
            code: code(&mut r, alignment),
            gpr,
            rflags,
            xmm,
            memory,
            selectors: selectors(&mut r),
            fs_base: pointer(&mut r),
            kernel_gs_base: pointer(&mut r),
            tsc_aux: r.bits() & 0xffff_ffff,
            pending: r.below(3) == 0,
        }
    }

    /// Nothing at `rip` is the CPU's own: the time that RDTSCP has put into registers, and the mask
    /// XSAVE has put into memory, have been overwritten.
    pub fn is_settled(&self, rip: u64) -> bool {
        let mut code = Decoder::with_ip(64, &self.code, CODE, DecoderOptions::NONE);
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
        let mut code = Decoder::with_ip(64, &self.code, CODE, DecoderOptions::NONE);
        code.iter().filter(|insn| insn.ip() == rip).any(|insn| {
            let m = insn.mnemonic();
            matches!(m, Cmpsb | Cmpsw | Cmpsd | Cmpsq | Scasb | Scasw | Scasd | Scasq)
        })
    }

    /// The code, disassembled.
    pub fn listing(&self) -> String {
        let mut text = String::new();
        for insn in &mut Decoder::with_ip(64, &self.code, CODE, DecoderOptions::NONE) {
            text += &format!("  {:x}: {insn}\n", insn.ip());
        }
        text
    }
}

/// A value at a border, a pointer into one of the windows, or noise.
fn interesting(r: &mut Random) -> u64 {
    match r.below(8) {
        0 => r.pick(&[0, 1, 2, 7, 8, 63, 64, u64::MAX, 1 << 63, (1 << 63) - 1, 0x8000_0000, 0xff]),
        1..=3 => DATA + r.below(DATA_LEN),
        4 => USER + r.below(USER_LEN),
        5 => r.below(64),
        _ => r.bits(),
    }
}

/// Any selectors; those of CS and SS with a privilege level of zero.
fn selectors(r: &mut Random) -> [u16; 6] {
    let mut selectors = [0; 6];
    for selector in &mut selectors {
        *selector = r.bits() as u16;
    }
    selectors[seg::CS] &= !3;
    selectors[seg::SS] &= !3;
    selectors
}

/// A canonical address, the kernel's or the user's.
fn pointer(r: &mut Random) -> u64 {
    r.pick(&[DATA, DATA + 0x1000, PERCPU, USER, 0, 1 << 45])
}

fn code(r: &mut Random, alignment: bool) -> Vec<u8> {
    let mut alignment = alignment;
    let mut code = Vec::new();
    for _ in 0..1 + r.below(7) {
        let at = CODE + code.len() as u64;
        code.extend(instruction(r, at, &mut alignment));
    }
    code.push(0xf4);
    code
}

/// One encodable instruction, from a template or from random bytes.
fn instruction(r: &mut Random, at: u64, alignment: &mut bool) -> Vec<u8> {
    loop {
        let bytes = match r.below(5) {
            0 => template(r, at, alignment),
            _ => noise(r, at),
        };
        if let Some(bytes) = bytes {
            return bytes;
        }
    }
}

/// Random bytes that decode to something, with its memory operand steered.
fn noise(r: &mut Random, at: u64) -> Option<Vec<u8>> {
    let mut bytes = [0u8; 15];
    for byte in &mut bytes {
        *byte = r.bits() as u8;
    }
    steer_opcode(r, &mut bytes);
    let mut insn = Decoder::with_ip(64, &bytes, at, DecoderOptions::NONE).decode();
    if insn.code() == Code::INVALID || unwanted(&insn) {
        return None;
    }
    if (0..insn.op_count()).any(|i| insn.op_kind(i) == OpKind::Memory) {
        steer_memory(r, &mut insn);
        let mut encoder = Encoder::new(64);
        encoder.encode(&insn, at).ok()?;
        return Some(encoder.take_buffer());
    }
    Some(bytes[..insn.len()].to_vec())
}

/// Prefixes and escapes with the frequency of real code rather than of noise.
fn steer_opcode(r: &mut Random, bytes: &mut [u8; 15]) {
    let mut at = 0;
    let mut put = |byte: u8| {
        bytes[at] = byte;
        at += 1;
    };
    if r.below(10) == 0 {
        put(r.pick(&[0x66, 0xf2, 0xf3, 0xf0, 0x65, 0x3e]));
    }
    if r.below(2) == 0 {
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
fn steer_memory(r: &mut Random, insn: &mut Instruction) {
    if insn.is_vsib() || (r.below(12) == 0) {
        return;
    }
    let offset = r.below(DATA_LEN - 64) & !if r.below(2) == 0 { 15 } else { 0 };
    let target = if insn.segment_prefix() == Register::GS {
        offset.wrapping_sub(PERCPU - DATA)
    } else {
        if insn.segment_prefix() != Register::None {
            insn.set_segment_prefix(Register::None);
        }
        DATA + offset
    };
    match r.below(3) {
        // A stack slot.
        0 => {
            insn.set_memory_base(Register::RSP);
            insn.set_memory_index(Register::None);
            insn.set_memory_displ_size(8);
            insn.set_memory_displacement64(r.below(0x200));
        }
        // Wherever its registers happen to point.
        1 if insn.memory_base() != Register::RIP => {}
        _ => {
            insn.set_memory_base(Register::None);
            insn.set_memory_index(Register::None);
            insn.set_memory_displ_size(8);
            insn.set_memory_displacement64(target);
        }
    }
}

/// What random bytes hardly give.
fn template(r: &mut Random, at: u64, alignment: &mut bool) -> Option<Vec<u8>> {
    match r.below(8) {
        0 => Some(flags_and_stack(r)),
        1 => {
            *alignment = !*alignment;
            Some(vec![0x0f, 0x01, if *alignment { 0xcb } else { 0xca }])
        }
        2 => Some(string(r)),
        3 => Some(transfer(r, at)),
        4 => Some(segments(r)),
        5 => saved_vectors(r, at),
        _ => constructed(r, at),
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
fn transfer(r: &mut Random, at: u64) -> Vec<u8> {
    match r.below(5) {
        0 => vec![0x70 | r.below(16) as u8, 0],      // jcc
        1 => vec![0xe8, 0, 0, 0, 0],                 // call
        2 => vec![0xe9, 0, 0, 0, 0],                 // jmp
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
    match r.below(6) {
        0 => vec![0x0f, 0x01, 0xf8],                        // swapgs
        1 => vec![0xf3, 0x48, 0x0f, 0xae, 0xc0 | register], // rdfsbase
        2 => vec![0xf3, 0x48, 0x0f, 0xae, 0xc8 | register], // rdgsbase
        3 => vec![0xf3, 0x48, 0x0f, 0xae, 0xd0 | register], // wrfsbase
        4 => vec![0xf3, 0x48, 0x0f, 0xae, 0xd8 | register], // wrgsbase
        // mov r, sreg, of each size
        _ => {
            let operand = 0xc0 | (r.below(6) as u8) << 3 | register;
            r.pick(&[&[0x66][..], &[], &[0x48]]).iter().chain(&[0x8c, operand]).copied().collect()
        }
    }
}

/// XSAVE of x87 or SSE state, which both sides know. RDTSCP, of which only TSC_AUX can be compared.
fn saved_vectors(r: &mut Random, at: u64) -> Option<Vec<u8>> {
    if r.below(2) == 0 {
        return Some(vec![0x0f, 0x01, 0xf9, 0xb8, 0, 0, 0, 0, 0xba, 0, 0, 0, 0]);
    }
    let area = DATA + r.below((DATA_LEN - VECTORS_LEN) / 64) * 64 + u64::from(r.below(20) == 0);
    let to = MemoryOperand::with_displ(area, 8);
    let save = Instruction::with1(Code::Xsave64_mem, to).ok()?;
    // mov eax, SSE
    let mut code = vec![0xb8, 2, 0, 0, 0];
    code.extend(encode(&save, at + code.len() as u64)?);
    // MXCSR_MASK is the CPU's: mov dword [area + 28], 0
    code.extend(with_address(&[0xc7, 0x04, 0x25], area + 28, &[0; 4]));
    Some(code)
}

/// Memory operands of kinds that matter.
fn constructed(r: &mut Random, at: u64) -> Option<Vec<u8>> {
    let any = Register::RAX + r.below(16) as u32;
    let relative = |r: &mut Random| {
        MemoryOperand::with_base_displ(Register::RIP, (CODE + r.below(4088)) as i64)
    };
    let gs = |displacement: u64| {
        let at = displacement.wrapping_sub(PERCPU - DATA) as i64;
        MemoryOperand::new(Register::None, Register::None, 1, at, 8, false, Register::GS)
    };
    let insn = match r.below(6) {
        0 => Instruction::with2(Code::Lea_r64_m, any, relative(r)),
        1 => Instruction::with2(Code::Mov_r64_rm64, any, relative(r)),
        2 => {
            let slot = MemoryOperand::with_base_displ(Register::RSP, r.below(0x100) as i64);
            Instruction::with1(Code::Push_rm64, slot)
        }
        3 => Instruction::with1(Code::Push_rm64, gs(r.below(DATA_LEN - 8))),
        4 => Instruction::with2(Code::Add_r64_rm64, any, gs(r.below(DATA_LEN - 8))),
        _ => {
            let segment = r.pick(&[Register::ES, Register::CS, Register::SS, Register::DS]);
            let to = MemoryOperand::with_displ(DATA + r.below(DATA_LEN - 8), 8);
            Instruction::with2(Code::Mov_rm16_Sreg, to, segment)
        }
    };
    encode(&insn.ok()?, at)
}

fn encode(insn: &Instruction, at: u64) -> Option<Vec<u8>> {
    let mut encoder = Encoder::new(64);
    encoder.encode(insn, at).ok()?;
    Some(encoder.take_buffer())
}

fn string(r: &mut Random) -> Vec<u8> {
    let mut bytes = Vec::new();
    // A count is only sane now and then, so REP comes with one: mov ecx, n
    if r.below(2) == 0 {
        bytes.extend([0xb9, r.below(40) as u8, 0, 0, 0]);
        bytes.push(r.pick(&[0xf3, 0xf2]));
    }
    if r.below(2) == 0 {
        bytes.push(0x48);
    }
    bytes.push(r.pick(&[0xa4, 0xa5, 0xaa, 0xab, 0xac, 0xad, 0xa6, 0xa7, 0xae, 0xaf]));
    bytes
}
