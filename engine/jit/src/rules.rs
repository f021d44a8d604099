//! What becomes of a guest kernel instruction: the one table.
//!
//! Only what is known to behave the same in user mode is copied ([`copied`] lists it); everything not named
//! there or here is a call-out, so a forgotten instruction is slow, never wrong. User code has the same
//! table, less what only a kernel may do.

use iced_x86::{
    Code, FlowControl, Instruction, InstructionInfoFactory, Mnemonic, OpKind, Register,
};

mod narrow;

use crate::copied;
pub use narrow::narrow;
pub(crate) use narrow::own_segment;
use std::sync::OnceLock;

/// What to emit for an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// The same bytes: no memory operand, nothing privileged.
    Copy,
    /// One memory operand: through the bias.
    Memory,
    /// One memory operand relative to the guest's GS base (in user code: FS base): through the host's
    /// FS base.
    PerCpu,
    /// LEA of a RIP-relative address: a constant.
    LoadAddress,
    /// PUSH of a 64-bit register, immediate or memory.
    Push,
    /// POP of a 64-bit register.
    Pop,
    /// LEAVE.
    Leave,
    /// PUSHFQ.
    PushFlags,
    /// POPFQ.
    PopFlags,
    /// CLI and STI.
    SetInterrupts(bool),
    /// CLAC and STAC.
    SetAlignment(bool),
    /// MOVS, STOS, LODS, with or without REP; 64-bit addresses.
    String,
    /// Near direct CALL.
    Call,
    /// Near indirect CALL.
    CallIndirect,
    /// Near direct JMP.
    Jump,
    /// Near indirect JMP.
    JumpIndirect,
    /// Jcc.
    Conditional,
    /// Near RET.
    Return,
    /// SWAPGS.
    SwapGs,
    /// A segment selector into a register.
    ReadSelector,
    /// A segment selector into memory.
    StoreSelector,
    /// A register into the selector of DS, ES, FS or GS.
    LoadSelector,
    /// The same in 32-bit code, where the descriptor counts; from memory and the stack, too.
    LoadSegment,
    /// MOV from CR2 and CR3.
    ReadControl,
    /// MOV to CR3.
    LoadSpace,
    /// INVLPG.
    InvalidatePage,
    /// RDTSCP.
    ReadTime,
    /// XSAVE and XSAVEOPT.
    SaveVectors,
    /// XRSTOR.
    LoadVectors,
    /// XSAVE, XSAVEC and XRSTOR of a program, which uses them around calls that are bound late.
    MoveVectors,
    /// RDFSBASE and RDGSBASE.
    ReadBase,
    /// WRFSBASE and WRGSBASE.
    WriteBase,
    /// SYSRET to 64-bit code.
    Sysret,
    /// SYSRET to 32-bit code.
    SysretNarrow,
    /// IRETQ.
    Iret,
    /// SYSCALL, by user code.
    SystemCall,
    /// SYSENTER, by a 32-bit guest's program.
    EnterSystem,
    /// INT n, by such a program.
    SoftwareInterrupt,
    /// SYSEXIT, by a 32-bit guest's kernel.
    ExitSystem,
    /// PAUSE.
    Pause,
    /// Interpreted.
    CallOut,
}

impl Rule {
    /// Translated code leaves it to the wedge or the interpreter.
    pub fn is_left_to_others(self) -> bool {
        use Rule::*;
        matches!(
            self,
            CallOut
                | Sysret
                | SysretNarrow
                | Iret
                | LoadSpace
                | LoadSegment
                | LoadVectors
                | InvalidatePage
                | SystemCall
                | EnterSystem
                | SoftwareInterrupt
                | ExitSystem
        )
    }
}

/// Whose code it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Level {
    /// The kernel's.
    #[default]
    Kernel,
    /// A program's.
    User,
}

impl Level {
    /// The guest segment whose base the host's FS base follows.
    pub fn base_in_fs(self) -> Register {
        match self {
            Self::Kernel => Register::GS,
            Self::User => Register::FS,
        }
    }
}

/// Chooses the rule.
pub fn rule(insn: &Instruction, level: Level) -> Rule {
    match common(insn, level) {
        _ if level == Level::User && moves_vectors(insn) => Rule::MoveVectors,
        rule if level == Level::Kernel || is_users(rule) => rule,
        _ => Rule::CallOut,
    }
}

/// XSAVE, XSAVEC and XRSTOR.
fn moves_vectors(insn: &Instruction) -> bool {
    use Mnemonic::*;
    let moves = matches!(insn.mnemonic(), Xsave | Xsave64 | Xsavec | Xsavec64 | Xrstor | Xrstor64);
    let by_rcx = [insn.memory_base(), insn.memory_index()].contains(&Register::RCX);
    moves && vectors_operand(insn) && biased_segment(insn) && !by_rcx
}

