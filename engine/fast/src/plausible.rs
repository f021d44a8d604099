//! Whether bytes that could be an instruction are one, or lie in data among code.
//!
//! Compilers at run time keep tables beside the code they make, and hand-written code has its constants
//! next to it. Programs read both, so a change there breaks them. Code and data look alike to a decoder,
//! but not for long: what compilers emit is drawn from few instructions, and bytes that mean something
//! else soon decode to one they never use. So an instruction counts only among usual ones.

use iced_x86::{
    Code, CodeSize, Decoder, DecoderError, DecoderOptions, FlowControl, Instruction, Mnemonic,
    OpKind, Register,
};

/// Bytes of the longest instruction.
pub const LONGEST: usize = 15;
/// Where decoding starts before a place, nearest and farthest (bytes).
const NEAREST: usize = 128;
const FARTHEST: usize = 192;
/// Usual instructions that count, before and behind.
const BEFORE: usize = 8;
const BEHIND: usize = 12;
/// How many there have to be before. Functions begin right behind tables.
const LEAST_BEFORE: usize = 2;
/// How many there have to be altogether, in a program's text.
pub const ENOUGH: usize = 14;
/// And in what a program has written itself, which holds more tables.
pub const ENOUGH_WRITTEN: usize = 18;
/// What a jump or return that is always taken counts.
const AT_AN_END: usize = 7;

/// log2 of how far a branch leads, a RIP-relative operand lies and a structure's member from its start,
/// at the most.
const BRANCH_BITS: u32 = 27;
const RELATIVE_BITS: u32 = 29;
const OFFSET_BITS: u32 = 24;

/// `jmp [rip+...]`, and how long it is.
const JUMP: [u8; 2] = [0xff, 0x25];
const JUMP_LEN: usize = 6;
/// Bytes of the number behind a jump in a table of jumps.
const NUMBER: usize = 4;

/// A page of code.
#[derive(Clone, Copy, Debug)]
pub struct Page<'a> {
    pub bytes: &'a [u8],
    /// 64 or 32: as what it is executed.
    pub bits: u32,
}

impl Page<'_> {
    /// An instruction starts at `at`: most of the decodings that pass it have one start there, and it is
    /// among so many usual ones.
    pub fn has_instruction(self, at: usize, enough: usize) -> bool {
        is_instruction(self, at, enough)
    }
}

fn is_instruction(page: Page<'_>, at: usize, enough: usize) -> bool {
    if is_number_of_a_jump(page.bytes, at) {
        return false;
    }
    let first = at.saturating_sub(FARTHEST);
    let near = at < LONGEST;
    let last = if near { at } else { at.saturating_sub(NEAREST).max(first + LONGEST) };
    let last = last.clamp(first + 1, at + 1);
    let ways: Vec<_> = (first..last).filter_map(|start| usual_before(page, start, at)).collect();
    let behind = usual_behind(page, at);
    // At the start of the page there is little before.
    let good = |before: &&usize| {
        near && behind > AT_AN_END || **before >= LEAST_BEFORE && **before + behind >= enough
    };
    let good = ways.iter().filter(good).count();
    ways.len() * 2 >= last - first && good * 2 >= ways.len()
}

/// It lies in a number between two jumps through memory. Mono's compiled libraries have tables of such jumps, each with
/// a number behind it for the one who finds its target.
fn is_number_of_a_jump(page: &[u8], at: usize) -> bool {
    let jumps = |from: usize| page.get(from..from + JUMP.len()).is_none_or(|bytes| bytes == JUMP);
    let number = |within: usize| at.checked_sub(within);
    let jump = |number: usize| number.checked_sub(JUMP_LEN).is_some_and(jumps);
    (0..NUMBER).filter_map(number).any(|number| jump(number) && jumps(number + NUMBER))
}

/// If decoding from `start` comes to `at`: how many instructions right before it are usual.
fn usual_before(page: Page<'_>, start: usize, at: usize) -> Option<usize> {
    let mut decoder = Decoder::new(page.bits, &page.bytes[start..], DecoderOptions::NONE);
    let mut run = 0;
    while decoder.position() < at - start {
        run = if is_usual(&decoder.decode()) { run + 1 } else { 0 };
    }
    (decoder.position() == at - start).then_some(run.min(BEFORE))
}

/// How many of those that follow the one at `at` are; where code may end, some more.
fn usual_behind(page: Page<'_>, at: usize) -> usize {
    let mut decoder = Decoder::new(page.bits, &page.bytes[at..], DecoderOptions::NONE);
    let _ = decoder.decode();
    for run in 0..BEHIND {
        let insn = decoder.decode();
        if decoder.last_error() == DecoderError::NoMoreBytes {
            return BEHIND;
        }
        if !is_usual(&insn) {
            return run;
        }
        if matches!(insn.flow_control(), FlowControl::Return | FlowControl::UnconditionalBranch) {
            return (run + AT_AN_END).min(BEHIND);
        }
    }
    BEHIND
}

/// Compilers emit it, and so do people who write system code.
fn is_usual(insn: &Instruction) -> bool {
    let padding = insn.mnemonic() == Mnemonic::Nop;
    let segment = insn.segment_prefix();
    (padding || matches!(segment, Register::None | Register::FS | Register::GS))
        && !is_byte_arithmetic(insn)
        && is_near(insn)
        && (is_usual_mnemonic(insn.mnemonic()) || is_vector(insn))
}