/// User code may do it, and it means the same there; the rest is known to the vCPU page in kernel code only.
fn is_users(rule: Rule) -> bool {
    use Rule::*;
    matches!(
        rule,
        Copy | Memory
            | PerCpu
            | LoadAddress
            | Push
            | Pop
            | Leave
            | PushFlags
            | String
            | Call
            | CallIndirect
            | Jump
            | JumpIndirect
            | Conditional
            | Return
            | ReadSelector
            | StoreSelector
            | ReadTime
            | SystemCall
    )
}

fn common(insn: &Instruction, level: Level) -> Rule {
    of_any_width(insn, level).unwrap_or_else(|| wide(insn, level))
}

/// The rule for an instruction that is the same in 64-bit and in 32-bit code.
fn of_any_width(insn: &Instruction, level: Level) -> Option<Rule> {
    use Rule::*;
    Some(match insn.mnemonic() {
        Mnemonic::Cli => SetInterrupts(false),
        Mnemonic::Sti => SetInterrupts(true),
        Mnemonic::Clac => SetAlignment(false),
        Mnemonic::Stac => SetAlignment(true),
        // With REX.B it is XCHG to AMD's CPUs.
        Mnemonic::Pause if insn.len() > 2 => CallOut,
        Mnemonic::Pause if level == Level::Kernel => Pause,
        Mnemonic::Rdtscp => ReadTime,
        Mnemonic::Mov if reads_selector(insn) => ReadSelector,
        Mnemonic::Mov if reads_control(insn) => ReadControl,
        _ => return None,
    })
}

fn wide(insn: &Instruction, level: Level) -> Rule {
    use Rule::*;
    match insn.mnemonic() {
        Mnemonic::Pushfq => PushFlags,
        Mnemonic::Popfq => PopFlags,
        Mnemonic::Leave if insn.code() == Code::Leaveq => Leave,
        Mnemonic::Push => push(insn, level),
        Mnemonic::Pop if insn.code() == Code::Pop_r64 => Pop,
        Mnemonic::Lea if insn.is_ip_rel_memory_operand() => LoadAddress,
        Mnemonic::Lea => Copy,
        Mnemonic::Swapgs => SwapGs,
        Mnemonic::Rdfsbase | Mnemonic::Rdgsbase if insn.op0_register().is_gpr64() => ReadBase,
        Mnemonic::Wrfsbase | Mnemonic::Wrgsbase if insn.op0_register().is_gpr64() => WriteBase,
        Mnemonic::Mov if loads_selector(insn) => LoadSelector,
        Mnemonic::Mov if stores_selector(insn) => StoreSelector,
        Mnemonic::Mov if insn.op0_register() == Register::CR3 => LoadSpace,
        Mnemonic::Invlpg if biased_segment(insn) && !insn.is_ip_rel_memory_operand() => {
            InvalidatePage
        }
        Mnemonic::Syscall if level == Level::User => SystemCall,
        Mnemonic::Xsave64 | Mnemonic::Xsaveopt64 if vectors_operand(insn) => SaveVectors,
        Mnemonic::Xrstor64 if in_memory(insn) => LoadVectors,
        _ => match insn.flow_control() {
            FlowControl::Next if is_string(insn) => String,
            FlowControl::Next => straight(insn, is_reached(insn, level)),
            _ => branch(insn),
        },
    }
}

fn push(insn: &Instruction, level: Level) -> Rule {
    match insn.code() {
        Code::Push_r64 | Code::Pushq_imm8 | Code::Pushq_imm32 => Rule::Push,
        Code::Push_rm64 if is_reached(insn, level) => Rule::Push,
        _ => Rule::CallOut,
    }
}

fn branch(insn: &Instruction) -> Rule {
    match insn.code() {
        Code::Call_rel32_64 => Rule::Call,
        Code::Call_rm64 if indirect_operand(insn) => Rule::CallIndirect,
        Code::Jmp_rel8_64 | Code::Jmp_rel32_64 => Rule::Jump,
        Code::Jmp_rm64 if indirect_operand(insn) => Rule::JumpIndirect,
        Code::Retnq | Code::Retnq_imm16 => Rule::Return,
        Code::Sysretq => Rule::Sysret,
        Code::Sysretd => Rule::SysretNarrow,
        Code::Iretq => Rule::Iret,
        _ if insn.is_jcc_short_or_near() && insn.op0_kind() == OpKind::NearBranch64 => {
            Rule::Conditional
        }
        _ => Rule::CallOut,
    }
}

/// A register or a memory operand that needs only the bias.
fn indirect_operand(insn: &Instruction) -> bool {
    insn.op0_kind() == OpKind::Register || biased_segment(insn)
}

/// The operand is relative to no segment base but the one the host's FS base follows.
fn is_reached(insn: &Instruction, level: Level) -> bool {
    biased_segment(insn) || insn.memory_segment() == level.base_in_fs()
}

/// The memory operand is relative to neither FS nor GS.
fn biased_segment(insn: &Instruction) -> bool {
    !matches!(insn.memory_segment(), Register::FS | Register::GS)
}

fn reads_control(insn: &Instruction) -> bool {
    matches!(insn.code(), Code::Mov_r64_cr | Code::Mov_r32_cr)
        && matches!(insn.op1_register(), Register::CR2 | Register::CR3)
}

/// A register into a selector that says nothing of the privilege level.
fn loads_selector(insn: &Instruction) -> bool {
    use Register::{DS, ES, FS, GS};
    matches!(insn.op0_register(), DS | ES | FS | GS) && insn.op1_kind() == OpKind::Register
}

/// A selector into a register of any size.
fn reads_selector(insn: &Instruction) -> bool {
    moves_selector(insn.code()) && insn.op0_kind() == OpKind::Register
}

/// A selector into memory, always two bytes.
fn stores_selector(insn: &Instruction) -> bool {
    moves_selector(insn.code()) && in_memory(insn)
}

fn moves_selector(code: Code) -> bool {
    matches!(code, Code::Mov_rm16_Sreg | Code::Mov_r32m16_Sreg | Code::Mov_r64m16_Sreg)
}

/// The operand is in memory that needs only the bias.
fn in_memory(insn: &Instruction) -> bool {
    insn.op0_kind() == OpKind::Memory && biased_segment(insn)
}

/// The same, not by way of RAX or RDX, which hold the mask.
fn vectors_operand(insn: &Instruction) -> bool {
    let mask = |r: Register| matches!(r.full_register(), Register::RAX | Register::RDX);
    in_memory(insn)
        && !insn.is_ip_rel_memory_operand()
        && !mask(insn.memory_base())
        && !mask(insn.memory_index())
}

fn is_string(insn: &Instruction) -> bool {
    (0..insn.op_count()).any(|i| {
        matches!(
            insn.op_kind(i),
            OpKind::MemorySegSI
                | OpKind::MemorySegESI
                | OpKind::MemorySegRSI
                | OpKind::MemoryESDI
                | OpKind::MemoryESEDI
                | OpKind::MemoryESRDI
        )
    })
}

/// Instructions that go on with the next one. `is_reached`: translated code can address the memory operand, if there is one.
fn straight(insn: &Instruction, is_reached: bool) -> Rule {
    if !same_in_user_mode(insn) {
        return Rule::CallOut;
    }
    let memory = (0..insn.op_count()).any(|i| insn.op_kind(i) == OpKind::Memory);
    let segments = (0..insn.op_count()).any(|i| insn.op_register(i).is_segment_register());
    match (memory, segments, insn.memory_segment()) {
        (_, true, _) => Rule::CallOut,
        (false, ..) if touches_memory(insn) => Rule::CallOut,
        (false, ..) => Rule::Copy,
        (true, ..) if !is_reached => Rule::CallOut,
        (true, _, Register::FS | Register::GS) => Rule::PerCpu,
        (true, ..) => Rule::Memory,
    }
}

/// Whether an instruction without a memory operand accesses memory (a stack, a fixed pointer). All instructions with the same code
/// do, or none does. The decoder's library takes longer to say so than the rest of a rule takes, so each code is asked about once.
fn touches_memory(insn: &Instruction) -> bool {
    /// More than there are codes.
    const CODES: usize = 8192;
    static KNOWN: [OnceLock<bool>; CODES] = [const { OnceLock::new() }; CODES];
    let ask = || !InstructionInfoFactory::new().info(insn).used_memory().is_empty();
    KNOWN.get(insn.code() as usize).map_or_else(ask, |known| *known.get_or_init(ask))
}

/// The instruction's effect on registers and its memory operand does not depend on the privilege
/// level, on control registers or on anything the host keeps for itself.
fn same_in_user_mode(insn: &Instruction) -> bool {
    copied::has(insn.mnemonic())
        && insn.cpuid_features().iter().all(|feature| copied::has_extension(*feature))
        // Of MOV, the forms with control and debug registers.
        && !insn.is_privileged()
}

#[cfg(test)]
mod tests {
    use super::*;
    use iced_x86::{Decoder, DecoderOptions};

    fn rule_of(bytes: &[u8]) -> Rule {
        rule(&Decoder::new(64, bytes, DecoderOptions::NONE).decode(), Level::Kernel)
    }