/// What it jumps to and what it reads are as near as in any program; it has no absolute address of 64 bits.
fn is_near(insn: &Instruction) -> bool {
    let within =
        |distance: u64, bits: u32| extended(insn, distance).wrapping_add(1 << bits) < 2 << bits;
    if insn.is_jmp_short_or_near() || insn.is_jcc_short_or_near() || insn.is_call_near() {
        return within(insn.near_branch_target(), BRANCH_BITS);
    }
    let displacement = insn.memory_displacement64();
    match insn.memory_base() {
        Register::RIP | Register::EIP => within(displacement, RELATIVE_BITS),
        Register::None => !has_long_address(insn),
        _ => within(displacement, OFFSET_BITS),
    }
}

/// The distance as a signed number: in 32-bit code it is one of 32 bits.
fn extended(insn: &Instruction, distance: u64) -> u64 {
    if insn.code_size() == CodeSize::Code32 { distance as i32 as u64 } else { distance }
}

/// MOV of the accumulator from or to an address of 64 bits.
fn has_long_address(insn: &Instruction) -> bool {
    use Code::*;
    matches!(
        insn.code(),
        Mov_AL_moffs8
            | Mov_AX_moffs16
            | Mov_EAX_moffs32
            | Mov_RAX_moffs64
            | Mov_moffs8_AL
            | Mov_moffs16_AX
            | Mov_moffs32_EAX
            | Mov_moffs64_RAX
    )
}

/// ADD, OR and their like between a byte register and memory: what small numbers decode to.
fn is_byte_arithmetic(insn: &Instruction) -> bool {
    use Mnemonic::*;
    let memory = (0..insn.op_count()).any(|n| insn.op_kind(n) == OpKind::Memory);
    let byte = (0..insn.op_count()).any(|n| insn.op_register(n).is_gpr8());
    matches!(insn.mnemonic(), Add | Or | Adc | Sbb | And | Sub | Xor) && memory && byte
}

/// SSE and AVX, but not MMX, whose opcodes have no prefix.
fn is_vector(insn: &Instruction) -> bool {
    (0..insn.op_count()).any(|n| {
        let register = insn.op_register(n);
        register.is_xmm() || register.is_ymm() || register.is_zmm() || register.is_k()
    })
}

fn is_usual_mnemonic(mnemonic: Mnemonic) -> bool {
    use Mnemonic::*;
    let general = matches!(
        mnemonic,
        Mov | Movzx
            | Movsx
            | Movsxd
            | Lea
            | Push
            | Pop
            | Xchg
            | Bswap
            | Cdqe
            | Cqo
            | Cdq
            | Leave
            | Add
            | Sub
            | And
            | Or
            | Xor
            | Not
            | Neg
            | Inc
            | Dec
            | Cmp
            | Test
            | Imul
            | Mul
            | Div
            | Idiv
            | Shl
            | Shr
            | Sar
            | Rol
            | Ror
            | Shld
            | Shrd
            | Bt
            | Bts
            | Btr
            | Bsf
            | Bsr
            | Tzcnt
            | Lzcnt
            | Popcnt
            | Andn
            | Bextr
            | Shlx
            | Shrx
            | Sarx
            | Rorx
            | Mulx
            | Bzhi
            | Adc
            | Sbb
            | Cld
            | Prefetchw
            | Pushfq
            | Popfq
            | Stosq
            | Stosd
            | Movsq
            | Nop
            | Endbr64
            | Int3
            | Ud2
            | Pause
    );
    let system = matches!(
        mnemonic,
        Cpuid
            | Rdtsc
            | Rdtscp
            | Xgetbv
            | Lfence
            | Mfence
            | Sfence
            | Syscall
            | Lar
            | Lsl
            | Verr
            | Verw
            | Rdpid
            | Xsave
            | Xsave64
            | Xsavec
            | Xsavec64
            | Xsaveopt
            | Xsaveopt64
            | Xrstor
            | Xrstor64
            | Fxsave
            | Fxrstor
            | Rdpkru
            | Wrpkru
            | Ldmxcsr
            | Stmxcsr
            | Vzeroupper
            | Rdfsbase
            | Rdgsbase
            | Wrfsbase
            | Wrgsbase
    );
    let flow = matches!(
        mnemonic,
        Jmp | Call
            | Ret
            | Jo
            | Jno
            | Jb
            | Jae
            | Je
            | Jne
            | Jbe
            | Ja
            | Js
            | Jns
            | Jl
            | Jge
            | Jle
            | Jg
    );
    let conditional = matches!(
        mnemonic,
        Seto | Setb
            | Setae
            | Sete
            | Setne
            | Setbe
            | Seta
            | Sets
            | Setns
            | Setl
            | Setge
            | Setle
            | Setg
            | Cmovb
            | Cmovae
            | Cmove
            | Cmovne
            | Cmovbe
            | Cmova
            | Cmovs
            | Cmovns
            | Cmovl
            | Cmovge
            | Cmovle
            | Cmovg
    );
    general || system || flow || conditional
}