    #[test]
    fn plain_instructions_are_copied() {
        assert_eq!(rule_of(&[0x48, 0x01, 0xd8]), Rule::Copy); // add rax, rbx
        assert_eq!(rule_of(&[0x0f, 0x31]), Rule::Copy); // rdtsc
        assert_eq!(rule_of(&[0xf3, 0x0f, 0x1e, 0xfa]), Rule::Copy); // endbr64
        assert_eq!(rule_of(&[0x48, 0x8b, 0x03]), Rule::Memory); // mov rax, [rbx]
        assert_eq!(rule_of(&[0x65, 0x48, 0x8b, 0x04, 0x25, 0, 0, 0, 0]), Rule::PerCpu);
    }

    /// Linux 7.2 restores the initial state by an address relative to RIP after each signal.
    #[test]
    fn the_wedge_restores_vectors_whatever_their_address() {
        let restores = [
            &[0x48, 0x0f, 0xae, 0x2f][..],                   // xrstor64 [rdi]
            &[0x48, 0x0f, 0xae, 0x2a],                       // xrstor64 [rdx]
            &[0x48, 0x0f, 0xae, 0x2d, 0x40, 0x00, 0x00, 00], // xrstor64 [rip + 0x40]
        ];
        assert!(restores.iter().all(|bytes| rule_of(bytes) == Rule::LoadVectors));
        assert_eq!(rule_of(&[0x0f, 0xae, 0x2f]), Rule::CallOut, "of 32-bit pointers");
    }

    #[test]
    fn sensitive_instructions_are_not() {
        for bytes in [
            &[0x0f, 0x01, 0x03][..], // sgdt [rbx]
            &[0x0f, 0x20, 0xc0],     // mov rax, cr0
            &[0x0f, 0xa2],           // cpuid
            &[0x8e, 0xd0],           // mov ss, eax
            &[0x8e, 0x18],           // mov ds, [rax]
            &[0xf4],                 // hlt
            &[0x0f, 0xae, 0x03],     // fxsave [rbx]
            &[0x0f, 0xb2, 0x03],     // lss eax, [rbx]
            &[0x66, 0xc9],           // leave with 16-bit operands
            &[0x0f, 0x77],           // emms
            &[0x0f, 0x18, 0xf8],     // a reserved no-operation
            &[0x0f, 0xc7, 0x23],     // xsavec [rbx]
            &[0x0f, 0x01, 0xe8],     // serialize
        ] {
            assert_eq!(rule_of(bytes), Rule::CallOut, "{bytes:x?}");
        }
        assert_eq!(rule_of(&[0xf3, 0x0f, 0xc7, 0xf9]), Rule::CallOut); // rdpid rcx
    }

    #[test]
    fn user_code_may_do_less() {
        let user = |bytes: &[u8]| {
            rule(&Decoder::new(64, bytes, DecoderOptions::NONE).decode(), Level::User)
        };
        assert_eq!(user(&[0x48, 0x01, 0xd8]), Rule::Copy); // add rax, rbx
        assert_eq!(user(&[0x64, 0x48, 0x8b, 0x04, 0x25, 0, 0, 0, 0]), Rule::PerCpu);
        assert_eq!(user(&[0x65, 0x48, 0x8b, 0x04, 0x25, 0, 0, 0, 0]), Rule::CallOut);
        assert_eq!(user(&[0x9c]), Rule::PushFlags);
        assert_eq!(user(&[0x0f, 0x05]), Rule::SystemCall);
        for bytes in [
            &[0xfa][..],                     // cli
            &[0x9d],                         // popfq
            &[0x0f, 0x01, 0xcb],             // stac
            &[0x0f, 0x01, 0xf8],             // swapgs
            &[0x0f, 0x20, 0xd0],             // mov rax, cr2
            &[0x48, 0xcf],                   // iretq
            &[0xf3, 0x48, 0x0f, 0xae, 0xd0], // wrfsbase rax
        ] {
            assert_eq!(user(bytes), Rule::CallOut, "{bytes:x?}");
        }
    }

    #[test]
    fn flow() {
        assert_eq!(rule_of(&[0xe8, 0, 0, 0, 0]), Rule::Call);
        assert_eq!(rule_of(&[0xc3]), Rule::Return);
        assert_eq!(rule_of(&[0x74, 0]), Rule::Conditional);
        assert_eq!(rule_of(&[0xff, 0xe0]), Rule::JumpIndirect);
        assert_eq!(rule_of(&[0x0f, 0x05]), Rule::CallOut);
        assert_eq!(rule_of(&[0x48, 0xcf]), Rule::Iret);
        assert_eq!(rule_of(&[0x48, 0x0f, 0x07]), Rule::Sysret);
        assert_eq!(rule_of(&[0x0f, 0x07]), Rule::SysretNarrow);
        assert_eq!(rule_of(&[0x8c, 0xd8]), Rule::ReadSelector);
    }
}
